# SPDX-License-Identifier: Apache-2.0
"""Tables and the figure of an experiment. They are made from its stored results only."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from files import new_path, read_json, write_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan import STAGES, Plan, Run, Variant
from scipy import stats
from scores import markdown, mean, sections

from normalign_llava import without_spread


PAGE = "report.md"
FIGURE = "information.png"
CONFIDENCE = 0.95
AVERAGED = 160
"""I is the mean over the last 160 steps, as far as it was measured at them."""

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
    """Reads the stored result of a run. Returns None if there is none yet.

    Raises:
        ValueError: It cannot be read, or belongs to a run with other settings.
    """
    file = plan.results / f"{run.key}.json"
    if not file.exists():
        return None
    result = read_json(file)
    if result is None:
        raise ValueError(f"{file} cannot be read. Remove it to make the run again.")
    planned_options = dict(zip(STAGES, plan.options(run), strict=True))
    stored_settings = vars(Variant()) | result["settings"]
    stored = (stored_settings, result["options"], result["bf16"])
    if stored != (vars(run.variant), planned_options, plan.bf16):
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
    stored: dict[str, dict[str, Any]] = {}
    results: Results = defaultdict(dict)
    for run in plan.runs():
        result = read_result(plan, run)
        if result is None:
            continue
        stored[run.key] = result
        if "failed" not in result:
            results[run.name_in_plan][run.seed] = result
    if not stored:
        raise ValueError(f"{plan.results} has no result. Run `python experiments run` first.")
    page_lines = _progress(plan, stored)
    if plan.commands:
        page_lines += sections(plan, results)
    else:
        page_lines += _information_sections(plan, results)
        draw(plan, results, plan.results / FIGURE)
    write_text(plan.results / PAGE, "\n".join(page_lines) + "\n")
    return plan.results / PAGE


def _progress(plan: Plan, stored: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the lines about how many runs are finished, and why others failed."""
    minutes = 0.0
    devices: set[str] = set()
    failures = []
    for key, result in stored.items():
        minutes += result.get("minutes", 0)
        devices.update(result.get("hardware", {}).get("devices", []))
        if "failed" in result:
            failures.append(f"\n{key} failed: {result['failed']}")
    planned = {run.key for run in plan.runs([])}
    run_count = len(planned.union(stored))
    return [
        f"# Results of `{plan.name}`",
        "",
        f"{len(stored)} of {run_count} runs are finished, {len(failures)} of them failed. "
        f"They took {minutes / 60:.1f} hours on {', '.join(sorted(devices))}.",
        *failures,
        "",
    ]


def _information_sections(plan: Plan, results: Results) -> list[str]:
    """Returns the lines about visual information: each group, and the planned differences."""
    page_lines = [EXPLANATION, "", f"![I over steps]({FIGURE})"]
    for group_name, group in plan.groups.items():
        group_results = results_of_group(results, group_name)
        if group_results:
            page_lines += ["", f"## {group_name}", "", group["question"], ""]
            page_lines += _by_seed(group_results)
            page_lines += ["", *_table(group_results)]
    page_lines += ["", "## Decisions", ""]
    page_lines += _differences(results, plan.decisions, together=True)
    if plan.differences:
        page_lines += ["", "## Other differences", ""]
        page_lines += _differences(results, plan.differences, together=False)
    return page_lines


def results_of_group(results: Results, group_name: str) -> Results:
    """Returns the results of one group."""
    group_results = {}
    for name_in_plan, by_seed in results.items():
        if name_in_plan.partition("/")[0] == group_name:
            group_results[name_in_plan] = by_seed
    return group_results


def information(result: dict[str, Any], kind: str = "information") -> float:
    """Returns I of a run: the mean over the measured ones of its last `AVERAGED` steps."""
    entries = result["information"]
    last_before = entries[-1]["all_steps"] - AVERAGED
    return _mean([log_entry[kind] for log_entry in entries if log_entry["all_steps"] > last_before])


