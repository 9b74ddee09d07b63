# SPDX-License-Identifier: Apache-2.0
"""Experiments: plans, and the statistics of the report of stored results."""

import json
import re

import numpy as np
import pytest
from paths import ROOT
from plan import read_plan
from report import difference, holm, read_result, write_report
from scipy import stats

from normalign_llava.evaluate.engine import SUITES


def test_differences_are_paired_and_corrected_as_by_hand():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 6))
    earlier = {"all_steps": 40, "information": 9.0}
    results = {
        name: {
            seed: {"data": seed, "information": [earlier, {"all_steps": 200, "information": nats}]}
            for seed, nats in enumerate(values[row])
        }
        for row, name in enumerate("abcd")
    }
    apart, interval, p = difference(results, ["a", "b", "c", "d"])
    by_hand = values[0] - values[1] + values[2] - values[3]
    half = stats.t.ppf(0.975, 5) * by_hand.std(ddof=1) / 6**0.5
    assert apart == pytest.approx(by_hand)
    assert interval == pytest.approx((by_hand.mean() - half, by_hand.mean() + half))
    assert p == pytest.approx(2 * stats.t.sf(abs(by_hand.mean()) / (by_hand.std(ddof=1) / 6**0.5), 5))
    results["a"][0]["data"] = "other"
    with pytest.raises(ValueError, match="seed 0 has other data"):
        difference(results, ["a", "b"])
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


def test_stored_results_make_the_report_that_is_stored():
    plan = read_plan(ROOT / "experiments" / "regime.yaml")
    stored = (plan.results / "report.md").read_text()
    assert write_report(plan).read_text() == stored


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_plan_can_be_read_and_names_tasks_that_there_are(file):
    plan = read_plan(file)
    assert plan.runs() and set(plan.tasks) <= {*SUITES["paper"], *SUITES["offline"]}
    assert all(plan.options(run) for run in plan.runs())


def test_results_of_a_plan_that_has_changed_are_refused(tmp_path):
    plan = (ROOT / "experiments" / "regime.yaml").read_text()
    (tmp_path / "regime.yaml").write_text(plan.replace("max_steps: 140", "max_steps: 141", 1))
    changed = read_plan(tmp_path / "regime.yaml", ROOT / "experiments" / "results" / "regime")
    with pytest.raises(ValueError, match="keep the results of the changed plan in another folder with --results"):
        [read_result(changed, run) for run in changed.runs()]


def test_figures_of_the_first_experiment_are_those_of_its_stored_results():
    folder = ROOT / "experiments" / "results" / "small"
    page = (ROOT / "experiments" / "first.md").read_text()
    for arm, name in {"none": "no norm", "unit": "gain 1", "aligned": "aligned", "gwc": "aligned, GWC"}.items():
        stored = [json.loads((folder / f"arms-{arm}-seed{seed}.json").read_text()) for seed in range(5)]
        row = next(line for line in page.splitlines() if re.match(rf"\| {name} \| 0\.\d+, 0\.\d+ \|", line))
        assert ", ".join(f"{each['scores']['offline_easy_vqa acc']:.2f}" for each in stored) in row
