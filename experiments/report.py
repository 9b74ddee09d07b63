# SPDX-License-Identifier: Apache-2.0
"""Tables and the figure of an experiment, from its stored results alone."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from plan import Plan, Run, Variant
from scipy import stats
from scores import markdown, mean, sections

from normalign_llava.checkpoint.files import atomic_write, json_or_none
from normalign_llava.evaluation.compare import without_spread


PAGE = "report.md"
FIGURE = "information.png"
CONFIDENCE = 0.95
AVERAGED = 160
"""I is averaged over so many steps, the last ones, at which it was measured."""

PARTS = ("projector", "gain", "bias", "language_model", "vision_tower")

EXPLANATION = (
    "I is visual information in nats an answer, the mean over the last 160 steps, at every 40th. "
    "± is half the 95 % interval over seeds, if these are not all alike; brackets are the 95 % "
    "interval of a difference, paired by seed. `wrong image` is the cross-entropy with another "
    "image minus that with the right one, `loss` the mean of the last quarter of training. `clip "
    "budget` is the mean share of each module in the squared norm of the gradient that is clipped."
)

Results = dict[str, dict[int, dict[str, Any]]]  # by "GROUP/VARIANT" and seed


def read_result(plan: Plan, run: Run) -> dict[str, Any] | None:
    """The stored result of a run; None if there is none yet.

    Raises:
        ValueError: It cannot be read, or is of a run with other settings.
    """
    file = plan.results / f"{run.key}.json"
    if not file.exists():
        return None
    result = json_or_none(file)
    if result is None:
        raise ValueError(f"{file} cannot be read. Remove it to make the run again.")
    options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
    settings = vars(Variant()) | result["settings"]
    if settings != vars(run.variant) or result["options"] != options or result["bf16"] != plan.bf16:
        raise ValueError(
            f"{file} is of a run with other settings than {plan.name} has now. Remove it to make "
            "the run again, or keep the results of the changed plan in another folder with "
            "--results."
        )
    return result


def write_report(plan: Plan) -> Path:
    """Writes the page and its figure into the folder of the results.

    Raises:
        ValueError: No run is finished, a result has other settings, or a pair has different data.
    """
    runs = plan.runs()
    stored = {run.key: result for run in runs if (result := read_result(plan, run)) is not None}
    if not stored:
        raise ValueError(f"{plan.results} has no result. Run `python experiments run` first.")
    results: Results = defaultdict(dict)
    for run in runs:
        if run.key in stored and "failed" not in stored[run.key]:
            results[f"{run.group}/{run.name}"][run.seed] = stored[run.key]
    failed = {key: result["failed"] for key, result in stored.items() if "failed" in result}
    hours = sum(result.get("minutes", 0) for result in stored.values()) / 60
    devices: set[str] = set()
    for result in stored.values():
        devices.update(result.get("hardware", {}).get("devices", []))
    wanted = {*stored, *(run.key for run in plan.runs([]))}
    lines = [
        f"# Results of `{plan.name}`",
        "",
        f"{len(stored)} of {len(wanted)} runs are finished, {len(failed)} of them failed. "
        f"They took {hours:.1f} hours on {', '.join(sorted(devices))}.",
        *(f"\n{key} failed: {reason}" for key, reason in failed.items()),
        "",
    ]
    if plan.commands:
        lines += sections(plan, results)
    else:
        lines += [EXPLANATION, "", f"![I over steps]({FIGURE})"]
        for name, group in plan.groups.items():
            of_group = {key: seeds for key, seeds in results.items() if key.split("/")[0] == name}
            if of_group:
                lines += ["", f"## {name}", "", group["question"]]
                lines += ["", *_by_seed(of_group), "", *_table(of_group)]
        lines += ["", "## Decisions", "", *_differences(results, plan.decisions, together=True)]
        if plan.differences:
            others = _differences(results, plan.differences, together=False)
            lines += ["", "## Other differences", "", *others]
        draw(plan, results, plan.results / FIGURE)
    with atomic_write(plan.results / PAGE) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return plan.results / PAGE


def information(result: dict[str, Any], kind: str = "information") -> float:
    """I of a run: the mean over the measured ones of its last `AVERAGED` steps."""
    entries = result["information"]
    first = entries[-1]["all_steps"] - AVERAGED
    measured = [entry[kind] for entry in entries if entry["all_steps"] > first]
    return sum(measured) / len(measured)


def difference(
    results: Results, terms: list[str]
) -> tuple[np.ndarray, tuple[float, float] | None, float | None]:
    """Values of I by seed, by turns plus and minus.

    Returns:
        The difference for each seed that all have, `(seeds,)`; its 95 % t interval and p value,
        None with one seed, and if all seeds differ by the same.

    Raises:
        ValueError: Two of them were trained on other data with the same seed.
    """
    seeds = sorted(set.intersection(*({*results.get(term, {})} for term in terms)))
    for seed in seeds:
        if len({results[term][seed]["data"] for term in terms}) > 1:
            raise ValueError(
                f"{', '.join(terms)}: seed {seed} has other data in one of them. "
                "Make these runs again."
            )
    values = np.array([[information(results[term][seed]) for seed in seeds] for term in terms])
    apart = (values * np.array([1, -1] * (len(terms) // 2))[:, None]).sum(0)
    if len(seeds) < 2 or without_spread(apart, values):
        return apart, None, None
    test = stats.ttest_1samp(apart, 0)
    low, high = test.confidence_interval(CONFIDENCE)
    return apart, (float(low), float(high)), float(test.pvalue)


def holm(p_values: list[float]) -> list[float]:
    """P values of tests that are made together, by Holm's step-down correction."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        corrected[number] = largest
    return corrected


