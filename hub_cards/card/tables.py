# SPDX-License-Identifier: Apache-2.0
"""The tables of a card, in Markdown. Rows without any known figure are left out."""

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ...diagnose.report import number, with_error
from ...evaluate.results import Evaluation
from .facts import Facts, Part


DASH = "–"


def text(value: Any) -> Markup:
    """`value` on one line, as what others wrote is shown: what Markdown or HTML would read as markup is escaped."""
    if isinstance(value, Markup):
        return value
    line = "".join(character for character in " ".join(str(value).split()) if character.isprintable())
    line = re.sub(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)  # inside a word, _ is not markup
    return Markup(re.sub(r"^(\d*)(?=[#=]|[+-](?:[\s-]|$)|(?<=\d)[.)](?:\s|$))", r"\1\\", line))  # headings, lists


def link(name: str, address: str) -> Markup:
    """`name` as a link to `address`."""
    return Markup(f"[{text(name)}]({quote(address, safe='/:@#?&=%+')})")


def part_link(part: Part) -> Markup:
    """A part's name, linked if the Hub has it, with its commit if known."""
    if part.hub_id is None:
        return text(part.name)
    address = f"https://huggingface.co/{'datasets/' if part.role == 'data' else ''}{part.hub_id}"
    commit = f" ({link(part.revision[:7], f'{address}/tree/{part.revision}')})" if part.revision else ""
    return Markup(link(part.name, address) + commit)


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table of the rows with anything known in them, or nothing. Columns of numbers are aligned to the right."""
    cells = [[text(DASH if cell in (None, "") else cell).replace(" ± ", "\xa0±\xa0") for cell in row] for row in rows]
    cells = [row for row in cells if {*row[1:]} != {DASH}]
    if not cells:
        return Markup()
    numbers = [all(re.match(r"[\d–−-]", cell) for cell in column) for column in zip(*cells, strict=True)]
    rule = [Markup("---:" if is_number else "---") for is_number in numbers]
    cells = [[text(column) for column in columns], rule, *cells]
    return Markup("".join(f"| {' | '.join(row)} |\n" for row in cells))


def alignment(facts: Facts) -> Markup:
    """The measurements of norm and rotation, of this model and of the baseline if there is one."""
    report, baseline = (facts.diagnosis or {}).get("report") or {}, (facts.diagnosis or {}).get("against")
    columns = [_measured(report, facts.gain, facts.setting("text_embedding_norm"))]
    if baseline:
        vocabulary = baseline["interface"].get("vocabulary") or {}
        columns.append(_measured(baseline, baseline.get("gain") or {}, vocabulary.get("mean")))
    return _by_row(["this model", *([f"baseline: {baseline['model']}"] if baseline else [])], columns)


def _measured(report: dict[str, Any], gain: dict[str, Any], n_text: float | None) -> dict[str, str]:
    interface, depth = report.get("interface") or {}, report.get("depth") or {}
    moments = {
        key: f"{number(moment['mean'], 3)} (σ {number(moment['std'], 2)})"
        for key in ("visual", "text")
        if (moment := interface.get(key))
    }
    return {
        "Mean norm of text embeddings, N_text": number(n_text),
        "Gain at the start, every element": number(gain.get("start")),
        "Gain now, mean magnitude": number(gain.get("mean_abs")),
        "Bias now, mean magnitude (0 at the start)": number(gain.get("bias_mean_abs"), 2),
        "Norm of visual tokens as they enter": moments.get("visual", DASH),
        "Norm of text tokens in the same data": moments.get("text", DASH),
        "Norm, visual over N_text": number(interface.get("ratio"), 3),
        "Norm, visual over text in the same data": number(interface.get("ratio_data"), 3),
        "Rotation by layer, visual over text": with_error(depth.get("asymmetry"), depth.get("asymmetry_error"), 3),
    }


def is_stale(facts: Facts) -> bool:
    """Whether the diagnosis was made of other weights: another norm, or a gain that differs by more than 1 %."""
    report: dict[str, Any] = (facts.diagnosis or {}).get("report") or {}
    norm, measured = facts.setting("projector_norm"), (report.get("gain") or {}).get("mean_abs")
    if None not in (norm, report.get("norm")) and norm != report["norm"]:
        return True
    now = facts.gain.get("mean_abs")
    return now is not None and measured is not None and not math.isclose(now, measured, rel_tol=0.01)


def training(facts: Facts) -> Markup:
    """How it was trained, one column for each stage. Options are in the recipe below."""
    columns = []
    for stage in facts.stages:
        run, hardware = stage.get("run") or {}, stage.get("hardware") or {}
        modules, batch, seconds = run.get("modules", ()), run.get("batch"), stage.get("seconds")
        steps = dict.fromkeys(count for count in (stage.get("steps_done"), run.get("steps")) if count is not None)
        rates = [f"{module['module']} {module['learning_rate']:g}" for module in modules if module["trained"]]
        factors = batch and f"{batch['per_device']} × {batch['processes']} × {batch['accumulation']}"
        devices = [hardware.get("count"), ", ".join(hardware.get("devices") or ())]
        columns.append(
            {
                "Trained, at a peak learning rate": ", ".join(rates),
                "Frozen": ", ".join(module["module"] for module in modules if not module["trained"]),
                "Steps": " of ".join(f"{count:,}" for count in steps),
                "Rows a step: a device × processes × accumulated": batch and f"{batch['rows']:,} ({factors})",
                "Data": "; ".join(map(_chosen, stage.get("data", ()))),
                "Hardware": ", ".join(
                    filter(None, [" × ".join(map(str, filter(None, devices))), hardware.get("machine")])
                ),
                "Time": seconds and str(timedelta(seconds=round(seconds))),
                "Software": ", ".join(f"{name} {version}" for name, version in stage["versions"].items()),
                "Commit of the code": stage.get("commit"),
            }
        )
    return _by_row([title(facts, stage) for stage in facts.stages], columns)


def _chosen(source: dict[str, Any]) -> str:
    name = (source.get("dataset") or {}).get("id") or source["source"]
    counts = [f"{count:,}" for count in (source.get("used"), source.get("found")) if count is not None]
    use = "" if source.get("split") == "train" else ", held out"
    rows = f", {' of '.join(counts)} rows" if source.get("used") is not None else ""
    bad = [f"{source[key]:,} {key.replace('_', ' ')}" for key in ("bad", "too_long") if source.get(key)]
    return name + rows + (f" ({', '.join(bad)})" if bad else "") + use


def _by_row(titles: Sequence[Any], columns: Sequence[dict[str, Any]]) -> Markup:
    """A table of columns that have the same rows."""
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]] if columns else []
    return table(["", *titles], rows)


def title(facts: Facts, stage: dict[str, Any]) -> str:
    """A stage's name: "stage 1 (align)", or "align" where no other is recorded."""
    name = stage.get("stage")
    if len(facts.stages) == 1:
        return name or "training"
    return f"stage {facts.stages.index(stage) + 1}" + (f" ({name})" if name else "")


def results(evaluation: Evaluation) -> Markup:
    """The results of one task, with their references."""
    references = list(dict.fromkeys(name for metric in evaluation.metrics for name in metric.references))
    rows = []
    for metric in evaluation.metrics:
        beside = [number(metric.references.get(name), 3) for name in references]
        samples = None if metric.samples is None else f"{metric.samples:,}"
        value = with_error(metric.value, metric.stderr, 3)
        rows.append([metric.subset or "all", metric.name, value, *beside, samples])
    return table(["", "metric", "this model", *references, "n"], rows)
