# SPDX-License-Identifier: Apache-2.0
"""`python experiments cost`: what a plan of commands takes, before it runs, without weights."""

import argparse
import math
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from accelerate.utils import convert_file_size_to_int
from datasets import Dataset
from peft import PeftModel
from PIL import Image
from plan import STAGES, Plan, Run
from runs import parts
from scores import markdown
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from normalign_llava import (
    DATA_FEATURES,
    NormAlignLlavaForConditionalGeneration,
    NormAlignTrainer,
    build_checkpoint,
    make_trainer,
    option_words,
    parse_options,
    static_bytes,
)


SPARSE_CHECKPOINT = Path(__file__).parents[1] / "benchmarks" / "sparse_checkpoint.py"
GPUS = (1, 2, 4, 8, 16, 32, 64)
GIBIBYTE = 2**30
KEPT_FREE = GIBIBYTE  # of each GPU, as a dry run keeps it
GRADIENTS = "gradients"
BATCHES = "batches"
"""Parts of a memory estimate."""
PROMPT_TOKENS = 28  # in the row of a dry run: the chat template and the question


class Estimate(Protocol):
    """The memory of a training step on one GPU.

    Attributes:
        parts: Bytes by name of the part.
    """

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""


class StageCost(NamedTuple):
    """What a stage of one run takes.

    Attributes:
        steps: The number of optimizer steps.
        tokens: How many tokens enter the language model in all steps, visual ones included.
        flops: Floating-point operations of training in all steps.
        memory: Returns the bytes of a step on each of so many GPUs.
        kept: Bytes of its result, without files that are links.
        disk: Bytes of its result and its checkpoints.
    """

    steps: int
    tokens: float
    flops: float
    memory: Callable[[int], int]
    kept: int
    disk: int


def row_flops(
    trainer: NormAlignTrainer, text: float, images: float = 1, scored: float | None = None
) -> Counter[str]:
    """Returns the floating-point operations of a training step for each row, by part.

    A linear layer of N weights takes 2 N for each position in the forward pass, 2 N more in the
    backward pass if a gradient flows to its input, and 2 N if its weights are trained (Kaplan et
    al. 2020, arXiv 2001.08361, table 1: 6 N where all is trained). Attention over T positions takes
    4 T^2 d in the forward pass, for the products with keys and values, and twice that in the
    backward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Masked positions count,
    though kernels may skip them.

    Layers under gradient checkpointing are computed again except for their last linear layer, since
    no gradient needs its output (Korthikanti et al. 2022, arXiv 2205.05198, call these hardware
    FLOPs). No gradient flows to the encoder's layers behind the features, nor to a frozen encoder
    at all. The optimizer's step, the collectives, and all that is not a matrix product are left
    out.

    Args:
        trainer: The trainer of a dry run. Its model, options and processor are read.
        text: The tokens of a row's text.
        images: The images of a row.
        scored: How many positions have logits. By default all have, as on a GPU.
    """
    model = base_model(trainer.model)
    config = model.config
    text_config = config.get_text_config()
    is_repeated = trainer.args.gradient_checkpointing
    tokens = images * config.image_seq_length + text
    language = layers_flops(
        model.model.language_model,
        text_config,
        tokens,
        deepest=text_config.num_hidden_layers,
        is_repeated=is_repeated,
    )
    if scored is None:
        scored = tokens
    head = linear_flops(model.get_output_embeddings(), scored, flows=True)
    return Counter(
        {
            "vision tower": images * _encoder_flops(model, is_repeated),
            "projector": images * _projector_flops(model),
            "language model": language,
            "head": head,
        }
    )


def _encoder_flops(model: NormAlignLlavaForConditionalGeneration, is_repeated: bool) -> float:
    """Returns the operations of the vision encoder for an image."""
    config = model.config
    tower = model.model.vision_tower
    patches = config.image_seq_length
    positions = patches
    if config.vision_feature_select_strategy == "default":
        positions += 1  # the class token
    is_trained = _is_trained(tower)
    deepest = 0
    if is_trained:
        deepest = _deepest_feature_layer(config)
    operations = layers_flops(
        tower, config.vision_config, positions, deepest=deepest, is_repeated=is_repeated
    )
    for module in tower.modules():
        if isinstance(module, nn.Conv2d):
            operations += 2 * module.weight.numel() * patches * (1 + is_trained)
    return operations


