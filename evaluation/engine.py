# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: its tasks, a checkpoint as its model, and the results of a task."""

import gc
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from textwrap import shorten
from typing import Any

from lm_eval import evaluator, simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.hf_vlms import HFMultimodalLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer, PreTrainedModel, ProcessorMixin

from ..assembly.processing import text_tokenizer
from ..checkpoint.precision import quantization_name
from ..diagnose.load import ModelHandle
from .answering import greedy_config
from .results import Evaluation, Metric


VISION = ("mmbench_en_dev", "mmstar", "pope", "seedbench_2_plus", "ocrbench", "scienceqa", "ai2d")
TEXT = ("mmlu", "hellaswag")
OFFLINE = ("offline_easy_vqa", "offline_emoji", "offline_perplexity")
SUITES = {"paper": (*VISION, *TEXT), "vision": VISION, "text": TEXT, "offline": OFFLINE}
"""Tasks of each suite; `"paper"` has the paper's nine (table 4)."""
# Metrics that accuracy is compared with, and their names in results.
REFERENCES = {"blank": "blank image", "commonest": "commonest answer"}

evaluator.get_git_commit_hash = lambda: None  # git prints an error outside a repository
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of all models in memory
VERSIONED = ("lm_eval", "torch", "transformers", "normalign_llava")


class MultimodalLM(HFMultimodalLM):
    """The harness's `hf-multimodal` for a model in memory; answers do not depend on the batch."""

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, batch_size: int):
        self.processor = processor
        # The harness ties weights, but an adapter may have brought its own head or embeddings.
        model.tie_weights = lambda *args, **kwargs: None
        super().__init__(model, batch_size=batch_size)

    def _create_tokenizer(self, *args, **kwargs):
        self.tokenizer = text_tokenizer(self.processor.tokenizer)

    def tok_batch_multimodal_encode(
        self, strings, images, padding_side="left", left_truncate_len=None, **_
    ):
        tokenizer = self.processor.tokenizer
        first = tokenizer.bos_token  # which the template wrote already
        if first and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
            strings = [string.removeprefix(first) for string in strings]
        if any(images):
            inputs = super().tok_batch_multimodal_encode(strings, images, padding_side)
        else:  # at which that of lm-eval 0.4.13 fails; and it cuts the images off long questions
            options = {"padding": True, "padding_side": padding_side, "return_tensors": "pt"}
            inputs = tokenizer(strings, **options).to(self.device)
        if (most := left_truncate_len) and (length := inputs["input_ids"].shape[1]) > most:
            question = shorten(max(strings, key=len), 100)
            raise ValueError(f"Shorten {question!r}: its {length:,} tokens are more than {most:,}.")
        return inputs


def chosen_tasks(
    suites: Sequence[str], tasks: Sequence[str], include_path: Path | None, limit: int | None
) -> tuple[list[str], TaskManager]:
    """The tasks of some suites, and others by name, without repetition; and their manager."""
    if others := [suite for suite in suites if suite not in SUITES]:
        raise ValueError(f"There is no suite {others[0]!r}. There are {', '.join(SUITES)}.")
    chosen = list(dict.fromkeys([task for suite in suites for task in SUITES[suite]] + list(tasks)))
    paths = [str(files(__package__) / "tasks")]
    paths += [str(include_path)] if include_path else []  # which wins over those before
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not set(chosen) <= set(manager.all_tasks):
        manager = TaskManager(include_path=paths)  # reads the harness's 10,000 files
    if unknown := [task for task in chosen if task not in manager.all_tasks]:
        raise ValueError(f"There is no task {unknown[0]!r}. `lm-eval ls tasks` lists all.")
    if limit and "mmbench_en_dev" in chosen:
        fault = "mmbench_en_dev asks each question several times, and a limit would cut that"
        raise ValueError(f"{fault}. Leave out the limit, or the task.")
    return chosen, manager


def task_version(task: str | Task, manager: TaskManager) -> str | None:
    """The version in a task's file, without its questions. None of a group, or if there is none."""
    if not isinstance(task, str):
        return str(task.VERSION)
    entry = manager.task_index[task]
    if entry.kind.name not in ("TASK", "PY_TASK") or entry.cfg is None:
        return None
    metadata = entry.cfg.get("metadata") or {}
    version = metadata.get("version")
    return None if version is None else str(version)


def as_lm(handle: ModelHandle, *, batch_size: int, **loading: Any) -> LM:
    """A checkpoint as a model of the harness, loaded as [`ModelHandle.load`] does."""
    model = handle.load(**loading)
    if handle.processor is None:
        tokenizer = handle.checkpoint.preprocessor(AutoTokenizer)
    else:
        tokenizer = handle.processor.tokenizer
    # `generate` takes what a task leaves open, such as a repetition penalty, from the model's own.
    model.generation_config = greedy_config(model.generation_config, tokenizer)
    if handle.processor is None:
        return HFLM(model, tokenizer=tokenizer, batch_size=batch_size)
    return MultimodalLM(model, handle.processor, batch_size)


