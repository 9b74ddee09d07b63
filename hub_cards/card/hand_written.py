# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a card's author wrote by hand: the Hub's text stays, and the folder's is used where the Hub has none."""

from huggingface_hub import ModelCard

from .write import by_hand, is_ours


def settle(local: str | None, remote: str | None, repo_id: str) -> dict[str, str]:
    """What the next card holds of what was written by hand.

    Args:
        local: README.md of the folder, None without one of ours.
        remote: README.md of the repository, None without one of ours.
        repo_id: For the error.

    Returns:
        Part -> text; empty parts are left out.

    Raises:
        ValueError: A part is damaged.
    """
    ours = by_hand(local) if local else {}
    try:
        theirs = by_hand(remote) if remote else {}
    except ValueError as error:
        raise ValueError(f"In {repo_id}: {error}") from None
    return {name: text for name in ours | theirs for text in _first(theirs.get(name), ours.get(name))}


def _first(*texts: str | None) -> list[str]:
    return [text for text in texts if text and text.strip()][:1]


def insert_parts(card: str, written: dict[str, str]) -> str:
    """`card` with these parts in place of its own."""
    for name, text in written.items():
        start = card.index(mark := f"<!-- by hand: {name} -->\n") + len(mark)
        card = card[:start] + text + card[start + len(by_hand(card)[name]) :]
    return card


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
