# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What padding costs: rows and tokens per second of ours packed, ours padded, and TRL's `SFTTrainer` on stock LLaVA.

    python benchmarks/packing.py [--data quickstart|mixture|mixture-1b] [--device cuda] [--output results.json]

All variants train on the same rows for one epoch, LoRA on the language model with projector and norm, each in its own
process, and the processes take turns step by step. Peak memory is that of the process; on a CPU, with what glibc keeps
of freed memory.

The mixture stands in for LLaVA-NeXT's data, whose lengths are not published: kinds of rows in the proportions that
its authors give (500 thousand rows of short answers, 158 of conversations, 50 of long answers, 40 of text alone), one
row in twenty with two to four images, and lengths as in `KINDS`.

Padding and balance depend on the lengths alone. They are counted for eight processes and 128 rows a step, over 16,384
rows of the mixture, or over the quickstart's rows 50 times: tokens that are padding, and by how much the process with
the most tokens is off the mean of all, in a forward pass and in a step.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from measuring import write
from rich.console import Console
from rich.table import Table
from step import random_parts, real_parts, run
from torch.utils.data import BatchSampler


PACKED, PADDED, GROUPED = "ours, packed", "ours, padded", "ours, grouped"  # by length, and padded
TRL, TRL_GROUPED = "TRL, padded", "TRL, grouped"
VARIANTS = [PACKED, PADDED, GROUPED, TRL, TRL_GROUPED]
KINDS = {"short": (500, 20, 120), "conversation": (158, 150, 500), "long": (50, 250, 800), "text": (40, 300, 2000)}
"""Thousands of rows, and the least and most tokens of text."""
PATCHES = 576
"""Tokens of an image in LLaVA-1.5. Text is shortened as much as images are."""
PROCESSES, ROWS_PER_STEP, ROWS_PER_PASS = 8, 128, 4
"""For the counts."""


def mixture_lengths(rows: int, tokens_per_image: int, seed: int = 0) -> list[tuple[int, int]]:
    """Images and tokens of text of each row."""
    rng, scale, found = random.Random(seed), tokens_per_image / PATCHES, []
    for kind in rng.choices(list(KINDS), [share for share, _, _ in KINDS.values()], k=rows):
        _, least, most = KINDS[kind]
        images = 0 if kind == "text" else rng.choice((2, 3, 4)) if rng.random() < 0.05 else 1
        tokens = least * (most / least) ** rng.random()  # as many rows in each doubling of length
        found.append((images, max(1, round(tokens * scale))))
    return found


def mixture(folder: Path, rows: int) -> None:
    """The quickstart's untrained checkpoint with images of 112 pixels, 64 tokens, and rows of the mixture."""
    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.convert import convert_language, convert_vision

    build_checkpoint(str(convert_vision(112)), str(convert_language()), folder / "checkpoint", feature_layer=-4)
    write_rows(folder, rows, tokens_per_image=64, side=112)


def large_mixture(folder: Path, rows: int) -> None:
    """Random weights of 1B in size with images of 729 tokens, and rows of the mixture."""
    random_parts(folder, 1)
    shutil.rmtree(folder / "data")
    write_rows(folder, rows, tokens_per_image=729, side=384)


def write_rows(folder: Path, rows: int, tokens_per_image: int, side: int) -> None:
    """Writes rows of the mixture to `folder/data`, with images of random pixels."""
    from datasets import Dataset
    from PIL import Image

    from normalign_llava.fetched.easy_vqa import FEATURES, png

    rng, data = random.Random(0), []
    for images, tokens in mixture_lengths(rows, tokens_per_image):
        user = [{"type": "image"}] * images + [{"type": "text", "text": "describe"}]
        answer = [{"type": "text", "text": " ".join(rng.choices("etaoin", k=tokens))}]
        pixels = [rng.randbytes(3 * side**2) for _ in range(images)]
        stored = [{"bytes": png(Image.frombytes("RGB", (side, side), each))} for each in pixels]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        data.append({"images": stored, "messages": messages})
    Dataset.from_list(data, features=FEATURES).save_to_disk(folder / "data")


