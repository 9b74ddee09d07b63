# SPDX-License-Identifier: Apache-2.0
"""A card's front matter, and what people write into the card by hand."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ...checkpoint.files import CARD
from ...checkpoint.untrusted import refuse_unreadable
from .facts import LLAVA, Facts, Part


TAGS = ["normalign-llava", "llava", "vision-language-model", "custom_code"]
PERMISSIVE = ("mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0")
"""The most demanding one is last. Parts under several of them may be distributed under it."""
SECTIONS = ("introduction", "notes")  # parts of a card that people write

_OURS = re.compile(r"^<!-- normalign card, metadata: (.*?) -->\r?$", re.MULTILINE)
_START = re.compile(r"^<!-- by hand: (.*?) -->\r?\n", re.MULTILINE)
_END = "<!-- end by hand -->"


def terms(parts: Sequence[Part]) -> tuple[dict[str, Any], str, str | None]:
    """Returns what follows from the licences of the parts for the whole.

    Returns:
        The licence's fields of the front matter, a sentence for the card, and a warning for its
        author if no licence follows.
    """
    known = {str(part.terms): part.licence for part in parts}
    # Two licences called "other" may differ, so one without a name is not known.
    unknown = [part.name for part in parts if part.terms in (None, "other", "unknown")]
    keep = "into the front matter of README.md; it is kept."
    if unknown or not parts:
        missing = ", ".join(dict.fromkeys(unknown)) or "its parts"
        sentence = f"The licence of {missing} is not recorded here, so none follows for the whole."
        return {}, sentence, f"No licence is known for {missing}. Write `license:` {keep}"
    if len(known) == 1:
        [(name, licence)] = known.items()
        return licence, f"All parts are under {name}, and so is the whole.", None
    if known.keys() <= set(PERMISSIVE):
        most_demanding = max(known, key=PERMISSIVE.index)
        licence_names = ", ".join(sorted(known))
        sentence = f"Parts are under {licence_names}; the whole is under {most_demanding}."
        return {"license": most_demanding}, sentence, None
    licence_list = ", ".join(f"{part.name} ({part.terms})" for part in parts)
    warning = (
        f"The metadata has `license: other`: the licences of the parts differ, {licence_list}. "
        f"If one of them covers the whole, write it {keep}"
    )
    sentence = "No licence covers all parts: the conditions of all apply."
    return {"license": "other"}, sentence, warning


def metadata(facts: Facts, base: Part | None, licence: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the front matter that follows from the records of a folder.

    Args:
        facts: The records.
        base: The base of an adapter.
        licence: The licence's fields, from [`terms`].
        name: The name of the model, for its scores.

    Returns:
        The arguments of `ModelCardData`. It writes scores as `model-index`.
    """
    base_models, base_relation = _base_models(facts, base)
    scores = eval_results(facts)
    content = {
        **licence,
        "language": _languages(facts.data),
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": "image-text-to-text",
        "base_model": base_models,
        "base_model_relation": base_relation if base_models else None,
        "datasets": _hub_ids(facts.data),
        "tags": [*TAGS, "gguf"] if facts.gguf else TAGS,
        "model_name": name if scores else None,
        "eval_results": scores,
    }
    return {field: value for field, value in content.items() if value}


def _base_models(facts: Facts, base: Part | None) -> tuple[list[str], str | None]:
    """Returns the Hub ids of the models that this one was made from, and how."""
    if facts.adapter:
        return ([str(base.hub_id)] if base else []), "adapter"
    if facts.started_from:
        return [facts.started_from], "finetune"
    base_models = _hub_ids(facts.parts)
    if facts.parts and facts.parts[0].role == LLAVA:
        return base_models, "finetune"
    if len(base_models) > 1:
        return base_models, "merge"
    return base_models, None  # with only one of two parts on the Hub, the Hub infers the relation


def _languages(data: Sequence[Part]) -> list[str]:
    """Returns the languages of all data sets. An incomplete list would mislead, so it is empty."""
    languages: dict[str, None] = {}
    for part in data:
        if not part.languages:
            return []
        languages |= dict.fromkeys(part.languages)
    return list(languages)


def _hub_ids(parts: Sequence[Part]) -> list[str]:
    return list(dict.fromkeys(part.hub_id for part in parts if part.hub_id))


def eval_results(facts: Facts) -> list[EvalResult]:
    """Returns the scores of this model on whole tasks, as the Hub reads them.

    The text of the card has all scores.
    """
    results = []
    for evaluation in facts.evaluations:
        if evaluation.partial or evaluation.task in facts.outdated:
            continue
        for metric in evaluation.metrics:
            metric_name = metric.name
            if metric.subset:
                metric_name += f", {metric.subset}"
            result = EvalResult(
                task_type="image-text-to-text",
                dataset_type=evaluation.task,
                dataset_name=evaluation.title,
                metric_type=metric.name,
                metric_name=metric_name,
                metric_value=metric.value,
            )
            results.append(result)
    return results


def read_card(folder: Path) -> str | None:
    """Reads `README.md` of a folder, with its line ends. Returns None if there is none.

    Raises:
        ValueError: It is not UTF-8.
    """
    file = folder / CARD
    if not file.is_file():
        return None
    with refuse_unreadable(str(file), remedy="Save it as UTF-8."):
        return file.read_bytes().decode("utf-8-sig")


def is_ours(card: str) -> bool:
    """Returns whether this package rendered a card."""
    return _OURS.search(card) is not None


def added_metadata(card: str) -> dict[str, Any]:
    """Returns the fields of a card's front matter that this package did not derive.

    Raises ValueError if the front matter cannot be read.
    """
    derived: list[str] = []
    mark = _OURS.search(card)
    if mark:
        derived = mark[1].split(", ")
    with refuse_unreadable("The front matter of README.md", remedy="Fix it."):
        content = vars(ModelCard(card).data)
    added_fields = {}
    for field, value in content.items():
        if value is not None and field not in derived:
            added_fields[field] = value
    return added_fields


def by_hand(card: str, where: str = CARD) -> dict[str, str]:
    """Returns the sections of a card that were written by hand, by name, byte for byte.

    Raises:
        ValueError: A section has no end, comes twice, or is not in `SECTIONS`. It names `where`.
    """
    sections: dict[str, str] = {}
    _, *pieces = _START.split(card)
    for section, following in zip(pieces[::2], pieces[1::2], strict=True):
        fault = f"{where} has a part by hand {section!r}"
        if section not in SECTIONS or section in sections:
            known_sections = " and one ".join(SECTIONS)
            raise ValueError(f"{fault}, but room for one {known_sections}. Move its text there.")
        section_text, end, _ = following.partition(_END)
        if not end:
            raise ValueError(f"{fault} without end. Put the line {_END} after it.")
        sections[section] = section_text
    return sections


def check_replaceable(card: str | None, where: str) -> None:
    """Raises ValueError if a card has text by others. One with only metadata may be replaced.

    Args:
        card: The text of `README.md`, or None if there is none.
        where: The folder or repository, for the message.
    """
    if not card or is_ours(card):
        return
    if ModelCard(card, ignore_metadata_errors=True).text.strip():
        raise ValueError(
            f"README.md of {where} was not written by this package. Move it away, or replace it by "
            "`normalign card --replace` or `normalign publish --replace-card`, and write what you "
            "want to keep between the new one's marks."
        )
