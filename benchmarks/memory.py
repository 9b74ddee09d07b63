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
from measuring import FORKS, Row, in_process, parser, report
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
    """The peak of what torch allocates on the CPU while `function` runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    highest = now = 0
    for event in sorted(changes, key=lambda change: change.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def measure(folder: Path, shape: str, words: list[str], options: argparse.Namespace) -> dict:
    """Trains two steps in this process: predicted and measured bytes, and those by part."""
    from transformers import PrinterCallback, logging

    from normalign_llava.train.parsing import parse
    from normalign_llava.train.run import make_trainer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own: dict[str, Any] = dict(
        stage="tune",
        model_name_or_path=folder / "checkpoint",
        dataset_name=folder / "data",
        output_dir=folder / "run",
        global_batch_size=ROWS[shape][0],
        per_device_train_batch_size=ROWS[shape][0],
        max_steps=2,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        save_strategy="no",
        disable_tqdm=True,
    )
    words = [word for name, value in own.items() for word in (f"--{name}", str(value))] + words

    def trainer_of(*more: str):
        data, args, model = parse([*words, *more])
        return make_trainer(data, args, model)[0]

    dry = trainer_of("--dry_run", "true")
    estimate = dry.estimate_memory()
    del dry
    trainer = trainer_of()
    trainer.remove_callback(PrinterCallback)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        measured = torch.cuda.max_memory_allocated()
    else:
        tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
        states = [getattr(tensor, "quant_state", None) for tensor in tensors]
        constants = [value for state in states if state for value in state.as_dict().values()]
        tensors += [value for value in constants if isinstance(value, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        measured = sum(sizes.values()) + allocated(trainer.train)
    return {"predicted": estimate.total, "measured": measured, "parts": estimate.parts}


def main() -> None:
    """Measures all of them, and prints predicted and measured memory."""
    arguments = parser(__doc__)
    shapes = list(ROWS)
    methods = list(METHODS)
    arguments.add_argument("--shapes", nargs="+", default=shapes[:-1], choices=shapes)  # not 1b
    arguments.add_argument("--methods", nargs="+", default=methods, choices=methods)
    options = arguments.parse_args()

    preloaded = ["normalign_llava.train.run", "bitsandbytes", "measuring", "step"]
    FORKS.set_forkserver_preload(preloaded)  # which imports once
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
            random_checkpoint(Path(name), shape)
            count, images, words = ROWS[shape]
            write_rows(Path(name), SHAPES[shape][0]["image_size"], [(images, words)] * 2 * count)
            pairs = []
            for method in options.methods:
                ratios = []
                for checkpointing in ("true", "false"):
                    line = [*METHODS[method], "--gradient_checkpointing", checkpointing]
                    size = in_process(measure, Path(name), shape, line, options)
                    case = f"{shape}, {method}, checkpointing {checkpointing}"
                    figures[case] = size
                    ratios.append(f"{size['predicted'] / size['measured']:.3f}")
                    print(f"{case}: {ratios[-1]}", flush=True)
                pairs.append(", ".join(ratios))
            what = f"predicted / measured: {', '.join(options.methods)}"
            rows.append((f"memory of a step, {shape}", what, "; ".join(pairs)))
    precision = "bfloat16" if options.bf16 else "float32"
    report(f"Memory of a step, {precision}, {options.device}", rows, options, figures=figures)


if __name__ == "__main__":
    main()