def draw(plan: Plan, results: Results, output: Path) -> None:
    """I over steps: a panel for each group; for each variant the mean over seeds, and the range."""
    names = [name for name in plan.groups if any(key.startswith(f"{name}/") for key in results)]
    rows = max(1, -(-len(names) // 3))
    columns = max(1, min(len(names), 3))
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    colours: dict[str, str] = {}
    for axes, name in zip(panels, names, strict=False):
        for key, seeds in results.items():
            group, _, variant = key.partition("/")
            if group != name:
                continue
            measured = [result["information"] for result in seeds.values()]
            steps = [entry["all_steps"] for entry in measured[0]]
            values = np.array([[entry["information"] for entry in entries] for entries in measured])
            low = values.min(0)
            high = values.max(0)
            colour = colours.setdefault(variant, f"C{len(colours)}")  # one in all panels
            axes.plot(steps, values.mean(0), "o-", label=variant, markersize=3, color=colour)
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("I, nats an answer")
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png", dpi=110)


def _by_seed(group: Results) -> list[str]:
    seeds = sorted({seed for results in group.values() for seed in results})
    body = []
    for name, results in group.items():
        cells = (f"{information(results[seed]):.3f}" if seed in results else "" for seed in seeds)
        body.append([name.partition("/")[2], *cells])
    return markdown(["I by seed", *map(str, seeds)], body)


def _table(group: Results) -> list[str]:
    """Means over seeds of all that was measured: a column for each variant."""
    columns = {
        name.partition("/")[2]: [_figures(result) for result in results.values()]
        for name, results in group.items()
    }
    headings: dict[str, None] = {}  # in order
    for figures in columns.values():
        for each in figures:
            headings |= dict.fromkeys(each)
    body = []
    for heading in headings:
        body.append([heading])
        for figures in columns.values():
            body[-1].append(mean([each[heading] for each in figures if heading in each]))
    return markdown(["", *columns], body)


def _figures(result: dict[str, Any]) -> dict[str, float]:
    tokens = result["tokens"]
    curves = result["curves"]
    n_text = tokens["trained"]["n_text"]
    losses = curves["stage2"]["loss"]
    last = result["information"][-1]
    kinds = [name for name in last if name.startswith("information/")]
    budget = _clip_budget(curves["stage2"])
    return {
        "I": information(result),
        **{f"I, {name.partition('/')[2]}": information(result, name) for name in kinds},
        "I at the end": last["information"],
        **({"wrong image": last["wrong_image"]} if "wrong_image" in last else {}),
        **{name.removeprefix("offline_"): value for name, value in result["scores"].items()},
        "loss": _mean(losses[-max(len(losses) // 4, 1) :]),
        "enters at the start, N_text": tokens["untrained"] / n_text,
        "enters at the end, N_text": tokens["trained"]["norm"] / n_text,
        "rotation over text's": tokens["trained"]["asymmetry"],
        **{f"gradient norm, {name}": _mean(curve["grad_norm"]) for name, curve in curves.items()},
        **{f"clipped steps, {name}": _mean(curve["clip/share"]) for name, curve in curves.items()},
        **{f"clip budget, stage 2, {part}": share for part, share in budget.items()},
    }


def _clip_budget(curves: dict[str, list]) -> dict[str, float]:
    logged = [part for part in PARTS if f"grad_norm/{part}" in curves]
    squares = {part: np.square(curves[f"grad_norm/{part}"]) for part in logged}
    total = sum(squares.values())
    return {part: _mean(each / total) for part, each in squares.items()}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))


def _differences(results: Results, named: dict[str, list[str]], *, together: bool) -> list[str]:
    differences = {name: difference(results, terms) for name, terms in named.items()}
    tested = {name: p for name, (*_, p) in differences.items() if p is not None}
    corrected = dict(zip(tested, holm([*tested.values()]), strict=True))
    body = []
    for name, (apart, interval, p) in differences.items():
        signed = zip("+-" * len(named[name]), named[name], strict=False)
        shown = "".join(f" {sign} {term}" for sign, term in signed)
        mean = f"{apart.mean():+.3f}" if len(apart) else ""
        between = "" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}"
        p_shown = "" if p is None else f"{p:.3g}"
        if p is not None and together:
            p_shown += f", Holm {corrected[name]:.3g}"
        body.append([name, shown.removeprefix(" + "), str(len(apart)), mean, between, p_shown])
    return markdown(["", "I", "seeds", "difference", "95 % interval", "p"], body)
