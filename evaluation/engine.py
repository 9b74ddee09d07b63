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
from ..models import ModelHandle
from .answering import greedy_config
from .results import Evaluation, Metric


VISION = ("mmbench_en_dev", "mmstar", "pope", "seedbench_2_plus", "ocrbench", "scienceqa", "ai2d")
TEXT = ("mmlu", "hellaswag")
OFFLINE = ("offline_easy_vqa", "offline_emoji", "offline_perplexity")
SUITES = {"paper": (*VISION, *TEXT), "vision": VISION, "text": TEXT, "offline": OFFLINE}
"""Tasks of each suite; `"paper"` has the paper's nine (table 4)."""
# Prefixes of the metrics that accuracy is compared with, and their names in results.
REFERENCES = {"blank": "blank image", "commonest": "commonest answer"}

evaluator.get_git_commit_hash = lambda: None  # git prints an error outside a repository
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of all models in memory
VERSIONED = ("lm_eval", "torch", "transformers", "normalign_llava")


class MultimodalLM(HFMultimodalLM):
    """The harness's `hf-multimodal` for a loaded model. Answers do not depend on the batch.

    Raises ValueError for questions that are too long: the harness would cut their images off.
    """

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
        first_token = tokenizer.bos_token
        if first_token and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
            # The chat template wrote the first token already.
            strings = [string.removeprefix(first_token) for string in strings]
        if any(images):
            inputs = super().tok_batch_multimodal_encode(strings, images, padding_side)
        else:  # lm-eval 0.4.13 fails without images
            inputs = tokenizer(
                strings, padding=True, padding_side=padding_side, return_tensors="pt"
            ).to(self.device)
        # The harness would cut long questions on the left, where the images are.
        token_count = inputs["input_ids"].shape[1]
        if left_truncate_len and token_count > left_truncate_len:
            question = shorten(max(strings, key=len), 100)
            raise ValueError(
                f"Shorten {question!r}: its {token_count:,} tokens are more than "
                f"{left_truncate_len:,}."
            )
        return inputs


def chosen_tasks(
    suites: Sequence[str], tasks: Sequence[str], include_path: Path | None, limit: int | None
) -> tuple[list[str], TaskManager]:
    """Returns the names of tasks in suites and of other `tasks`, each once, and their manager.

    Raises ValueError if a suite or task does not exist, or `limit` would cut questions of MMBench.
    """
    task_names: list[str] = []
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"Suite {suite!r} does not exist. Name one of {', '.join(SUITES)}.")
        task_names.extend(SUITES[suite])
    task_names = list(dict.fromkeys([*task_names, *tasks]))
    folders = [str(files(__package__) / "tasks")]
    if include_path:
        folders.append(str(include_path))  # it takes precedence over those before it
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not set(task_names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders)  # reads the harness's 10,000 files
    for task_name in task_names:
        if task_name not in manager.all_tasks:
            raise ValueError(f"Task {task_name!r} does not exist. `lm-eval ls tasks` lists all.")
    if limit and "mmbench_en_dev" in task_names:
        raise ValueError(
            "mmbench_en_dev asks each question several times, and a limit would cut that. Leave "
            "out the limit, or the task."
        )
    return task_names, manager


def task_version(task: str | Task, manager: TaskManager) -> str | None:
    """Returns the version in a task's file, without reading the task's questions.

    Returns None for a group, and for a task without a version.
    """
    if not isinstance(task, str):
        return str(task.VERSION)
    entry = manager.task_index[task]
    if entry.kind.name not in ("TASK", "PY_TASK") or entry.cfg is None:
        return None
    stated_version = (entry.cfg.get("metadata") or {}).get("version")
    return None if stated_version is None else str(stated_version)


def as_lm(handle: ModelHandle, batch_size: int) -> LM:
    """Loads a checkpoint as a model of the harness. Raises as [`ModelHandle.load`] does."""
    model = handle.load()
    if handle.processor is None:
        tokenizer = handle.checkpoint.preprocessor(AutoTokenizer)
        language_model = HFLM(model, tokenizer=tokenizer, batch_size=batch_size)
    else:
        tokenizer = handle.processor.tokenizer
        language_model = MultimodalLM(model, handle.processor, batch_size)
    # `generate` takes what a task leaves open, such as a repetition penalty, from the model's own.
    model.generation_config = greedy_config(model.generation_config, tokenizer)
    return language_model


def run_task(
    lm: LM, task: str | Task, manager: TaskManager, folder: Path, weights: str, settings: dict
) -> Evaluation:
    """Runs a task, or a group by its name, and writes the harness's files into a folder.

    Answers are generated through the chat template. Likelihoods are of plain text, as usual.

    Args:
        lm: Model of the harness, see [`as_lm`].
        task: Name of a task or group, or a task without a file.
        manager: Knows the task files, see [`chosen_tasks`].
        folder: Folder that gets the harness's files of results and answers.
        weights: Hash of the weights, or Hub id and commit, for the result.
        settings: What else the result depends on. `limit` is the number of samples, or None.

    Raises any error of the harness, and ValueError if a metric is not finite.
    """
    name = task if isinstance(task, str) else str(task.config.task)
    through_chat_template = _uses_chat_template(lm, task, manager)
    gc.freeze()  # the harness collects garbage after a batch, and must not visit all of a model
    try:
        raw = simple_evaluate(
            lm,
            tasks=[task],
            limit=settings["limit"],
            apply_chat_template=through_chat_template,
            task_manager=manager,
        )
    finally:
        gc.unfreeze()
    assert raw is not None  # in the first process
    config = next(iter(raw["configs"].values()))
    metadata = config.get("metadata") or {}
    versions = {package: version(package) for package in VERSIONED}
    versions[name] = str(metadata.get("version"))
    sample_counts = raw["n-samples"].values()
    result = Evaluation(
        task=name,
        title=metadata.get("title", name),
        metrics=_metrics(raw, name),
        samples=sum(count["effective"] for count in sample_counts),
        total=sum(count["original"] for count in sample_counts),
        protocol=_protocol_sentences(
            raw, config, through_chat_template, settings.get("quantization")
        ),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions,
        weights=weights,
        settings=settings,
    )
    samples_by_task = raw.pop("samples")
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))  # it adds the date
    tracker.save_results_aggregated(raw, samples=samples_by_task)
    for task_name, samples in samples_by_task.items():
        tracker.save_results_samples(task_name, samples)
    return result


