# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the recipes `lora` and `qlora` cost on models of 3B and 7B in size: tokens per second, FLOPs, memory.

    python benchmarks/recipes.py [--device cuda] [--parts tiny 3b 7b] [--recipes lora qlora] [--output results.json]
                                 [OPTIONS OF normalign train]

Weights are random, rows have one image and all the same length. Each recipe trains in its own process with its own
options but for the rows in a step, and those that are given: `--padding_free true`, say. The first two steps warm up.

FLOPs are those of all matrix products, counted by torch in the first step; what gradient checkpointing computes again
counts, and causal attention counts in full. The peak is what a product of two large bfloat16 (or float32) matrices
reaches in the same process, or `--peak`, in TFLOP/s, from the chip's data sheet. Memory on a GPU is what torch has
allocated at most in training, and is compared with what the run's summary says before it: without activations.
"""

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import in_process, parser, peak_bytes, report, seconds
from shapes import SHAPES
from step import random_checkpoint, write_rows
from torch.utils.flop_counter import FlopCounterMode


WARM_UP = 2


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices, the best of ten."""
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [seconds(lambda: left @ right, device) for _ in range(11)]
    return 2 * size**3 / min(times[1:])


def make_checkpoint(folder: Path, parts: str, rows: int, device: str, pipe) -> None:
    """Writes `folder/checkpoint` and `folder/data`, and sends True."""
    random_checkpoint(folder, parts, device)
    write_rows(folder, SHAPES[parts][0]["image_size"], [(1, 256)] * rows)
    for part in ("vision", "language"):
        shutil.rmtree(folder / part)
    pipe.send(True)


def train(recipe: str, folder: Path, options: argparse.Namespace, words: list[str], pipe) -> None:
    """Trains in this process and sends what was measured."""
    from transformers import PrinterCallback, TrainerCallback, logging

    from normalign_llava.train.options.arguments import parse
    from normalign_llava.train.run import make_trainer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own: dict[str, Any] = dict(
        model_name_or_path=folder / "checkpoint",
        dataset_name=folder / "data",
        output_dir=folder / "run",
        global_batch_size=options.rows,
        max_steps=WARM_UP + options.steps,
        bf16=options.bf16,
        save_strategy="no",
        report_to="none",
        logging_steps=WARM_UP + options.steps,
        disable_tqdm=True,
    )
    if options.device == "cpu":  # of which the paged optimizer of `qlora` knows nothing
        own |= {"use_cpu": True, "optim": "adamw_torch"}
    given = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    data_args, args, model_args = parse([recipe, *given, *words])
    mapping = {}
    if model_args.load_in_4bit:
        import bitsandbytes  # noqa: F401  has the operation

        mapping[torch.ops.bitsandbytes.gemm_4bit] = lambda x, weight, shape, *_, **__: 2 * math.prod(x) * shape[0]
    counter, marks = FlopCounterMode(display=False, custom_mapping=mapping), []

    class Steps(TrainerCallback):
        """Counts FLOPs in the first step, and notes time and tokens where steps begin, so that collating counts."""

        def mark(self, state):
            if options.device == "cuda":
                torch.cuda.synchronize()
            marks.append((time.perf_counter(), state.num_input_tokens_seen))

        def on_step_begin(self, args, state, control, **kwargs):
            self.mark(state)
            if state.global_step == 0:
                counter.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                counter.__exit__(None, None, None)

        def on_train_end(self, args, state, control, **kwargs):
            self.mark(state)

    trainer, _ = make_trainer(data_args, args, model_args, [Steps()])
    trainer.remove_callback(PrinterCallback)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    pipe.send(
        {
            "seconds": [after - before for (before, _), (after, _) in pairwise(marks)][WARM_UP:],
            "tokens": [after - before for (_, before), (_, after) in pairwise(marks)][WARM_UP:],
            "flops": counter.get_total_flops(),
            "peak_bytes": peak_bytes(options.device),
            "summary_bytes": trainer.facts["memory"]["total"],
            "matmul": matmul_flops(options.device, torch.bfloat16 if options.bf16 else torch.float32),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
    )


def main() -> None:
    """Trains each recipe on each model, and prints what it took."""
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", default=["3b", "7b"], choices=list(SHAPES))
    arguments.add_argument("--recipes", nargs="+", default=["lora", "qlora"], metavar="RECIPE", help="or YAML files")
    arguments.add_argument("--rows", type=int, default=8, help="rows in a step, one image and 256 words each")
    arguments.add_argument("--steps", type=int, default=5, help="steps that count")
    arguments.add_argument("--peak", type=float, help="TFLOP/s of the chip, by its data sheet")
    options, words = arguments.parse_known_args()

    rows, figures = [], {}
    for parts in options.parts:
        with tempfile.TemporaryDirectory() as name:
            os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
            count = options.rows * (WARM_UP + options.steps)
            in_process(make_checkpoint, Path(name), parts, count, options.device)
            for recipe in options.recipes:
                what = f"{recipe}, {parts}"
                try:
                    measured = in_process(train, recipe, Path(name), options, words)
                except EOFError:  # out of memory, say: its process has printed why
                    rows.append((what, "failed", "-"))
                    continue
                rate = statistics.median(
                    tokens / taken for tokens, taken in zip(measured["tokens"], measured["seconds"], strict=True)
                )
                flops = measured["flops"] * rate / measured["tokens"][0]
                share = flops / (options.peak * 1e12 if options.peak else measured["matmul"])
                figures[what] = {**measured, "tokens_per_second": rate, "share_of_peak": share}
                rows += [
                    (what, "tokens per second", f"{rate:,.0f}"),
                    (what, "TFLOP/s", f"{flops / 1e12:.3g}"),
                    (what, "share of the peak", f"{share:.3f}"),
                    (what, "peak memory, GiB", f"{measured['peak_bytes'] / 2**30:.2f}"),
                    (
                        what,
                        "memory by the run's summary, without activations, GiB",
                        f"{measured['summary_bytes'] / 2**30:.2f}",
                    ),
                ]
    precision = "bfloat16" if options.bf16 else "float32"
    title = f"Recipes, {options.rows} rows a step, {precision}, {options.device}"
    report(title, rows, options, figures=figures, train=words)


if __name__ == "__main__":
    main()
