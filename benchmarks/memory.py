# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step: what `normalign train --dry_run` predicts, and what steps take.

    python benchmarks/memory.py [--device cuda] [--bf16] [--shapes tiny 135m]
                                [--output results.json]

Weights are random. Each shape, with rows of its own, trains in full, with LoRA and with QLoRA, with
gradient checkpointing and without, two steps each in a process of its own.

What torch has allocated counts, where it is highest: on a GPU by its caching allocator, on a CPU
the weights and what the profiler sees allocated and freed after loading. Not measured: memory that
libraries take without torch, the interpreter, and on a GPU CUDA's context.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import FORKS, Row, in_process, parser, precision, quiet, report
from shapes import SHAPES
from step import random_checkpoint, write_rows


ROWS: dict[str, tuple[int, int, int]] = {
    "tiny": (16, 3, 100),
    "10m": (8, 1, 200),
    "50m": (4, 2, 120),
    "135m": (2, 1, 60),
    "1b": (4, 1, 250),
}
"""Rows of a step, images and words of a row, by shape."""

METHODS = {
    "full": [],
    "lora": ["--use_peft", "true"],
    "qlora": ["--use_peft", "true", "--load_in_4bit", "true"],
}


def allocated(function) -> int:
    """Measures the peak of what torch allocates on the CPU.

    Args:
        function: Runs meanwhile.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    profiled_events = profiler.profiler.kineto_results.events()
    changes = [
        memory_change for memory_change in profiled_events if memory_change.name() == "[memory]"
    ]
    highest = 0
    allocated_now = 0
    for memory_change in sorted(changes, key=lambda change: change.start_ns()):
        allocated_now += memory_change.nbytes()
        highest = max(highest, allocated_now)
    return highest


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of a model's tensors, with the constants of their quantization."""
    tensors: list[torch.Tensor] = []
    for tensor in [*model.parameters(), *model.buffers()]:
        tensors.append(tensor)
        quantization = getattr(tensor, "quant_state", None)
        if quantization is not None:
            constants = quantization.as_dict().values()
            tensors += [value for value in constants if isinstance(value, torch.Tensor)]
    storage_sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storage_sizes[storage.data_ptr()] = storage.nbytes()
    return sum(storage_sizes.values())


def measure(
    folder: Path, shape: str, words: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Trains two steps in this process.

    Args:
        folder: The folder of the checkpoint and the rows.
        shape: The shape of the model.
        words: Options of `normalign train`.
        options: The options of the script.

    Returns:
        `predicted` and `measured` bytes, and the predicted ones by part, `parts`.
    """
    from transformers import PrinterCallback

    from normalign_llava import make_trainer, option_words, parse_options

    quiet()
    batch_size = ROWS[shape][0]
    train_options = {
        "stage": "tune",
        "model_name_or_path": folder / "checkpoint",
        "dataset_name": folder / "data",
        "output_dir": folder / "run",
        "global_batch_size": batch_size,
        "per_device_train_batch_size": batch_size,
        "max_steps": 2,
        "bf16": options.bf16,
        "use_cpu": options.device == "cpu",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    train_words = [*option_words(train_options), *words]
    dry_trainer, _ = make_trainer(*parse_options([*train_words, "--dry_run", "true"]))
    estimate = dry_trainer.estimate_memory()
    del dry_trainer
    trainer, _ = make_trainer(*parse_options(train_words))
    trainer.remove_callback(PrinterCallback)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        measured = torch.cuda.max_memory_allocated()
    else:
        measured = weight_bytes(trainer.model) + allocated(trainer.train)
    return {"predicted": estimate.total, "measured": measured, "parts": estimate.parts}


def measure_shape(folder: Path, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all methods on a shape, with and without checkpointing.

    Args:
        folder: A folder for the checkpoint and the rows.
        shape: The shape of the model.
        options: The options of the script.

    Returns:
        What [`measure`] returns, by method and checkpointing.
    """
    random_checkpoint(folder, shape)
    batch_size, images, words = ROWS[shape]
    vision_sizes, _ = SHAPES[shape]
    write_rows(folder, vision_sizes["image_size"], [(images, words)] * 2 * batch_size)
    figures = {}
    for method in options.methods:
        for checkpointing in ("true", "false"):
            method_words = [*METHODS[method], "--gradient_checkpointing", checkpointing]
            case = f"{shape}, {method}, checkpointing {checkpointing}"
            figures[case] = in_process(measure, folder, shape, method_words, options)
            print(f"{case}: {ratio(figures[case])}", flush=True)
    return figures


def ratio(figures: dict[str, Any]) -> str:
    """Returns predicted over measured memory."""
    return f"{figures['predicted'] / figures['measured']:.3f}"


def main() -> None:
    """Measures all of them, and prints predicted and measured memory."""
    arguments = parser(__doc__)
    shapes = list(ROWS)
    methods = list(METHODS)
    arguments.add_argument("--shapes", nargs="+", default=shapes[:-1], choices=shapes)  # not 1b
    arguments.add_argument("--methods", nargs="+", default=methods, choices=methods)
    options = arguments.parse_args()

    # The forked processes find these imported.
    FORKS.set_forkserver_preload(["trl.trainer.sft_trainer", "bitsandbytes", "step"])
    table_rows: list[Row] = []
    all_figures: dict[str, Any] = {}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
            figures = measure_shape(Path(temporary), shape, options)
        all_figures |= figures
        ratios = [ratio(case_figures) for case_figures in figures.values()]
        ratio_pairs = []
        for with_checkpointing, without in zip(ratios[::2], ratios[1::2], strict=True):
            ratio_pairs.append(f"{with_checkpointing}, {without}")
        measured = f"predicted / measured: {', '.join(options.methods)}"
        table_rows.append((f"memory of a step, {shape}", measured, "; ".join(ratio_pairs)))
    title = f"Memory of a step, {precision(options)}, {options.device}"
    report(title, table_rows, options, figures=all_figures)


if __name__ == "__main__":
    main()