def run_task(
    lm: LM, task: str | Task, manager: TaskManager, folder: Path, weights: str, settings: dict
) -> Evaluation:
    """Runs a task, or a group by its name, and writes what the harness writes into a folder.

    Answers are generated through the chat template; likelihoods are of plain text, as is usual.
    """
    name = task if isinstance(task, str) else str(task.config.task)
    parts = manager.load([task])["tasks"].values()
    generates = all(part.get_config("output_type") == "generate_until" for part in parts)
    chat = generates and (isinstance(lm, MultimodalLM) or bool(lm.tokenizer.chat_template))
    options: dict[str, Any] = {"apply_chat_template": chat, "task_manager": manager}
    gc.freeze()  # the harness collects garbage after a batch, and must not visit all of a model
    try:
        raw = simple_evaluate(lm, tasks=[task], limit=settings["limit"], **options)
    finally:
        gc.unfreeze()
    assert raw is not None  # in the first process
    counts, config = raw["n-samples"].values(), next(iter(raw["configs"].values()))
    metadata = config.get("metadata") or {}
    result = Evaluation(
        task=name,
        title=metadata.get("title", name),
        metrics=_metrics(raw, name),
        samples=sum(count["effective"] for count in counts),
        total=sum(count["original"] for count in counts),
        protocol=_protocol(raw, config, chat, settings.get("quantization")),
        date=datetime.now(UTC).date().isoformat(),
        versions={key: version(key) for key in VERSIONED} | {name: str(metadata.get("version"))},
        weights=weights,
        settings=settings,
    )
    samples = raw.pop("samples")
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    tracker.save_results_aggregated(raw, samples=samples)
    for part, answers in samples.items():
        tracker.save_results_samples(part, answers)
    return result


def _metrics(raw: dict[str, Any], task: str) -> list[Metric]:
    """Of `acc` references are `blank` and `commonest`, of `acc_colour` `blank_colour` and so on.

    Of `contains` it is `blank_contains`.
    """
    metrics = []
    for name in sorted(raw["results"], key=lambda name: name != task):
        scores, samples = raw["results"][name], raw["samples"].get(name)  # a group has no samples
        subset = None if name == task else scores.get("alias", name).strip(" -")
        for key, value in scores.items():
            metric, _, rule = key.partition(",")
            is_number = isinstance(value, int | float) and rule and not metric.endswith("_stderr")
            if not is_number or metric.partition("_")[0] in REFERENCES:
                continue
            error = scores.get(f"{metric}_stderr,{rule}")
            error = float(error) if isinstance(error, int | float) else None
            part = metric.removeprefix("exact_match").removeprefix("acc")
            part = "_contains" if metric == "contains" else part
            keys = {title: f"{prefix}{part},{rule}" for prefix, title in REFERENCES.items()}
            references = {title: float(scores[key]) for title, key in keys.items() if key in scores}
            count = samples and sum(metric in s["metrics"] for s in samples if s["filter"] == rule)
            title = metric if rule == "none" else f"{metric}, {rule}"
            metrics.append(Metric(title, float(value), error, references, subset, count))
    return metrics


def _protocol(raw: dict, config: dict, chat: bool, quantization: dict | None) -> list[str]:
    """Sentences on how results were obtained, and the first prompt, unless it is of own data."""
    names = filter(None, (config.get("dataset_path"), config.get("dataset_name")))
    data = " ".join(Path(name).name if Path(name).exists() else name for name in names)  # no path
    kind, options = config["output_type"], json.dumps(config.get("generation_kwargs"))
    made = f"generated with {options}" if kind == "generate_until" else f"chosen by {kind}"
    template = "through the chat template" if chat else "as plain text"
    greedy = "Of the model's own generation_config only the tokens are used, and no penalty."
    rule = (config.get("metadata") or {}).get("rule")  # of own data
    sentences = [
        f"lm-evaluation-harness runs its task {config['task']} on {data}.",
        f"Answers are {made}.",
        *([greedy] if kind == "generate_until" else []),
        f"Prompts are written {template}, after {config.get('num_fewshot') or 0} examples.",
        *([rule] if rule else []),
    ]
    if config.get("description"):
        sentences.append(f'The system prompt is "{config["description"]}"')
    if any(metric["metric"] == "blank" for metric in config.get("metric_list", ())):
        sentences.append("Blank image: the answer to a white image, for all questions so worded.")
        sentences.append("Commonest answer: the share of questions whose true answer it is.")
    samples = next(iter(raw["samples"].values()), None)
    if samples and kind != "loglikelihood_rolling" and not rule:
        prompt = json.dumps(samples[0]["arguments"][0][0], ensure_ascii=False)
        sentences.append(f"The first prompt is {shorten(prompt, 600, placeholder=' ...')}")
    if quantization:
        name = quantization_name(quantization)
        sentences.append(f"The layers of the language model, and no others, are quantized: {name}.")
    return sentences
