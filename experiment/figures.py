# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of an experiment."""

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..checkpoint.files import finished_file
from ..diagnose.critical import Updates
from .plan import Variant
from .statistics import mean_of


Results = Mapping[str, Mapping[int, dict[str, Any]]]
ACCURACY, BLANK = "offline_easy_vqa acc", "blank image"
TRAINED = {
    False: ("trained at that norm, set by the gain", "tab:blue"),
    True: ("trained at that norm, set by the projector's last layer", "tab:orange"),
}
SCALED = ("trained at N_text, scaled afterwards", "tab:gray")


def draw_dial(results: Results, variants: Mapping[str, Variant], start: dict[str, Any], output: Path) -> Path:
    """Accuracy and rotation against the norm on entry: trained at it, scaled to it, and predicted."""
    updates = Updates(start["n_text"], start["update_sizes"], start["update_angles"])
    figure = Figure(figsize=(8, 7), layout="constrained")
    accuracy, rotation = figure.subplots(2, 1, sharex=True)
    for plain, (label, colour) in TRAINED.items():
        chosen = {name: seeds for name, seeds in results.items() if (variants[name].arm == "none") == plain}
        points = sorted(
            ((variants[name].enters_at or math.nan, seeds) for name, seeds in chosen.items()), key=itemgetter(0)
        )
        for axes, key in ((accuracy, _accuracy), (rotation, _asymmetry)):
            _line(axes, [(norm, [key(each) for each in seeds.values()]) for norm, seeds in points], label, colour)
    scaled: dict[float, list[dict[str, Any]]] = {}
    every = [result for seeds in results.values() for result in seeds.values()]
    for each in (each for result in every for each in result.get("scaled", [])):
        scaled.setdefault(each["factor"], []).append(each)
    for axes, name in ((accuracy, "accuracy"), (rotation, "asymmetry")):
        lines = [
            (sum(each["norm"] for each in found) / len(found) / start["n_text"], [each[name] for each in found])
            for _, found in sorted(scaled.items())
        ]
        _line(axes, lines, *SCALED)
    blank = [
        each["references"][ACCURACY][BLANK] for each in every if BLANK in each.get("references", {}).get(ACCURACY, {})
    ]
    if blank:
        accuracy.axhline(mean_of(blank).value, color="k", linestyle=":", label="trained models, shown a blank image")
        accuracy.legend(fontsize="small", loc="upper right")
    norms = [2 ** (step / 8) for step in range(-16, 65)]
    rotation.plot(
        norms, [updates.relative_rotation(norm * updates.n_text) for norm in norms], "k--", label="predicted"
    )
    critical = [norm and norm / updates.n_text for norm in start["norms"].values()]
    for axes in (accuracy, rotation):
        if all(critical):
            axes.axvspan(*critical, color="tab:red", alpha=0.1, label="predicted rotation 0.9 to 0.5 of text's")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1)
        axes.grid(alpha=0.3)
    accuracy.set_ylabel("accuracy on easy-VQA")
    rotation.set_ylabel("rotation of visual tokens over text's")
    rotation.set_xlabel("norm of visual tokens on entry, at the start of training or as scaled, in N_text")
    rotation.xaxis.set_major_formatter("{x:g}")
    rotation.set_xticks([4.0**power for power in range(-1, 5)])
    rotation.legend(fontsize="small", loc="lower left")
    return _saved(figure, output)


def draw_curves(results: Results, output: Path) -> Path:
    """The loss of stage 2 by variant: the mean over seeds, and the seeds beside it."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(results.items()):
        curves = [each["curves"]["stage2"] for each in seeds.values()]
        steps, losses = curves[0]["step"], [each["loss"] for each in curves]
        colour = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        axes.plot(steps, [sum(at) / len(at) for at in zip(*losses, strict=True)], style, color=colour, label=name)
        if len(losses) > 1:
            low, high = ([find(at) for at in zip(*losses, strict=True)] for find in (min, max))
            axes.fill_between(steps, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("step of stage 2")
    axes.set_ylabel("loss (mean and range over seeds)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", ncols=2)
    return _saved(figure, output)


def _accuracy(result: dict[str, Any]) -> float:
    return result["scores"].get(ACCURACY, math.nan)


def _asymmetry(result: dict[str, Any]) -> float:
    return result["tokens"]["trained"]["asymmetry"]


def _line(axes: Axes, points: list[tuple[float, list[float]]], label: str, colour: str) -> None:
    """Means over seeds as a line, and each seed as a dot."""
    if not points:
        return
    axes.plot([at for at, _ in points], [mean_of(found).value for _, found in points], "-", color=colour, label=label)
    for at, found in points:
        axes.plot([at] * len(found), found, "o", color=colour, markersize=4)


def _saved(figure: Figure, output: Path) -> Path:
    with finished_file(output) as partial:
        figure.savefig(partial, format="png", dpi=110)
    return output
