# SPDX-License-Identifier: Apache-2.0
"""Makes one run of an experiment: builds, trains both stages, evaluates and measures."""

import hashlib
import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from filelock import FileLock
from information import InformationCallback, held_out_questions
from plan import Plan, Run
from rescale import rescale
from torch import nn
from transformers import AutoProcessor, TrainerCallback

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.files import STATE, TRAINING_RECORD, finished_folder, json_or_none
from normalign_llava.diagnose.data import batches, load_samples
from normalign_llava.diagnose.measure.probe import probe
from normalign_llava.evaluation.results import read_evaluations
from normalign_llava.evaluation.run import evaluate
from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import training_data
from normalign_llava.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.quickstart.train import rows_of, train_stage
from normalign_llava.train.modules.model import base_model, projector_norm


RECIPE_SEEDS = (0, 2)
RECIPE_ROWS = 1920
"""The quickstart's data on which its recipes were chosen."""

BATCH_SIZE = {"probe": 16, "evaluate": 64}


def make_run(plan: Plan, run: Run, vision: Path, language: Path, work: Path) -> dict[str, Any]:
    """The result of a run, from folders of the parts; `failed` is the reason, if it diverged.

    `work` holds checkpoints and data while they are needed; a stopped run goes on from there.
    """
    folder = work / run.key
    variant = run.variant
    first, second = plan.options(run)
    result = {
        **{"group": run.group, "variant": run.name, "seed": run.seed, "settings": vars(variant)},
        "options": {"stage1": first, "stage2": second},
        "bf16": plan.bf16,
        "threads": torch.get_num_threads(),
    }
    data = work / f"data-{run.seed}-{rows_of(first)}-{rows_of(second)}"
    with FileLock(work / "parts.lock"):
        write_data(data, rows_of(first), rows_of(second), run.seed)
        factors = {"text": variant.text, "features": variant.features}
        vision, language = rescale(vision, language, work / "parts", **factors)
    names = ("untrained", "stage1", "stage2", "model")
    untrained, aligned, tuned, model = (folder / name for name in names)
    if not untrained.exists():
        options = {"arm": variant.arm, "feature_layer": plan.feature_layer, "seed": run.seed}
        build_checkpoint(str(vision), str(language), untrained, **options)
    start = measure_tokens(untrained, plan.diagnosed)
    multiplier = 1.0
    if variant.enters_at is not None:
        multiplier = variant.enters_at * start["n_text"] / start["norm"]
    questions = held_out_questions()
    between = first["max_steps"]
    last = between + second["max_steps"]

    def train(options: dict[str, Any], start: Path, rows: Path, output: Path, before: int) -> None:
        factors = FixedFactors(multiplier, variant.gradient)
        callbacks = [factors, InformationCallback(questions, before, last)]
        train_stage(options, start, rows, output, bf16=plan.bf16, callbacks=callbacks)

    try:
        train(first, untrained, data / "stage1", aligned, before=0)
        train(second, aligned, data / "stage2", tuned, before=between)
    except FloatingPointError as error:  # that it diverged is a result too
        shutil.rmtree(folder)
        return {**result, "failed": str(error)}
    began = time.monotonic()
    if not model.exists():
        whole = folder / "merged" if second.get("use_peft") else tuned
        if whole != tuned and not whole.exists():
            merge_adapter(tuned, whole, base=str(aligned))
        write_multiplied(whole, multiplier, model)
    states = [json_or_none(each / STATE) for each in (aligned, tuned)]
    history = [entry for state in states for entry in state["log_history"]]
    record = json_or_none(tuned / TRAINING_RECORD)
    result |= {
        "date": datetime.now(UTC).date().isoformat(),
        "data": data_hash(data),
        "multiplier": multiplier,
        "curves": {"stage1": curve(aligned), "stage2": curve(tuned)},
        "information": [entry for entry in history if "information" in entry],
        "scores": scores(model, plan.tasks),
        "tokens": {
            "untrained": start["norm"] * multiplier,
            "trained": measure_tokens(model, plan.diagnosed),
        },
        **{name: record[name] for name in ("hardware", "versions", "commit")},
    }
    seconds = [json_or_none(each / TRAINING_RECORD)["seconds"] for each in (aligned, tuned)]
    result["minutes"] = round((sum(seconds) + time.monotonic() - began) / 60, 1)
    shutil.rmtree(folder)
    return result


def parts(plan: Plan, group: str) -> tuple[str, str]:
    """Vision encoder and language model of a group: folders or Hub ids."""
    language = plan.groups[group].get("language", plan.language)
    return plan.vision or str(convert_vision(56)), language or str(convert_language())


