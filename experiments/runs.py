# SPDX-License-Identifier: Apache-2.0
"""Makes one run of an experiment: builds, trains both stages, evaluates and measures."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from commands import scores_by_metric
from datasets import Dataset, load_from_disk
from filelock import FileLock
from files import TRAINER_STATE, TRAINING_RECORD, new_path, read_json
from information import InformationCallback, held_out_questions
from peft import PeftModel
from plan import STAGES, Plan, Run, row_count
from rescale import rescale, save_together
from torch import nn
from transformers import AutoProcessor, TrainerCallback

from normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    build_checkpoint,
    convert_language,
    convert_vision,
    evaluate,
    load_samples,
    merge_adapter,
    probe,
    read_evaluations,
    sample_batches,
    train_stage,
    training_data,
)


RECIPE_SEEDS = (0, 2)
RECIPE_ROWS = 1920
"""The recipes were chosen on this many rows of the quickstart's data, with `RECIPE_SEEDS`."""

PROBE_BATCH_SIZE = 16
EVALUATE_BATCH_SIZE = 64
CURVES = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "clip/share",
    "norm/visual",
    "norm/text",
    "gain/mean_abs",
)


@dataclass(frozen=True)
class RunFolders:
    """The folders of a run.

    Attributes:
        run: The folder that holds all but the data.
        data: The data of both stages.
    """

    run: Path
    data: Path

    @property
    def untrained(self) -> Path:
        """The checkpoint before stage 1."""
        return self.run / "untrained"

    @property
    def model(self) -> Path:
        """The trained model with the factor on visual tokens."""
        return self.run / "model"

    def stage(self, name: str) -> Path:
        """Returns the result of a stage."""
        return self.run / name


def make_run(plan: Plan, run: Run, vision: Path, language: Path, work: Path) -> dict[str, Any]:
    """Makes a run and returns its result. If it diverged, `failed` in it is the reason.

    Args:
        plan: The plan.
        run: The run.
        vision: Folder of the vision encoder.
        language: Folder of the language model.
        work: The folder of checkpoints and data while they are needed. A stopped run is resumed
            from there.
    """
    options = dict(zip(STAGES, plan.options(run), strict=True))
    result = {
        "group": run.group,
        "variant": run.name,
        "seed": run.seed,
        "settings": vars(run.variant),
        "options": options,
        "bf16": plan.bf16,
        "threads": torch.get_num_threads(),
    }
    folders = _write_untrained(plan, run, vision, language, work)
    start = measure_tokens(folders.untrained, plan.diagnosed)
    multiplier = 1.0
    if run.variant.enters_at is not None:
        multiplier = run.variant.enters_at * start["n_text"] / start["norm"]
    try:
        _train_stages(plan, run, folders, multiplier)
    except FloatingPointError as error:  # that it diverged is a result too
        shutil.rmtree(folders.run)
        return {**result, "failed": str(error)}
    start_time = time.monotonic()
    _write_model(folders, multiplier, is_adapter=bool(options["stage2"].get("use_peft")))
    result |= _measurements(plan, folders)
    result["multiplier"] = multiplier
    result["tokens"] = {
        "untrained": start["norm"] * multiplier,
        "trained": measure_tokens(folders.model, plan.diagnosed),
    }
    seconds = time.monotonic() - start_time
    for stage in STAGES:
        seconds += read_json(folders.stage(stage) / TRAINING_RECORD)["seconds"]
    result["minutes"] = round(seconds / 60, 1)
    shutil.rmtree(folders.run)
    return result


def _write_untrained(plan: Plan, run: Run, vision: Path, language: Path, work: Path) -> RunFolders:
    """Writes data, rescaled parts and the untrained checkpoint, unless they are there."""
    align_options, tune_options = plan.options(run)
    align_rows = row_count(align_options)
    tune_rows = row_count(tune_options)
    folders = RunFolders(work / run.key, work / f"data-{run.seed}-{align_rows}-{tune_rows}")
    with FileLock(work / "parts.lock"):
        write_data(folders.data, align_rows, tune_rows, run.seed)
        encoder, decoder = rescale(
            vision,
            language,
            work / "parts",
            text=run.variant.text,
            features=run.variant.features,
        )
    if not folders.untrained.exists():
        build_checkpoint(
            str(encoder),
            str(decoder),
            folders.untrained,
            arm=run.variant.arm,
            feature_layer=plan.feature_layer,
            seed=run.seed,
        )
    return folders


def _train_stages(plan: Plan, run: Run, folders: RunFolders, multiplier: float) -> None:
    """Trains both stages, and measures visual information.

    Raises:
        FloatingPointError: The run diverged.
    """
    questions = held_out_questions()
    all_options = plan.options(run)
    last_step = sum(options["max_steps"] for options in all_options)
    steps_before = 0
    checkpoint = folders.untrained
    for stage, options in zip(STAGES, all_options, strict=True):
        factors = FixedFactors(multiplier, run.variant.gradient)
        information = InformationCallback(questions, steps_before, last_step)
        train_stage(
            options,
            checkpoint,
            folders.data / stage,
            folders.stage(stage),
            bf16=plan.bf16,
            callbacks=[factors, information],
        )
        steps_before += options["max_steps"]
        checkpoint = folders.stage(stage)


def _write_model(folders: RunFolders, multiplier: float, *, is_adapter: bool) -> None:
    """Writes the whole trained model with the factor on visual tokens, unless it is there."""
    if folders.model.exists():
        return
    trained = folders.stage("stage2")
    if is_adapter:
        trained = folders.run / "merged"
        if not trained.exists():
            base = str(folders.stage("stage1"))
            merge_adapter(folders.stage("stage2"), trained, base=base)
    write_multiplied(trained, multiplier, folders.model)


