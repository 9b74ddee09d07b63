# SPDX-License-Identifier: Apache-2.0
"""What padding costs: tokens per second of ours packed, ours padded, and TRL's on stock LLaVA.

    python benchmarks/packing.py [--device cuda] [--output results.json]

All variants train on the same rows for one epoch, LoRA on the language model with projector and
norm, each in its own process, and the processes take turns step by step.

The rows stand in for LLaVA-NeXT's data, whose lengths are not published: kinds of rows in the
proportions that its authors give (500 thousand rows of short answers, 158 of conversations, 50 of
long answers, 40 of text alone), one row in twenty with two to four images, and lengths as in
`KINDS`.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

from measuring import parser, report
from step import prepared_rows, run, trainer_of, write_rows


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


def mixture_lengths(rows: int) -> list[tuple[int, int]]:
    """Images and tokens of text of each row."""
    rng = random.Random(0)
    scale = TOKENS_PER_IMAGE / PATCHES
    sizes = []
    for kind in rng.choices(list(KINDS), [share for share, _, _ in KINDS.values()], k=rows):
        _, least, most = KINDS[kind]
        images = 0 if kind == "text" else rng.choice((2, 3, 4)) if rng.random() < 0.05 else 1
        tokens = least * (most / least) ** rng.random()  # as many rows in each doubling of length
        sizes.append((images, max(1, round(tokens * scale))))
    return sizes


def mixture(folder: Path, rows: int) -> None:
    """The quickstart's untrained checkpoint with images of 112 pixels, 64 tokens, and the rows."""
    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.convert import convert_language, convert_vision

    vision = str(convert_vision(112))
    language = str(convert_language())
    build_checkpoint(vision, language, folder / "checkpoint", feature_layer=-4)
    write_rows(folder, 112, mixture_lengths(rows))


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """The trainer of a variant on `folder/checkpoint` and `folder/data`."""
    grouped = variant in (GROUPED, TRL_GROUPED)
    settings = dict(
        output_dir=str(folder / "runs" / variant),
        max_steps=steps + 1,  # one more, in which nothing is measured
        per_device_train_batch_size=options.rows_per_pass,
        gradient_accumulation_steps=options.rows_per_step // options.rows_per_pass,
        learning_rate=1e-5,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        logging_steps=10**6,
        train_sampling_strategy="group_by_length" if grouped else "random",
    )
    stock = variant in (TRL, TRL_GROUPED)
    return trainer_of(folder, settings, stock=stock, packing=variant == PACKED)


def main() -> None:
    """Runs the comparison and prints it."""
    arguments = parser(__doc__, bf16=True)
    arguments.add_argument("--steps", type=int, default=14, help="optimizer steps of the epoch")
    arguments.add_argument("--rows_per_step", type=int, default=16)
    arguments.add_argument("--rows_per_pass", type=int, default=8, help="what fits without packing")
    options = arguments.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        mixture(folder, options.rows_per_step * options.steps)
        lengths = prepared_rows(folder).with_format(None)["length"][:]
        seconds, losses = run(folder, VARIANTS, options, options.steps, make_trainer)
    spent = {variant: sum(times) for variant, times in seconds.items()}

    faster = ", ".join(f"{spent[variant] / spent[PACKED]:.2f}" for variant in VARIANTS[1:])
    rows = [("packing, mixture", f"tokens per second / {'; '.join(VARIANTS[1:])}", faster)]
    tokens = f"{min(lengths)} to {max(lengths)} tokens"
    title = f"Packing, {len(lengths)} rows of {tokens}, {options.device}"
    report(title, rows, options, lengths=lengths, seconds=seconds, losses=losses)


if __name__ == "__main__":
    main()