def _deepest_feature_layer(config: PreTrainedConfig) -> int:
    """Returns the number of the last of the encoder's hidden states that the projector reads."""
    feature_layers = config.vision_feature_layer
    if isinstance(feature_layers, int):
        feature_layers = [feature_layers]
    state_count = config.vision_config.num_hidden_layers + 1
    return max(layer % state_count for layer in feature_layers)


def _projector_flops(model: NormAlignLlavaForConditionalGeneration) -> float:
    """Returns the operations of the projector for an image."""
    projector = model.model.multi_modal_projector
    projector = getattr(projector, "modules_to_save", projector)  # with adapters, the trained copy
    first_layer, second_layer = _linear_layers(projector)
    patches = model.config.image_seq_length
    encoder_is_trained = _is_trained(model.model.vision_tower)
    operations = linear_flops(first_layer, patches, flows=encoder_is_trained)
    return operations + linear_flops(second_layer, patches, flows=True)


def layers_flops(
    part: nn.Module,
    config: PreTrainedConfig,
    positions: float,
    *,
    deepest: int,
    is_repeated: bool,
) -> float:
    """Returns the operations of all transformer layers of a part for a row.

    Args:
        part: The vision encoder or the language model.
        config: Its configuration.
        positions: The length of the row.
        deepest: Gradients flow to the inputs of so many layers, from the first.
        is_repeated: Whether layers are computed again in the backward pass.
    """
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 4 * positions**2 * heads * head_width
    layers = [module for module in part.modules() if isinstance(module, GradientCheckpointingLayer)]
    operations = 0.0
    for number, layer in enumerate(layers):
        flows = number < deepest
        *earlier_linears, last_linear = _linear_layers(layer)
        for linear in earlier_linears:
            operations += linear_flops(linear, positions, flows=flows, is_repeated=is_repeated)
        operations += linear_flops(last_linear, positions, flows=flows)
        operations += attention
        if flows:
            operations += attention * (2 + is_repeated)
    return operations


