"""The report of runs in one process: its tables and its figure, part by part."""

import json

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from plan import read_plan
from report import _by_seed, _differences, _table, difference, draw, holm, write_report


CONTENT = {
    "stage1": {"recipe": "quickstart-align"},
    "stage2": {"recipe": "quickstart-tune"},
    "tasks": ["pope"],
    "optional": ["rare"],
}


def plan_of(tmp_path, *groups, **changes):
    variants = {"a": {"arm": "none"}, "b": None, "rare": None}
    known = {
        name: {"question": f"{name}?", "seeds": [1, 2], "variants": variants} for name in groups
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CONTENT | {"groups": known} | changes))
    return read_plan(tmp_path / "mine.yaml", tmp_path / "results")


def measured(nats, *, last=True, part="bias", **changes):
    """A result, of three logged steps; the gradients of the second stage are of two parts."""
    entry = {"all_steps": 40, "information": nats, "information/shape": 2 * nats}
    if last:
        entry["wrong_image"] = 0.25
    stage = {"loss": [9.0, 8.0, 3.0], "grad_norm": [1.0, 2.0, 3.0], "clip/share": [1.0, 0.5, 0.0]}
    parts = {"grad_norm/projector": [3.0, 3.0, 3.0], f"grad_norm/{part}": [4.0, 4.0, 4.0]}
    return {
        "data": "same",
        "information": [entry],
        "tokens": {"untrained": 4.0, "trained": {"n_text": 2.0, "norm": 3.0, "asymmetry": 0.5}},
        "curves": {"stage1": stage, "stage2": stage | parts},
        "scores": {"offline_emoji acc": 0.75},
        **changes,
    }


def rows(lines):
    table = [line.strip("| ").split(" | ") for line in lines if not line.startswith("|---")]
    return {name.strip(): cells for name, *cells in table}


def test_a_table_has_the_means_of_what_each_variant_measured():
    group = {"g/a": {1: measured(0.5)}, "g/b": {1: measured(0.5, last=False, part="gain")}}
    cells = rows(_table(group))
    assert cells["I"] == ["0.500", "0.500"] and cells["I, shape"] == ["1.000", "1.000"]
    assert cells["emoji acc"] == ["0.750", "0.750"]
    assert cells["loss"] == ["3.000", "3.000"]  # the last quarter, at least one
    assert cells["enters at the start, N_text"] == ["2.000", "2.000"]
    assert cells["enters at the end, N_text"] == ["1.500", "1.500"]
    assert cells["gradient norm, stage1"] == ["2.000", "2.000"]
    assert cells["clipped steps, stage2"] == ["0.500", "0.500"]
    assert cells["clip budget, stage 2, projector"] == ["0.360", "0.360"]  # 9 of 25
    assert cells["clip budget, stage 2, bias"][0] == "0.640"
    assert cells["clip budget, stage 2, gain"][-1].strip() == "0.640"
    assert cells["wrong image"][0] == "0.250" and "0.250" not in cells["wrong image"][1:]


def test_a_seed_that_a_variant_lacks_is_empty():
    first, second = ({seed: measured(seed / 4) for seed in seeds} for seeds in ((1, 2), (2,)))
    lines = _by_seed({"g/a": first, "g/b": second})
    assert lines[0] == "| I by seed | 1 | 2 |"
    assert lines[2:] == ["| a | 0.250 | 0.500 |", "| b |  | 0.500 |"]


def test_a_difference_without_runs_is_empty_and_one_seed_has_no_interval():
    apart, *unknown = difference({}, ["a", "b"])
    assert len(apart) == 0 and unknown == [None, None]
    one = {"a": {1: measured(1.0), 2: measured(2.0)}, "b": {2: measured(0.5)}}
    apart, *unknown = difference(one, ["a", "b"])
    assert apart.tolist() == [1.5] and unknown == [None, None]


def test_p_values_are_corrected_where_differences_are_tested_together():
    results = {
        "g/a": {seed: measured(1.0 + seed / 10) for seed in range(3)},
        "g/b": {seed: measured(0.5) for seed in range(3)},
    }
    named = {"H1": ["g/a", "g/b"], "H2": ["g/b", "g/a"], "H3": ["g/a", "g/c"]}
    together = rows(_differences(results, named, together=True))
    alone = rows(_differences(results, named, together=False))
    assert together["H1"][:3] == ["g/a - g/b", "3", "+0.600"]
    assert together["H2"][:3] == ["g/b - g/a", "3", "-0.600"]
    p = float(alone["H1"][-1])
    shown, corrected = together["H1"][-1].split(", Holm ")
    assert (float(shown), float(corrected)) == (p, pytest.approx(2 * p, rel=0.01))  # of two
    assert together["H3"] == ["g/a - g/c", "0"]  # and nothing else is known
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_the_page_counts_what_is_stored_and_an_optional_run_only_then(tmp_path):
    plan = plan_of(tmp_path, "one", "one2", decisions={"H1": ["one/a", "one/b"]})
    plan.results.mkdir()
    for run in plan.runs():
        if run.cell in ("one2/rare/1", "one2/a/1"):
            options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
            known = {"settings": vars(run.variant), "options": options, "bf16": plan.bf16}
            ended = {"failed": "no luck"} if run.name == "rare" else measured(0.5)
            (plan.results / f"{run.key}.json").write_text(json.dumps({**known, **ended}))
    page = write_report(plan).read_text()
    # Eight runs are not optional.
    assert "2 of 9 runs are finished, 1 of them failed. They took 0.0 hours" in page
    assert "## one2" in page and "## one\n" not in page and "## Other differences" not in page
    assert "| H1 | one/a - one/b | 0 |  |" in page


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 3))])
def test_the_figure_has_a_panel_for_each_group_with_results(tmp_path, monkeypatch, count, shape):
    figures = []

    def keep(figure, file, **options):
        figures.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    names = [f"g{number}" for number in range(count)]
    plan = plan_of(tmp_path, *names, "empty")
    results = {}
    for number, name in enumerate(names):
        results[f"{name}/b"] = {seed: measured(number + seed) for seed in (1, 3)}
        results[f"{name}/a"] = {1: measured(number + 0.5)}
    draw(plan, results, tmp_path / "figure.png")
    axes = figures[0].axes
    assert axes[0].get_gridspec().get_geometry() == shape
    shown = [panel for panel in axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == names
    for number, panel in enumerate(shown):
        lines = {line.get_label(): line for line in panel.lines}
        assert list(lines) == ["b", "a"]
        assert list(lines["b"].get_xdata()) == [40] and list(lines["b"].get_ydata()) == [number + 2]
        low, high = np.sort(panel.collections[0].get_paths()[0].vertices[:, 1])[[0, -1]]
        assert (low, high) == (number + 1, number + 3)
        assert lines["a"].get_color() == axes[0].lines[1].get_color() != lines["b"].get_color()