def _uses_chat_template(lm: LM, task: str | Task, manager: TaskManager) -> bool:
    """Returns whether all parts of a task generate answers, and the model has a chat template."""
    for part in manager.load([task])["tasks"].values():
        if part.get_config("output_type") != "generate_until":
            return False
    return isinstance(lm, MultimodalLM) or bool(lm.tokenizer.chat_template)


def _metrics(raw: dict, task: str) -> list[Metric]:
    """Returns the metrics of a whole task, then of its subsets if it is a group.

    The references of `acc` and `exact_match` are `blank` and `commonest`, and `acc_colour` has
    `blank_colour` and `commonest_colour`. The reference of `contains` is `blank_contains`.

    Args:
        raw: What the harness returned. The keys of scores are name and filter, as `acc,none`.
        task: Name of the task or group.
    """
    metrics = []
    for task_name in sorted(raw["results"], key=lambda task_name: task_name != task):
        scores = raw["results"][task_name]
        subset = None
        if task_name != task:
            subset = scores.get("alias", task_name).strip(" -")
        for key, score in scores.items():
            name, _, filter_name = key.partition(",")
            is_result = filter_name and not name.endswith("_stderr")
            is_reference = name.partition("_")[0] in REFERENCES
            if not is_result or is_reference or not isinstance(score, int | float):
                continue
            standard_error = None
            stored_error = scores.get(f"{name}_stderr,{filter_name}")
            if isinstance(stored_error, int | float):
                standard_error = float(stored_error)
            suffix = name.removeprefix("exact_match").removeprefix("acc")
            if name == "contains":
                suffix = "_contains"
            references = {}
            for prefix, title in REFERENCES.items():
                reference = scores.get(f"{prefix}{suffix},{filter_name}")
                if reference is not None:
                    references[title] = float(reference)
            sample_count = None
            if task_name in raw["samples"]:  # a group has none
                sample_count = sum(
                    sample["filter"] == filter_name and name in sample["metrics"]
                    for sample in raw["samples"][task_name]
                )
            metric = Metric(
                name=name if filter_name == "none" else f"{name}, {filter_name}",
                value=float(score),
                stderr=standard_error,
                references=references,
                subset=subset,
                samples=sample_count,
            )
            metrics.append(metric)
    return metrics


def _protocol_sentences(
    raw: dict, config: dict, through_chat_template: bool, quantization: dict | None
) -> list[str]:
    """Returns sentences on how results were obtained.

    They quote the first prompt, but not if it comes from the user's own data, because they are
    published.

    Args:
        raw: What the harness returned.
        config: The task's configuration. For a group, the first task's.
        through_chat_template: Whether prompts were written through the chat template.
        quantization: How the language model was quantized, or None.
    """
    data_name_parts = []
    for name in filter(None, (config.get("dataset_path"), config.get("dataset_name"))):
        path = Path(name)
        data_name_parts.append(path.name if path.exists() else name)
    output_type = config["output_type"]
    rule_of_own_data = (config.get("metadata") or {}).get("rule")
    data_name = " ".join(data_name_parts)
    sentences = [f"lm-evaluation-harness runs its task {config['task']} on {data_name}."]
    if output_type == "generate_until":
        sentences += [
            f"Answers are generated with {json.dumps(config.get('generation_kwargs'))}.",
            "Of the model's own generation_config only the tokens are used, and no penalty.",
        ]
    else:
        sentences.append(f"Answers are chosen by {output_type}.")
    prompt_form = "through the chat template" if through_chat_template else "as plain text"
    example_count = config.get("num_fewshot") or 0
    sentences.append(f"Prompts are written {prompt_form}, after {example_count} examples.")
    if rule_of_own_data:
        sentences.append(rule_of_own_data)
    if config.get("description"):
        sentences.append(f'The system prompt is "{config["description"]}"')
    if any(metric["metric"] == "blank" for metric in config.get("metric_list", ())):
        sentences += [
            "Blank image: the answer to a white image, given to all questions with these words.",
            "Commonest answer: the share of questions whose true answer it is.",
        ]
    samples = next(iter(raw["samples"].values()), None)
    if samples and output_type != "loglikelihood_rolling" and not rule_of_own_data:
        first_prompt = json.dumps(samples[0]["arguments"][0][0], ensure_ascii=False)
        sentences.append(f"The first prompt is {shorten(first_prompt, 600, placeholder=' ...')}")
    if quantization:
        sentences.append(
            "The layers of the language model, and no others, are quantized: "
            f"{quantization_name(quantization)}."
        )
    return sentences
