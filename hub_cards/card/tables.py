# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of a card about the model and its measurements. Rows without any known figure are left out."""

import math
from typing import Any

from markupsafe import Markup

from ...diagnose.verdict import number, with_error
from ...evaluate.results import Evaluation, Metric
from .facts import Facts
from .markdown import table, text
from .training_tables import DASH, count, part_link, run, title, trained_rows


def glance(facts: Facts, licence: Any) -> list[tuple[str, Any]]:
    """The summary at the top of the card: name and value."""
    tokens = visual_tokens(facts)
    config = facts.config
    context = config and getattr(config.text_config, "max_position_embeddings", None)
    dtype = config and config.dtype and str(config.dtype).removeprefix("torch.")
    weights = f"{facts.weights.size / 1e9:.2f} GB"
    if facts.weights.parameters:
        weights = f"{count(facts.weights.parameters)} parameters, {weights}" + (f" in {dtype}" if dtype else "")
    rows = [
        *((part.role.capitalize(), part_link(part)) for part in facts.parts),
        ("Weights", weights if facts.weights.size else None),
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
    gain = facts.weights.gain
    columns = [[facts.setting("text_embedding_norm"), *((gain.start, gain.now, gain.bias) if gain else [None] * 3)]]
    for baseline in reports[1:]:
        existing = baseline.get("gain") or {}
        n_text = (baseline["interface"].get("vocabulary") or {}).get("mean")
        columns.append([n_text, *(existing.get(key) for key in ("start", "mean_abs", "bias_mean_abs"))])
    names = [
        ("Mean norm of text embeddings, N_text", 4),
        ("Gain at the start, every element", 4),
        ("Gain now, mean magnitude", 4),
        ("Bias now, mean magnitude (0 at the start)", 2),
    ]
    rows = [
        [name, *(number(value, digits) for value in values)]
        for (name, digits), values in zip(names, zip(*columns, strict=True), strict=True)
    ]
    measured = [
        ("Norm of visual tokens as they enter", lambda each: _moments(each["interface"].get("visual"))),
        ("Norm of the text tokens beside them", lambda each: _moments(each["interface"].get("text"))),
        ("Norm, visual over N_text", lambda each: number(each["interface"].get("ratio"), 3)),
        ("Norm, visual over the text beside it", lambda each: number(each["interface"].get("ratio_data"), 3)),
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
    gain = facts.weights.gain
    return gain is not None and measured is not None and not math.isclose(gain.now, measured, rel_tol=0.01)


def results(evaluation: Evaluation) -> Markup:
    """The results of one task, with their references."""
    references = list(dict.fromkeys(name for metric in evaluation.metrics for name in metric.references))
    names = list(dict.fromkeys(metric.name for metric in evaluation.metrics))
    rows = []
    for metric in evaluation.metrics:
        subset = "all" if metric.subset is None else metric.subset
        beside = [_figure(metric.references.get(name), evaluation) for name in references]
        samples = DASH if metric.samples is None else f"{metric.samples:,}"
        value = _value(metric, evaluation)
        rows.append([subset, *([metric.name] if len(names) > 1 else []), value, *beside, samples])
    columns = ["metric", "this model"] if len(names) > 1 else names
    return table(["", *columns, *references, "n"], rows)


def visual_tokens(facts: Facts) -> int | None:
    """Visual tokens per image."""
    if facts.config is not None:
        return facts.config.image_seq_length
    return run(facts.stages[-1]).get("tokens_per_image") if facts.stages else None


def _headline(evaluation: Evaluation) -> str | None:
    metric = next((each for each in evaluation.metrics if each.subset is None), None)
    if metric is None:
        return None
    beside = [f"{name} {_figure(value, evaluation)}" for name, value in metric.references.items()]
    partial = [f"partial: {evaluation.samples:,} of {evaluation.total:,} samples"] if evaluation.partial else []
    noted = "; ".join([*([", ".join(beside)] if beside else []), *partial])
    return f"{metric.name} {_value(metric, evaluation)}" + (f" ({noted})" if noted else "")


def _value(metric: Metric, evaluation: Evaluation) -> str:
    error = f" ± {_figure(metric.stderr, evaluation)}" if metric.stderr else ""
    return _figure(metric.value, evaluation) + error


def _figure(value: float | None, evaluation: Evaluation) -> str:
    """`value` with as many decimals as the smallest standard error of the task, or else four digits."""
    if value is None:
        return DASH
    errors = [metric.stderr for metric in evaluation.metrics if metric.stderr]
    if errors:
        return f"{value:,.{max(0, -math.floor(math.log10(min(errors))))}f}".replace("-", "−")
    return f"{value:.3f}".replace("-", "−") if abs(value) <= 1 else number(value, 4)


def _moments(moments: dict[str, Any] | None) -> str:
    return f"{number(moments['mean'], 3)} (σ {number(moments['std'], 2)})" if moments else DASH


def _asymmetry(depth: dict[str, Any] | None) -> str:
    return with_error(depth.get("asymmetry"), depth.get("asymmetry_error"), 3) if depth else DASH