def linear_flops(
    layer: nn.Linear, positions: float, *, flows: bool, is_repeated: bool = False
) -> float:
    """Returns the operations of a linear layer.

    Args:
        layer: The layer.
        positions: How many positions it is applied to.
        flows: Whether a gradient flows to its input.
        is_repeated: Whether it is computed again in the backward pass.
    """
    products = 1
    if flows:
        products += 1 + is_repeated
    if layer.weight.requires_grad:
        products += 1
    return 2 * layer.in_features * layer.out_features * positions * products


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """Returns the model without PEFT's wrapper."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def run_cost(plan: Plan, run: Run, device_memory: str) -> tuple[dict[str, StageCost], int]:
    """Returns what both stages take, from dry runs, and the bytes of the untrained checkpoint.

    If the run's group has a `shape`, the checkpoint has random weights that take no disk. Otherwise
    it is built from parts, and they must be there.

    Args:
        plan: The plan.
        run: The run.
        device_memory: The memory of a GPU, such as "80GB".
    """
    shape = plan.groups[run.group].get("shape")
    costs = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = folder / "checkpoint"
        if shape:
            command = [sys.executable, str(SPARSE_CHECKPOINT), str(folder), shape]
            subprocess.run(command, check=True)
        else:
            vision, language = parts(plan, run.group)
            build_checkpoint(vision, language, checkpoint, feature_layer=plan.feature_layer)
        untrained = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for stage, options in zip(STAGES, plan.options(run), strict=True):
            longest = int(plan.rows[stage]["longest"])
            write_longest_row(folder / "data", longest, image_size=384 if shape else 56)
            trainer = dry_run_trainer(folder, options, plan.rows[stage], device_memory)
            costs[stage] = _stage_cost(plan, stage, trainer, untrained)
    return costs, untrained


def write_longest_row(folder: Path, tokens: int, image_size: int) -> None:
    """Writes a data set of one row with an image.

    Args:
        folder: The folder of the data set.
        tokens: The tokens of the row besides the image's. In a checkpoint without weights each
            letter and each space is a token.
        image_size: The side of the image in pixels.
    """
    letters = (tokens - PROMPT_TOKENS) // 2
    question = [{"type": "image"}, {"type": "text", "text": "describe"}]
    answer = [{"type": "text", "text": " ".join("e" * letters)}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    row = {"images": [Image.new("RGB", (image_size, image_size))], "messages": messages}
    Dataset.from_list([row], features=DATA_FEATURES).save_to_disk(folder)


def dry_run_trainer(
    folder: Path, options: dict[str, Any], data: dict[str, float], device_memory: str
) -> NormAlignTrainer:
    """Returns the trainer of a dry run, with as many steps as the stage would take.

    Args:
        folder: The folder of `checkpoint` and `data`.
        options: The options of the stage.
        data: What the plan says of the stage's data.
        device_memory: The memory of a GPU, such as "80GB".
    """
    dry_options = {**options, "dry_run": True, "device_memory": device_memory}
    for name in ("image_folder", "probe_steps"):
        dry_options.pop(name, None)
    dry_options["model_name_or_path"] = folder / "checkpoint"
    dry_options["dataset_name"] = folder / "data"
    dry_options["output_dir"] = folder / "run"
    trainer, _ = make_trainer(*parse_options(option_words(dry_options)))
    training_args = trainer.args  # with the defaults of the stage
    if training_args.max_steps > 0:
        return trainer
    rows = training_args.num_train_epochs * data["rows"]
    dry_options["max_steps"] = math.ceil(rows / training_args.global_batch_size)
    trainer, _ = make_trainer(*parse_options(option_words(dry_options)))
    return trainer


def _stage_cost(plan: Plan, stage: str, trainer: NormAlignTrainer, untrained: int) -> StageCost:
    """Returns what a stage takes, from the trainer of its dry run.

    Args:
        plan: The plan.
        stage: "stage1" or "stage2".
        trainer: The trainer.
        untrained: Bytes of the untrained checkpoint.
    """
    data = plan.rows[stage]
    images = data.get("images", 1)
    text = data["text"]
    is_sharded = plan.accelerate.get(stage, "ddp") != "ddp"
    row_tokens = images * base_model(trainer.model).config.image_seq_length + text
    operations = row_flops(trainer, text, images, data.get("scored"))
    rows = trainer.args.max_steps * trainer.args.global_batch_size
    kept, disk = _disk(trainer, untrained, is_sharded)
    memory = partial(
        memory_on,
        estimate=trainer.estimate_memory(),
        static=static_bytes(trainer.model, trainer.args),
        sharded=is_sharded,
    )
    return StageCost(
        steps=trainer.args.max_steps,
        tokens=rows * row_tokens,
        flops=rows * operations.total(),
        memory=memory,
        kept=kept,
        disk=disk,
    )


def _disk(trainer: NormAlignTrainer, untrained: int, is_sharded: bool) -> tuple[int, int]:
    """Returns the bytes of a stage's result, and of its result and its checkpoints.

    Args:
        trainer: The trainer of a dry run.
        untrained: Bytes of the untrained checkpoint. A merged model has as many.
        is_sharded: Whether optimizer states are stored with the whole model's weights.
    """
    disk_use = trainer.facts["disk"]
    checkpoints = disk_use["checkpoints"] * disk_use["checkpoint"]
    kept = disk_use["total"] - checkpoints
    if isinstance(trainer.model, PeftModel):
        kept += untrained
    if is_sharded:
        weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
        checkpoints += disk_use["checkpoints"] * weights
    return kept, kept + checkpoints


def memory_on(gpus: int, *, estimate: Estimate, static: dict[str, int], sharded: bool) -> int:
    """Returns the bytes of a step on each of some GPUs.

    Args:
        gpus: The number of GPUs.
        estimate: The memory of a step on one.
        static: Bytes of weights, gradients and optimizer states, by part.
        sharded: Whether these are divided among the GPUs.
    """
    if gpus == 1:
        return estimate.total
    share_of_others = 1 - 1 / gpus
    # A step has fewer batches on each GPU.
    total = estimate.total - share_of_others * estimate.parts[BATCHES]
    gradients = estimate.parts.get(GRADIENTS, 0)
    if not sharded:
        return int(total + gradients)
    divided = gradients
    for part, size in static.items():
        if part != GRADIENTS:
            divided += size
    return int(total - share_of_others * divided)


def print_cost(plan: Plan, options: argparse.Namespace) -> None:
    """Prints what a plan takes, stage by stage and in all, and what is assumed.

    Raises:
        ValueError: The plan does not say what its data have.
    """
    if plan.rows.keys() != set(STAGES):
        raise ValueError(
            f"{plan.name} does not say how many rows its data have. Add `rows`, as in table4.yaml."
        )
    runs = plan.runs(options.only)
    plan_costs: list[StageCost] = []
    kept = 0
    peak = 0
    table_rows = []
    for name, similar_runs in _similar(runs).items():
        run_count = len(similar_runs)
        costs, untrained = run_cost(plan, similar_runs[0], options.device_memory)
        for stage, stage_cost in costs.items():
            row_name = f"{name}, {stage}"
            memory = _memory_verdict(stage_cost, options)
            table_rows.append(_row(row_name, [stage_cost], stage_cost.disk, options, memory=memory))
        run_costs = list(costs.values())
        kept_by_run = untrained + sum(stage_cost.kept for stage_cost in run_costs)
        peak_of_run = untrained + sum(stage_cost.disk for stage_cost in run_costs)
        peak = max(peak, kept + (run_count - 1) * kept_by_run + peak_of_run)
        kept += run_count * kept_by_run
        group_costs = run_count * run_costs
        plan_costs += group_costs
        group_disk = run_count * kept_by_run
        table_rows.append(_row(f"{name}, all", group_costs, group_disk, options, runs=run_count))
    table_rows.append(_row("the plan", plan_costs, peak, options, runs=len(runs)))
    headings = ["", "runs", "steps", "tokens", "FLOPs", "GPU-hours", "hours"]
    headings += ["memory of a step", "disk, GB"]
    print(*markdown(headings, table_rows), sep="\n")
    _print_assumptions(plan, options)


def _similar(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns lists of runs that differ only in arm and seed, by name."""
    similar_runs = defaultdict(list)
    for run in runs:
        name = run.group
        if run.variant.stage1 or run.variant.stage2:
            name = run.name_in_plan
        similar_runs[name].append(run)
    return similar_runs


