# SPDX-License-Identifier: Apache-2.0
"""The model card: `README.md`, rendered from the files of a checkpoint and its author's words."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...checkpoint.files import CARD, atomic_write, check_folder, check_repo_id, lock_folder
from ...checkpoint.untrusted import refuse_unreadable
from ...diagnose.report import paper_ratios
from . import markdown
from .facts import Facts, Part
from .metadata import (
    check_replaceable,
    front_matter,
    is_ours,
    merge_author_edits,
    read_card,
)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    finalize=markdown.escape,  # all that others wrote is escaped, unless it is Markup
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


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
    hub_card: str = "",
    base: Part | None = None,
    with_gguf: bool = True,
) -> Card:
    """Renders the card of a checkpoint folder.

    Args:
        checkpoint: The folder.
        repo_id: Where the card's code loads the model from. By default it is the current folder.
        revision: The branch or commit of `repo_id` that it loads.
        hub_card: The card on the Hub. Its edits take precedence over the folder's.
        base: An adapter's base. By default it is what its training started from, if the Hub has it.
        with_gguf: Whether the card lists the GGUF files in the folder.

    Raises:
        ValueError: A record in the folder, or the author's part of a card, is not valid.
    """
    remedy = "Fix or remove training.json, build.json, or what is in diagnostics/ and evaluation/."
    # A record may have fields of any type, so reading them may raise any error.
    with refuse_unreadable(f"What {checkpoint} records of itself", remedy=remedy):
        facts = Facts(checkpoint)
        if not with_gguf:
            facts.gguf = {}
        edits = merge_author_edits(read_card(checkpoint), hub_card, repo_id)
        if base is None:
            base = _recorded_base(facts)
        parts = _licensed_parts(facts, base)
        model_name = (repo_id or facts.name).rpartition("/")[2]
        matter = front_matter(facts, base, parts, model_name, edits.metadata)
        yaml_text = ModelCardData(**matter.content).to_yaml(original_order=list(matter.content))
        card_text = _TEMPLATES.get_template("card.md.jinja").render(
            front_matter=yaml_text,
            matter=matter,
            name=model_name,
            facts=facts,
            source=repo_id or ".",
            revision=revision,
            base=base,
            part={part.role: markdown.part_link(part) for part in facts.parts},
            ratios=paper_ratios(),
            parts=parts,
            edits=edits,
            markdown=markdown,
        )
        ModelCard(card_text)  # raises ValueError if the Hub's client cannot read the front matter
    return Card(card_text, [*matter.warnings, *_warnings(facts, base, edits.unused)])


def _recorded_base(facts: Facts) -> Part | None:
    """Returns the checkpoint on the Hub that an adapter's training started from."""
    if not facts.adapter or not facts.started_from:
        return None
    revision = facts.last_stage.get("model_revision") or "main"
    return Part("base model", facts.started_from, facts.started_from, revision)


def _licensed_parts(facts: Facts, base: Part | None) -> list[Part]:
    """Returns what the model was made from: the parts, or else the base, and the data."""
    parts = [*facts.parts, *facts.data]
    if base is not None and not facts.parts:
        parts.insert(0, base)
    if facts.norm_moved and not facts.stages:
        parts.append(Part("data", "what it was trained on"))
    return parts


def _warnings(facts: Facts, base: Part | None, unused: list[str]) -> list[str]:
    """Returns what the author of the card should know, a sentence or two each."""
    warnings = []
    if unused:
        warnings.append(
            f"Text by hand on the Hub is kept: {', '.join(unused)}. The folder's is not used."
        )
    is_built = facts.build and not facts.build.get("from_llava")
    if is_built and facts.norm_moved is False and not facts.stages:
        warnings.append(
            f"{facts.name} was never trained: its projector is random, so it cannot see yet."
        )
    if facts.report_is_stale:
        warnings.append(
            f"diagnostics/report.json was made with other weights than {facts.name} has, and the "
            "card shows its figures. Diagnose again, or remove diagnostics/."
        )
    if facts.adapter and base is None:
        warnings.append("The adapter's base is not on the Hub, so no code loads it.")
    return warnings


def write_card(checkpoint: Path, *, repo_id: str | None = None, replace: bool = False) -> Card:
    """Writes `README.md` into a checkpoint folder.

    Args:
        checkpoint: The folder of a checkpoint or adapter.
        repo_id: Where the card's code loads the model from. By default it is the current folder.
        replace: Also replace a card that others wrote.

    Raises:
        ValueError: The folder or a record in it is not valid, or others wrote its card. The earlier
            card remains.
        OSError: The card cannot be written. The earlier card remains.
    """
    check_folder(checkpoint)
    if repo_id is not None:
        check_repo_id(repo_id)
    with lock_folder(checkpoint):
        if not replace:
            check_replaceable(read_card(checkpoint), str(checkpoint))
        card = render_card(checkpoint, repo_id=repo_id)
        with atomic_write(checkpoint / CARD) as file:
            file.write_bytes(card.text.encode())
    return card


def refresh_card(checkpoint: Path) -> None:
    """Writes a card of ours again, since a merged checkpoint still has the adapter's or the base's.

    Raises ValueError if a record in the folder is not valid.
    """
    if is_ours(read_card(checkpoint)):
        write_card(checkpoint)