def difference(
    results: Results, terms: list[str]
) -> tuple[np.ndarray, tuple[float, float] | None, float | None]:
    """Returns a sum of values of I by seed, with signs that are plus and minus by turns.

    Args:
        results: The results.
        terms: The `GROUP/VARIANT` of each value.

    Returns:
        The sum for each seed that all have, `(seeds,)`, its 95 % t interval, and its p value. The
        last two are None with one seed, and if the sum is the same with all seeds.

    Raises:
        ValueError: Two of them were trained on other data with the same seed.
    """
    seeds_by_term = [set(results.get(term, ())) for term in terms]
    seeds = sorted(set.intersection(*seeds_by_term))
    term_values = []
    for term in terms:
        term_values.append([information(results[term][seed]) for seed in seeds])
    for seed in seeds:
        if len({results[term][seed]["data"] for term in terms}) > 1:
            raise ValueError(
                f"{', '.join(terms)}: seed {seed} has other data in one of them. "
                "Make these runs again."
            )
    all_values = np.array(term_values)
    signed_sum = all_values[::2].sum(0) - all_values[1::2].sum(0)
    if len(seeds) < 2 or without_spread(signed_sum, all_values):
        return signed_sum, None, None
    t_test = stats.ttest_1samp(signed_sum, 0)
    lower_end, upper_end = t_test.confidence_interval(CONFIDENCE)
    return signed_sum, (float(lower_end), float(upper_end)), float(t_test.pvalue)


