# SPDX-License-Identifier: Apache-2.0
"""What padding costs: tokens per second of ours packed, ours padded, and TRL's on stock LLaVA.

    python benchmarks/packing.py [--device cuda] [--output results.json]

All variants train on the same rows for one epoch, LoRA on the language model with projector and
norm, each in its own process, and the processes take turns step by step.

The rows stand in for LLaVA-NeXT's data, since the lengths of those are not published. Kinds of rows
are in the proportions that its authors give: 500 thousand rows of short answers, 158 of
conversations, 50 of long answers, 40 of text only. One row in twenty has two to four images, and
lengths are as in `KINDS`.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

from measuring import parser, report
from step import our_trainer, prepared_rows, run, stock_trainer, trainer_settings, write_rows


PACKED = "packed"
PADDED = "padded"
GROUPED = "grouped"  # by length, and padded
TRL = "TRL, padded"
TRL_GROUPED = "TRL, grouped"
VARIANTS = [PACKED, PADDED, GROUPED, TRL, TRL_GROUPED]
KINDS = {
    "short": (500, 20, 120),
    "conversation": (158, 150, 500),
    "long": (50, 250, 800),
    "text": (40, 300, 2000),
}
"""Thousands of rows, and the least and most tokens of text."""
PATCHES = 576
TOKENS_PER_IMAGE = 64
"""Tokens of an image in LLaVA-1.5, and here. Text is shortened as much as images are."""
MAX_LENGTH = 2048  # tokens of a packed pass, as in the recipes


def mixture_lengths(rows: int) -> list[tuple[int, int]]:
    """Returns how many images and tokens of text each row has.

    Args:
        rows: The number of rows.
    """
    generator = random.Random(0)
    scale = TOKENS_PER_IMAGE / PATCHES
    row_shares = [share for share, _, _ in KINDS.values()]
    row_sizes = []
    for kind in generator.choices(list(KINDS), row_shares, k=rows):
        _, least, most = KINDS[kind]
        image_count = 1
        if kind == "text":
            image_count = 0
        elif generator.random() < 0.05:
            image_count = generator.choice((2, 3, 4))
        token_count = (
            least * (most / least) ** generator.random()
        )  # as many rows in each doubling of length
        row_sizes.append((image_count, max(1, round(token_count * scale))))
    return row_sizes


def mixture(folder: Path, rows: int) -> None:
    """Writes the quickstart's untrained checkpoint with images of 64 tokens, and the rows."""
    from normalign_llava import build_checkpoint, convert_language, convert_vision

    vision = str(convert_vision(112))
    language = str(convert_language())
    build_checkpoint(vision, language, folder / "checkpoint", feature_layer=-4)
    write_rows(folder, 112, mixture_lengths(rows))


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """Returns the trainer of a variant.

    Args:
        variant: One of `VARIANTS`.
        folder: The folder of the checkpoint and the rows.
        options: The options of the script.
        steps: How many steps are measured.
    """
    settings = trainer_settings(options, folder / "runs" / variant, steps)
    settings["per_device_train_batch_size"] = options.rows_per_pass
    settings["gradient_accumulation_steps"] = options.rows_per_step // options.rows_per_pass
    settings["logging_steps"] = 10**6
    settings["train_sampling_strategy"] = "random"
    if variant in (GROUPED, TRL_GROUPED):
        settings["train_sampling_strategy"] = "group_by_length"
    if variant in (TRL, TRL_GROUPED):
        return stock_trainer(folder, settings)
    if variant == PACKED:
        settings["max_length"] = MAX_LENGTH
    return our_trainer(folder, settings, packing=variant == PACKED)


def main() -> None:
    """Runs the comparison and prints it."""
    arguments = parser(__doc__, bf16=True)
    arguments.add_argument("--steps", type=int, default=14, help="optimizer steps of the epoch")
    arguments.add_argument("--rows_per_step", type=int, default=16)
    arguments.add_argument("--rows_per_pass", type=int, default=8, help="what fits without packing")
    options = arguments.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
        mixture(folder, options.rows_per_step * options.steps)
        lengths = prepared_rows(folder).with_format(None)["length"][:]
        step_seconds, losses = run(folder, VARIANTS, options, options.steps, make_trainer)
    packed_seconds = sum(step_seconds[PACKED])
    ratios = []
    for variant in VARIANTS[1:]:
        ratios.append(f"{sum(step_seconds[variant]) / packed_seconds:.2f}")
    measured = f"tokens per second / {'; '.join(VARIANTS[1:])}"
    table_rows = [("packing, mixture", measured, ", ".join(ratios))]
    token_count = f"{min(lengths)} to {max(lengths)} tokens"
    title = f"Packing, {len(lengths)} rows of {token_count}, {options.device}"
    report(title, table_rows, options, lengths=lengths, seconds=step_seconds, losses=losses)


if __name__ == "__main__":
    main()
