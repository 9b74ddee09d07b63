# SPDX-License-Identifier: Apache-2.0
"""The report of runs by commands: scores as in the paper's table 4, differences, and the diagnosis.

table4.md has the rule that puts differences into words.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from files import new_path
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from plan import STAGES, Plan
from scipy import stats

from normalign_llava import (
    Difference,
    Evaluation,
    ModelScores,
    compare_models,
    over_seeds,
    paper_tables,
    without_spread,
)


AVERAGE = "average"
FIGURE = "scores.png"
CONFIDENCE = 0.95
SEEDS_ALIKE = "all seeds differ by the same: too few to tell"
QUESTIONS_ALIKE = "all questions differ by the same: too few to tell"
PAPER_COLUMNS = {
    "MMBench-EN": ("mmbench_en_dev", "acc_circular", 100),
    "MMStar": ("mmstar", "acc_by_category", 100),
    "POPE": ("pope", "acc", 100),
    "SEED-Bench-2-Plus": ("seedbench_2_plus", "acc", 100),
    "OCRBench": ("ocrbench", "total", 0.1),
    "ScienceQA": ("scienceqa", "acc", 100),
    "AI2D": ("ai2d", "acc", 100),
    "HellaSwag": ("hellaswag", "acc", 100),
    "MMLU": ("mmlu", "acc", 100),
}
"""Task, metric and factor of each column of table 4. The paper does not name HellaSwag's metric."""
NAMES = {"none": "w/o norm", "unit": "norm, gain 1", "aligned": "norm", "gwc": "norm and GWC"}
IN_PAPER = {"none": "no norm", "aligned": "norm", "gwc": "norm and GWC"}
COLUMN_BY_BENCHMARK = {
    f"{task} {metric}": (column, factor) for column, (task, metric, factor) in PAPER_COLUMNS.items()
}
# A question has 0 or 1. The paper's score is out of 1000.
COLUMN_BY_BENCHMARK["ocrbench total"] = ("OCRBench", 100)

COLOURS = {"none": "black", "unit": "C2", "aligned": "C0", "gwc": "C1"}

Interval = tuple[float, float]
Seeds = dict[int, dict[str, Any]]
"""Results of an arm, by seed."""


class Line(NamedTuple):
    """The difference between an arm and arm none on a benchmark.

    Attributes:
        benchmark: The name of the benchmark.
        score: The arm's score, the mean over seeds.
        reference: The score of arm none, the mean over seeds.
        paper: The paper's difference, if it has one.
        over_questions: The interval over questions, or None if it is not known.
        over_seeds: The interval over seeds, or None if it is not known.
        unknown: Why nothing can be said, although there are several seeds.
    """

    benchmark: str
    score: float
    reference: float
    paper: float | None
    over_questions: Interval | None
    over_seeds: Interval | None
    unknown: str | None = None

    @property
    def difference(self) -> float:
        """The difference of the scores."""
        return self.score - self.reference

    @property
    def interval(self) -> Interval | None:
        """The interval over seeds and questions together.

        It is the interval of a sum of independent errors (Zou and Donner 2008, "MOVER"). It is None
        if the interval over seeds is not known, or nothing can be said.
        """
        if self.over_seeds is None or self.unknown is not None:
            return None
        centre = self.difference
        lower_end, upper_end = self.over_seeds
        questions_low, questions_high = self.over_questions or (centre, centre)
        below = math.hypot(lower_end - centre, questions_low - centre)
        above = math.hypot(upper_end - centre, questions_high - centre)
        return centre - below, centre + above

    @property
    def sentence(self) -> str:
        """What can be said, by the rule of table4.md."""
        if self.interval is None:
            return self.unknown or "too few seeds to tell"
        lower_end, upper_end = self.interval
        holds_none = lower_end <= 0 <= upper_end
        if self.paper is None:
            if holds_none:
                return "not shown"
            return "higher" if lower_end > 0 else "lower"
        holds_paper = lower_end <= self.paper <= upper_end
        position = f"the paper's {self.paper:+.2f} is"
        if holds_paper and holds_none:
            seeds_are_wider = _width(self.over_seeds) >= _width(self.over_questions)
            scarce = "seeds" if seeds_are_wider else "questions"
            return f"too few {scarce} to tell"
        if holds_paper:
            return f"{position} inside"
        if holds_none:
            return f"no difference shown, {position} outside"
        has_same_sign = (lower_end > 0) == (self.paper > 0)
        sign = "same" if has_same_sign else "opposite"
        return f"{sign} sign, {position} outside"


def _width(interval: Interval | None) -> float:
    if interval is None:
        return 0.0
    lower_end, upper_end = interval
    return upper_end - lower_end


