# SPDX-License-Identifier: Apache-2.0
"""The report of runs by commands: scores as in the paper's table 4, differences, and the diagnosis.

table4.md has the rule by which differences are put into words.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from plan import Plan
from scipy import stats

from normalign_llava.checkpoint.files import atomic_write
from normalign_llava.diagnose.report import paper_tables
from normalign_llava.evaluation.compare import (
    CONFIDENCE,
    Difference,
    Interval,
    ModelScores,
    compare_models,
    over_seeds,
    without_spread,
)
from normalign_llava.evaluation.results import Evaluation


AVERAGE = "average"
FIGURE = "scores.png"
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
COLUMN_OF = {
    f"{task} {metric}": (name, factor) for name, (task, metric, factor) in PAPER_COLUMNS.items()
}
COLUMN_OF["ocrbench total"] = ("OCRBench", 100)  # a question has 0 or 1; the paper's is of 1000

COLOURS = {"none": "black", "unit": "C2", "aligned": "C0", "gwc": "C1"}

Seeds = dict[int, dict[str, Any]]
"""Results of an arm, by seed."""


class Line(NamedTuple):
    """The difference of an arm to none on a benchmark.

    Attributes:
        score, reference: Of the arm and of none, means over seeds.
        paper: The paper's difference, if it has one.
        over_questions, over_seeds: Intervals of the difference, None where not known.
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
        """Of the scores."""
        return self.score - self.reference

    @property
    def interval(self) -> Interval | None:
        """Over seeds and questions: of a sum of independent errors (Zou and Donner 2008, "MOVER").

        None if that over seeds is not known, or something is unknown.
        """
        if self.over_seeds is None or self.unknown is not None:
            return None
        value = self.difference
        lows, highs = zip(self.over_seeds, self.over_questions or (value, value), strict=True)
        below = math.hypot(*(low - value for low in lows))
        return value - below, value + math.hypot(*(high - value for high in highs))

    @property
    def sentence(self) -> str:
        """What can be said, by the rule of table4.md."""
        if self.interval is None:
            return self.unknown or "too few seeds to tell"
        low, high = self.interval
        none = low <= 0 <= high
        same = self.paper is not None and low <= self.paper <= high
        if self.paper is None:
            return "not shown" if none else "higher" if low > 0 else "lower"
        paper = f"the paper's {self.paper:+.2f} is"
        if same and none:
            intervals = (self.over_seeds, self.over_questions)
            seeds, questions = (each[1] - each[0] if each else 0 for each in intervals)
            return f"too few {'seeds' if seeds >= questions else 'questions'} to tell"
        if same:
            return f"{paper} inside"
        if none:
            return f"no difference shown, {paper} outside"
        sign = "same" if (low > 0) == (self.paper > 0) else "opposite"
        return f"{sign} sign, {paper} outside"


