# SPDX-License-Identifier: Apache-2.0
"""`python experiments cost`: what a plan of commands takes, before it runs, without weights."""

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from accelerate.utils import convert_file_size_to_int
from plan import Plan, Run
from runs import parts
from scores import markdown
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.checkpoint.weights import size_of, stored_tensors
from normalign_llava.quickstart.train import words
from normalign_llava.train.keeping.summary import gib
from normalign_llava.train.memory import CONTEXT, MemoryEstimate
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.modules.sizes import BATCHES, GRADIENTS, static_bytes
from normalign_llava.train.parsing import parse
from normalign_llava.train.run import make_trainer
from normalign_llava.train.trainer import NormAlignTrainer


sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from dry_runs import sparse_checkpoint
from step import write_rows


GPUS = (1, 2, 4, 8, 16, 32, 64)


class StageCost(NamedTuple):
    """What a stage of one run takes.

    Attributes:
        steps: Optimizer steps.
        tokens: That enter the language model, visual ones included.
        flops: Of training, in all steps.
        memory: Bytes of a step on each of so many GPUs.
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
    """Floating-point operations of a training step for each row, by part.

    A linear layer of N weights takes 2 N for each position in the forward pass, 2 N more in the
    backward pass if a gradient flows to its input, and 2 N if its weights are trained (Kaplan et
    al. 2020, arXiv 2001.08361, table 1: 6 N where all is trained). Attention over T positions takes
    4 T^2 d in the forward pass, for the products with keys and values, and twice that in the
    backward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B); masked positions count,
    though kernels may skip them. Layers under gradient checkpointing are computed again but for
    their last linear layer, whose output no gradient needs (Korthikanti et al. 2022, arXiv
    2205.05198, call these hardware FLOPs). No gradient flows to the encoder's layers behind the
    features, nor to a frozen encoder at all. What is not a matrix product, the optimizer's step and
    the collectives are left out.

    Args:
        trainer: Of a dry run; its model, options and processor are read.
        text: Tokens of a row beside those of its images.
        images: Of a row.
        scored: Positions whose logits are computed; by default all, as on a GPU.
    """
    model = base_model(trainer.model)
    again = trainer.args.gradient_checkpointing
    config = model.config
    inner = model.model
    projector = model.model.multi_modal_projector
    trained = {each for each in trainer.model.parameters() if each.requires_grad}
    sees = not trained.isdisjoint(inner.vision_tower.parameters())  # whether the encoder is trained
    patches = config.image_seq_length
    tokens = images * patches + text

    def linear(layer: nn.Linear, positions: float, *, flows: bool, again: bool = False) -> float:
        passes = 1 + flows + (flows and again) + (layer.weight in trained)
        return 2 * layer.in_features * layer.out_features * positions * passes

    def layers(part: nn.Module, of_part: PreTrainedConfig, positions: float, deepest: int) -> float:
        operations = 0.0
        heads = of_part.num_attention_heads
        width = heads * (getattr(of_part, "head_dim", None) or of_part.hidden_size // heads)
        modules = [each for each in part.modules() if isinstance(each, GradientCheckpointingLayer)]
        for number, layer in enumerate(modules):
            flows = number < deepest
            *others, last = _linears(layer)
            operations += sum(linear(each, positions, flows=flows, again=again) for each in others)
            operations += linear(last, positions, flows=flows)
            operations += 4 * positions**2 * width * (1 + flows * (2 + again))
        return operations

    tower = inner.vision_tower
    vision_config = config.vision_config
    read = config.vision_feature_layer
    depth = vision_config.num_hidden_layers
    read = [read] if isinstance(read, int) else read
    deepest = max(each % (depth + 1) for each in read) if sees else 0
    with_class = patches + (config.vision_feature_select_strategy == "default")
    encoder = layers(tower, vision_config, with_class, deepest)
    convolutions = [each.weight for each in tower.modules() if isinstance(each, nn.Conv2d)]
    embedding = sum(2 * each.numel() * patches * (1 + sees) for each in convolutions)
    first, second = _linears(getattr(projector, "modules_to_save", projector))
    projected = linear(first, patches, flows=sees) + linear(second, patches, flows=True)
    text_config = config.get_text_config()
    language = layers(inner.language_model, text_config, tokens, text_config.num_hidden_layers)
    scored = tokens if scored is None else scored
    operations = {
        "vision tower": images * (encoder + embedding),
        "projector": images * projected,
        "language model": language,
        "head": linear(model.get_output_embeddings(), scored, flows=True),
    }
    return Counter(operations)


def run_cost(plan: Plan, run: Run, device_memory: str) -> tuple[dict[str, StageCost], int]:
    """What both stages take, by the trainers of dry runs, and bytes of the untrained checkpoint.

    Without `shape` in its group the checkpoint is built, from parts that must then be there.
    """
    shape = plan.groups[run.group].get("shape")
    costs = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = Path(name, "checkpoint")
        if shape:
            sparse_checkpoint(folder, shape)
        else:
            build_checkpoint(*parts(plan, run.group), checkpoint, feature_layer=plan.feature_layer)
        untrained = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for stage, options in zip(("stage1", "stage2"), plan.options(run), strict=True):
            rows = plan.rows[stage]
            # In a sparse checkpoint letters and spaces are tokens; template and question have 28.
            write_rows(folder, 384 if shape else 56, [(1, (int(rows["longest"]) - 28) // 2)])
            left_out = {"image_folder", "probe_steps"}
            dry = {name: value for name, value in options.items() if name not in left_out}
            dry |= {"model_name_or_path": checkpoint, "dataset_name": folder / "data"}
            dry |= {"output_dir": folder / "run", "dry_run": True, "device_memory": device_memory}
            _, args, _ = parse(words(dry))
            if (steps := args.max_steps) <= 0:
                steps = math.ceil(args.num_train_epochs * rows["rows"] / args.global_batch_size)
            arguments = parse(words({**dry, "max_steps": steps}))
            trainer = make_trainer(*arguments)[0]
            model = base_model(trainer.model)
            disk = trainer.facts["disk"]
            sharded = plan.accelerate.get(stage, "ddp") != "ddp"
            checkpoints = disk["checkpoints"] * disk["checkpoint"]
            whole = size_of(stored_tensors(model))
            kept = disk["total"] - checkpoints + (whole if options.get("use_peft") else 0)  # merged
            more = disk["checkpoints"] * whole if sharded else 0  # weights with optimizer states
            estimate = trainer.estimate_memory()
            static = static_bytes(trainer.model, trainer.args)
            images = rows.get("images", 1)
            text = rows["text"]
            flops = row_flops(trainer, text, images, rows.get("scored")).total()
            count = steps * args.global_batch_size
            costs[stage] = StageCost(
                steps,
                count * (images * model.config.image_seq_length + text),
                count * flops,
                partial(memory_on, estimate=estimate, static=static, sharded=sharded),
                kept,
                kept + checkpoints + more,
            )
    return costs, untrained


def memory_on(gpus: int, *, estimate: MemoryEstimate, static: dict[str, int], sharded: bool) -> int:
    """Bytes of a step on each of some GPUs, from its estimate on one by [`estimate_memory`]."""
    if gpus == 1:
        return estimate.total
    rest = 1 - 1 / gpus
    total = estimate.total - rest * estimate.parts[BATCHES]  # a step has fewer of them on each
    gradients = estimate.parts.get(GRADIENTS, 0)
    divided = sum(size for name, size in static.items() if name != GRADIENTS) + gradients
    return int(total - rest * divided if sharded else total + gradients)


def print_cost(plan: Plan, options: argparse.Namespace) -> None:
    """Prints what a plan takes, stage by stage and in all, and what is assumed.

    Raises ValueError if the plan does not say what its data have.
    """
    if plan.rows.keys() != {"stage1", "stage2"}:
        raise ValueError(
            f"{plan.name} does not say how many rows its data have. Add `rows`, as in table4.yaml."
        )
    runs = plan.runs(options.only)
    every = []
    kept = 0
    peak = 0
    body = []
    room = convert_file_size_to_int(options.device_memory) - CONTEXT
    gpus = options.gpus
    alike = defaultdict(list)  # but for arm and seed
    for run in runs:
        own = f"/{run.name}" if run.variant.stage1 or run.variant.stage2 else ""
        alike[run.group + own].append(run)

    def row(name: str, count: int, costs: list[StageCost], disk: float, memory: str = "") -> None:
        steps, tokens, flops = (sum(values) for values in list(zip(*costs, strict=True))[:3])
        hours = flops / (options.tflops * 1e12 * options.mfu) / 3600
        times = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (hours, hours / gpus))
        numbers = (f"{steps:,}", f"{tokens:.3g}", f"{flops:.3g}", *times)
        body.append([name, str(count), *numbers, memory, f"{disk / 1e9:,.1f}"])

    for group, of_group in alike.items():
        count = len(of_group)
        stages, untrained = run_cost(plan, of_group[0], options.device_memory)
        for name, cost in stages.items():
            size = cost.memory(gpus)
            enough = [str(number) for number in GPUS if cost.memory(number) <= room]
            fewest = enough[0] if enough else f"more than {GPUS[-1]}"
            fits = "fits" if size <= room else f"does not fit; on {fewest} GPUs"
            row(f"{group}, {name}", 1, [cost], cost.disk, f"{gib(size)}, {fits}")
        first, second = stages.values()
        of_run = untrained + first.kept + second.kept
        peak = max(peak, kept + (count - 1) * of_run + untrained + first.disk + second.disk)
        kept += count * of_run
        every += count * [first, second]
        row(f"{group}, all", count, count * [first, second], count * of_run)
    row("the plan", len(runs), every, peak)
    headings = ["", "runs", "steps", "tokens", "FLOPs", "GPU-hours", "hours"]
    headings += ["memory of a step", "disk, GB"]
    print(*markdown(headings, body), sep="\n")
    print(
        f"\n{gpus} GPU(s) of {options.device_memory}, 1 GiB of which is kept free. Hours are for "
        f"{options.mfu:.0%} of {options.tflops:g} TFLOP/s (--mfu, --tflops), without evaluation "
        "and diagnosis. Disk: of a stage and of the plan at the peak, of all runs of a group what "
        "they keep; without downloads."
    )
    sizes = [f"{name} {size:g} GB" for name, size in plan.downloads.items()]
    total = f"{sum(plan.downloads.values()):g} GB"
    print(f"Downloads: {total}: {', '.join(sizes)}." if sizes else "Downloads: none.")


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [each for each in module.modules() if isinstance(each, nn.Linear)]
