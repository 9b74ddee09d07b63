# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Tables and figures of an experiment, from its stored results alone."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..checkpoint.files import finished_file, read_json
from ..train.arguments import STAGES
from .figures import draw_curves, draw_dial
from .plan import TUNING, UNTUNED, Group, Plan, Run
from .results import Result, final_loss, read_result
from .run import START
from .statistics import difference_of, mean_of


PAGE = "report.md"
METRICS = {"offline_perplexity": "bits_per_byte"}
"""The metric of a task that is shown, if it is not its accuracy."""

EXPLANATION = (
    "A ± is half the 95 % interval over seeds. Brackets are the 95 % interval of a difference, paired by seed, and d "
    "is the mean difference over the standard deviation of the differences. One seed has no interval. `loss` is the "
    "mean of the last quarter of training, on rows drawn anew; lower is better, as with `bits_per_byte`. `gain moved` "
    "is ||gain - start|| / ||start||. `apart` is how far the changes of the two projectors in training are from each "
    "other, over the second's length: 0 if they are the same, 1.4 if they are unrelated and of one length. The last "
    "table of a group has means over steps and seeds: the norm of each module's gradient before clipping, and the "
    "share of steps that are clipped."
)

GRADIENTS = [*(f"grad_norm/{part}" for part in ("projector", "gain", "language_model", "vision_tower")), "clip/share"]
"""The curves whose means are shown."""

TUNED = "Final loss of stage 2 by the learning rates of stage 1 and stage 2."

Results = dict[str, dict[int, Result]]  # by variant and seed


def write_report(plan: Plan) -> Path:
    """Writes the page and its figures beside the results.

    Raises:
        ValueError: No run is finished, or a result is not of this plan, or of other data than what it is paired with.
    """
    runs = {run.key: run for quick in (True, False) for run in plan.runs(quick)}
    found = {run.key: result for run in runs.values() if (result := read_result(plan, run)) is not None}
    if not found:
        raise ValueError(f"{plan.results} has no result. Run `normalign experiment run` first.")
    lines = [f"# Results of `{plan.name}`", "", *_summary(plan, found)]
    for name, label in _groups(plan):
        group, results = plan.groups[name], _by_variant(runs, found, label)
        if not results:
            continue
        lines += ["", f"## {label}", "", group.question, ""]
        if group.tuned:
            lines += [_rates(plan, results, tuned=label == name), ""]
        lines += [*_table(plan, results), "", *_differences(plan, results, group), "", *_gradients(results)]
        figures = [draw_curves(results, plan.results / f"{label}-loss.png")]
        if all(variant.enters_at for variant in group.variants.values()):
            start = read_json(plan.results / START)
            figures.insert(0, draw_dial(results, group.variants, start, plan.results / f"{label}.png"))
        lines += [line for figure in figures for line in ("", f"![{label}]({figure.name})")]
    if tried := [result for key, result in found.items() if runs[key].group == TUNING]:
        lines += ["", f"## {TUNING}", "", TUNED, "", *_tuning(tried)]
    lines += ["", "## All runs", "", *_all_runs(runs, found)]
    with finished_file(plan.results / PAGE) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return plan.results / PAGE


def columns(plan: Plan) -> dict[str, str]:
    """What is shown of each run's scores, by heading."""
    return {
        f"{task.removeprefix('offline_')} {metric}": f"{task} {metric}"
        for task in plan.tasks
        for metric in [METRICS.get(task, "acc")]
    }


def values(result: Result, plan: Plan) -> dict[str, float]:
    """What is compared of a run, by heading."""
    tokens = result["tokens"]
    n_text = tokens["trained"]["n_text"]
    return {
        **{name: result["scores"][key] for name, key in columns(plan).items()},
        "loss": final_loss(result),
        "norm at the start, N_text": tokens["untrained"] / n_text,
        "norm trained, N_text": tokens["trained"]["norm"] / n_text,
        "rotation": tokens["trained"]["asymmetry"],
        **({"gain trained": gains[-1]} if (gains := result["curves"]["stage2"].get("gain/mean_abs")) else {}),
        **({"gain moved": result["change"]["gain"]} if "gain" in result["change"] else {}),
    }


def _groups(plan: Plan) -> list[tuple[str, str]]:
    """Names of groups and of their results; those of a tuned group without tuning too."""
    found = []
    for name, group in plan.groups.items():
        found += [(name, name)] + ([(name, f"{name}{UNTUNED}")] if group.tuned else [])
    return found


def _by_variant(runs: dict[str, Run], found: dict[str, Result], label: str) -> Results:
    """The results of a group's runs that did not fail."""
    results: Results = defaultdict(dict)
    for key, result in found.items():
        if runs[key].group == label and "failed" not in result:
            results[runs[key].name][runs[key].seed] = result
    return dict(results)


def _summary(plan: Plan, found: dict[str, Result]) -> list[str]:
    """How many runs there are, and what they cost."""
    whole = plan.runs()
    done = sum(run.key in found and "failed" not in found[run.key] for run in whole)
    failed = sum("failed" in result for result in found.values())
    hours = sum(result["minutes"]["processor"] for result in found.values() if "failed" not in result) / 60
    machines = sorted({device for each in found.values() for device in each.get("hardware", {}).get("devices", [])})
    return [
        f"{done} of {len(whole)} planned runs are finished, and {len(found) - failed - done} of the reduced grid "
        f"alone; {failed} failed. They took {hours:.1f} hours of processor time on {', '.join(machines)}.",
        "",
        EXPLANATION,
    ]


