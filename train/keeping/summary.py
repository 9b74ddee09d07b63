# SPDX-License-Identifier: Apache-2.0
"""The summary of a run. It is printed before the first step."""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from ...checkpoint import weights as stored
from ...console import Console, Printed
from ...data.rows.checks import DataReport, by_kind, counted, unused_and_changed
from ...data.rows.parse import DroppedRows
from ..modules.model import base_model, module_of
from ..modules.sizes import parameter_count
from ..settings import autocast_dtype


def summary(trainer: Any, report: DataReport, steps: int) -> dict[str, Any]:
    """Returns the facts of a run as JSON: modules, data, batch, steps, precision."""
    args = trainer.args
    sources = asdict(report)["sources"]
    for source in sources:
        source["dropped"] = len(source["dropped"])
    return {
        "modules": modules(trainer.model, trainer.learning_rates),
        "data": sources,
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
    full_names = {"vision": "vision tower", "language": "language model"}
    module_rows: dict[str, dict[str, Any]] = {}
    for module in (*learning_rates, "adapters"):
        module_rows[module] = {
            "module": full_names.get(module, module),
            "parameters": 0,
            "trained": 0,
            "learning_rate": 0.0,
            "dtypes": Counter(),
        }
    for parameter_name, parameter in model.named_parameters():
        if ".original_module." in parameter_name:  # PEFT's untrained copies
            continue
        module = module_of(parameter_name)
        module_row = module_rows["adapters" if ".lora_" in parameter_name else module]
        count = parameter_count(parameter)
        dtype_name = str(parameter.dtype).removeprefix("torch.")
        if type(parameter).__name__ == "Params4bit":
            dtype_name = parameter.quant_type
        module_row["parameters"] += count
        module_row["dtypes"][dtype_name] += count
        if parameter.requires_grad:
            module_row["trained"] += count
            module_row["learning_rate"] = learning_rates[module]
    for module_row in module_rows.values():
        module_row["dtypes"] = [dtype_name for dtype_name, _ in module_row["dtypes"].most_common()]
    return [module_row for module_row in module_rows.values() if module_row["parameters"]]


@dataclass(frozen=True)
class RunSummary(Printed):
    """The options, modules, data, batch, steps and disk of a run, as tables in 100 columns.

    Attributes:
        record: The record of the run.
        facts: The facts of [`summary`], and the disk that the run takes.
        output_dir: The folder of the run.
    """

    record: dict[str, Any]
    facts: dict[str, Any]
    output_dir: Path

    def renderable(self) -> Group:
        """Returns the tables for `rich` and notebooks."""
        record = self.record
        facts = self.facts
        data_rows = []
        notes = []
        for source in facts["data"]:
            name = Path(source["source"]).name
            cells = [name, source["split"]]
            for column in ("found", "bad", "too_long", "used", "images"):
                count = source[column]
                cells.append("" if count is None else f"{count:,}")
            tokens = "streamed"
            if source["longest"] is not None:
                tokens = (
                    f"{source['shortest']:,} to {source['longest']:,} ({source['median']:,.0f})"
                )
            data_rows.append([*cells, tokens])
            lines = unused_and_changed(source["left_out"], source["changed"])
            if source["files"]:
                rows_by_file = {Path(file).name: rows for file, rows in source["files"].items()}
                lines = {"files": counted(rows_by_file), **lines}
            notes += [Text(f"{name}, {title}: {text}") for title, text in lines.items()]
        batch = facts["batch"]
        divided = f"= {batch['per_device']:,} per device x"
        if batch["packed"]:
            divided = "packed into"
        passes = (
            f"{batch['processes']:,} process(es) x {batch['accumulation']:,} accumulation step(s)"
        )
        precision = facts["autocast"] or "none"
        if facts["precision_because"]:
            precision += f" ({facts['precision_because']})"
        disk = facts["disk"]
        checkpoints = f"{disk['checkpoints']:,} checkpoint(s) of {gib(disk['checkpoint'])}"
        free_space = gib(stored.free_space(self.output_dir))
        run_in_words = {
            "Tokens per image": f"{facts['tokens_per_image']:,}",
            "Batch": f"{batch['rows']:,} rows {divided} {passes}",
            "Steps": f"{facts['steps']:,}, {facts['warmup_steps']:,} of them warm-up",
            "Autocast": precision,
            "Disk": f"{gib(disk['total'])} ({checkpoints} at a time); {free_space} are free",
        }
        columns = ["", "parameters", "trained", "dtype", "learning rate"]
        data_columns = ["", "", "rows", "bad", "too long", "used", "images", "tokens (median)"]
        return Group(
            "Options",
            _pairs({"stage": record["stage"], "arm": record["arm"], **record["options"]}),
            titled_table("Modules", columns, _module_rows(facts["modules"])),
            titled_table("Data", data_columns, data_rows),
            *notes,
            _pairs(run_in_words),
        )

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self.renderable())
        return text.getvalue()


def _module_rows(modules: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns a table's rows for the modules, and a last row for all of them."""
    module_rows = []
    for module in modules:
        learning_rate = "frozen"
        if module["trained"]:
            learning_rate = f"{module['learning_rate']:g}"
        counts = [f"{module['parameters']:,}", f"{module['trained']:,}"]
        module_rows.append([module["module"], *counts, " + ".join(module["dtypes"]), learning_rate])
    parameters = sum(module["parameters"] for module in modules)
    trained = sum(module["trained"] for module in modules)
    module_rows.append(["all", f"{parameters:,}", f"{trained:,}"])
    return module_rows


def _pairs(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, Text(str(value)))
    return table


def titled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table for `rich`. Its first column has words, the others have numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))
    return table


def gib(size: int) -> str:
    """Returns bytes in a form that people read."""
    if size >= 2**27:
        return f"{size / 2**30:,.1f} GiB"
    return f"{size / 2**20:,.1f} MiB"


def read_dropped(dropped: DroppedRows) -> list[str]:
    """Reads the dropped rows. Returns lines with their number and kinds, or no line without any."""
    rows = dropped.read()
    if not rows:
        return []
    subject = "1 row was" if len(rows) == 1 else f"{len(rows):,} rows were"
    return [f"{subject} dropped, listed in {dropped.path}:", *by_kind(rows, 10)]
