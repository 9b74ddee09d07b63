# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of a card about training. Rows without any known figure are left out."""

from datetime import timedelta
from typing import Any

from markupsafe import Markup

from .facts import Facts
from .markdown import part_link, table


DASH = "–"


def training(facts: Facts) -> Markup:
    """How it was trained, one column for each stage; empty if nothing is recorded. Options are in the recipe below."""
    rows = []
    for name, value in (
        ("Trained", lambda stage: _modules(stage, trained=True)),
        ("Frozen", lambda stage: _modules(stage, trained=False)),
        ("Learning rate, peak", _rates),
        ("Steps", _steps),
        ("Rows a step: a device × processes × accumulated", _batch),
        ("Rows trained on", trained_rows),
        ("Hardware", _hardware),
        ("Time", lambda stage: stage.get("seconds") and str(timedelta(seconds=round(stage["seconds"])))),
        ("Software", lambda stage: ", ".join(f"{name} {version}" for name, version in stage["versions"].items())),
        ("Commit of the code", lambda stage: stage.get("commit")),
    ):
        cells = [value(stage) for stage in facts.stages]
        if any(cell not in (None, "") for cell in cells):
            rows.append([name, *(DASH if cell in (None, "") else cell for cell in cells)])
    return table(["", *(title(facts, stage) for stage in facts.stages)], rows)


def data(facts: Facts) -> Markup:
    """How many rows of each data set were found, left out and used; empty if nothing is recorded."""
    columns = ["data set", "stage", "used for", "rows found", "bad", "too long", "chosen", "images", "median tokens"]
    parts = {part.name: part_link(part) for part in facts.data}
    rows = []
    for stage in facts.stages:
        for source in stage.get("data", ()):
            name = (source.get("dataset") or {}).get("id") or source["source"]
            numbers = [source.get(key) for key in ("found", "bad", "too_long", "used", "images", "median")]
            rows.append(
                [
                    parts.get(name, name),
                    title(facts, stage),
                    "training" if source.get("split") == "train" else "held out",
                    *(DASH if each is None else f"{each:,.0f}" for each in numbers),
                ]
            )
    return table(columns, rows)


def title(facts: Facts, stage: dict[str, Any]) -> str:
    """A stage's name: "stage 1 (align)", or "align" where no other is recorded."""
    name = stage.get("stage")
    if len(facts.stages) == 1:
        return name or "training"
    return f"stage {facts.stages.index(stage) + 1}" + (f" ({name})" if name else "")


def trained_rows(stage: dict[str, Any]) -> str | None:
    """How many rows a stage trained on: those of its data or, if it used fewer, of its steps. None if unknown."""
    used = [source.get("used") for source in stage.get("data", ()) if source.get("split") == "train"]
    steps, batch = stage.get("steps_done", run(stage).get("steps")), run(stage).get("batch")
    bounds = [] if None in used else [sum(used)]
    if steps is not None and batch:
        bounds.append(steps * batch["rows"])
    return f"{min(bounds):,} rows" if used and bounds else None


def run(stage: dict[str, Any]) -> dict[str, Any]:
    """The field `run` of a stage's `training.json`."""
    return stage.get("run") or {}


def _modules(stage: dict[str, Any], *, trained: bool) -> str:
    modules = run(stage).get("modules", ())
    return ", ".join(each["module"] for each in modules if bool(each["trained"]) == trained)


def _rates(stage: dict[str, Any]) -> str:
    modules = run(stage).get("modules", ())
    rates = {each["module"]: each["learning_rate"] for each in modules if each["trained"]}
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):g}"
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items())


def _steps(stage: dict[str, Any]) -> str | None:
    taken_and_planned = dict.fromkeys((stage.get("steps_done"), run(stage).get("steps")))
    return " of ".join(f"{each:,}" for each in taken_and_planned if each is not None) or None


def _batch(stage: dict[str, Any]) -> str | None:
    batch = run(stage).get("batch")
    if not batch:
        return None
    factors = f"{batch['per_device']} × {batch['processes']} × {batch['accumulation']}"
    return f"{batch['rows']:,} ({factors})"


def _hardware(stage: dict[str, Any]) -> str | None:
    hardware = stage.get("hardware") or {}
    devices = ", ".join(hardware.get("devices") or ())
    counted = f"{hardware['count']} × {devices}" if devices and hardware.get("count") else devices
    return ", ".join(each for each in (counted, hardware.get("machine")) if each)
