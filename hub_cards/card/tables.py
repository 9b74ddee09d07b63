# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of a card about the model and its measurements, and the limits of these.

Rows without any known figure are left out.
"""

import math
from typing import Any

from markupsafe import Markup

from ...diagnose.report import number, with_error
from ...evaluate.results import Evaluation, forgotten
from .facts import Facts
from .markdown import part_link, table, text
from .training_tables import DASH, run, title, trained_rows


STALE = "The diagnosis was made of other weights: its figures are not this model's."


def glance(facts: Facts, licence: Any) -> list[tuple[str, Any]]:
    """The summary at the top of the card: name and value."""
    config, last = facts.config, facts.stages[-1] if facts.stages else {}
    tokens = config.image_seq_length if config else run(last).get("tokens_per_image")
    context = config and getattr(config.text_config, "max_position_embeddings", None)
    dtype = config and config.dtype and str(config.dtype).removeprefix("torch.")
    weights = f"{facts.weights.size / 1e9:.2f} GB"
    if facts.weights.parameters:
        weights = f"{facts.weights.parameters:,} parameters, {weights}" + (f" in {dtype}" if dtype else "")
    rows = [
        *((part.role.capitalize(), part_link(part)) for part in facts.parts),
        ("Weights", weights),
        ("An image is", tokens and f"{tokens:,} visual tokens"),
        ("Context", context and f"{context:,} tokens"),
        (
            "Trained on",
            "; ".join(f"{title(facts, stage)}: {rows}" for stage in facts.stages if (rows := trained_rows(stage))),
        ),
        *((text(evaluation.title), _headline(evaluation)) for evaluation in facts.evaluations),
        ("Licence", licence),
    ]
    return [(name, value) for name, value in rows if value]


def alignment(facts: Facts) -> Markup:
    """The measurements of norm and rotation, of this model and of the baseline if there is one."""
    reports = [each for each in map((facts.diagnosis or {}).get, ("report", "against")) if each]
    gains = [facts.weights.gain, *(each.get("gain") or {} for each in reports[1:])]
    n_texts = [(each["interface"].get("vocabulary") or {}).get("mean") for each in reports[1:]]
    rows = [["Mean norm of text embeddings, N_text", *map(number, [facts.setting("text_embedding_norm"), *n_texts])]]
    rows += [
        [name, *(number(gain.get(key), digits) for gain in gains)]
        for name, key, digits in (
            ("Gain at the start, every element", "start", 4),
            ("Gain now, mean magnitude", "mean_abs", 4),
            ("Bias now, mean magnitude (0 at the start)", "bias_mean_abs", 2),
        )
    ]
    measured = [
        ("Norm of visual tokens as they enter", lambda each: _moments(each["interface"].get("visual"))),
        ("Norm of text tokens in the same data", lambda each: _moments(each["interface"].get("text"))),
        ("Norm, visual over N_text", lambda each: number(each["interface"].get("ratio"), 3)),
        ("Norm, visual over text in the same data", lambda each: number(each["interface"].get("ratio_data"), 3)),
        ("Rotation by layer, visual over text", lambda each: _asymmetry(each.get("depth"))),
    ]
    if reports:
        rows += [[name, *(value(report) for report in reports)] for name, value in measured]
    titles = ["", "this model", *(f"baseline: {report['model']}" for report in reports[1:])]
    return table(titles, [row for row in rows if set(row[1:]) != {DASH}])


def is_stale(facts: Facts) -> bool:
    """Whether the diagnosis was made of other weights: another norm, or a gain that differs by more than 1 %."""
    report: dict[str, Any] = (facts.diagnosis or {}).get("report") or {}
    norm, measured = facts.setting("projector_norm"), (report.get("gain") or {}).get("mean_abs")
    if None not in (norm, report.get("norm")) and norm != report["norm"]:
        return True
    now = facts.weights.gain.get("mean_abs")
    return now is not None and measured is not None and not math.isclose(now, measured, rel_tol=0.01)


def results(evaluation: Evaluation) -> Markup:
    """The results of one task, with their references."""
    references = list(dict.fromkeys(name for metric in evaluation.metrics for name in metric.references))
    rows = []
    for metric in evaluation.metrics:
        value = with_error(metric.value, metric.stderr, 3)
        beside = [number(metric.references.get(name), 3) for name in references]
        samples = DASH if metric.samples is None else f"{metric.samples:,}"
        rows.append([metric.subset or "all", metric.name, value, *beside, samples])
    return table(["", "metric", "this model", *references, "n"], rows)


def limits(facts: Facts) -> list[str]:
    """Sentences for a person who decides whether to rely on the model."""
    found = []
    if facts.stages:
        seeds = dict.fromkeys(str(stage["options"]["seed"]) for stage in facts.stages if "seed" in stage["options"])
        seed = f", seed {', '.join(seeds)}" if seeds else ""
        found.append(f"This is one training run{seed}: how much another run would differ was not measured.")
    found += filter(None, [forgotten(facts.evaluations)])
    if facts.outdated:
        found.append(
            f"Evaluated with other weights, so the results are not this model's: {', '.join(facts.outdated)}."
        )
    if not facts.evaluations:
        found.append("No evaluation is recorded: how good its answers are is not known.")
    found.append("Bias, safety and made-up answers were not measured.")
    if facts.diagnosis is None:
        return [*found, "Norms and rotation of visual tokens were not measured on this checkpoint."]
    report, baseline = facts.diagnosis["report"], facts.diagnosis.get("against")
    found += [STALE] if is_stale(facts) else []
    if report.get("samples"):
        on = f" of {report['data']}" if report.get("data") else ""
        found.append(
            f"Norms and rotation were measured on {report['samples']:,} samples{on}, in {report['dtype']}; on other "
            "images they may differ."
        )
    if baseline is None and report.get("norm") not in (None, "none"):
        found.append("No baseline without the norm was measured with it: what the norm changed is not shown.")
    return [*found, *(f"Not measured: {sentence}" for sentence in report.get("left_out", ()))]


def _headline(evaluation: Evaluation) -> str | None:
    metric = next((each for each in evaluation.metrics if each.subset is None), None)
    if metric is None:
        return None
    noted = [f"{name} {number(value, 3)}" for name, value in metric.references.items()]
    noted += [f"partial: {evaluation.samples:,} of {evaluation.total:,} samples"] if evaluation.partial else []
    return f"{metric.name} {with_error(metric.value, metric.stderr, 3)}" + (f" ({', '.join(noted)})" if noted else "")


def _moments(moments: dict[str, Any] | None) -> str:
    return f"{number(moments['mean'], 3)} (σ {number(moments['std'], 2)})" if moments else DASH


def _asymmetry(depth: dict[str, Any] | None) -> str:
    return with_error(depth.get("asymmetry"), depth.get("asymmetry_error"), 3) if depth else DASH
