# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the hub of the tests reads in a card: its metadata, and what is wrong with them."""

import re

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results


TYPES: dict[str, tuple[type, ...]] = {
    "license": (str, list),
    "library_name": (str,),
    "pipeline_tag": (str,),
    "base_model": (str, list),
    "base_model_relation": (str,),
    "tags": (list,),
    "datasets": (str, list),
    "language": (str, list),
    "model-index": (list,),
}
FORMS = {"license": r"[a-z0-9.+-]+", "base_model": r"[\w.-]+(/[\w.-]+)?", "datasets": r"[\w.-]+(/[\w.-]+)?"}


def metadata(card: str) -> dict:
    """The metadata of a card; empty without any. ValueError names what the Hub would not accept."""
    found = re.match(r"---\r?\n(.*?)\r?\n?---(\r?\n|$)", card, re.DOTALL)
    try:
        read = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise ValueError(f"YAML metadata: {error}") from error
    if not isinstance(read, dict | None):
        raise ValueError(f"YAML metadata must be a mapping, not {type(read).__name__}")
    read = read or {}
    for key, types in TYPES.items():
        if key in read and not isinstance(read[key], types):
            raise ValueError(f'"{key}" must be {" or ".join(kind.__name__ for kind in types)}, not {read[key]!r}')
    for key, form in FORMS.items():
        for value in listed(read, key):
            if not re.fullmatch(form, str(value)):
                raise ValueError(f'"{key}" with value {value!r} is not valid')
    try:
        if "model-index" in read:
            model_index_to_eval_results(read["model-index"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'"model-index" is not valid: {error!r}') from error
    return read


def description(card: str) -> dict:
    """What a repository's description takes from its card: nothing, if that is not valid."""
    try:
        read = metadata(card)
    except ValueError:
        return {}
    tags = [*listed(read, "library_name"), *listed(read, "tags"), *listed(read, "language")]
    for prefix, key in {"base_model": "base_model", "dataset": "datasets", "license": "license"}.items():
        tags += [f"{prefix}:{value}" for value in listed(read, key)]
    tags += listed(read, "pipeline_tag")
    shown = ("pipeline_tag", "library_name", "sdk", "model-index")
    return {"cardData": read, "tags": [*dict.fromkeys(tags)], **{key: read[key] for key in shown if key in read}}


def listed(read: dict, key: str) -> list:
    """The values of a key that may hold one or several."""
    value = read.get(key) or []
    return value if isinstance(value, list) else [value]
