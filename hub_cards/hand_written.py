# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a card's author wrote by hand, in the folder and on the Hub: which of the two the next card keeps."""

import hashlib

from huggingface_hub import ModelCard

from .card import by_hand, is_ours


def settle(local: str | None, remote: str | None, published: dict[str, str], repo_id: str) -> dict[str, str]:
    """What the next card holds of what was written by hand: of each part the text that was edited.

    Args:
        local: README.md of the folder, None without one of ours.
        remote: README.md of the repository, None without one of ours.
        published: Their `digests` when the card was last published.
        repo_id: For the error.

    Returns:
        Part -> text; empty parts are left out.

    Raises:
        ValueError: A part was edited in both, and neither text holds the other; or a part has no end.
    """
    ours = by_hand(local) if local else {}
    try:
        theirs = by_hand(remote) if remote else {}
    except ValueError as error:
        raise ValueError(f"In {repo_id}: {error}") from None
    settled, torn = {}, []
    for name in ours | theirs:
        here, there = ours.get(name, ""), theirs.get(name, "")
        if not there.strip() or there.strip() in here or _digest(there) == published.get(name):
            # An empty part in the folder is no wish to lose what was written on the Hub.
            settled[name] = here if here.strip() else there
        elif here.strip() in there or _digest(here) == published.get(name):
            settled[name] = there
        else:
            torn.append(name)
    if torn:
        raise ValueError(
            f"What is written by hand under {' and '.join(torn)} was edited both in README.md of the folder and in "
            f"that of {repo_id}. Copy what is to stay of the latter into the former, between the same marks."
        )
    return {name: text for name, text in settled.items() if text.strip()}


def put(card: str, written: dict[str, str]) -> str:
    """`card` with these parts in place of its own."""
    for name, text in written.items():
        start = card.index(mark := f"<!-- by hand: {name} -->\n") + len(mark)
        card = card[:start] + text + card[start + len(by_hand(card)[name]) :]
    return card


def digests(card: str) -> dict[str, str]:
    """Part -> SHA-256 of what is written by hand in it."""
    return {name: _digest(text) for name, text in by_hand(card).items() if text.strip()}


def own_card(card: str | None, repo_id: str, replace: bool) -> str | None:
    """README.md of a repository if it is one of ours, None if there is nothing in it to keep.

    Raises:
        ValueError: Somebody wrote it, and it may not be replaced.
    """
    if card is None or is_ours(card):
        return card
    if ModelCard(card, ignore_metadata_errors=True).text.strip() and not replace:
        raise ValueError(
            f"README.md of {repo_id} was not written by this package. Copy what you want to keep of it between "
            "the marks of the card that `normalign card` writes into the folder, and publish with --replace-card."
        )
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").strip().encode()).hexdigest()
