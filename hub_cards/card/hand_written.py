# SPDX-License-Identifier: Apache-2.0
"""What people write in a card: text between the marks of this package's, or a whole card of their own."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

from ...checkpoint.names import CARD


SECTIONS = ("introduction", "notes")
"""The parts of a card that are written by hand."""

_OURS = re.compile(r"^<!-- normalign card, metadata: (.*?) -->\r?$", re.MULTILINE)
_START, _END = re.compile(r"^<!-- by hand: (.*?) -->\r?\n", re.MULTILINE), "<!-- end by hand -->"


def card_in(folder: Path) -> str | None:
    """`README.md` of a folder, line ends unchanged; None if there is none. Raises ValueError if it is not UTF-8."""
    file = folder / CARD
    try:
        return file.read_bytes().decode("utf-8-sig") if file.is_file() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error}). Save it as UTF-8.") from error


def is_ours(card: str) -> bool:
    """Whether this package rendered a card."""
    return _OURS.search(card) is not None


def derived_keys(card: str) -> set[str]:
    """The front matter's keys that this package wrote into a card; all others are the author's."""
    mark = _OURS.search(card)
    return set(mark[1].split(", ")) if mark else set()


def by_hand(card: str, where: str = "README.md") -> dict[str, str]:
    """The parts of a card that were written by hand, by name, byte for byte.

    Raises ValueError, which names `where`, if a part has no end, comes twice, or is none of [`SECTIONS`].
    """
    parts: dict[str, str] = {}
    _, *pieces = _START.split(card)
    for name, part in zip(pieces[::2], pieces[1::2], strict=True):
        if name not in SECTIONS or name in parts:
            raise ValueError(
                f"{where} has a part by hand {name!r}, where a card has one of {', '.join(SECTIONS)} each. Move "
                "its text there."
            )
        if _END not in part:
            raise ValueError(f"The part by hand {name!r} of {where} has no end. Put the line {_END} after it.")
        parts[name] = part.partition(_END)[0]
    return parts


def check_replaceable(card: str | None, where: str) -> None:
    """Raises ValueError if somebody else wrote the `README.md` of `where`. Mere metadata may be replaced."""
    if card is None or is_ours(card) or not ModelCard(card, ignore_metadata_errors=True).text.strip():
        return
    raise ValueError(
        f"README.md of {where} was not written by this package. Move it away, or replace it: `normalign card` has "
        "--replace and `normalign publish` --replace-card. What you want to keep of it goes between the marks of the "
        "new one."
    )
