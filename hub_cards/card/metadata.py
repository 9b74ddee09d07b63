# SPDX-License-Identifier: Apache-2.0
"""A card's front matter, and what people write into the card by hand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FrontMatter:
    """The front matter of a card.

    Attributes:
        content: All fields, in their order in the card.
        derived: The names of the fields that follow from the folder. They change when it does.
        licence: A sentence about the licence of the whole.
        warnings: What the author should write into it.
    """

    content: dict[str, Any]
    derived: list[str]
    licence: str
    warnings: list[str]


def front_matter(
    facts: Facts, base: Part | None, parts: list[Part], name: str, author: dict[str, Any]
) -> FrontMatter:
    """Returns the front matter that follows from the folder, merged with the author's.

    The author's value takes precedence where the folder does not tell all.

    Args:
        facts: The records of the folder.
        base: The base of an adapter.
        parts: What the model was made from.
        name: The name of the model.
        author: The fields that the author added.
    """
    licence, licence_sentence, licence_warning = terms(parts)
    base_models, base_relation = _base_models(facts, base)
    scores = eval_results(facts)
    languages = dict.fromkeys(language for part in facts.data for language in part.languages)
    are_all_known = all(part.languages for part in facts.data)  # an incomplete list would mislead
    # Arguments of `ModelCardData`. It writes scores as `model-index`.
    of_folder = {
        **licence,
        "language": list(languages) if are_all_known else None,
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": "image-text-to-text",
        "base_model": base_models,
        "base_model_relation": base_relation if base_models else None,
        "datasets": _hub_ids(facts.data),
        "tags": [*TAGS, "gguf"] if facts.gguf else TAGS,
        "model_name": name if scores else None,
        "eval_results": scores,
    }
    derived = {field: value for field, value in of_folder.items() if value}
    without_hub_id = []
    if not facts.adapter and not facts.started_from:
        without_hub_id = [part.name for part in facts.parts if not part.hub_id]
    settled = dict(derived)
    if licence_warning:
        settled.pop("license", None)
    if without_hub_id:
        settled.pop("base_model", None)
    # Tags are those that were derived and the author's.
    tags = [*settled.pop("tags"), *(author.get("tags") or ())]
    content = {"license": None, **derived, **author, **settled}  # in this order
    content["tags"] = list(dict.fromkeys(tags))
    stated = content.get("license_name") or content["license"]
    warnings = []
    if licence_warning and content["license"] and stated != derived.get("license"):
        licence_sentence = f"Its author states: {stated}."
    elif licence_warning:
        warnings.append(licence_warning)
    if without_hub_id and content.get("base_model") == derived.get("base_model"):
        warnings.append(
            f"No Hub id is recorded for {' and '.join(without_hub_id)}. If the Hub has it, write "
            "`base_model:` into the front matter of README.md; it is kept."
        )
    return FrontMatter(content, list(settled), licence_sentence, warnings)


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
            subset = f", {metric.subset}" if metric.subset else ""
            results.append(
                EvalResult(
                    task_type="image-text-to-text",
                    dataset_type=evaluation.task,
                    dataset_name=evaluation.title,
                    metric_type=metric.name,
                    metric_name=metric.name + subset,
                    metric_value=metric.value,
                )
            )
    return results


def read_card(folder: Path) -> str:
    """Reads `README.md` of a folder, with its line ends. Returns "" if there is none.

    Raises:
        ValueError: It is not UTF-8.
    """
    file = folder / CARD
    if not file.is_file():
        return ""
    with refuse_unreadable(str(file), remedy="Save it as UTF-8."):
        return file.read_bytes().decode("utf-8-sig")


def is_ours(card: str) -> bool:
    """Returns whether this package rendered a card."""
    return _OURS.search(card) is not None


@dataclass(frozen=True)
class AuthorEdits:
    """What the author of a card wrote into it.

    Attributes:
        sections: The text of each of `SECTIONS`, empty if there is none.
        metadata: The fields that were added to the front matter.
        unused: The sections whose text in the folder is not used, since the Hub has another one.
    """

    sections: dict[str, str]
    metadata: dict[str, Any]
    unused: list[str]


def merge_author_edits(folder_card: str, hub_card: str, repo_id: str | None) -> AuthorEdits:
    """Returns the edits in the cards of the folder and the Hub. The Hub's take precedence.

    Args:
        folder_card: The text of the folder's card, or "" if there is none.
        hub_card: The text of the Hub's card, or "" if there is none.
        repo_id: The repository, for errors.

    Raises:
        ValueError: A section or the front matter of a card is not valid.
    """
    folder_sections, folder_metadata = author_edits(folder_card, CARD)
    hub_sections, hub_metadata = author_edits(hub_card, f"{CARD} of {repo_id} on the Hub")
    unused = []
    for name, text in hub_sections.items():
        if folder_sections.get(name, text).strip() != text.strip():
            unused.append(name)
    return AuthorEdits(
        sections={**dict.fromkeys(SECTIONS, ""), **folder_sections, **hub_sections},
        metadata={**folder_metadata, **hub_metadata},
        unused=unused,
    )


def author_edits(card: str, where: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns what the author of a card wrote into it, if this package rendered it.

    Args:
        card: The text of the card, or "" if there is none.
        where: Its name in errors.

    Returns:
        The sections with text, and the fields of the front matter that were added to it.

    Raises:
        ValueError: A section or the front matter is not valid.
    """
    mark = _OURS.search(card)
    if mark is None:
        return {}, {}
    sections = {name: text for name, text in by_hand(card, where).items() if text.strip()}
    derived = mark[1].split(", ")
    with refuse_unreadable("The front matter of README.md", remedy="Fix it."):
        content = vars(ModelCard(card).data)
    return sections, {
        field: value
        for field, value in content.items()
        if value is not None and field not in derived
    }


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


def check_replaceable(card: str, where: str) -> None:
    """Raises ValueError if a card has text by others. One with only metadata may be replaced.

    Args:
        card: The text of `README.md`, or "" if there is none.
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