def write_data(output: Path, first: int, second: int, seed: int) -> None:
    """Writes conversations of both stages, about images that the recipes' seeds do not show."""
    if output.exists():
        return
    wanted = first + second
    known = set()
    for each in RECIPE_SEEDS:
        known.update(_images(training_data(RECIPE_ROWS, seed=each)))
    drawn = training_data(4 * wanted, 0.0, seed)
    fresh = [number for number, image in enumerate(_images(drawn)) if image not in known][:wanted]
    if len(fresh) < wanted:
        missing = f"There are {len(fresh)} rows of new images; {wanted} are needed."
        raise ValueError(f"{missing} Take fewer steps.")
    with finished_folder(output) as folder:
        drawn.select(fresh[:first]).save_to_disk(folder / "stage1")
        drawn.select(fresh[first:]).save_to_disk(folder / "stage2")


def data_hash(data: Path) -> str:
    """SHA-256 over messages and images of both stages."""
    digest = hashlib.sha256()
    for name in ("stage1", "stage2"):
        rows = load_from_disk(str(data / name))
        digest.update(json.dumps(rows["messages"][:], sort_keys=True).encode())
        for image in _images(rows):
            digest.update(image)
    return digest.hexdigest()


def _images(rows: Dataset) -> list[bytes]:
    column = rows.with_format("arrow")[:]["images"].to_pylist()
    return [image["bytes"] for images in column for image in images]


class FixedFactors(TrainerCallback):
    """Multiplies the projector's output, and the gradient at the normalised tokens, in training.

    Args:
        tokens: Factor on the projector's output.
        gradient: Factor on the gradient at the norm's output before the gain. LayerNorm's backward
            is linear, so at the norm's input the factor is the same.
    """

    def __init__(self, tokens: float, gradient: float):
        self.tokens = tokens
        self.gradient = gradient
        self._hooks: list[Any] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Hooks the projector and its norm."""
        if self.tokens != 1:
            projector = base_model(model).model.multi_modal_projector
            self._hooks.append(projector.register_forward_hook(self._scale_tokens))
        if self.gradient != 1:
            norm = projector_norm(model)
            self._hooks.append(norm.register_forward_pre_hook(self._scale_gradient))

    def on_train_end(self, args, state, control, **kwargs):
        """Removes the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _scale_tokens(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * self.tokens

    def _scale_gradient(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: gradient * self.gradient)


@torch.no_grad()
def write_multiplied(checkpoint: Path, multiplier: float, output: Path) -> None:
    """Writes a checkpoint with a fixed factor on visual tokens as part of its projector."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    for parameter in model.model.multi_modal_projector.linear_2.parameters():
        parameter.mul_(multiplier)
    with finished_folder(output) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


def measure_tokens(checkpoint: Path, samples: int) -> dict[str, Any]:
    """Norms on entry to the decoder, and rotations of visual tokens and text, on held-out images.

    Returns:
        `n_text`; `norm` and `text_norm` on entry; `asymmetry`, the mean rotation over all layers
        but the last of visual tokens over text; `rotation`, of each layer, by kind, in radians.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    drawn = batches(processor, load_samples(None, samples).samples, BATCH_SIZE["probe"])
    depth = probe(model, drawn, tokenizer=processor.tokenizer).depth
    return {
        "n_text": model.measure_text_embedding_norm(),
        "norm": depth.norm["visual"].mean[0],
        "text_norm": depth.norm["text"].mean[0],
        "asymmetry": depth.asymmetry,
        "rotation": {kind: depth.rotation[kind].mean for kind in ("visual", "text")},
    }


def scores(model: Path, tasks: list[str]) -> dict[str, float]:
    """The metrics of all tasks, by `"task metric"`."""
    run = evaluate(str(model), tasks=tasks, batch_size=BATCH_SIZE["evaluate"], dtype="float32")
    for task, reason in run.failed.items():
        raise ValueError(f"{task} could not be run: {reason} Start again to resume.")
    return {
        f"{evaluation.task} {metric.name}": metric.value
        for evaluation in read_evaluations(model)
        for metric in evaluation.metrics
    }


def curve(folder: Path) -> dict[str, list]:
    """What training logged, by quantity: a value for each logged step, None where there is none."""
    log = [each for each in json_or_none(folder / STATE)["log_history"] if "loss" in each]
    names = ["step", "loss", "learning_rate", "grad_norm", "clip/share"]
    names += ["norm/visual", "norm/text", "gain/mean_abs"]
    logged = sorted({name for each in log for name in each})
    shown = [name for name in logged if name in names or name.startswith("grad_norm/")]
    return {name: [each.get(name) and float(f"{each[name]:.5g}") for each in log] for name in shown}
