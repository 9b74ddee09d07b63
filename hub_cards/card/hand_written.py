# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a card's author wrote by hand, in the folder and on the Hub: which of the two the next card keeps."""

import hashlib
import json

from huggingface_hub import ModelCard

from .metadata import read_front_matter
from .write import by_hand, is_ours


_IN_FOLDER = " in the folder"


def settle(local: str | None, remote: str | None, published: dict[str, str], repo_id: str) -> dict[str, str]:
    """What the next card holds of what was written by hand: of each part the text that was edited since.

    Publishing leaves the folder's card as it is. So that an edit on the Hub is not undone the time after, it is known
    of both what they said.

    Args:
        local: README.md of the folder, None without one of ours.
        remote: README.md of the repository, None without one of ours.
        published: `digests` of when the card was last published.
        repo_id: For the error.

    Returns:
        Part -> text; empty parts are left out.

    Raises:
        ValueError: A part was edited in both, and neither text holds the other; or a part is damaged.
    """
    ours = by_hand(local) if local else {}
    try:
        theirs = by_hand(remote) if remote else {}
    except ValueError as error:
        raise ValueError(f"In {repo_id}: {error}") from None
    settled, torn = {}, []
    for name in ours | theirs:
        here, existing = ours.get(name, ""), theirs.get(name, "")
        # An empty part in the folder is no wish to lose what was written on the Hub.
        new_here = bool(here.strip()) and _digest(here) != published.get(name + _IN_FOLDER)
        new_there = (_digest(existing) if existing.strip() else None) != published.get(name)
        if remote is None or (new_here and (not new_there or existing.strip() in here)):
            settled[name] = here
        elif not new_here or here.strip() in existing:
            settled[name] = existing
        else:
            torn.append(name)
    if torn:
        raise ValueError(
            f"What is written by hand under {' and '.join(torn)} was edited both in README.md of the folder and in "
            f"that of {repo_id}. Copy what is to stay of the latter into the former, between the same marks."
        )
    return {name: text for name, text in settled.items() if text.strip()}


def insert_parts(card: str, written: dict[str, str]) -> str:
    """`card` with these parts in place of its own."""
    for name, text in written.items():
        start = card.index(mark := f"<!-- by hand: {name} -->\n") + len(mark)
        card = card[:start] + text + card[start + len(by_hand(card)[name]) :]
    return card


def digests(card: str, local: str | None = None) -> dict[str, str]:
    """What is written by hand when a card is published, as SHA-256, for the next time.

    Args:
        card: The card.
        local: README.md of the folder, None without one of ours. It may say otherwise: see [`settle`].

    Returns:
        Part -> digest, of parts that are not empty; "PART in the folder" -> digest; and those of "metadata" and of all
        other "text".
    """
    written = {name: text for name, text in by_hand(card).items() if text.strip()}
    written |= {name + _IN_FOLDER: text for name, text in by_hand(local or "").items() if text.strip()}
    return {name: _digest(text) for name, text in written.items()} | _elsewhere(card)


def is_reverted(remote: str, card: str, published: dict[str, str]) -> bool:
    """Whether a card was edited on the Hub outside its parts by hand, which `card` does not hold.

    Args:
        remote: The one there.
        card: The one that takes its place.
        published: The `digests` of the one that was published last. Without them nothing is known.
    """
    existing, new = _elsewhere(remote), _elsewhere(card)
    return any(published.get(part, existing[part]) != existing[part] != new[part] for part in existing)


def check_own(card: str | None, where: str, remedy: str | None) -> None:
    """Refuses to replace a `README.md` that somebody else wrote. One of nothing but metadata is no one's text.

    Args:
        card: The text, None without one.
        where: Whose it is, for the error.
        remedy: What to do about it, for the error; None: it may be replaced.

    Raises:
        ValueError: Somebody wrote it, and it may not be replaced.
    """
    if card is None or remedy is None or is_ours(card):
        return
    if ModelCard(card, ignore_metadata_errors=True).text.strip():
        raise ValueError(f"README.md of {where} was not written by this package. {remedy}")


def _elsewhere(card: str) -> dict[str, str]:
    card = card.replace("\r\n", "\n")
    without = ModelCard(insert_parts(card, dict.fromkeys(by_hand(card), "")), ignore_metadata_errors=True)
    metadata = json.dumps(read_front_matter(card), sort_keys=True, default=str)
    return {"metadata": _digest(metadata), "text": _digest(without.text)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").strip().encode()).hexdigest()
