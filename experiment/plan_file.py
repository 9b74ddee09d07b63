# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The plan of an experiment, from its YAML file."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from .plan import Group, Plan, Tuning, Variant, check


def read_plan(file: Path, results: Path | None = None) -> Plan:
    """Reads a plan.

    Args:
        file: The plan.
        results: Folder of its results; by default `results/NAME` beside it.

    Raises:
        ValueError: The file does not exist, is not YAML, or says something that no plan can say.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    try:
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
        groups = {name: _group(name, each) for name, each in content.pop("groups", {}).items()}
        tuning = content.pop("tuning", None)
        tuning = tuning and _read(Tuning, "tuning", tuning)
        results = results or file.resolve().parent / "results" / file.stem
        return _read(
            Plan, "the plan", {**content, "groups": groups, "tuning": tuning, "name": file.stem, "results": results}
        )
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is no plan of an experiment: {error}.") from error


def _group(name: str, content: dict[str, Any]) -> Group:
    check("variants" in content, f"{name} has no variants")
    variants = {each: _read(Variant, f"{name}.{each}", given or {}) for each, given in content.pop("variants").items()}
    return _read(Group, name, {**content, "variants": variants})


def _read(cls: Any, name: str, content: Any) -> Any:
    known = {each.name for each in fields(cls)}
    check(isinstance(content, dict), f"{name} is no mapping")
    check(content.keys() <= known, f"{name} has {', '.join(map(str, content.keys() - known))}, which it cannot have")
    try:
        return cls(**content)
    except TypeError as error:
        raise ValueError(f"{name} lacks {str(error).partition('argument')[2].lstrip('s: ')}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
