"""The report of runs in one process: its tables and its figure, part by part."""

import json

import pytest
import yaml
from plan import read_plan
from report import _by_seed, _differences, _table, difference, draw, holm, write_report


def write_plan(folder, *group_names, **changes):
    groups = {}
    for group_name in group_names:
        groups[group_name] = {
            "question": f"{group_name}?",
            "seeds": [1, 2],
            "variants": {"a": {"arm": "none"}, "b": None, "rare": None},
        }
    content = {
        "stage1": {"recipe": "quickstart-align"},
        "stage2": {"recipe": "quickstart-tune"},
        "tasks": ["pope"],
        "optional": ["rare"],
        "groups": groups,
        **changes,
    }
    plan_path = folder / "mine.yaml"
    plan_path.write_text(yaml.safe_dump(content))
    return read_plan(plan_path, folder / "results")


def run_result(nats, *, last=True, part="bias"):
    """Returns a result with three logged steps. Two parts have gradients in the second stage."""
    logged = {
        "all_steps": 40,
        "information": nats,
        "information/shape": 2 * nats,
    }
    if last:
        logged["wrong_image"] = 0.25
    first_curves = {
        "loss": [9.0, 8.0, 3.0],
        "grad_norm": [1.0, 2.0, 3.0],
        "clip/share": [1.0, 0.5, 0.0],
    }
    second_curves = {
        **first_curves,
        "grad_norm/projector": [3.0, 3.0, 3.0],
        f"grad_norm/{part}": [4.0, 4.0, 4.0],
    }
    trained_tokens = {
        "n_text": 2.0,
        "norm": 3.0,
        "asymmetry": 0.5,
    }
    return {
        "data": "same",
        "information": [logged],
        "tokens": {"untrained": 4.0, "trained": trained_tokens},
        "curves": {"stage1": first_curves, "stage2": second_curves},
        "scores": {"offline_emoji acc": 0.75},
    }


def table_cells(lines):
    """Returns the cells of each row of a table by its first."""
    cells_by_name = {}
    for line in lines:
        if not line.startswith("|---"):
            first_cell, *cells = line.strip("| ").split(" | ")
            cells_by_name[first_cell.strip()] = cells
    return cells_by_name


@pytest.fixture
def cells():
    """The table of a group whose second variant has the gain for the bias, and no wrong image."""
    group = {
        "g/a": {1: run_result(0.5)},
        "g/b": {1: run_result(0.5, last=False, part="gain")},
    }
    return table_cells(_table(group))


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("I", "0.500"),
        ("I, shape", "1.000"),
        ("emoji acc", "0.750"),
        ("loss", "3.000"),  # the last quarter, at least one
        ("enters at the start, N_text", "2.000"),
        ("enters at the end, N_text", "1.500"),
        ("gradient norm, stage1", "2.000"),
        ("clipped steps, stage2", "0.500"),
        ("clip budget, stage 2, projector", "0.360"),  # 9 of 25
    ],
)
def test_a_table_has_the_means_of_what_each_variant_measured(cells, measure, expected):
    assert cells[measure] == [expected, expected]


def test_parts_that_a_variant_lacks_are_empty_in_a_table(cells):
    assert cells["clip budget, stage 2, bias"][0] == "0.640"
    assert cells["clip budget, stage 2, gain"][-1].strip() == "0.640"


def test_a_wrong_image_is_shown_where_it_was_measured(cells):
    first_cell, *others = cells["wrong image"]
    assert first_cell == "0.250"
    assert "0.250" not in others


def test_a_seed_that_a_variant_lacks_is_empty():
    first_variant = {1: run_result(0.25), 2: run_result(0.5)}
    second_variant = {2: run_result(0.5)}
    lines = _by_seed({"g/a": first_variant, "g/b": second_variant})
    assert lines[0] == "| I by seed | 1 | 2 |"
    assert lines[2:] == ["| a | 0.250 | 0.500 |", "| b |  | 0.500 |"]


def test_a_difference_without_runs_is_empty():
    differences, interval, p_value = difference({}, ["a", "b"])
    assert len(differences) == 0
    assert interval is None
    assert p_value is None


def test_a_difference_of_one_seed_has_no_interval():
    results = {
        "a": {1: run_result(1.0), 2: run_result(2.0)},
        "b": {2: run_result(0.5)},
    }
    differences, interval, p_value = difference(results, ["a", "b"])
    assert differences.tolist() == [1.5]
    assert interval is None
    assert p_value is None


