# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model card: `README.md`, written from what lies in a checkpoint folder and from nothing else.

What its author writes by hand between marked lines, and adds to the front matter, outlasts every new rendering.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...checkpoint.files import finished_file
from ...checkpoint.loading import loading
from ...diagnose.paper import paper_ratios
from .facts import Facts, Part, read_facts
from .markdown import hub_link, link, literal, table, text, yaml_block
from .metadata import (
    Terms,
    front_matter,
    licence_of,
    merged,
    metadata,
    open_keys,
    read_front_matter,
    terms,
    unlisted,
)
from .tables import alignment, glance, is_stale, results, visual_tokens
from .training_tables import data, part_link, title, training
from .unmeasured import limits


SECTIONS = ("introduction", "notes")
"""The parts of a card that are written by hand."""

INLINE = ("interface.png", "rotation.png")
"""The figures that are shown; all others are folded away."""

_FIX = "Fix or remove training.json, build.json, or what is in the folders diagnostics and evaluation."
_OURS = re.compile(r"^<!-- normalign card, metadata: (.*?) -->\r?$", re.MULTILINE)
_START, _END = re.compile(r"^<!-- by hand: (.*?) -->\r?\n", re.MULTILINE), "<!-- end by hand -->"


@dataclass(frozen=True)
class Card:
    """A card: the text of `README.md`, and what the author should know."""

    text: str
    warnings: list[str]


@dataclass(frozen=True)
class AdapterBase:
    """The base of an adapter that is published as such: a Hub repository, and its commit."""

    repo_id: str
    revision: str


def render_card(
    checkpoint: Path,
    *,
    repo_id: str | None = None,
    revision: str = "main",
    previous: Sequence[str] = (),
    adapter: AdapterBase | None = None,
) -> Card:
    """Renders the card of a checkpoint folder; nothing is written. The same folder gives the same card.

    Args:
        checkpoint: Folder of a checkpoint or an adapter.
        repo_id: Where it is to be loaded from; by default the folder itself, ".".
        revision: Branch of it.
        previous: Earlier cards whose parts by hand are kept where the folder's own card has none, best first. Those
            that are not ours are passed over.
        adapter: The base of an adapter. By default the Hub id that its training started from, if it was one.

    Raises:
        ValueError: The folder is no checkpoint, a file in it cannot be read, or a part by hand has no end.
    """
    with loading(f"What {checkpoint} records of itself", remedy=_FIX):  # of any type, in any field
        facts = read_facts(checkpoint)
        earlier = [card for card in (_read(checkpoint / "README.md"), *previous) if is_ours(card)]
        written = [by_hand(card) for card in earlier]
        name = " ".join((repo_id or facts.name).rpartition("/")[2].split())
        if facts.adapter is not None and adapter is None and facts.started_from:
            adapter = AdapterBase(facts.started_from, facts.stages[-1].get("model_revision") or "main")
        licensed = _licensed(facts, adapter)
        follows = terms(licensed)
        derived = metadata(facts, adapter.repo_id if adapter else None, follows)
        to_author = open_keys(facts, follows)
        content = merged(derived, [(read_front_matter(card), _derived(card)) for card in earlier], to_author)
        stated = licence_of(content)
        by_author = stated is not None and content.get("license") != derived.get("license")
        named = content.get("base_model") != derived.get("base_model")
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            undefined=StrictUndefined,
            finalize=text,  # all that others wrote is escaped, unless it is Markup
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        rendered = environment.get_template("card.md.jinja").render(
            front_matter=Markup(front_matter(content)),
            derived=Markup(", ".join(key for key in derived if content[key] == derived[key] and key not in to_author)),
            name=name,
            facts=facts,
            source=literal(repo_id or "."),
            revision=literal(revision),
            adapter=adapter,
            base=adapter and {"repo_id": literal(adapter.repo_id), "revision": literal(adapter.revision)},
            part={part.role: part_link(part) for part in facts.parts},
            tokens=visual_tokens(facts),
            ratios=paper_ratios(),
            glance=glance(facts, stated),
            alignment=alignment(facts),
            training=training(facts),
            data=data(facts),
            results=[(evaluation, results(evaluation)) for evaluation in facts.evaluations],
            shown=[figure for file in INLINE for figure in facts.figures if figure["file"] == file],
            folded=[figure for figure in facts.figures if figure["file"] not in INLINE],
            limits=limits(facts),
            licences=licensed,
            licence=f"Its author states: {stated}." if by_author else follows.sentence,
            hand={
                key: Markup(next((each[key] for each in written if each.get(key, "").strip()), "")) for key in SECTIONS
            },
            part_link=part_link,
            hub_link=hub_link,
            link=link,
            title=title,
            yaml_block=yaml_block,
            literal=literal,
            draw=table,
        )
        ModelCard(rendered)  # the Hub's own reading of it
        return Card(rendered, _warnings(facts, follows, by_author, named, adapter))


