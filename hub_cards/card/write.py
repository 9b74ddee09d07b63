# SPDX-License-Identifier: Apache-2.0
"""The model card: `README.md`, rendered from the files of a checkpoint folder and from nothing else.

What the author writes between its marks, and adds to the front matter, is kept when it is rendered again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...checkpoint.files import atomic_write, only_writer
from ...checkpoint.find import check_folder, check_repo_id
from ...checkpoint.names import CARD
from ...checkpoint.untrusted import loading
from ...diagnose.paper import paper_ratios
from . import tables
from .facts import Facts, Part, read_facts
from .hand_written import SECTIONS, by_hand, card_in, check_replaceable, derived_keys, is_ours
from .metadata import ORDER, metadata, read_front_matter, terms


@dataclass(frozen=True)
class Card:
    """A card: the text of `README.md`, and what the author should know."""

    text: str
    warnings: list[str]


def render_card(
    checkpoint: Path,
    *,
    repo_id: str | None = None,
    revision: str = "main",
    hub_card: str | None = None,
    base: Part | None = None,
) -> Card:
    """Renders the card of a checkpoint folder; nothing is written. The same folder gives the same card.

    What people added is taken from the card on the Hub, and where that has none of it, from the folder's.

    Args:
        checkpoint: Folder of a checkpoint or an adapter.
        repo_id, revision: Repository and branch that the card's code loads from; by default the folder itself, ".".
        hub_card: `README.md` on the Hub; ignored if this package did not write it.
        base: That of an adapter. By default what its training started from, if that is on the Hub.

    Raises:
        ValueError: The folder is not a checkpoint, a file in it cannot be read, or a part by hand has no end.
    """
    remedy = "Fix or remove training.json, build.json, or the files in the folders diagnostics and evaluation."
    with loading(f"What {checkpoint} records of itself", remedy=remedy):  # of any type, in any field
        facts = read_facts(checkpoint)
        hand, previous, unused = dict.fromkeys(SECTIONS, ""), dict[str, Any](), list[str]()
        for card, where in ((card_in(checkpoint), CARD), (hub_card, f"{CARD} of {repo_id} on the Hub")):
            if card and is_ours(card):
                written = {part: text for part, text in by_hand(card, where).items() if text.strip()}
                unused = [part for part, text in written.items() if hand[part].strip() not in ("", text.strip())]
                hand |= written
                ours = derived_keys(card)
                previous |= {key: value for key, value in read_front_matter(card).items() if key not in ours}
        if facts.adapter is not None and base is None and facts.started_from:
            revision_then = facts.stages[-1].get("model_revision") or "main"
            base = Part("base model", facts.started_from, facts.started_from, revision_then)
        parts = [*([base] if base and not facts.parts else []), *facts.parts, *facts.data]  # whose licence matters
        if not facts.stages and facts.moved:
            parts.append(Part("data", "what it was trained on"))
        licence, terms_sentence, no_licence = terms(parts)
        derived = metadata(facts, base, licence)
        whole = facts.adapter is None and not facts.started_from
        nameless = [part.name for part in facts.parts if whole and not part.hub_id]  # which base_model lacks
        # The author's value wins where the folder does not tell all. Tags are those of both.
        is_open = {"license": no_licence, "base_model": nameless, "tags": True}
        settled = {key: value for key, value in derived.items() if not is_open.get(key)}
        tags = list(dict.fromkeys([*derived["tags"], *(previous.get("tags") or ())]))
        content = {**derived, **previous, **settled, "tags": tags}
        if content.get("license") not in (None, derived.get("license")):
            stated = content.get("license_name") or content["license"]
            terms_sentence, no_licence = f"Its author states: {stated}.", None
        if content.get("base_model") != derived.get("base_model"):
            nameless = []
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            undefined=StrictUndefined,
            finalize=tables.text,  # all that others wrote is escaped, unless it is Markup
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        rendered = environment.get_template("card.md.jinja").render(
            front_matter=Markup(ModelCardData(**content).to_yaml(original_order=ORDER)),
            derived=Markup(", ".join(settled)),
            name=(repo_id or facts.name).rpartition("/")[2],
            facts=facts,
            source=repo_id or ".",
            revision=revision,
            base=base,
            part={part.role: tables.part_link(part) for part in [*facts.parts, *([base] if base else [])]},
            ratios=paper_ratios(),
            parts=parts,
            terms=terms_sentence,
            hand={name: Markup(text) for name, text in hand.items()},
            tables=tables,
        )
        ModelCard(rendered)  # the Hub's own reading of it
        return Card(rendered, [*filter(None, [no_licence]), *_warnings(facts, base, nameless, unused)])


def write_card(checkpoint: Path, *, repo_id: str | None = None, replace: bool = False) -> Card:
    """Writes `README.md` into a checkpoint folder.

    Raises:
        ValueError: There is a `README.md` that this package did not write and `replace` is not set, or as for
            [`render_card`]. Nothing is written.
        OSError: The folder cannot be written; the earlier card remains.
    """
    check_folder(checkpoint)
    if repo_id is not None:
        check_repo_id(repo_id)
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


def _warnings(facts: Facts, base: Part | None, nameless: list[str], unused: list[str]) -> list[str]:
    """What the author should know: of parts without a Hub id, of `unused` parts by hand, and else."""
    unseeing = facts.moved is False and not facts.stages and facts.build and not facts.build.get("from_llava")
    warnings = {
        f"The metadata does not name {' and '.join(nameless)} as base, of which the checkpoint has no Hub id. If the "
        "Hub has it, write `base_model:` into the front matter of README.md; it is kept.": nameless,
        f"Written by hand on the Hub and kept: {', '.join(unused)}. That of the folder is not used.": unused,
        f"{facts.name} was never trained: its projector is random, so it cannot see yet.": unseeing,
        f"diagnostics/report.json was measured on other weights than those of {facts.name}, and the card shows its "
        "figures. Diagnose again, or remove the folder diagnostics.": tables.is_stale(facts),
        "The adapter's base is not on the Hub, so the card cannot say how others load it.": (
            facts.adapter is not None and base is None
        ),
    }
    return [warning for warning, holds in warnings.items() if holds]
