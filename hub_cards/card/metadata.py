# SPDX-License-Identifier: Apache-2.0
"""The metadata of a card: the front matter of README.md, which the Hub reads."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import yaml
from huggingface_hub import ModelCard

from .facts import LLAVA, Facts, Part


TAGS = ["normalign-llava", "llava", "vision-language-model", "custom_code"]
PERMISSIVE = ("mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0")
"""Permissive licences, the most demanding last: parts under several of them may be distributed under that one."""

ORDER = ["license", "license_name", "license_link", "language", "library_name", "pipeline_tag"]
ORDER += ["base_model", "base_model_relation", "datasets", "tags"]
"""The keys of the front matter that are derived."""


def terms(parts: Sequence[Part]) -> tuple[dict[str, Any], str, str | None]:
    """The licence that follows from those of all parts: metadata, a sentence, and a warning if none follows."""
    known = list(dict.fromkeys(part.licence for part in parts if part.licence is not None))
    # Two licences called "other" may differ, so one without a name is not known.
    vague = [licence for licence in known if licence.license in ("other", "unknown") and licence.license_name is None]
    unknown = [part.name for part in parts if part.licence in (None, *vague)] or ([] if parts else ["its parts"])
    keep = "into the front matter of README.md; it is kept."
    if unknown:
        missing = ", ".join(dict.fromkeys(unknown))
        sentence = f"The licence of {missing} is not recorded here, so none follows for the whole."
        return {}, sentence, f"No licence in the metadata: that of {missing} is not recorded. Write `license:` {keep}"
    if len(known) == 1:
        stated = {key: value for key, value in asdict(known[0]).items() if value is not None}
        return stated, f"All parts are under {known[0]}, and so is the whole.", None
    if all(licence.license in PERMISSIVE for licence in known):
        whole = max((licence.license for licence in known), key=PERMISSIVE.index)
        names = ", ".join(sorted(map(str, known)))
        sentence = f"The parts are under {names}; the whole is under {whole}, and their notices stay."
        return {"license": whole}, sentence, None
    named = ", ".join(f"{part.name} ({part.licence})" for part in parts)
    return (
        {"license": "other"},
        "The licences of the parts differ, and none of them covers the whole: the conditions of each apply.",
        f"The metadata says `license: other`: the licences of the parts differ, {named}. If one holds for the whole, "
        f"write it {keep}",
    )


def metadata(facts: Facts, base: Part | None, licence: dict[str, Any]) -> dict[str, Any]:
    """The front matter that follows from `facts`, an adapter's base, and the licence of [`terms`]."""
    models, relation = list(dict.fromkeys(part.hub_id for part in facts.parts if part.hub_id)), None
    if facts.adapter is not None:
        models, relation = [str(base.hub_id)] if base else [], "adapter"
    elif facts.started_from:
        models, relation = [facts.started_from], "finetune"
    elif facts.parts and facts.parts[0].role == LLAVA:
        relation = "finetune"
    elif len(models) > 1:  # with only one of the two parts on the Hub, the Hub itself infers the relation
        relation = "merge"
    sources = [source for stage in facts.stages for source in stage.get("data", ()) if source.get("split") == "train"]
    languages = [(source.get("dataset") or {}).get("language") or [] for source in sources]
    content = {
        **licence,
        # An incomplete list would mislead.
        "language": list(dict.fromkeys(chain.from_iterable(languages))) if all(languages) else None,
        "library_name": "transformers" if facts.adapter is None else "peft",
        "pipeline_tag": "image-text-to-text",
        "base_model": models,
        "base_model_relation": relation if models else None,
        "datasets": list(dict.fromkeys(part.hub_id for part in facts.data if part.hub_id)),
        "tags": TAGS,
    }
    return {key: value for key, value in content.items() if value}


def read_front_matter(card: str) -> dict[str, Any]:
    """The front matter of a card. Raises ValueError if it is not YAML, or not in a form that the Hub accepts."""
    try:
        return ModelCard(card).data.to_dict()
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The front matter of README.md cannot be read: {error}. Fix it.") from error
