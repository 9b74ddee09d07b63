# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The limits that a card states: what was not measured, and how much data stands behind what was."""

from ...evaluate.results import forgotten
from .facts import Facts
from .tables import is_stale
from .training_tables import has_streams, rows_seen


LLAVA_ROWS = 1_223_000
"""Rows that LLaVA-1.5 was trained on: 558 thousand and 665 thousand."""

STALE = "The diagnosis was made of other weights: its figures are not this model's."


def limits(facts: Facts) -> list[str]:
    """Sentences for a person who decides whether to rely on the model."""
    found = []
    if facts.stages:
        seeds = dict.fromkeys(str(stage["options"]["seed"]) for stage in facts.stages if "seed" in stage["options"])
        seed = f", seed {', '.join(seeds)}" if seeds else ""
        found.append(f"This is one training run{seed}: how much another run would differ was not measured.")
    rows = [rows_seen(stage) for stage in facts.stages]
    known = [each for each in rows if each is not None]
    if known and len(known) == len(rows) and sum(known) < LLAVA_ROWS / 10:
        at_most = "at most " if any(map(has_streams, facts.stages)) else ""
        found.append(
            f"The training recorded here took {at_most}{sum(known):,} rows, that of LLaVA-1.5 {LLAVA_ROWS:,}. Expect "
            "it to know only what is in them."
        )
    found += filter(None, [forgotten(facts.evaluations)])
    if not facts.evaluations:
        found.append("No evaluation is recorded: how good its answers are is not known.")
    return [*found, "Bias, safety and made-up answers were not measured.", *_diagnosis(facts)]


def _diagnosis(facts: Facts) -> list[str]:
    if facts.diagnosis is None:
        return ["Norms and rotation of visual tokens were not measured on this checkpoint."]
    report, baseline = facts.diagnosis["report"], facts.diagnosis.get("against")
    found = [STALE] if is_stale(facts) else []
    if report.get("samples"):
        on = f" of {report['data']}" if report.get("data") else ""
        found.append(
            f"Norms and rotation were measured on {report['samples']:,} samples{on}, in {report['dtype']}; on other "
            "images they may differ."
        )
    if baseline is None and report.get("norm") not in (None, "none"):
        found.append("No baseline without the norm was measured beside it: what the norm changed is not shown.")
    return [*found, *(f"Not measured: {sentence}" for sentence in report.get("left_out", ()))]
