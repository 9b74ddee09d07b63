# SPDX-License-Identifier: Apache-2.0
"""A card's front matter, which the Hub reads, and what people write into the card by hand."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index

from ...checkpoint.files import CARD
from ...checkpoint.untrusted import loading
from .facts import LLAVA, Facts, Part


TAGS = ["normalign-llava", "llava", "vision-language-model", "custom_code"]
PERMISSIVE = ("mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0")
"""The most demanding last: parts under several of them may be distributed under that one."""
SECTIONS = ("introduction", "notes")  # of a card, which people write

_OURS = re.compile(r"^<!-- normalign card, metadata: (.*?) -->\r?$", re.MULTILINE)
_START, _END = re.compile(r"^<!-- by hand: (.*?) -->\r?\n", re.MULTILINE), "<!-- end by hand -->"


def terms(parts: Sequence[Part]) -> tuple[dict[str, Any], str, str | None]:
    """What follows from the parts' licences: metadata, a sentence, and a warning if none does."""
    known = {str(part.terms): part.licence for part in parts}
    # Two licences called "other" may differ, so one without a name is not known.
    unknown = [part.name for part in parts if part.terms in (None, "other", "unknown")]
    keep = "into the front matter of README.md; it is kept."
    if unknown or not parts:
        missing = ", ".join(dict.fromkeys(unknown)) or "its parts"
        sentence = f"The licence of {missing} is not recorded here, so none follows for the whole."
        return {}, sentence, f"No licence is known for {missing}. Write `license:` {keep}"
    if len(known) == 1:
        ((name, licence),) = known.items()
        return licence, f"All parts are under {name}, and so is the whole.", None
    if known.keys() <= {*PERMISSIVE}:
        whole = max(known, key=PERMISSIVE.index)
        names = ", ".join(sorted(known))
        sentence = f"Parts are under {names}; the whole is under {whole}."
        return {"license": whole}, sentence, None
    named = ", ".join(f"{part.name} ({part.terms})" for part in parts)
    differ = f"The metadata has `license: other`: the licences of the parts differ, {named}. "
    differ += f"If one is that of the whole, write it {keep}"
    return {"license": "other"}, "No licence covers all parts: the conditions of all apply.", differ


def metadata(facts: Facts, base: Part | None, licence: dict[str, Any], name: str) -> dict[str, Any]:
    """The front matter that follows from `facts`, an adapter's base, and the licence of `terms`.

    `name` is the model's, beside its scores.
    """
    models, relation = list(dict.fromkeys(part.hub_id for part in facts.parts if part.hub_id)), None
    if facts.adapter:
        models, relation = [str(base.hub_id)] if base else [], "adapter"
    elif facts.started_from:
        models, relation = [facts.started_from], "finetune"
    elif facts.parts and facts.parts[0].role == LLAVA:
        relation = "finetune"
    elif len(models) > 1:  # with only one of them on the Hub, the Hub infers the relation
        relation = "merge"
    languages = [part.languages for part in facts.data]
    scores = eval_results(facts)
    content = {
        **licence,
        # An incomplete list would mislead.
        "language": list(dict.fromkeys(sum(languages, ()))) if all(languages) else None,
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": "image-text-to-text",
        "base_model": models,
        "base_model_relation": relation if models else None,
        "datasets": list(dict.fromkeys(part.hub_id for part in facts.data if part.hub_id)),
        "tags": TAGS,
        "model-index": eval_results_to_model_index(name, scores) if scores else None,
    }
    return {key: value for key, value in content.items() if value}


def eval_results(facts: Facts) -> list[EvalResult]:
    """The scores of this model on whole tasks, as the Hub reads them. The card's text has all."""
    results = []
    for evaluation in facts.evaluations:
        if evaluation.partial or evaluation.task in facts.outdated:
            continue
        for metric in evaluation.metrics:
            of_subset = f"{metric.name}, {metric.subset}" if metric.subset else metric.name
            result = EvalResult(
                task_type="image-text-to-text",
                dataset_type=evaluation.task,
                dataset_name=evaluation.title,
                metric_type=metric.name,
                metric_name=of_subset,
                metric_value=metric.value,
            )
            results.append(result)
    return results


def card_in(folder: Path) -> str | None:
    """`README.md` of a folder, line ends unchanged, or None. Raises ValueError if not UTF-8."""
    file = folder / CARD
    with loading(str(file), remedy="Save it as UTF-8."):
        return file.read_bytes().decode("utf-8-sig") if file.is_file() else None


def is_ours(card: str) -> bool:
    """Whether this package rendered a card."""
    return _OURS.search(card) is not None


def added(card: str) -> dict[str, Any]:
    """What the author of a card added to its front matter: what this package did not derive."""
    mark = _OURS.search(card)
    derived = mark[1].split(", ") if mark else []
    with loading("The front matter of README.md", remedy="Fix it."):
        content = ModelCard(card).data.to_dict()
        return {key: value for key, value in content.items() if key not in derived}


def by_hand(card: str, where: str = CARD) -> dict[str, str]:
    """The parts of a card that were written by hand, by name, byte for byte.

    Raises ValueError, naming `where`, if a part has no end, comes twice, or is none of `SECTIONS`.
    """
    parts: dict[str, str] = {}
    _, *pieces = _START.split(card)
    for name, part in zip(pieces[::2], pieces[1::2], strict=True):
        fault = f"{where} has a part by hand {name!r}"
        if name not in SECTIONS or name in parts:
            room = " and one ".join(SECTIONS)
            raise ValueError(f"{fault}, but room for one {room}. Move its text there.")
        if _END not in part:
            raise ValueError(f"{fault} without end. Put the line {_END} after it.")
        parts[name] = part.partition(_END)[0]
    return parts


def check_replaceable(card: str | None, where: str) -> None:
    """Raises ValueError if others wrote the `README.md` of `where`. Metadata may be replaced."""
    if card and not is_ours(card) and ModelCard(card, ignore_metadata_errors=True).text.strip():
        raise ValueError(
            f"README.md of {where} was not written by this package. Move it away, or replace it by "
            "`normalign card --replace` or `normalign publish --replace-card`, and write what you "
            "want to keep between the new one's marks."
        )