def paper_average(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """The average of table 4's columns, by `AVERAGE`; empty if a task was not evaluated whole."""
    whole = {result.task: result.metrics for result in evaluations if not result.partial}
    scores = [
        factor * m.value
        for task, metric, factor in PAPER_COLUMNS.values()
        for m in whole.get(task, ())
        if (m.name, m.subset) == (metric, None)
    ]
    return {AVERAGE: float(np.mean(scores))} if len(scores) == len(PAPER_COLUMNS) else {}


def sections(plan: Plan, results: dict[str, Seeds]) -> list[str]:
    """The report's lines by group, of `results` by "GROUP/VARIANT"; draws the figure beside it."""
    groups: dict[str, dict[str, Seeds]] = defaultdict(dict)
    for key, seeds in results.items():
        group, _, arm = key.partition("/")
        groups[group][arm] = seeds
    papers = {name: plan.groups[name].get("paper") for name in groups}
    tasks = len(plan.tasks)
    by_group = {name: lines_of(arms, papers[name], tasks) for name, arms in groups.items()}
    draw(groups, by_group, plan.results / FIGURE)
    verdict = [f"**The paper's main result {main_result(by_group, len(plan.groups))}.**", ""]
    lines = [
        *(verdict if any(papers.values()) else []),
        "The rule of the last column was written before any result (experiments/table4.md). "
        f"Intervals are at 1 - 0.05/{tasks}, for {tasks} benchmarks, the average's at 95 %. "
        "± is half the 95 % interval over seeds, if these are not all alike.",
        "",
        f"![Differences to no norm, and the paper's figure 5]({FIGURE})",
    ]
    for name, arms in groups.items():
        lines += ["", f"## {name}", "", plan.groups[name]["question"]]
        lines += ["", *_scores(arms, papers[name])]
        for arm, differences in by_group[name].items():
            lines += ["", f"### {NAMES[arm]}, against {NAMES['none']}"]
            lines += ["", *_differences(differences)]
        lines += ["", "### Diagnosis", "", *_diagnosis(arms)]
    return lines


def main_result(by_group: dict[str, dict[str, list[Line]]], models: int) -> str:
    """Whether the average is higher with norm and GWC for all `models`, as the paper says."""
    lines = [line for by_arm in by_group.values() for line in by_arm.get("gwc", [])]
    averages = [line.interval for line in lines if line.benchmark == AVERAGE]
    intervals = [interval for interval in averages if interval is not None]
    if any(high < 0 for _, high in intervals):
        return "does not hold"
    holds = len(intervals) == models and all(low > 0 for low, _ in intervals)
    return "holds" if holds else "is not shown"


def _scaled(interval: Interval | None, factor: float) -> Interval | None:
    """An interval in other units."""
    if interval is None:
        return None
    low, high = interval
    return factor * low, factor * high


def lines_of(arms: dict[str, Seeds], paper: str | None, benchmarks: int) -> dict[str, list[Line]]:
    """Differences to none over the seeds that both have, by arm; the average last, if it is known.

    Intervals are corrected for so many benchmarks (Bonferroni), and not that of the average.
    """
    by_arm: dict[str, list[Line]] = {}
    for arm, seeds in arms.items():
        common = sorted(seeds.keys() & arms.get("none", {}).keys())
        if arm == "none" or not common:
            continue
        pair = [_arm(name, [arms[name][seed] for seed in common]) for name in ("none", arm)]
        theirs = _paper_row(paper, arm)
        their_none = _paper_row(paper, "none")
        both = theirs.keys() & their_none.keys()
        reported = {name: theirs[name] - their_none[name] for name in both}
        by_arm[arm] = []
        for each in compare_models(pair, 1 - (1 - CONFIDENCE) / benchmarks).differences:
            name, factor = _named(each.task)
            line = Line(
                name,
                factor * each.score,
                factor * each.reference,
                reported.get(name),
                _scaled(each.over_questions, factor),
                _scaled(each.over_seeds, factor),
                _unknown(each),
            )
            by_arm[arm].append(line)
        columns = [[arms[name][seed]["columns"] for seed in common] for name in ("none", arm)]
        none, own = (np.array([run[AVERAGE] for run in of if AVERAGE in run]) for of in columns)
        if len(none) == len(own) == len(common):
            means = (own.mean(), none.mean())
            interval = over_seeds(own, none)
            unknown = SEEDS_ALIKE if interval is None and len(common) > 1 else None
            line = Line(AVERAGE, *means, reported.get(AVERAGE), None, interval, unknown)
            by_arm[arm].append(line)
    return by_arm


def _unknown(difference: Difference) -> str | None:
    """Why nothing can be said of a difference, although there are several seeds and questions."""
    if difference.over_seeds is None and difference.several_runs:
        return SEEDS_ALIKE
    if difference.over_questions is None:
        return QUESTIONS_ALIKE
    return None


def draw(
    groups: dict[str, dict[str, Seeds]], by_group: dict[str, dict[str, list[Line]]], output: Path
) -> None:
    """The differences to none with intervals and the paper's, by group, above its figure 5."""
    figure = Figure(figsize=(6.4 * len(groups), 7.5), layout="constrained")
    panels = figure.subplots(2, len(groups), squeeze=False)
    for (above, below), (name, arms) in zip(panels.T, groups.items(), strict=True):
        for arm, lines in by_group[name].items():
            colour = COLOURS[arm]
            labels: list[str | None] = [NAMES[arm], "the paper's"]
            shift = 0.1 * list(NAMES).index(arm) - 0.2
            for place, line in enumerate(lines):
                ends = line.interval or line.over_questions or [line.difference] * 2
                above.vlines(place + shift, *ends, color=colour)
                above.plot(place + shift, line.difference, "o", color=colour, label=labels[0])
                if line.paper is not None:
                    above.plot(place + shift, line.paper, "x", color=colour, label=labels[1])
                labels = [None, None]
            names = [line.benchmark for line in lines]
            above.set_xticks(range(len(lines)), names, rotation=30, ha="right")
        above.axhline(0, color="black", linewidth=0.8)
        above.margins(y=0.25)  # room for the legend
        above.set(title=name, ylabel="difference to no norm, with its interval")
        for arm, seeds in arms.items():
            for kind, style in (("visual", ".-"), ("text", ".:")):
                dynamics = [result["dynamics"] for result in seeds.values()]
                curves = [[np.mean(step[kind]) for step in of_run] for of_run in dynamics]
                steps = [step["step"] for step in dynamics[0]]
                label = f"{NAMES[arm]}, {kind} tokens"
                below.plot(steps, np.mean(curves, 0), style, color=COLOURS[arm], label=label)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.set(xlabel="step of stage 1", ylabel="cosine of a layer's input and output")
        for axes in (above, below):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small", ncols=2)
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png", dpi=110)


def mean(values: Sequence[float], digits: int = 3) -> str:
    """The mean of runs, and half its 95 % interval, if they are several and not all alike."""
    if not values:
        return ""
    runs = np.array(values)
    if len(runs) < 2 or without_spread(runs, runs):
        return f"{runs.mean():.{digits}f}"
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    half = quantile * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def markdown(headings: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table."""
    rows = [list(headings), *map(list, body)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _arm(name: str, results: Sequence[dict[str, Any]]) -> ModelScores:
    runs = []
    for result in results:
        scores: dict[str, dict[tuple[str, int, str], float]] = {}
        for benchmark, stored in result["answers"].items():
            numbered = enumerate(stored["scores"])
            asked = stored["asked"]
            scores[benchmark] = {(benchmark, number, asked): score for number, score in numbered}
        runs.append(scores)
    return ModelScores(name, runs)


def _paper_row(model: str | None, arm: str) -> dict[str, float]:
    table = paper_tables()["table_4"]
    wanted = (model, IN_PAPER.get(arm))
    rows = [row["scores"] for row in table["rows"] if (row["model"], row["arm"]) == wanted]
    return dict(zip(table["columns"], rows[0], strict=True)) if rows else {}


def _scores(arms: dict[str, Seeds], paper: str | None) -> list[str]:
    """As in the paper: a column for each benchmark, a row for each arm, and the paper's rows."""
    digits = 2 if paper else 3
    columns: dict[str, list[float]] = {}
    body = []
    for arm, seeds in arms.items():
        columns = {}
        for result in seeds.values():
            for benchmark, each in result["answers"].items():
                name, factor = _named(benchmark)
                columns.setdefault(name, []).append(factor * float(np.mean(each["scores"])))
            if AVERAGE in result["columns"]:
                columns.setdefault(AVERAGE, []).append(result["columns"][AVERAGE])
        means = (mean(values, digits) for values in columns.values())
        body.append([NAMES[arm], str(len(seeds)), *means])
    for arm in arms:
        if row := _paper_row(paper, arm):
            theirs = (f"{row[name]:.2f}" if name in row else "" for name in columns)
            body.append([f"the paper's {NAMES[arm]}", "1", *theirs])
    return markdown(["", "seeds", *columns], body)


def _named(benchmark: str) -> tuple[str, float]:
    """The paper's column of a task and metric, and the factor of its scores; or the own name."""
    return COLUMN_OF.get(benchmark, (benchmark.removeprefix("offline_").replace("_", " "), 1))


def _differences(lines: Sequence[Line]) -> list[str]:
    def shown(interval: Interval | None, digits: int) -> str:
        return "" if interval is None else "{:+.{d}f} to {:+.{d}f}".format(*interval, d=digits)

    body = []
    for line in lines:
        digits = 3 if line.paper is None else 2
        paper = "" if line.paper is None else f"{line.paper:+.2f}"
        intervals = shown(line.over_questions, digits), shown(line.over_seeds, digits)
        difference = f"{line.difference:+.{digits}f}"
        body.append([line.benchmark, difference, paper, *intervals, line.sentence])
    return markdown(["", "difference", "the paper's", "over questions", "over seeds", ""], body)


def _diagnosis(arms: dict[str, Seeds]) -> list[str]:
    body = []
    for arm, seeds in arms.items():
        row = [NAMES[arm]]
        for stage in ("stage1", "stage2"):
            of_stage = [result["diagnosis"][stage] for result in seeds.values()]
            for quantity in ("entry", "rotation"):
                row.append(mean([each[quantity] for each in of_stage]))
            gains = [each["gain"] for each in of_stage if each["gain"]]
            row.append(mean([each["mean_abs"] / each["start"] for each in gains]))
        body.append(row)
    quantities = ("norm on entry, N_text", "rotation over text's", "gain, of its start")
    headings = [f"{name}, stage {stage}" for stage in (1, 2) for name in quantities]
    return markdown(["", *headings], body)