def _measurements(plan: Plan, folders: RunFolders) -> dict[str, Any]:
    """Evaluates the model, and returns the scores and what training logged and recorded."""
    information = []
    curves = {}
    for stage in STAGES:
        curves[stage] = curve(folders.stage(stage))
        for log_entry in _log_history(folders.stage(stage)):
            if "information" in log_entry:
                information.append(log_entry)
    record = read_json(folders.stage("stage2") / TRAINING_RECORD)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "data": data_hash(folders.data),
        "curves": curves,
        "information": information,
        "scores": scores(folders.model, plan.tasks),
        "hardware": record["hardware"],
        "versions": record["versions"],
        "commit": record["commit"],
    }


def parts(plan: Plan, group: str) -> tuple[str, str]:
    """Returns folders or Hub ids of vision encoder and language model of a group.

    The quickstart's parts are fetched if the plan names none.
    """
    language = plan.groups[group].get("language", plan.language)
    return plan.vision or str(convert_vision(56)), language or str(convert_language())


def write_data(output: Path, align_rows: int, tune_rows: int, seed: int) -> None:
    """Writes conversations of both stages, about images that the recipes' seeds do not show.

    Args:
        output: Folder of the two data sets. Nothing is done if it exists.
        align_rows: How many conversations stage 1 has.
        tune_rows: How many conversations stage 2 has.
        seed: The seed that they are drawn with.

    Raises:
        ValueError: There are not enough such images.
    """
    if output.exists():
        return
    planned_rows = align_rows + tune_rows
    known_images: set[bytes] = set()
    for recipe_seed in RECIPE_SEEDS:
        known_images.update(_images(training_data(RECIPE_ROWS, seed=recipe_seed)))
    drawn_rows = training_data(4 * planned_rows, 0.0, seed)
    new_rows = []
    for number, image in enumerate(_images(drawn_rows)):
        if image not in known_images:
            new_rows.append(number)
    if len(new_rows) < planned_rows:
        missing = f"There are {len(new_rows)} rows of new images; {planned_rows} are needed."
        raise ValueError(f"{missing} Take fewer steps.")
    with new_path(output) as folder:
        drawn_rows.select(new_rows[:align_rows]).save_to_disk(folder / "stage1")
        drawn_rows.select(new_rows[align_rows:planned_rows]).save_to_disk(folder / "stage2")


def data_hash(data: Path) -> str:
    """Returns the SHA-256 over messages and images of both stages."""
    data_digest = hashlib.sha256()
    for stage in STAGES:
        rows = load_from_disk(str(data / stage))
        messages = json.dumps(rows["messages"][:], sort_keys=True)
        data_digest.update(messages.encode())
        for image in _images(rows):
            data_digest.update(image)
    return data_digest.hexdigest()


def _images(rows: Dataset) -> list[bytes]:
    """Returns the files of all images, in order of the rows."""
    image_files = []
    for row_images in rows.with_format("arrow")[:]["images"].to_pylist():
        image_files += [image["bytes"] for image in row_images]
    return image_files


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
        if isinstance(model, PeftModel):
            model = model.get_base_model()
        projector = model.model.multi_modal_projector
        if self.tokens != 1:
            self._hooks.append(projector.register_forward_hook(self._scale_tokens))
        if self.gradient != 1:
            self._hooks.append(projector.norm.register_forward_pre_hook(self._scale_gradient))

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
    save_together(output, model, processor)


def measure_tokens(checkpoint: Path, sample_count: int) -> dict[str, Any]:
    """Measures norms on entry to the decoder, and rotations, on held-out images.

    Returns:
        `n_text`, then `norm` and `text_norm` on entry. `asymmetry` is the mean rotation of visual
        tokens over text in all layers but the last. `rotation` is of each layer, by kind, in
        radians.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    samples = load_samples(None, sample_count).samples
    inputs = sample_batches(processor, samples, PROBE_BATCH_SIZE)
    depth = probe(model, inputs, tokenizer=processor.tokenizer).depth
    return {
        "n_text": model.measure_text_embedding_norm(),
        "norm": depth.norm["visual"].mean[0],
        "text_norm": depth.norm["text"].mean[0],
        "asymmetry": depth.asymmetry,
        "rotation": {kind: depth.rotation[kind].mean for kind in ("visual", "text")},
    }


def scores(model: Path, tasks: list[str]) -> dict[str, float]:
    """Evaluates a model, and returns the metrics of all tasks, by `"task metric"`.

    Raises:
        ValueError: A task could not be run.
    """
    evaluated = evaluate(str(model), tasks=tasks, batch_size=EVALUATE_BATCH_SIZE, dtype="float32")
    for task, reason in evaluated.failed.items():
        raise ValueError(f"{task} could not be run: {reason} Start again to resume.")
    return scores_by_metric(read_evaluations(model))


def _log_history(folder: Path) -> list[dict[str, Any]]:
    return read_json(folder / TRAINER_STATE)["log_history"]


def curve(folder: Path) -> dict[str, list]:
    """Returns what training logged, by quantity.

    A quantity has a value for each logged step, and None where it was not logged.
    """
    entries = [log_entry for log_entry in _log_history(folder) if "loss" in log_entry]
    logged_names: set[str] = set()
    for log_entry in entries:
        logged_names.update(log_entry)
    curves = {}
    for name in sorted(logged_names):
        if name in CURVES or name.startswith("grad_norm/"):
            curves[name] = [_rounded(log_entry.get(name)) for log_entry in entries]
    return curves


def _rounded(number: float | None) -> float | None:
    """Returns a number with five significant digits."""
    if number is None:
        return None
    return float(f"{number:.5g}")
