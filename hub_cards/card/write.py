# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model card: `README.md`, rendered from the files of a checkpoint folder and from nothing else.

What the author writes between its marks, and adds to the front matter, is kept when it is rendered again.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...checkpoint.files import atomic_write
from ...checkpoint.find import check_folder
from ...checkpoint.loading import loading
from ...checkpoint.lock import only_writer
from ...checkpoint.names import CARD
from ...diagnose.paper import paper_ratios
from .facts import Facts, Licence, Part, read_facts
from .hand_written import SECTIONS, by_hand, check_replaceable, decode_card, derived_keys, is_ours
from .markdown import link, literal, part_link, text, yaml_block
from .metadata import ORDER, Terms, merged, metadata, read_front_matter, terms, unlisted
from .tables import alignment, glance, is_stale, limits, results
from .training_tables import data, title, training


INLINE = ("interface.png", "rotation.png")
"""The figures shown in full; the others are folded."""

_FIX = "Fix or remove training.json, build.json, or the files in the folders diagnostics and evaluation."


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

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit."""
        return self.revision if re.fullmatch("[0-9a-f]{40}", self.revision) else None


def render_card(
    checkpoint: Path,
    *,
    repo_id: str | None = None,
    revision: str = "main",
    hub_card: str | None = None,
    adapter: AdapterBase | None = None,
) -> Card:
    """Renders the card of a checkpoint folder; nothing is written. The same folder gives the same card.

    What was written by hand is taken from the card on the Hub, and from the folder's where that has none.

    Args:
        checkpoint: Folder of a checkpoint or an adapter.
        repo_id: Repository that the card's code loads from; by default the folder itself, ".".
        revision: Its branch.
        hub_card: `README.md` on the Hub; ignored if this package did not write it.
        adapter: The base of an adapter. By default the Hub id that its training started from, if it was one.

    Raises:
        ValueError: The folder is not a checkpoint, a file in it cannot be read, or a part by hand has no end.
    """
    with loading(f"What {checkpoint} records of itself", remedy=_FIX):  # of any type, in any field
        facts = read_facts(checkpoint)
        earlier = [card for card in (hub_card, card_in(checkpoint)) if card and is_ours(card)]
        by_hand(hub_card or "", f"README.md of {repo_id} on the Hub")  # for an error that names it
        parts = [by_hand(card) for card in earlier]
        hand = {part: next((each[part] for each in parts if each.get(part, "").strip()), "") for part in SECTIONS}
        name = " ".join((repo_id or facts.name).rpartition("/")[2].split())
        if facts.adapter is not None and adapter is None and facts.started_from:
            adapter = AdapterBase(facts.started_from, facts.stages[-1].get("model_revision") or "main")
        licensed = [*facts.parts, *facts.data]  # everything whose licence bears on the model's
        base = adapter and Part("base model", adapter.repo_id, adapter.repo_id, adapter.commit)
        if base and not facts.parts:
            licensed.insert(0, base)
        if not facts.stages and facts.weights.moved:
            licensed.append(Part("data", "what it was trained on"))
        follows = terms(licensed)
        derived = metadata(facts, adapter.repo_id if adapter else None, follows)
        partly = [("license", follows.warning), ("base_model", unlisted(facts))]
        to_author = [key for key in ORDER for group, is_open in partly if is_open and key.startswith(group)]
        content = merged(derived, [(read_front_matter(card), derived_keys(card)) for card in earlier], to_author)
        names = (content.get(key) for key in ("license_name", "license_link"))
        stated = Licence(str(content["license"]), *names) if content.get("license") else None
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
            front_matter=Markup(ModelCardData(**content).to_yaml(original_order=ORDER)),
            derived=Markup(", ".join(key for key in derived if content[key] == derived[key] and key not in to_author)),
            name=name,
            facts=facts,
            source=literal(repo_id or "."),
            revision=literal(revision),
            adapter=adapter,
            base=adapter and {"repo_id": literal(adapter.repo_id), "revision": literal(adapter.revision)},
            part={part.role: part_link(part) for part in [*facts.parts, *([base] if base else [])]},
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
            hand={name: Markup(text) for name, text in hand.items()},
            part_link=part_link,
            link=link,
            title=title,
            yaml_block=yaml_block,
            literal=literal,
        )
        ModelCard(rendered)  # the Hub's own reading of it
        warnings = _warnings(facts, follows, by_author, named, adapter)
        for part, text_here in (parts[-1] if parts else {}).items():
            if text_here.strip() and text_here.strip() != hand[part].strip():
                warnings.append(f"The part {part!r} written by hand on the Hub stays; that of the folder is not used.")
        return Card(rendered, warnings)


def write_card(checkpoint: Path, *, repo_id: str | None = None, replace: bool = False) -> Card:
    """Writes `README.md` into a checkpoint folder.

    Raises:
        ValueError: There is a `README.md` that this package did not write and `replace` is not set, or as for
            [`render_card`]. Nothing is written.
        OSError: The folder cannot be written; the earlier card remains.
    """
    check_folder(checkpoint)
    with only_writer(checkpoint):
        if not replace:
            check_replaceable(card_in(checkpoint), str(checkpoint))
        card = render_card(checkpoint, repo_id=repo_id)
        with atomic_write(checkpoint / CARD) as file:
            file.write_bytes(card.text.encode())
    return card


def refresh_card(checkpoint: Path) -> None:
    """Renders the card again, if this package wrote it: a merged checkpoint still has the adapter's or the base's."""
    if is_ours(card_in(checkpoint) or ""):
        write_card(checkpoint)


def card_in(folder: Path) -> str | None:
    """`README.md` of a folder, whoever wrote it; None if there is none. Raises ValueError if it is not text."""
    file = folder / CARD
    return decode_card(file.read_bytes(), str(folder)) if file.is_file() else None


def _warnings(facts: Facts, follows: Terms, by_author: bool, named: bool, adapter: AdapterBase | None) -> list[str]:
    found = [follows.warning] if follows.warning and not by_author else []
    if (missing := unlisted(facts)) and not named:
        have, them = ("have", "them as bases") if missing[1:] else ("has", "it as a base")
        found.append(
            f"{' and '.join(missing)} {have} no Hub id in the checkpoint, so the metadata does not name {them}. "
            "Write `base_model:` into the front matter of README.md, if the Hub has them; it is kept."
        )
    if facts.weights.moved is False and not facts.stages and facts.build and not facts.build.get("from_llava"):
        found.append(f"{facts.name} was never trained: its projector is random, so it cannot see yet.")
    if is_stale(facts):
        found.append(
            f"diagnostics/report.json was measured on other weights than those of {facts.name}, and the card shows "
            "its figures. Diagnose again, or remove the folder diagnostics."
        )
    if facts.adapter is not None and adapter is None:
        found.append("The adapter's base is not on the Hub, so the card cannot say how others load it.")
    return found