def _table(plan: Plan, results: Results) -> list[str]:
    rows = {name: [values(result, plan) for result in seeds.values()] for name, seeds in results.items()}
    headings = list(dict.fromkeys(heading for found in rows.values() for heading in found[0]))
    body = []
    for name, found in rows.items():
        cells = []
        for heading in headings:
            if any(heading not in each for each in found):
                cells.append("")
                continue
            mean = mean_of([each[heading] for each in found])
            error = "" if mean.error is None else f" ± {mean.error:.3f}"
            cells.append(f"{mean.value:.3f}{error}")
        body.append([name, str(len(found)), *cells])
    return _markdown(["", "seeds", *headings], body)


def _differences(plan: Plan, results: Results, group: Group) -> list[str]:
    """Each variant against its references: scores, loss, and the way that the projector was trained."""
    by_seed = {name: {seed: values(result, plan) for seed, result in seeds.items()} for name, seeds in results.items()}
    body = []
    for name, against in ((each, against) for each in results for against in group.references(each)):
        if not (seeds := by_seed[name].keys() & by_seed.get(against, {}).keys()):
            continue
        cells = []
        for heading in (*columns(plan), "loss"):
            ours, theirs = ({seed: by_seed[which][seed][heading] for seed in seeds} for which in (name, against))
            found = difference_of(ours, theirs)
            cells.append(f"{found.value:+.3f}{_shown(found.interval, found.effect)}")
        for seed in seeds:
            if any(results[name][seed][what] != results[against][seed][what] for what in ("data", "bf16")):
                raise ValueError(
                    f"{name} and {against} of seed {seed} were not trained on the same data in the same precision. "
                    "Remove the results of one of them, and make these runs again."
                )
        apart = [_apart(results[name][seed], results[against][seed]) for seed in seeds]
        body.append([f"{name} - {against}", *cells, f"{mean_of(apart).value:.2f}"])
    return _markdown(["difference", *columns(plan), "loss", "apart"], body) if body else []


def _gradients(results: Results) -> list[str]:
    """The norm of each module's gradient, and how many steps were clipped: means over steps and seeds."""
    rows: dict[str, dict[str, str]] = defaultdict(dict)  # by heading and variant
    for stage in ("stage1", "stage2"):
        for curve in GRADIENTS:
            for name, seeds in results.items():
                found = [result["curves"][stage].get(curve) for result in seeds.values()]
                if all(found):
                    rows[f"{curve}, stage {stage[-1]}"][name] = f"{np.mean(found):.3g}"
    body = [[name, *(cells.get(name, "") for cells in rows.values())] for name in results]
    return _markdown(["", *rows], body)


def _apart(ours: Result, theirs: Result) -> float:
    """||change of ours - change of theirs|| / ||change of theirs||, of the projectors, by their random directions."""
    first, second = (np.array(result["change"]["directions"]) for result in (ours, theirs))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def _shown(interval: tuple[float, float] | None, effect: float | None) -> str:
    if interval is None:
        return ""
    size = "" if effect is None else f", d {effect:+.1f}"
    return f" [{interval[0]:+.3f}, {interval[1]:+.3f}]{size}"


def _rates(plan: Plan, results: Results, *, tuned: bool) -> str:
    """The learning rates of each variant, as one sentence."""
    found = []
    for name, seeds in results.items():
        options = next(iter(seeds.values()))["options"]
        own = [{**STAGES[options[each]["stage"]], **options[each]} for each in ("stage1", "stage2")]
        found.append(f"{name} {own[0]['learning_rate']:g} and {own[1]['learning_rate']:g}")
    how = (
        "Learning rates of stage 1 and 2, best of those tried"
        if tuned
        else "The recipes' learning rates, without tuning"
    )
    return f"{how}: {'; '.join(found)}."


def _tuning(tried: list[Result]) -> list[str]:
    """The final loss of each try, by arm and learning rates; the least of an arm in bold."""
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for result in tried:
        settings = result["settings"]
        rates = ", ".join(f"{settings[stage]['learning_rate']:g}" for stage in ("stage1", "stage2"))
        losses[settings["arm"]][rates] = math.inf if "failed" in result else final_loss(result)
    headings = list(dict.fromkeys(rates for found in losses.values() for rates in found))
    body = []
    for arm, found in losses.items():
        shown = {rates: f"{loss:.3f}" for rates, loss in found.items()}
        best = min(found, key=lambda rates: found[rates])
        body.append([arm, *(f"**{shown[each]}**" if each == best else shown.get(each, "") for each in headings)])
    return _markdown(["arm", *headings], body)


def _all_runs(runs: dict[str, Run], found: dict[str, Result]) -> list[str]:
    body = []
    for key, result in found.items():
        if "failed" in result:
            body.append([key, "", "", f"failed: {result['failed']}"])
            continue
        body.append([key, f"{final_loss(result):.3f}", f"{result['minutes']['processor']:.1f}", result["data"][:12]])
    return _markdown(["run", "loss", "processor minutes", "hash of the data, or what failed"], body)


def _markdown(headings: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    rows = [list(headings), *map(list, body)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
