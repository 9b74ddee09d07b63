# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The theory's tables of `report.html`: what it predicts for the models measured, and what its simulation gave."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .page_tables import Table, degrees, names
from .report import Report
from .theory import predicted_rotation
from .verdict import asymmetry, number


DIRECTIONS = {
    "independent": "independent (the theorem)",
    "shared": "one turn for both",
    "toward": "partly toward the text token",
}


def theory_tables(models: Sequence[Report], simulation: Mapping[str, Any] | None) -> list[Table]:
    """Predicted beside measured asymmetry and, with `simulation` (what `simulate` returned), each claim's check."""
    rows = [
        [name, number(_predicted(model)), number(measured)]
        for name, model in zip(names(models), models, strict=True)
        if (measured := asymmetry(model)) is not None
    ]
    predicted = Table(
        "Ratio of rates if updates had the same size and angle for visual and text tokens, and as measured.",
        ["Model", "Predicted from the norms", "Measured"],
        rows,
    )
    return [predicted] if simulation is None else [predicted, *simulation_tables(simulation)]


def simulation_tables(simulation: Mapping[str, Any]) -> list[Table]:
    """Theorem 1, Lemma 1, the lag angle, the trace bound and the fall of signal to noise."""
    lemma, lag, trace, attention = (simulation[name] for name in ("lemma", "lag", "trace", "attention"))
    return [
        Table(
            "Theorem 1 (eqs. 15, 16): cosine of a pair after both have turned.",
            ["d", "θ", "ω visual", "ω text", "Directions", "Predicted", "Exact", "Simulated"],
            [
                [
                    str(row["dimension"]),
                    *(degrees(row[angle]) for angle in ("theta", "omega_visual", "omega_text")),
                    DIRECTIONS.get(row["directions"], row["directions"]),
                    number(row["predicted"]),
                    number(row["exact"]),
                    f"{number(row['simulated'])} ± {number(row['standard_error'], 1)}",
                ]
                for row in simulation["retention"]
            ],
            folded=True,
        ),
        Table(
            "Lemma 1: the retention factor λ against how unequal the rotations are.",
            ["tan ω text / tan ω visual", "Product fixed (the lemma)", "Text fixed"],
            _columns([lemma[name] for name in ("ratio", "product_fixed", "text_fixed")]),
            folded=True,
        ),
        Table(
            "Lag angle (eq. 17): angle of a pair by layer, from the recursion and simulated.",
            ["Layer", *(["Recursion", "Simulated"] * len(lag["angle"]))],
            [
                [
                    str(layer),
                    *(degrees(lag[of][case][place]) for case in lag["angle"] for of in ("angle", "simulated")),
                ]
                for place, layer in enumerate(lag["layer"])
            ],
            groups=[("", 1), *((case, 2) for case in lag["angle"])],
            folded=True,
        ),
        Table(
            "Trace bound (eqs. 18 to 20), over the bound without lag.",
            ["Lag δ", "cos δ", "Bound", "Attained", "Best of random", "One turn for all"],
            _columns(
                [trace[name] for name in ("delta", "predicted", "bound", "attained", "random", "same_turn")],
                angle=True,
            ),
            folded=True,
        ),
        Table(
            f"Attention over one related and {attention['keys']} unrelated keys, d = {attention['dimension']} "
            "(eqs. 10, 21).",
            ["Lag δ", "Signal", "Noise", "Signal / noise", "Predicted", "Entropy", "Share"],
            _columns(
                [attention[name] for name in ("delta", "signal", "noise", "snr", "predicted_snr", "entropy", "share")],
                angle=True,
            ),
            folded=True,
        ),
    ]


def _predicted(report: Report) -> float | None:
    if report.depth is None or asymmetry(report) is None:
        return None
    rotation = predicted_rotation(report.depth)
    visual, text = (fmean(rotation[kind][:-1]) for kind in ("visual", "text"))
    return visual / text


def _columns(columns: Sequence[Sequence[float]], angle: bool = False) -> list[list[str]]:
    """Rows of numbers from columns of numbers; with `angle` the first is in radians."""
    return [
        [degrees(first) if angle else number(first), *map(number, rest)] for first, *rest in zip(*columns, strict=True)
    ]
