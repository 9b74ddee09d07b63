# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share: options, measuring in turns, and rows of the table."""

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table


Row = tuple[str, str, str]
"""A line of the table: what was measured, in which unit or against what, and the figures."""

Value = TypeVar("Value")

FORKS = multiprocessing.get_context("forkserver")


def parser(doc: str | None, bf16: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every script: `--device`, `--bf16` and `--output`."""
    formatter = argparse.RawDescriptionHelpFormatter
    on_or_off = argparse.BooleanOptionalAction
    made = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--bf16", action=on_or_off, default=bf16, help="instead of float32")
    made.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    return made


def seconds(function: Callable[[], object], device: str) -> float:
    """Time of a call, on a GPU until it is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], Value],
) -> dict[str, list[Value]]:
    """What `measure` says of each function in each round, after one round that warms up.

    The order within a round is random, since the first finds the memory in another state.
    """
    values: dict[str, list[Value]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name in random.sample(list(functions), len(functions)):
            value = measure(functions[name])
            if round_:
                values[name].append(value)
    return values


def quartiles(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Median and outer quartiles of the ratios of values of the same round, in rising order."""
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def spread(ratios: Sequence[float]) -> str:
    """Quartiles as text, the median first."""
    low, middle, high = ratios
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def in_process(function: Callable[..., Value], *arguments, seconds: float | None = None) -> Value:
    """What a function returns in a process of its own, which is ended after some seconds.

    Raises RuntimeError, in a sentence, if it fails or does not end.
    """
    pipe, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_send, args=(theirs, function, arguments))
    process.start()
    theirs.close()  # so that recv raises EOFError if the process ends
    try:
        if not pipe.poll(seconds):
            raise RuntimeError(f"no end after {seconds:.0f} seconds")
        result, error = pipe.recv()
    except EOFError:
        result = None
        error = "the process ended without a word"
    finally:
        process.kill()
        process.join()
    if error:
        raise RuntimeError(error)
    return result


def _send(pipe, function: Callable[..., object], arguments: tuple) -> None:
    from normalign_llava.devices import device_error

    multiprocessing.set_start_method("fork", force=True)  # of a loader's workers, as by default
    try:
        pipe.send((function(*arguments), None))
    except Exception as error:  # of any library
        traceback.print_exc()
        said = device_error(error) or f"{type(error).__name__}: {error}"
        pipe.send((None, " ".join(said.split())[:400]))


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on: processor, cores, GPU, versions."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*: (.*)", about, re.MULTILINE)
    return {
        "processor": name[1].strip() if name else platform.processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }


def report(title: str, rows: list[Row], options: argparse.Namespace, **figures: Any) -> None:
    """Prints the rows, and writes them with all figures, options and the machine to `--output`."""
    table = Table("", "measured", "median (quartiles)", title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.output:
        content = {"machine": machine(options.device), "options": vars(options), "rows": rows}
        text = json.dumps({**content, **figures}, indent=2, default=str) + "\n"
        Path(options.output).write_text(text, encoding="utf-8")