def paper_average(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Returns the average of table 4's columns, by `AVERAGE`.

    It is empty if a task was not evaluated whole.
    """
    metrics_by_task = {}
    for evaluation in evaluations:
        if not evaluation.partial:
            metrics_by_task[evaluation.task] = evaluation.metrics
    column_scores = []
    for task, metric_name, factor in PAPER_COLUMNS.values():
        for metric in metrics_by_task.get(task, ()):
            if metric.name == metric_name and metric.subset is None:
                column_scores.append(factor * metric.value)
    if len(column_scores) < len(PAPER_COLUMNS):
        return {}
    return {AVERAGE: float(np.mean(column_scores))}


def sections(plan: Plan, results: dict[str, Seeds]) -> list[str]:
    """Draws the figure into the folder of results, and returns the report's lines by group.

    Args:
        plan: The plan.
        results: The results by "GROUP/VARIANT".
    """
    groups: dict[str, dict[str, Seeds]] = defaultdict(dict)
    for name_in_plan, seeds in results.items():
        group_name, _, arm = name_in_plan.partition("/")
        groups[group_name][arm] = seeds
    task_count = len(plan.tasks)
    paper_models = {}
    lines_by_group = {}
    for group_name, arms in groups.items():
        paper_models[group_name] = plan.groups[group_name].get("paper")
        lines_by_group[group_name] = lines_of(arms, paper_models[group_name], task_count)
    draw(groups, lines_by_group, plan.results / FIGURE)
    report_lines = []
    if any(paper_models.values()):
        verdict = main_result(lines_by_group, len(plan.groups))
        report_lines += [f"**The paper's main result {verdict}.**", ""]
    report_lines += [
        "The rule of the last column was written before any result (experiments/table4.md). "
        f"Intervals are at 1 - 0.05/{task_count}, for {task_count} benchmarks, the average's at "
        "95 %. ± is half the 95 % interval over seeds, if these are not all alike.",
        "",
        f"![Differences to no norm, and the paper's figure 5]({FIGURE})",
    ]
    for group_name, arms in groups.items():
        report_lines += ["", f"## {group_name}", "", plan.groups[group_name]["question"], ""]
        report_lines += _scores(arms, paper_models[group_name])
        for arm, differences in lines_by_group[group_name].items():
            report_lines += ["", f"### {NAMES[arm]}, against {NAMES['none']}", ""]
            report_lines += _differences(differences)
        report_lines += ["", "### Diagnosis", "", *_diagnosis(arms)]
    return report_lines


def main_result(lines_by_group: dict[str, dict[str, list[Line]]], model_count: int) -> str:
    """Returns whether the average is higher with norm and GWC for all models, as the paper says."""
    intervals = []
    for lines_by_arm in lines_by_group.values():
        for line in lines_by_arm.get("gwc", []):
            if line.benchmark == AVERAGE and line.interval is not None:
                intervals.append(line.interval)
    if any(upper_end < 0 for _, upper_end in intervals):
        return "does not hold"
    if len(intervals) == model_count and all(lower_end > 0 for lower_end, _ in intervals):
        return "holds"
    return "is not shown"


def lines_of(
    arms: dict[str, Seeds], paper_model: str | None, benchmark_count: int
) -> dict[str, list[Line]]:
    """Returns the differences between each arm and arm none, over the seeds that both have.

    Args:
        arms: The results of each arm.
        paper_model: The name of the model in the paper's table 4, if it has one.
        benchmark_count: For how many benchmarks intervals are corrected (Bonferroni). The
            average's is not corrected.

    Returns:
        The lines by arm. The average is the last one, if it is known.
    """
    lines_by_arm = {}
    for arm, seeds in arms.items():
        common_seeds = sorted(seeds.keys() & arms.get("none", {}).keys())
        if arm == "none" or not common_seeds:
            continue
        arm_results = [seeds[seed] for seed in common_seeds]
        none_results = [arms["none"][seed] for seed in common_seeds]
        reported = _paper_differences(paper_model, arm)
        pair = [_arm("none", none_results), _arm(arm, arm_results)]
        comparison = compare_models(pair, 1 - (1 - CONFIDENCE) / benchmark_count)
        lines = [_line(difference, reported) for difference in comparison.differences]
        arm_averages = _averages(arm_results)
        none_averages = _averages(none_results)
        if len(arm_averages) == len(none_averages) == len(common_seeds):
            lines.append(_average_line(arm_averages, none_averages, reported))
        lines_by_arm[arm] = lines
    return lines_by_arm


def _paper_differences(model: str | None, arm: str) -> dict[str, float]:
    """Returns the paper's differences between an arm and arm none, by column."""
    arm_scores = _paper_row(model, arm)
    differences = {}
    for column, none_score in _paper_row(model, "none").items():
        if column in arm_scores:
            differences[column] = arm_scores[column] - none_score
    return differences


def _line(difference: Difference, reported: dict[str, float]) -> Line:
    """Returns a line in the units of the paper."""
    benchmark, factor = _named(difference.task)
    unknown = None
    if difference.over_seeds is None and difference.several_runs:
        unknown = SEEDS_ALIKE
    elif difference.over_questions is None:
        unknown = QUESTIONS_ALIKE
    return Line(
        benchmark,
        factor * difference.score,
        factor * difference.reference,
        reported.get(benchmark),
        _scaled(difference.over_questions, factor),
        _scaled(difference.over_seeds, factor),
        unknown,
    )


def _scaled(interval: Interval | None, factor: float) -> Interval | None:
    if interval is None:
        return None
    lower_end, upper_end = interval
    return factor * lower_end, factor * upper_end


def _averages(results: Sequence[dict[str, Any]]) -> np.ndarray:
    """Returns the average of each run that has one."""
    averages = []
    for result in results:
        if AVERAGE in result["columns"]:
            averages.append(result["columns"][AVERAGE])
    return np.array(averages)


def _average_line(scores: np.ndarray, references: np.ndarray, reported: dict[str, float]) -> Line:
    interval = over_seeds(scores, references)
    unknown = None
    if interval is None and len(scores) > 1:
        unknown = SEEDS_ALIKE
    paper = reported.get(AVERAGE)
    return Line(AVERAGE, scores.mean(), references.mean(), paper, None, interval, unknown)


def draw(
    groups: dict[str, dict[str, Seeds]],
    lines_by_group: dict[str, dict[str, list[Line]]],
    output: Path,
) -> None:
    """Draws for each group the differences to arm none, and below them the paper's figure 5."""
    figure = Figure(figsize=(6.4 * len(groups), 7.5), layout="constrained")
    panels = figure.subplots(2, len(groups), squeeze=False)
    for (above, below), (group_name, arms) in zip(panels.T, groups.items(), strict=True):
        for arm, lines in lines_by_group[group_name].items():
            _draw_differences(above, arm, lines)
        above.axhline(0, color="black", linewidth=0.8)
        above.margins(y=0.25)  # room for the legend
        above.set(title=group_name, ylabel="difference to no norm, with its interval")
        for arm, seeds in arms.items():
            _draw_cosines(below, arm, list(seeds.values()))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.set(xlabel="step of stage 1", ylabel="cosine of a layer's input and output")
        for axes in (above, below):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small", ncols=2)
    with new_path(output) as partial_file:
        figure.savefig(partial_file, format="png", dpi=110)


def _draw_differences(axes: Axes, arm: str, lines: list[Line]) -> None:
    """Draws an arm's differences with intervals, and the paper's."""
    colour = COLOURS[arm]
    arm_label: str | None = NAMES[arm]
    paper_label: str | None = "the paper's"
    shift = 0.1 * list(NAMES).index(arm) - 0.2
    for position, line in enumerate(lines):
        place = position + shift
        interval = line.interval or line.over_questions
        lower_end, upper_end = interval or (line.difference, line.difference)
        axes.vlines(place, lower_end, upper_end, color=colour)
        axes.plot(place, line.difference, "o", color=colour, label=arm_label)
        if line.paper is not None:
            axes.plot(place, line.paper, "x", color=colour, label=paper_label)
        arm_label = None
        paper_label = None
    benchmarks = [line.benchmark for line in lines]
    axes.set_xticks(range(len(lines)), benchmarks, rotation=30, ha="right")


def _draw_cosines(axes: Axes, arm: str, results: list[dict[str, Any]]) -> None:
    """Draws the mean cosine over layers and seeds by step, for both kinds of tokens."""
    measured_steps = [step["step"] for step in results[0]["dynamics"]]
    for kind, style in (("visual", ".-"), ("text", ".:")):
        curves = []
        for result in results:
            curves.append([np.mean(step[kind]) for step in result["dynamics"]])
        label = f"{NAMES[arm]}, {kind} tokens"
        axes.plot(measured_steps, np.mean(curves, 0), style, color=COLOURS[arm], label=label)


def mean(numbers: Sequence[float], digits: int = 3) -> str:
    """Returns the mean of runs, and half its 95 % interval, if they are several and not alike."""
    if not numbers:
        return ""
    run_values = np.array(numbers)
    text = f"{run_values.mean():.{digits}f}"
    if len(run_values) < 2 or without_spread(run_values, run_values):
        return text
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(run_values) - 1)
    half_interval = quantile * run_values.std(ddof=1) / math.sqrt(len(run_values))
    return f"{text} ± {half_interval:.{digits}f}"


