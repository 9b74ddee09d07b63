# SPDX-License-Identifier: Apache-2.0
"""What follows from a checkpoint folder, merged with what the author of its card wrote."""

from dataclasses import dataclass
from typing import Any

from ...checkpoint.files import CARD
from .facts import Facts, Part
from .metadata import SECTIONS, added_metadata, by_hand, is_ours, metadata, terms


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


def author_edits(folder_card: str | None, hub_card: str | None, repo_id: str | None) -> AuthorEdits:
    """Returns the edits in the cards of the folder and the Hub. The Hub's take precedence.

    Args:
        folder_card: The text of the folder's card, or None if there is none.
        hub_card: The text of the Hub's card, or None if there is none.
        repo_id: The repository, for errors.

    Raises:
        ValueError: A section or the front matter of a card is not valid.
    """
    folder_sections, folder_metadata = _edits_in(folder_card, CARD)
    hub_sections, hub_metadata = _edits_in(hub_card, f"{CARD} of {repo_id} on the Hub")
    unused = []
    for name, text in hub_sections.items():
        if name in folder_sections and folder_sections[name].strip() != text.strip():
            unused.append(name)
    return AuthorEdits(
        sections={**dict.fromkeys(SECTIONS, ""), **folder_sections, **hub_sections},
        metadata={**folder_metadata, **hub_metadata},
        unused=unused,
    )


def _edits_in(card: str | None, where: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the sections with text, and the added metadata, of a card that this package wrote."""
    if not card or not is_ours(card):
        return {}, {}
    sections = {name: text for name, text in by_hand(card, where).items() if text.strip()}
    return sections, added_metadata(card)


@dataclass(frozen=True)
class FrontMatter:
    """The front matter of a card.

    Attributes:
        content: All fields, in their order in the card.
        derived: The names of the fields that follow from the folder. They change when it does.
        licence: A sentence about the licence of the whole.
        licence_warning: What the author should do about the licence, if none follows.
        without_hub_id: The parts whose Hub id the author should state.
    """

    content: dict[str, Any]
    derived: list[str]
    licence: str
    licence_warning: str | None
    without_hub_id: list[str]


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
    derived = metadata(facts, base, licence, name)
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
    if licence_warning and content["license"] and stated != derived.get("license"):
        licence_sentence = f"Its author states: {stated}."
        licence_warning = None
    if content.get("base_model") != derived.get("base_model"):
        without_hub_id = []
    return FrontMatter(
        content=content,
        derived=list(settled),
        licence=licence_sentence,
        licence_warning=licence_warning,
        without_hub_id=without_hub_id,
    )