DATA = {"quickstart": real_parts, "mixture": mixture, "mixture-1b": large_mixture}


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """The trainer of a variant on `folder/checkpoint` and `folder/data`."""
    from datasets import load_from_disk
    from transformers import AutoProcessor, LlavaForConditionalGeneration, PrinterCallback
    from trl import SFTConfig, SFTTrainer, get_peft_config

    from normalign_llava.data.sources.arguments import DataArguments
    from normalign_llava.data.sources.mixtures import load_data
    from normalign_llava.train.modules.adapter import language_adapter
    from normalign_llava.train.modules.model import freeze
    from normalign_llava.train.options.arguments import ModelArguments, NormAlignConfig
    from normalign_llava.train.trainer import NormAlignTrainer

    checkpoint = str(folder / "checkpoint")
    shared: dict[str, Any] = dict(
        output_dir=str(folder / "runs" / variant),
        max_steps=steps + 1,  # one more, in which nothing is measured
        per_device_train_batch_size=options.rows_per_pass,
        gradient_accumulation_steps=options.rows_per_step // options.rows_per_pass,
        learning_rate=1e-5,
        max_length=None,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        logging_steps=10**6,
        save_strategy="no",
        train_sampling_strategy="group_by_length" if variant in (GROUPED, TRL_GROUPED) else "random",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    ours = NormAlignConfig(**shared, vision_learning_rate=0.0, packing=variant == PACKED)
    model_args = ModelArguments(model_name_or_path=checkpoint, use_peft=True, lora_dropout=0.0)
    rates, adapter = ours.learning_rates(True), get_peft_config(model_args)
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    data = load_data(
        DataArguments(dataset_name=str(folder / "data")), processor, max_length=None, seed=0, with_eval=False
    ).train
    if variant in (PACKED, PADDED, GROUPED):
        trainer = NormAlignTrainer(checkpoint, ours, train_dataset=data, peft_config=adapter)
    else:
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        freeze(model, rates)
        rows = load_from_disk(str(folder / "data"))
        rows = rows.add_column("length", data.with_format(None)["length"][:])  # TRL groups by it
        trainer = SFTTrainer(
            model,
            SFTConfig(**shared, remove_unused_columns=False),  # it would remove the lengths
            train_dataset=rows,
            processing_class=processor,
            peft_config=language_adapter(adapter, model, rates),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def lengths_of(folder: Path) -> list[int]:
    """Tokens of each row of `folder/data`."""
    from transformers import AutoProcessor

    from normalign_llava.data.sources.arguments import DataArguments
    from normalign_llava.data.sources.mixtures import load_data

    processor = AutoProcessor.from_pretrained(folder / "checkpoint", trust_remote_code=False)
    data = load_data(
        DataArguments(dataset_name=str(folder / "data")), processor, max_length=None, seed=0, with_eval=False
    )
    return data.train.with_format(None)["length"][:]


def passes_of(variant: str, lengths: list[int], rank: int) -> list[list[int]]:
    """The rows of each forward pass of one of `PROCESSES` processes, in the whole steps of an epoch."""
    from normalign_llava.train.batches.packing import BalancedSampler
    from normalign_llava.train.batches.sampler import ModalityLengthGroupedSampler

    accumulation = ROWS_PER_STEP // PROCESSES // ROWS_PER_PASS
    order = SeedableRandomSampler(range(len(lengths)), data_seed=0)
    if variant == GROUPED:
        order = ModalityLengthGroupedSampler(lengths, [True] * len(lengths), ROWS_PER_STEP, seed=0)
    if variant == PACKED:
        passes = BalancedSampler(
            order, lengths, rows_per_step=ROWS_PER_STEP, rows_per_pass=ROWS_PER_PASS, accumulation=accumulation,
            processes=PROCESSES, rank=rank, drop_last=True,
        )  # fmt: skip
    else:
        passes = BatchSamplerShard(BatchSampler(order, ROWS_PER_PASS, drop_last=True), PROCESSES, rank)
    return list(passes)[: len(lengths) // ROWS_PER_STEP * accumulation]


def counts(lengths: list[int]) -> dict[str, dict[str, float]]:
    """Padding and balance of the three ways of ours."""
    accumulation = ROWS_PER_STEP // PROCESSES // ROWS_PER_PASS
    found = {}
    for variant in (PACKED, PADDED, GROUPED):
        tokens, real = [], 0  # tokens of each pass with padding, by process
        for rank in range(PROCESSES):
            rows = [[lengths[row] for row in each] for each in passes_of(variant, lengths, rank)]
            real += sum(map(sum, rows))
            tokens.append([sum(each) if variant == PACKED else len(each) * max(each) for each in rows])
        steps = [[sum(each[i : i + accumulation]) for i in range(0, len(each), accumulation)] for each in tokens]
        found[variant] = {"padding": 1 - real / sum(map(sum, tokens))}
        for name, sums in (("pass", tokens), ("step", steps)):
            found[variant][name] = statistics.mean(
                max(each) / statistics.mean(each) for each in zip(*sums, strict=True)
            )
    return found


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mixture", choices=list(DATA))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="multiply in bfloat16")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps of the epoch")
    parser.add_argument("--rows_per_step", type=int, default=16)
    parser.add_argument("--rows_per_pass", type=int, default=8, help="what fits in memory without packing")
    parser.add_argument("--output", help="also write the figures to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        DATA[options.data](folder, options.rows_per_step * options.steps)
        lengths = lengths_of(folder)
        seconds, ends = run(folder, VARIANTS, options, options.steps, make_trainer)
    rows, tokens = len(lengths), sum(lengths)
    spent = {variant: sum(times) for variant, times in seconds.items()}
    patches = {"mixture": 64, "mixture-1b": 729}.get(options.data)
    many = [count * patches + text for count, text in mixture_lengths(16_384, patches)] if patches else lengths * 50
    balance = counts(many)

    table = Table(
        "", title=f"{options.data}, {options.rows_per_step} rows a step, {options.device}", title_justify="left"
    )
    columns = ("rows/s", "tokens/s", "packed / it", "peak GiB", "padding", "off, pass", "off, step")
    for column in columns:
        table.add_column(column, justify="right")
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        found[variant] = {
            "rows_per_second": rows / spent[variant],
            "tokens_per_second": tokens / spent[variant],
            "packed_over_it": spent[variant] / spent[PACKED],
            "peak_bytes": ends[variant]["bytes"],
            **balance.get(variant, {}),
        }
        cells = [f"{rows / spent[variant]:.2f}", f"{tokens / spent[variant]:.0f}"]
        cells += [f"{spent[variant] / spent[PACKED]:.2f}", f"{ends[variant]['bytes'] / 2**30:.2f}"]
        cells += [f"{found[variant]['padding']:.1%}"] if variant in balance else ["-"]
        cells += [f"{found[variant][name] - 1:.1%}" if variant in balance else "-" for name in ("pass", "step")]
        table.add_row(variant, *cells)
    console = Console()
    console.print(table)
    console.print(
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {statistics.mean(lengths):.0f} on average."
    )
    what = f"packing, {options.data}"
    lines = [
        (what, f"tokens per second / {variant}", f"{found[variant]['packed_over_it']:.2f}") for variant in VARIANTS[1:]
    ]
    for variant, counted in balance.items():
        figures = f"{counted['padding']:.1%}, {counted['pass'] - 1:.1%}, {counted['step'] - 1:.1%}"
        lines.append((f"{what}: {variant}", "padding, imbalance of passes, of steps", figures))
    write(lines, options, lengths=lengths, variants=found, seconds=seconds)


if __name__ == "__main__":
    main()
