# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the hub of the tests reads in a card: its metadata, and whether its licence is one."""

import re

import yaml


def metadata(card: str) -> dict:
    """The metadata of a card; empty without any. ValueError names what the Hub would not accept."""
    found = re.match(r"---\r?\n(.*?)\r?\n?---(\r?\n|$)", card, re.DOTALL)
    try:
        read = (yaml.safe_load(found[1]) if found else None) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"YAML metadata: {error}") from error
    if "license" in read and not re.fullmatch("[a-z0-9.+-]+", str(read["license"])):
        raise ValueError(f'"license" with value {read["license"]!r} is not valid')
    return read


def description(card: str) -> dict:
    """What a repository's description takes from its card: nothing, if that is not valid."""
    try:
        read = metadata(card)
    except ValueError:
        return {}
    tags = list(read.get("tags") or ())
    for prefix, key in {"base_model": "base_model", "dataset": "datasets", "license": "license"}.items():
        values = read.get(key) or []
        tags += [f"{prefix}:{value}" for value in (values if isinstance(values, list) else [values])]
    shown = ("pipeline_tag", "library_name", "sdk")
    return {"cardData": read, "tags": tags, **{key: read[key] for key in shown if key in read}}
