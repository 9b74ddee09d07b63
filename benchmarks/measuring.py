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
"""A line of the table: what was measured, its unit or reference, and the figures."""

Value = TypeVar("Value")

FORKS = multiprocessing.get_context("forkserver")


def parser(doc: str | None, bf16: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with the options of every script: `--device`, `--bf16` and `--output`."""
    common_parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    common_parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=bf16,
        help="compute in bfloat16, not in float32",
    )
    common_parser.add_argument(
        "--output", type=Path, help="also write the figures to this JSON file"
    )
    return common_parser


def precision(options: argparse.Namespace) -> str:
    """Returns the precision of a run with the options of [`parser`]."""
    return "bfloat16" if options.bf16 else "float32"


def quiet() -> None:
    """Turns off what transformers logs, and its progress bars."""
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def seconds(function: Callable[[], object], device: str) -> float:
    """Measures the time of a call, on a GPU until it is idle.

    Args:
        function: The function to call.
        device: "cpu" or "cuda".
    """
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
    """Measures each function in each round, after one round that warms up.

    The order within a round is random, since the first finds the memory in another state.

    Args:
        functions: The functions by name.
        rounds: How many rounds count.
        measure: Calls a function and measures that.

    Returns:
        What `measure` returned, by name of the function, for each round.
    """
    measured: dict[str, list[Value]] = {name: [] for name in functions}
    for round_number in range(rounds + 1):
        for name in random.sample(list(functions), len(functions)):
            measurement = measure(functions[name])
            if round_number > 0:
                measured[name].append(measurement)
    return measured


def quartiles(measured: Sequence[float], references: Sequence[float]) -> list[float]:
    """Returns outer quartiles and median of the ratios in each round, in rising order."""
    ratios = []
    for measurement, reference in zip(measured, references, strict=True):
        ratios.append(measurement / reference)
    return statistics.quantiles(ratios, n=4, method="inclusive")


def spread(ratios: Sequence[float]) -> str:
    """Returns quartiles as text, the median first."""
    lower_quartile, median, upper_quartile = ratios
    return f"{median:.3f} ({lower_quartile:.3f} to {upper_quartile:.3f})"


def in_process(function: Callable[..., Value], *arguments, seconds: float | None = None) -> Value:
    """Calls a function in a process of its own, and returns what it returns.

    Args:
        function: The function.
        arguments: Its arguments.
        seconds: When the process is ended. By default it is not.

    Raises:
        RuntimeError: It fails or does not end. The message is a sentence.
    """
    receiver, sender = FORKS.Pipe()
    process = FORKS.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()  # so that recv raises EOFError if the process ends
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"no end after {seconds:.0f} seconds")
        result, problem = receiver.recv()
    except EOFError:
        result = None
        problem = "the process ended without a word"
    finally:
        process.kill()
        process.join()
    if problem:
        raise RuntimeError(problem)
    return result


def _send(pipe, function: Callable[..., object], arguments: tuple) -> None:
    """Calls a function, and sends what it returned and no problem, or None and the problem."""

    # A loader's workers are forked, as by default.
    multiprocessing.set_start_method("fork", force=True)
    try:
        pipe.send((function(*arguments), None))
    except Exception as error:  # of any library
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
        pipe.send((None, " ".join(problem.split())[:400]))


def machine(device: str) -> dict[str, Any]:
    """Returns what the figures depend on: processor, cores, GPU, versions."""
    processor = platform.processor()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        model_name = re.search(r"^model name\s*: (.*)", cpu_info.read_text(), re.MULTILINE)
        if model_name:
            processor = model_name[1].strip()
    description = {
        "processor": processor,
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
    }
    for package in ("torch", "transformers", "trl"):
        description[package] = version(package)
    return description


def report(title: str, rows: list[Row], options: argparse.Namespace, **figures: Any) -> None:
    """Prints the rows, and writes them with all figures, options and the machine to `--output`."""
    table = Table("", "measured", "median (quartiles)", title=title)
    for table_row in rows:
        table.add_row(*table_row)
    Console().print(table)
    if options.output:
        content = {
            "machine": machine(options.device),
            "options": vars(options),
            "rows": rows,
            **figures,
        }
        text = json.dumps(content, indent=2, default=str)
        options.output.write_text(text + "\n", encoding="utf-8")
