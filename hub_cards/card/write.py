# SPDX-License-Identifier: Apache-2.0
"""The model card: `README.md`, rendered from the files of a checkpoint and its author's words."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...checkpoint.files import CARD, atomic_write, check_folder, check_repo_id, only_writer
from ...checkpoint.untrusted import loading
from ...diagnose.report import number, paper_ratios, with_error
from ...evaluation.results import Evaluation
from .facts import Facts, Part
from .metadata import SECTIONS, added, by_hand, card_in, check_replaceable, is_ours, metadata, terms


DASH = "–"


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
    """Renders the card of a checkpoint folder, with code that loads it from there or from the Hub.

    What people added comes from `hub_card`, or where that has none of it, from the folder's. `base`
    is an adapter's, by default what its training started from, if that is on the Hub.
    """
    remedy = "Fix or remove training.json, build.json, or what is in diagnostics/ and evaluation/."
    with loading(f"What {checkpoint} records of itself", remedy=remedy):  # fields of any type
        facts = Facts(checkpoint)
        cards = {CARD: card_in(checkpoint), f"{CARD} of {repo_id} on the Hub": hub_card}
        hand, previous, unused = dict.fromkeys(SECTIONS, ""), dict[str, Any](), list[str]()
        for where, card in cards.items():
            if card and is_ours(card):
                for name, text in by_hand(card, where).items():
                    if text.strip():
                        if hand[name].strip() not in ("", text.strip()):
                            unused.append(name)
                        hand[name] = text
                previous |= added(card)
        if facts.adapter and base is None and facts.started_from:
            revision_then = facts.stages[-1].get("model_revision") or "main"
            base = Part("base model", facts.started_from, facts.started_from, revision_then)
        licensed = [*([base] if base and not facts.parts else []), *facts.parts, *facts.data]
        if not facts.stages and facts.moved:
            licensed.append(Part("data", "what it was trained on"))
        licence, terms_sentence, no_licence = terms(licensed)
        name = (repo_id or facts.name).rpartition("/")[2]
        derived = metadata(facts, base, licence, name)
        whole = not facts.adapter and not facts.started_from
        nameless = [part.name for part in facts.parts if whole and not part.hub_id]
        # The author's value wins where the folder does not tell all. Tags are those of both.
        is_open = {"license": no_licence, "base_model": nameless, "tags": True}
        settled = {key: value for key, value in derived.items() if not is_open.get(key)}
        tags = list(dict.fromkeys([*derived["tags"], *(previous.get("tags") or ())]))
        content = {"license": None, **derived, **previous, **settled, "tags": tags}  # in this order
        stated = content.get("license") and (content.get("license_name") or content["license"])
        if no_licence and stated not in (None, derived.get("license")):
            terms_sentence, no_licence = f"Its author states: {stated}.", None
        if content.get("base_model") != derived.get("base_model"):
            nameless = []
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            undefined=StrictUndefined,
            finalize=_text,  # all that others wrote is escaped, unless it is Markup
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        rendered = environment.get_template("card.md.jinja").render(
            front_matter=Markup(ModelCardData(**content).to_yaml(original_order=[*content])),
            derived=Markup(", ".join(settled)),
            name=name,
            facts=facts,
            source=repo_id or ".",
            revision=revision,
            base=base,
            part={part.role: _part_link(part) for part in (*facts.parts, base) if part},
            ratios=paper_ratios(),
            parts=licensed,
            terms=terms_sentence,
            hand={name: Markup(text) for name, text in hand.items()},
            alignment=_alignment(facts),
            training=_training(facts.stages),
            results=_results,
            link=_link,
            part_link=_part_link,
        )
        ModelCard(rendered)  # the Hub's own reading of it
    from_parts = facts.build and not facts.build.get("from_llava")
    unseeing = from_parts and facts.moved is False and not facts.stages
    warnings = {
        no_licence: no_licence,
        f"No Hub id is recorded for {' and '.join(nameless)}. If the Hub has it, write "
        "`base_model:` into the front matter of README.md; it is kept.": nameless,
        f"Text by hand on the Hub is kept: {', '.join(unused)}. The folder's is not used.": unused,
        f"{facts.name} was never trained: its projector is random, so it cannot see yet.": unseeing,
        f"diagnostics/report.json is of other weights than {facts.name} has, and the card shows "
        "its figures. Diagnose again, or remove diagnostics/.": facts.stale,
        "The adapter's base is not on the Hub, so no code loads it.": facts.adapter and not base,
    }
    return Card(rendered, [str(warning) for warning, holds in warnings.items() if holds])


def write_card(checkpoint: Path, *, repo_id: str | None = None, replace: bool = False) -> Card:
    """Writes `README.md` into a checkpoint folder; with `replace`, over one that others wrote too.

    If it raises ValueError or OSError, the earlier one remains.
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
    """Renders a card of ours again: a merged checkpoint still has the adapter's or the base's."""
    if is_ours(card_in(checkpoint) or ""):
        write_card(checkpoint)