def markdown(headings: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    """Returns the lines of a table."""
    titles = list(headings)
    lines = []
    for row_cells in (titles, *body):
        lines.append(f"| {' | '.join(row_cells)} |")
    lines.insert(1, "|" + "---|" * len(titles))
    return lines


def _arm(name: str, results: Sequence[dict[str, Any]]) -> ModelScores:
    """Returns an arm with the stored scores of its runs."""
    runs = []
    for result in results:
        scores: dict[str, dict[tuple[str, int, str], float]] = {}
        for benchmark, stored in result["answers"].items():
            scores[benchmark] = {}
            for number, score in enumerate(stored["scores"]):
                scores[benchmark][benchmark, number, stored["asked"]] = score
        runs.append(scores)
    return ModelScores(name, runs)


def _paper_row(model: str | None, arm: str) -> dict[str, float]:
    """Returns the paper's scores of an arm, by column. Empty if it has none."""
    table = paper_tables()["table_4"]
    for table_row in table["rows"]:
        if (table_row["model"], table_row["arm"]) == (model, IN_PAPER.get(arm)):
            return dict(zip(table["columns"], table_row["scores"], strict=True))
    return {}


def _scores(arms: dict[str, Seeds], paper_model: str | None) -> list[str]:
    """Returns a table as in the paper.

    It has a column for each benchmark, a row for each arm, and the paper's rows.
    """
    digits = 2 if paper_model else 3
    columns: dict[str, list[float]] = {}
    table_rows = []
    for arm, seeds in arms.items():
        columns = _columns(list(seeds.values()))
        row_cells = [NAMES[arm], str(len(seeds))]
        row_cells += [mean(scores, digits) for scores in columns.values()]
        table_rows.append(row_cells)
    for arm in arms:
        paper_row = _paper_row(paper_model, arm)
        if paper_row:
            row_cells = [f"the paper's {NAMES[arm]}", "1"]
            for column in columns:
                row_cells.append(f"{paper_row[column]:.2f}" if column in paper_row else "")
            table_rows.append(row_cells)
    return markdown(["", "seeds", *columns], table_rows)


def _columns(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the scores of runs by column."""
    columns: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for benchmark, stored in result["answers"].items():
            column, factor = _named(benchmark)
            columns[column].append(factor * float(np.mean(stored["scores"])))
        if AVERAGE in result["columns"]:
            columns[AVERAGE].append(result["columns"][AVERAGE])
    return columns


def _named(benchmark: str) -> tuple[str, float]:
    """Returns the paper's column of a task and metric, and the factor of its scores.

    If the paper has no column for it, its own name is returned.
    """
    own_name = benchmark.removeprefix("offline_").replace("_", " ")
    return COLUMN_BY_BENCHMARK.get(benchmark, (own_name, 1))


def _differences(lines: Sequence[Line]) -> list[str]:
    """Returns a table of an arm's differences to arm none."""
    table_rows = []
    for line in lines:
        digits = 2
        paper = ""
        if line.paper is None:
            digits = 3
        else:
            paper = f"{line.paper:+.2f}"
        row_cells = [line.benchmark, f"{line.difference:+.{digits}f}", paper]
        for interval in (line.over_questions, line.over_seeds):
            if interval is None:
                row_cells.append("")
            else:
                lower_end, upper_end = interval
                row_cells.append(f"{lower_end:+.{digits}f} to {upper_end:+.{digits}f}")
        table_rows.append([*row_cells, line.sentence])
    headings = ["", "difference", "the paper's", "over questions", "over seeds", ""]
    return markdown(headings, table_rows)


def _diagnosis(arms: dict[str, Seeds]) -> list[str]:
    """Returns a table of norm, rotation and gain after each stage: a row for each arm."""
    headings = [""]
    for stage_number in (1, 2):
        for quantity in ("norm on entry, N_text", "rotation over text's", "gain, of its start"):
            headings.append(f"{quantity}, stage {stage_number}")
    table_rows = []
    for arm, seeds in arms.items():
        row_cells = [NAMES[arm]]
        for stage in STAGES:
            diagnoses = [result["diagnosis"][stage] for result in seeds.values()]
            relative_gains = []
            for diagnosis in diagnoses:
                gain = diagnosis["gain"]
                if gain:
                    relative_gains.append(gain["mean_abs"] / gain["start"])
            row_cells.append(mean([diagnosis["entry"] for diagnosis in diagnoses]))
            row_cells.append(mean([diagnosis["rotation"] for diagnosis in diagnoses]))
            row_cells.append(mean(relative_gains))
        table_rows.append(row_cells)
    return markdown(headings, table_rows)
