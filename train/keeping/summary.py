# SPDX-License-Identifier: Apache-2.0
"""The summary of a run, which is printed before its first step."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from ...checkpoint import weights as stored
from ...data.rows.checks import DataReport, by_kind, counted, not_read
from ...data.rows.parse import DroppedRows
from ..modules.model import base_model, module_of
from ..modules.sizes import parameter_count
from ..settings import autocast_dtype


def summary(trainer: Any, report: DataReport, steps: int) -> dict[str, Any]:
    """The facts of a run as JSON: modules, data, batch, steps, precision."""
    args = trainer.args
    return {
        "modules": modules(trainer.model, trainer.learning_rates),
        "data": [{**data, "dropped": len(data["dropped"])} for data in asdict(report)["sources"]],
        "tokens_per_image": base_model(trainer.model).config.image_seq_length,
        "batch": {
            "rows": trainer.get_total_train_batch_size(args),
            "per_device": args.per_device_train_batch_size,
            "processes": args.world_size,
            "accumulation": args.gradient_accumulation_steps,
            "packed": args.packing,
        },
        "steps": steps,
        "warmup_steps": args.get_warmup_steps(steps),
        "autocast": autocast_dtype(args),
        "precision_because": trainer.precision.because,
    }


def modules(model: nn.Module, learning_rates: dict[str, float]) -> list[dict[str, Any]]:
    """Returns the parameters of each module, how many are trained, dtypes and learning rate."""
    names = {"vision": "vision tower", "language": "language model"}
    rows: dict[str, dict[str, Any]] = {}
    for key in (*learning_rates, "adapters"):
        rows[key] = {"module": names.get(key, key), "parameters": 0, "trained": 0}
        rows[key]["learning_rate"] = 0.0
    counts_of_dtypes = {key: Counter[str]() for key in rows}
    for name, parameter in model.named_parameters():
        if ".original_module." in name:  # PEFT's untrained copies
            continue
        module = module_of(name)
        key = "adapters" if ".lora_" in name else module
        count = parameter_count(parameter)
        rows[key]["parameters"] += count
        counts_of_dtypes[key][_dtype_name(parameter)] += count
        if parameter.requires_grad:
            rows[key]["trained"] += count
            rows[key]["learning_rate"] = learning_rates[module]
    for key, counts in counts_of_dtypes.items():
        rows[key]["dtypes"] = [dtype for dtype, _ in counts.most_common()]
    return [row for row in rows.values() if row["parameters"]]


def _dtype_name(parameter: nn.Parameter) -> str:
    """Returns the name of a parameter's dtype, or of its type of quantization."""
    if type(parameter).__name__ == "Params4bit":
        return parameter.quant_type
    return str(parameter.dtype).removeprefix("torch.")


def render(record: dict[str, Any], facts: dict[str, Any], output_dir: str | os.PathLike) -> Group:
    """Returns options and the facts of [`summary`] for `rich`, in 100 columns."""
    options = {"stage": record["stage"], "arm": record["arm"], **record["options"]}
    columns = ["", "parameters", "trained", "dtype", "learning rate"]
    data_columns = ["", "", "rows", "bad", "too long", "used", "images", "tokens (median)"]
    notes: list[Text] = []
    for source in facts["data"]:
        notes += _notes(source)
    return Group(
        "Options",
        _pairs(options),
        titled_table("Modules", columns, _module_rows(facts["modules"])),
        titled_table("Data", data_columns, [_data_row(source) for source in facts["data"]]),
        *notes,
        _pairs(_run(facts, Path(output_dir))),
    )


def _module_rows(modules: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns a table's rows for the modules, and one for all of them."""
    rows = []
    for module in modules:
        learning_rate = "frozen"
        if module["trained"]:
            learning_rate = f"{module['learning_rate']:g}"
        counts = [f"{module['parameters']:,}", f"{module['trained']:,}"]
        rows.append([module["module"], *counts, " + ".join(module["dtypes"]), learning_rate])
    parameters = sum(module["parameters"] for module in modules)
    trained = sum(module["trained"] for module in modules)
    rows.append(["all", f"{parameters:,}", f"{trained:,}"])
    return rows


def _data_row(source: dict[str, Any]) -> list[str]:
    """Returns a table's row for a data set."""
    row = [Path(source["source"]).name, source["split"]]
    for name in ("found", "bad", "too_long", "used", "images"):
        count = source[name]
        row.append("" if count is None else f"{count:,}")
    tokens = "streamed"
    if source["longest"] is not None:
        tokens = f"{source['shortest']:,} to {source['longest']:,} ({source['median']:,.0f})"
    return [*row, tokens]


def _notes(source: dict[str, Any]) -> list[Text]:
    """Returns lines about the files of a data set, and about what of it was not read."""
    name = Path(source["source"]).name
    lines = {}
    if source["files"]:
        lines["files"] = counted({Path(file).name: rows for file, rows in source["files"].items()})
    lines |= not_read(source["left_out"], source["changed"])
    return [Text(f"{name}, {title}: {text}") for title, text in lines.items()]


def _run(facts: dict[str, Any], output_dir: Path) -> dict[str, str]:
    """Returns the facts of a run in words, by title."""
    batch = facts["batch"]
    passes = f"{batch['processes']:,} process(es) x {batch['accumulation']:,} accumulation step(s)"
    divided = f"= {batch['per_device']:,} per device x"
    if batch["packed"]:
        divided = "packed into"
    precision = facts["autocast"] or "none"
    if facts["precision_because"]:
        precision += f" ({facts['precision_because']})"
    disk = facts["disk"]
    checkpoints = f"{disk['checkpoints']:,} checkpoint(s) of {gib(disk['checkpoint'])} at a time"
    free = gib(stored.free_space(output_dir))
    return {
        "Tokens per image": f"{facts['tokens_per_image']:,}",
        "Batch": f"{batch['rows']:,} rows {divided} {passes}",
        "Steps": f"{facts['steps']:,}, of which {facts['warmup_steps']:,} of warm-up",
        "Autocast": precision,
        "Disk": f"{gib(disk['total'])} ({checkpoints}); {free} are free",
    }


def _pairs(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, Text(str(value)))
    return table


def titled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for `rich.console.Console.print`: a first column of words, the others of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def gib(size: int) -> str:
    """Returns bytes in a form that people read."""
    if size >= 2**27:
        return f"{size / 2**30:,.1f} GiB"
    return f"{size / 2**20:,.1f} MiB"


def render_dropped(dropped: DroppedRows) -> list[str]:
    """Returns lines with the number of dropped rows and of each kind; none if none was dropped."""
    rows = dropped.read()
    if not rows:
        return []
    count = "1 row was" if len(rows) == 1 else f"{len(rows):,} rows were"
    return [f"{count} dropped, listed in {dropped.path}:", *by_kind(rows, 10)]
