# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The metadata of a card: the front matter of README.md, which the Hub reads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from .facts import LLAVA, Facts, Part


TAGS = ["normalign-llava", "llava", "vision-language-model", "custom_code"]
PERMISSIVE = ("mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0")
"""Permissive licences, the most demanding last: parts under several of them may be distributed under that one."""

ORDER = ["license", "license_name", "license_link", "language", "library_name", "pipeline_tag"]
ORDER += ["base_model", "base_model_relation", "datasets", "tags"]
"""The keys of the front matter that are derived."""


@dataclass(frozen=True)
class Terms:
    """The licence that follows from those of all parts: metadata, a sentence, and a warning if none follows."""

    metadata: dict[str, Any]
    sentence: str
    warning: str | None = None


def terms(parts: Sequence[Part]) -> Terms:
    """The licence of a model that is made of `parts`, data included."""
    known = list(dict.fromkeys(part.licence for part in parts if part.licence is not None))
    # Two licences called "other" may differ, so one without a name is not known.
    vague = [each for each in known if each.license in ("other", "unknown") and each.license_name is None]
    if unknown := [part.name for part in parts if part.licence in (None, *vague)] or ([] if parts else ["its parts"]):
        missing = ", ".join(dict.fromkeys(unknown))
        return Terms(
            {},
            f"The licence of {missing} is not recorded here, so none follows for the whole.",
            f"No licence in the metadata, since that of {missing} is not recorded. Write `license:` into the front "
            "matter of README.md; it is kept.",
        )
    if len(known) == 1:
        metadata = {key: value for key, value in asdict(known[0]).items() if value is not None}
        return Terms(metadata, f"All parts are under {known[0]}, and so is the whole.")
    names = sorted(str(each) for each in known)
    if all(each.license in PERMISSIVE for each in known):
        whole = max((each.license for each in known), key=PERMISSIVE.index)
        sentence = f"The parts are under {', '.join(names)}; the whole is under {whole}, and their notices stay."
        return Terms({"license": whole}, sentence)
    named = ", ".join(f"{part.name} ({part.licence})" for part in parts)
    return Terms(
        {"license": "other"},
        "The licences of the parts differ, and none of them covers the whole: the conditions of each apply.",
        f"The metadata says `license: other`, since the licences of the parts differ: {named}. If one holds for the "
        "whole, write it into the front matter of README.md; it is kept.",
    )


def metadata(facts: Facts, base: str | None, parts_terms: Terms) -> dict[str, Any]:
    """The front matter that can be derived from `facts`, the Hub id of an adapter's base, and [`terms`]."""
    models, relation = _bases(facts, base)
    datasets = list(dict.fromkeys(part.hub_id for part in facts.data if part.hub_id))
    data = ModelCardData(
        **parts_terms.metadata,
        language=_languages(facts),
        library_name="transformers" if facts.adapter is None else "peft",
        pipeline_tag="image-text-to-text",
        base_model=models or None,
        base_model_relation=relation,
        datasets=datasets or None,
        tags=TAGS,
    )
    return data.to_dict()


def unlisted(facts: Facts) -> list[str]:
    """Names of parts that are missing in `base_model`, since they have no known Hub id."""
    if facts.adapter is not None or facts.started_from:
        return []
    return [part.name for part in facts.parts if not part.hub_id]


def merged(
    derived: dict[str, Any], kept: Sequence[tuple[dict[str, Any], set[str]]], open_to_author: Sequence[str] = ()
) -> dict[str, Any]:
    """`derived`, with the keys and tags that the author added to earlier cards.

    Args:
        derived: From [`metadata`].
        kept: Front matter of earlier cards, the preferred one first, each with the keys that were derived in it.
        open_to_author: Keys that can only partly be inferred: here the author's value wins.
    """
    result = dict(derived)
    for earlier, derived_then in kept:
        theirs = {key: value for key, value in earlier.items() if key not in derived_then}
        for name in ("license", "base_model"):  # with the keys that belong to it
            if name in open_to_author and name in theirs and result.get(name) == derived.get(name):
                result = {key: value for key, value in result.items() if not key.startswith(name)}
        if isinstance(tags := earlier.get("tags"), list):
            result["tags"] = list(dict.fromkeys([*result["tags"], *tags]))
        result = {**theirs, **result}
    return result


def read_front_matter(card: str) -> dict[str, Any]:
    """The front matter of a card. Raises ValueError if it is not YAML, or not in a form that the Hub accepts."""
    try:
        return ModelCard(card).data.to_dict()
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The front matter of README.md cannot be read: {error}. Fix it.") from error


def _bases(facts: Facts, base: str | None) -> tuple[list[str], str | None]:
    """Base models on the Hub, and the relation of this model to them."""
    if facts.adapter is not None:
        return ([base], "adapter") if base else ([], None)
    if facts.started_from:
        return [facts.started_from], "finetune"
    found = list(dict.fromkeys(part.hub_id for part in facts.parts if part.hub_id))
    if found and facts.parts[0].role == LLAVA:
        return found, "finetune"
    # With only one of the two parts on the Hub, the Hub itself infers the relation.
    return found, "merge" if len(found) > 1 else None


def _languages(facts: Facts) -> list[str] | None:
    sources = [source for stage in facts.stages for source in stage.get("data", ()) if source.get("split") == "train"]
    languages = [(source.get("dataset") or {}).get("language") or [] for source in sources]
    # An incomplete list would mislead.
    return list(dict.fromkeys(chain(*languages))) if languages and all(languages) else None