def holm(p_values: list[float]) -> list[float]:
    """Returns p values of tests that are made together, by Holm's step-down correction."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(np.argsort(p_values)):
        adjusted = (len(p_values) - rank) * p_values[position]
        largest = max(largest, min(1.0, adjusted))
        corrected[position] = largest
    return corrected


def draw(plan: Plan, results: Results, output: Path) -> None:
    """Draws I over steps into a PNG file, with a panel for each group.

    A panel has for each variant the mean over seeds, and the range.
    """
    group_names = [name for name in plan.groups if results_of_group(results, name)]
    row_count = max(1, math.ceil(len(group_names) / 3))
    column_count = max(1, min(len(group_names), 3))
    figure = Figure(figsize=(4.2 * column_count, 3.6 * row_count), layout="constrained")
    grid = figure.subplots(row_count, column_count, sharey=True, squeeze=False)
    panels = grid.flatten()
    colours: dict[str, str] = {}  # a variant has one colour in all panels
    for axes, group_name in zip(panels, group_names, strict=False):
        for name_in_plan, by_seed in results_of_group(results, group_name).items():
            variant_name = name_in_plan.partition("/")[2]
            colour = colours.setdefault(variant_name, f"C{len(colours)}")
            _draw_variant(axes, variant_name, list(by_seed.values()), colour)
        axes.set_title(group_name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in panels[len(group_names) :]:
        axes.set_visible(False)
    for axes in panels[::column_count]:
        axes.set_ylabel("I, nats an answer")
    with new_path(output) as partial_file:
        figure.savefig(partial_file, format="png", dpi=110)


def _draw_variant(axes: Axes, name: str, results: list[dict[str, Any]], colour: str) -> None:
    """Draws the mean of I over seeds, and its range."""
    measured_steps = [log_entry["all_steps"] for log_entry in results[0]["information"]]
    seed_curves = []
    for result in results:
        seed_curves.append([log_entry["information"] for log_entry in result["information"]])
    curves = np.array(seed_curves)
    lowest = curves.min(0)
    highest = curves.max(0)
    axes.plot(measured_steps, curves.mean(0), "o-", label=name, markersize=3, color=colour)
    axes.fill_between(measured_steps, lowest, highest, color=colour, alpha=0.12, linewidth=0)


def _by_seed(group: Results) -> list[str]:
    """Returns a table of I: a row for each variant, a column for each seed."""
    all_seeds: set[int] = set()
    for by_seed in group.values():
        all_seeds.update(by_seed)
    columns = sorted(all_seeds)
    table_rows = []
    for name_in_plan, by_seed in group.items():
        row_cells = [name_in_plan.partition("/")[2]]
        for seed in columns:
            row_cells.append(f"{information(by_seed[seed]):.3f}" if seed in by_seed else "")
        table_rows.append(row_cells)
    return markdown(["I by seed", *map(str, columns)], table_rows)


def _table(group: Results) -> list[str]:
    """Returns a table of means over seeds of all that was measured: a column for each variant."""
    columns: dict[str, dict[str, list[float]]] = {}
    headings: dict[str, None] = {}  # in order
    for name_in_plan, by_seed in group.items():
        column: dict[str, list[float]] = defaultdict(list)
        for result in by_seed.values():
            for heading, number in _figures(result).items():
                headings[heading] = None
                column[heading].append(number)
        columns[name_in_plan.partition("/")[2]] = column
    table_rows = []
    for heading in headings:
        row_cells = [heading]
        for column in columns.values():
            row_cells.append(mean(column.get(heading, [])))
        table_rows.append(row_cells)
    return markdown(["", *columns], table_rows)


def _figures(result: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a run by the name of their row."""
    tokens = result["tokens"]
    trained = tokens["trained"]
    curves = result["curves"]
    losses = curves["stage2"]["loss"]
    last_quarter = losses[-max(len(losses) // 4, 1) :]
    last_entry = result["information"][-1]
    figures = {"I": information(result)}
    for kind in last_entry:
        if kind.startswith("information/"):
            figures[f"I, {kind.partition('/')[2]}"] = information(result, kind)
    figures["I at the end"] = last_entry["information"]
    if "wrong_image" in last_entry:
        figures["wrong image"] = last_entry["wrong_image"]
    for metric, score in result["scores"].items():
        figures[metric.removeprefix("offline_")] = score
    figures["loss"] = _mean(last_quarter)
    figures["enters at the start, N_text"] = tokens["untrained"] / trained["n_text"]
    figures["enters at the end, N_text"] = trained["norm"] / trained["n_text"]
    figures["rotation over text's"] = trained["asymmetry"]
    for stage, curve in curves.items():
        figures[f"gradient norm, {stage}"] = _mean(curve["grad_norm"])
    for stage, curve in curves.items():
        figures[f"clipped steps, {stage}"] = _mean(curve["clip/share"])
    for part, share in _clip_budget(curves["stage2"]).items():
        figures[f"clip budget, stage 2, {part}"] = share
    return figures


def _clip_budget(curves: dict[str, list]) -> dict[str, float]:
    """Returns the mean share of each module in the squared norm of the gradient."""
    squares = {}
    for part in PARTS:
        if f"grad_norm/{part}" in curves:
            squares[part] = np.square(curves[f"grad_norm/{part}"])
    total_squares = sum(squares.values())
    return {part: _mean(square / total_squares) for part, square in squares.items()}


def _mean(numbers: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(numbers))


def _differences(results: Results, named: dict[str, list[str]], *, together: bool) -> list[str]:
    """Returns a table of differences of I.

    Args:
        results: The results.
        named: The terms of each difference by its name, see [`difference`].
        together: Whether they are tested together, so that p values are corrected.
    """
    differences = {name: difference(results, terms) for name, terms in named.items()}
    p_values = {}
    for name, (_, _, p_value) in differences.items():
        if p_value is not None:
            p_values[name] = p_value
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    table_rows = []
    for name, (signed_sum, interval, p_value) in differences.items():
        row_cells = [name, _formula(named[name]), str(len(signed_sum)), "", "", ""]
        if len(signed_sum):
            row_cells[3] = f"{signed_sum.mean():+.3f}"
        if interval is not None:
            lower_end, upper_end = interval
            row_cells[4] = f"{lower_end:+.3f} to {upper_end:+.3f}"
        if p_value is not None:
            row_cells[5] = f"{p_value:.3g}"
            if together:
                row_cells[5] += f", Holm {corrected[name]:.3g}"
        table_rows.append(row_cells)
    return markdown(["", "I", "seeds", "difference", "95 % interval", "p"], table_rows)


def _formula(terms: list[str]) -> str:
    """Returns the terms with their signs, such as "a - b + c - d"."""
    formula = terms[0]
    for position, term in enumerate(terms[1:], start=1):
        sign = "-" if position % 2 else "+"
        formula += f" {sign} {term}"
    return formula