def _text(value: Any) -> Markup:
    """`value` on one line; what Markdown or HTML would read as markup is escaped."""
    if isinstance(value, Markup):
        return value
    line = "".join(filter(str.isprintable, " ".join(str(value).split())))
    line = re.sub(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)  # not _ in words
    heading_or_list = r"^(\d*)(?=[#=]|[+-](?:[\s-]|$)|(?<=\d)[.)](?:\s|$))"
    return Markup(re.sub(heading_or_list, r"\1\\", line))


def _link(name: str, address: str) -> Markup:
    return Markup(f"[{_text(name)}]({quote(address, safe='/:@#?&=%+')})")


def _part_link(part: Part) -> Markup:
    """A part's name, linked if the Hub has it, with its commit if known."""
    if part.hub_id is None:
        return _text(part.name)
    address = f"https://huggingface.co/{'datasets/' if part.role == 'data' else ''}{part.hub_id}"
    commit = part.revision
    tree = f" ({_link(commit[:7], f'{address}/tree/{commit}')})" if commit else ""
    return Markup(_link(part.name, address) + tree)


def _table(titles: Iterable[Any], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table of the rows with anything known in them, or nothing. Numbers stand on the right."""
    rows = [[DASH if cell in (None, "") else cell for cell in row] for row in rows]
    cells = [[_text(cell).replace(" ± ", "\xa0±\xa0") for cell in row] for row in rows]
    cells = [row for row in cells if {*row[1:]} != {DASH}]
    if not cells:
        return Markup()
    columns = zip(*cells, strict=True)
    numbers = [all(re.match(r"[\d–−-]", cell) for cell in column) for column in columns]
    rule = [Markup("---:" if is_number else "---") for is_number in numbers]
    cells = [[_text(title) for title in titles], rule, *cells]
    return Markup("".join(f"| {' | '.join(row)} |\n" for row in cells))


def _by_column(columns: Sequence[tuple[str, dict[str, Any]]]) -> Markup:
    """A table of columns, title and cells, that have the same rows."""
    names = columns[0][1] if columns else ()
    rows = [[name, *(cells[name] for _, cells in columns)] for name in names]
    return _table(["", *(title for title, _ in columns)], rows)


def _alignment(facts: Facts) -> Markup:
    """The measurements of norm and rotation, of this model and of the baseline if there is one."""
    report, baseline = facts.diagnosis.get("report") or {}, facts.diagnosis.get("against")
    models = [("this model", report, facts.gain, facts.setting("text_embedding_norm"))]
    if baseline:
        title, gain = f"baseline: {baseline['model']}", baseline.get("gain") or {}
        n_text = (baseline["interface"].get("vocabulary") or {}).get("mean")
        models.append((title, baseline, gain, n_text))
    columns = []
    for title, measured, gain, n_text in models:
        interface, depth = measured.get("interface") or {}, measured.get("depth") or {}
        norms = {
            kind: f"{number(moments['mean'], 3)} (σ {number(moments['std'], 2)})"
            for kind in ("visual", "text")
            if (moments := interface.get(kind))
        }
        rotation = with_error(depth.get("asymmetry"), depth.get("asymmetry_error"), 3)
        cells = {
            "Mean norm of text embeddings, N_text": number(n_text),
            "Gain at the start, every element": number(gain.get("start")),
            "Gain now, mean magnitude": number(gain.get("mean_abs")),
            "Bias now, mean magnitude (0 at the start)": number(gain.get("bias_mean_abs"), 2),
            "Norm of visual tokens as they enter": norms.get("visual"),
            "Norm of text tokens in the same data": norms.get("text"),
            "Norm, visual over N_text": number(interface.get("ratio"), 3),
            "Norm, visual over text in the same data": number(interface.get("ratio_data"), 3),
            "Rotation by layer, visual over text": rotation,
        }
        columns.append((title, cells))
    return _by_column(columns)


def _training(stages: Sequence[dict[str, Any]]) -> Markup:
    """How it was trained, one column for each stage. Options are in the recipe below."""
    columns = []
    for place, stage in enumerate(stages, start=1):
        run, hardware = stage.get("run") or {}, stage.get("hardware") or {}
        name = stage.get("stage")
        title = f"stage {place}" + (f" ({name})" if name else "")
        data = stage.get("data", ())
        learned = [source for source in data if source.get("split") == "train"]
        held_out = [source for source in data if source.get("split") != "train"]
        modules, batch, seconds = run.get("modules", ()), run.get("batch"), stage.get("seconds")
        rates = [f"{row['module']} {row['learning_rate']:g}" for row in modules if row["trained"]]
        steps = dict.fromkeys([stage.get("steps_done"), run.get("steps")])
        rows = "{rows:,} ({per_device} × {processes} × {accumulation})"
        names = ", ".join(hardware.get("devices") or ())
        devices = " × ".join(str(part) for part in (hardware.get("count"), names) if part)
        cells = {
            "Trained, at a peak learning rate": ", ".join(rates),
            "Frozen": ", ".join(row["module"] for row in modules if not row["trained"]),
            "Steps": " of ".join(f"{count:,}" for count in steps if count is not None),
            "Rows a step: a device × processes × accumulated": batch and rows.format(**batch),
            "Data": "; ".join(map(_rows_used, learned)),
            "Held-out data": "; ".join(map(_rows_used, held_out)),
            "Hardware": ", ".join(filter(None, [devices, hardware.get("machine")])),
            "Time": seconds and str(timedelta(seconds=round(seconds))),
            "Software": ", ".join(f"{key} {version}" for key, version in stage["versions"].items()),
            "Commit of the code": stage.get("commit"),
        }
        columns.append((title if len(stages) > 1 else name or "training", cells))
    return _by_column(columns)


def _rows_used(source: dict[str, Any]) -> str:
    name = (source.get("dataset") or {}).get("id") or source["source"]
    used, found = source.get("used"), source.get("found")
    counts = [f"{count:,}" for count in (used, found) if count is not None]
    rows = f", {' of '.join(counts)} rows" if used is not None else ""
    faults = {"bad": source.get("bad"), "too long": source.get("too_long")}
    bad = [f"{count:,} {fault}" for fault, count in faults.items() if count]
    return name + rows + (f" ({', '.join(bad)})" if bad else "")


def _results(evaluation: Evaluation) -> Markup:
    """The results of one task, with their references."""
    references = dict.fromkeys(name for metric in evaluation.metrics for name in metric.references)
    rows = []
    for metric in evaluation.metrics:
        beside = [number(metric.references.get(name), 3) for name in references]
        samples = None if metric.samples is None else f"{metric.samples:,}"
        value = with_error(metric.value, metric.stderr, 3)
        rows.append([metric.subset or "all", metric.name, value, *beside, samples])
    return _table(["", "metric", "this model", *references, "n"], rows)