@pytest.fixture
def differences_table():
    """Makes the table of three differences. The third has no runs."""
    results = {
        "g/a": {seed: run_result(1.0 + seed / 10) for seed in range(3)},
        "g/b": {seed: run_result(0.5) for seed in range(3)},
    }
    compared = {
        "H1": ["g/a", "g/b"],
        "H2": ["g/b", "g/a"],
        "H3": ["g/a", "g/c"],
    }

    def make_table(together):
        return table_cells(_differences(results, compared, together=together))

    return make_table


def test_differences_have_their_variants_their_count_and_their_mean(differences_table):
    table = differences_table(together=True)
    assert table["H1"][:3] == ["g/a - g/b", "3", "+0.600"]
    assert table["H2"][:3] == ["g/b - g/a", "3", "-0.600"]
    assert table["H3"] == ["g/a - g/c", "0"]  # and nothing else is known


def test_p_values_are_corrected_where_differences_are_tested_together(differences_table):
    p_value = float(differences_table(together=False)["H1"][-1])
    shown, corrected = differences_table(together=True)["H1"][-1].split(", Holm ")
    assert float(shown) == p_value
    assert float(corrected) == pytest.approx(2 * p_value, rel=0.01)  # two are tested


def test_a_corrected_p_value_is_at_most_1():
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def store_result(plan, run, result):
    first_options, second_options = plan.options(run)
    stored = {
        "settings": vars(run.variant),
        "options": {"stage1": first_options, "stage2": second_options},
        "bf16": plan.bf16,
        **result,
    }
    (plan.results / f"{run.key}.json").write_text(json.dumps(stored))


def test_the_page_counts_what_is_stored_and_an_optional_run_only_then(tmp_path):
    plan = write_plan(
        tmp_path,
        "one",
        "one2",
        decisions={"H1": ["one/a", "one/b"]},
    )
    plan.results.mkdir()
    plan_runs = {run.cell: run for run in plan.runs()}
    store_result(plan, plan_runs["one2/rare/1"], {"failed": "no luck"})
    store_result(plan, plan_runs["one2/a/1"], run_result(0.5))

    report_text = write_report(plan).read_text()
    # Eight runs are not optional.
    assert "2 of 9 runs are finished, 1 of them failed. They took 0.0 hours" in report_text
    assert "## one2" in report_text
    assert "## one\n" not in report_text
    assert "## Other differences" not in report_text
    assert "| H1 | one/a - one/b | 0 |  |" in report_text


def results_of_figure(group_names):
    """Returns results of two variants: `b` has two seeds."""
    results = {}
    for number, group_name in enumerate(group_names):
        results[f"{group_name}/b"] = {
            1: run_result(number + 1),
            3: run_result(number + 3),
        }
        results[f"{group_name}/a"] = {1: run_result(number + 0.5)}
    return results


@pytest.fixture(params=[(1, (1, 1)), (2, (1, 2)), (4, (2, 3))], ids=str)
def drawn_groups(request, tmp_path, drawn_figures):
    """The names of the groups of a figure, its axes and its expected rows and columns."""
    count, shape = request.param
    group_names = [f"g{number}" for number in range(count)]
    plan = write_plan(tmp_path, *group_names, "empty")
    draw(plan, results_of_figure(group_names), tmp_path / "figure.png")
    return group_names, drawn_figures[0].axes, shape


def test_the_figure_has_a_panel_for_each_group_with_results(drawn_groups):
    group_names, axes, shape = drawn_groups
    assert axes[0].get_gridspec().get_geometry() == shape
    titles = [panel.get_title() for panel in axes if panel.get_visible()]
    assert titles == group_names


def test_a_panel_shows_means_and_ranges_of_seeds(drawn_groups):
    group_names, axes, _ = drawn_groups
    color_of_a = axes[0].lines[1].get_color()
    visible_panels = [panel for panel in axes if panel.get_visible()]
    assert len(visible_panels) == len(group_names)
    for number, panel in enumerate(visible_panels):
        lines = {line.get_label(): line for line in panel.lines}
        assert list(lines) == ["b", "a"]
        assert list(lines["b"].get_xdata()) == [40]
        assert list(lines["b"].get_ydata()) == [number + 2]

        heights = panel.collections[0].get_paths()[0].vertices[:, 1]
        assert heights.min() == number + 1
        assert heights.max() == number + 3

        assert lines["a"].get_color() == color_of_a
        assert lines["b"].get_color() != color_of_a