def write_card(checkpoint: Path, *, repo_id: str | None = None, replace: bool = False) -> Card:
    """Writes `README.md` into a checkpoint folder.

    Args:
        checkpoint: Folder of a checkpoint or an adapter.
        repo_id: Where it will be published.
        replace: Whether to replace a `README.md` that is no card of ours.

    Raises:
        ValueError: There is one, and `replace` is not set; or as for [`render_card`]. Nothing is written.
        OSError: The folder cannot be written; the card that was there remains.
    """
    existing = _read(checkpoint / "README.md")
    if existing.strip() and not is_ours(existing) and not replace:
        raise ValueError(
            f"{checkpoint / 'README.md'} was not written by `normalign card`. Move it away, or replace it with "
            "`--replace` (in Python `replace=True`); nothing of it is kept then."
        )
    card = render_card(checkpoint, repo_id=repo_id)
    with finished_file(checkpoint / "README.md") as file:
        file.write_bytes(card.text.encode())
    return card


def refresh_card(checkpoint: Path) -> None:
    """Writes the card anew where there is one of ours: in a merged checkpoint it is the adapter's, or the base's."""
    if is_ours(_read(checkpoint / "README.md")):
        write_card(checkpoint)


def is_ours(card: str) -> bool:
    """Whether a card was rendered here."""
    return _OURS.search(card) is not None


def decoded(card: bytes, where: str) -> str:
    """The text of a `README.md`, line ends as they are. Raises ValueError, which names `where`, if it is no UTF-8."""
    try:
        return card.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"README.md of {where} is no text in UTF-8 ({error}). Save it as that.") from error


def by_hand(card: str) -> dict[str, str]:
    """The parts of a card that were written by hand, by name, byte for byte.

    Raises:
        ValueError: A part has no end, comes twice, or has a name that a card does not have.
    """
    found: dict[str, str] = {}
    position = 0
    while start := _START.search(card, position):
        name, end = start[1], card.find(_END, start.end())
        if name not in SECTIONS or name in found:
            raise ValueError(
                f"README.md has a part by hand {name!r}, where a card has one of {', '.join(SECTIONS)} each. Move "
                "what is in it there."
            )
        if end < 0 or _START.search(card, start.end(), end):
            raise ValueError(f"The part by hand {name!r} of README.md has no end. Put the line {_END} after it.")
        found[name], position = card[start.end() : end], end
    return found


def _read(file: Path) -> str:
    return decoded(file.read_bytes(), str(file.parent)) if file.is_file() else ""


def _derived(card: str) -> set[str]:
    mark = _OURS.search(card)
    return set(mark[1].split(", ")) if mark else set()


def _licensed(facts: Facts, adapter: AdapterBase | None) -> list[Part]:
    """All whose licences bear on the model's."""
    found = [*facts.parts, *facts.data]
    if adapter is not None and not facts.parts:
        found.insert(0, Part("base model", adapter.repo_id, adapter.repo_id))
    if not facts.stages and facts.moved:
        found.append(Part("data", "what it was trained on"))
    return found


def _warnings(facts: Facts, follows: Terms, by_author: bool, named: bool, adapter: AdapterBase | None) -> list[str]:
    found = [follows.warning] if follows.warning and not by_author else []
    if (missing := unlisted(facts)) and not named:
        have, them = ("have", "them as bases") if missing[1:] else ("has", "it as a base")
        found.append(
            f"{' and '.join(missing)} {have} no Hub id in the checkpoint, so the metadata does not name {them}. "
            "Write `base_model:` into the front matter of README.md, if the Hub has them; it is kept."
        )
    if is_stale(facts):
        found.append(
            f"diagnostics/report.json is of other weights than {facts.name} has, and the card shows its figures. "
            "Diagnose anew, or remove the folder diagnostics."
        )
    if facts.adapter is not None and adapter is None:
        found.append("The adapter's base is not on the Hub, so the card cannot say how others load it.")
    elif adapter is not None and not re.fullmatch("[0-9a-f]{40}", adapter.revision):
        found.append(f"The adapter's base {adapter.repo_id} is not pinned to a commit.")
    return found