def _memory_verdict(cost: StageCost, options: argparse.Namespace) -> str:
    """Returns the memory of a step, and whether it fits."""
    available = convert_file_size_to_int(options.device_memory) - KEPT_FREE
    size = cost.memory(options.gpus)
    if size <= available:
        return f"{size / GIBIBYTE:.1f} GiB, fits"
    fewest = f"more than {GPUS[-1]}"
    for gpus in GPUS:
        if cost.memory(gpus) <= available:
            fewest = str(gpus)
            break
    return f"{size / GIBIBYTE:.1f} GiB, does not fit; on {fewest} GPUs"


def _row(
    name: str,
    costs: Sequence[StageCost],
    disk: float,
    options: argparse.Namespace,
    *,
    runs: int = 1,
    memory: str = "",
) -> list[str]:
    """Returns a row of the table, with the sums of some stages."""
    steps = sum(cost.steps for cost in costs)
    tokens = sum(cost.tokens for cost in costs)
    operations = sum(cost.flops for cost in costs)
    hours = operations / (options.tflops * 1e12 * options.mfu) / 3600
    return [
        name,
        str(runs),
        f"{steps:,}",
        f"{tokens:.3g}",
        f"{operations:.3g}",
        _hours(hours),
        _hours(hours / options.gpus),
        memory,
        f"{disk / 1e9:,.1f}",
    ]


def _hours(hours: float) -> str:
    if hours >= 100:
        return f"{hours:,.0f}"
    return f"{hours:.3g}"


def _print_assumptions(plan: Plan, options: argparse.Namespace) -> None:
    """Prints what the table assumes, and the downloads."""
    print(
        f"\n{options.gpus} GPU(s) of {options.device_memory}. 1 GiB of each is kept free. Hours "
        f"are for {options.mfu:.0%} of {options.tflops:g} TFLOP/s (--mfu, --tflops), without "
        "evaluation and diagnosis. Disk: for a stage and for the plan, the peak; for all runs of a "
        "group, what they keep; without downloads."
    )
    downloads = []
    for name, size in plan.downloads.items():
        downloads.append(f"{name} {size:g} GB")
    if downloads:
        total = sum(plan.downloads.values())
        print(f"Downloads: {total:g} GB: {', '.join(downloads)}.")
    else:
        print("Downloads: none.")
