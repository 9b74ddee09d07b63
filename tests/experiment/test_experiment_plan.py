# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Plans of experiments: what they may say, the order of runs, and the options that reach training."""

import pytest
import yaml
from paths import ROOT

from normalign_llava.experiment.plan_file import read_plan


PLAN = {
    "seeds": [0, 1],
    "tasks": ["offline_emoji"],
    "stage1": {"recipe": "quickstart-align"},
    "stage2": {"recipe": "quickstart-tune", "max_steps": 5},
    "tuning": {"seed": 9, "arms": ["none", "gwc"], "stage1": [1e-3], "stage2": [1e-4, 1e-3]},
    "quick": ["dial", "arms"],
    "groups": {
        "dial": {
            "question": "Where?",
            "against": {"b": "a"},
            "variants": {"a": {"enters_at": 4}, "b": {"arm": "none", "enters_at": 4, "stage2": {"max_steps": 7}}},
        },
        "arms": {"question": "Which?", "against": "a", "tuned": True, "variants": {"a": None, "b": {"arm": "none"}}},
        "last": {"question": "One?", "against": "a", "seeds": [3], "variants": {"a": None}},
    },
}


def plan_of(folder, content):
    (folder / "plan.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return read_plan(folder / "plan.yaml")


def test_runs_are_in_order_and_tuning_comes_before_the_first_tuned_group(tmp_path):
    plan = plan_of(tmp_path, PLAN)
    assert plan.results == tmp_path.resolve() / "results" / "plan"
    assert [run.key for run in plan.runs()] == [
        *("dial-a-seed0", "dial-b-seed0", "dial-a-seed1", "dial-b-seed1"),
        *("tuning-none-0.001-0.0001-seed9", "tuning-none-0.001-0.001-seed9"),
        *("tuning-gwc-0.001-0.0001-seed9", "tuning-gwc-0.001-0.001-seed9"),
        *("arms-a-seed0", "arms-b-seed0", "arms-a-seed1", "arms-b-seed1"),
        "last-a-seed3",
    ]
    quick = plan.runs(quick=True)
    assert [run.key for run in quick] == [
        *("dial-a-seed0", "dial-b-seed0", "arms-untuned-a-seed0", "arms-untuned-b-seed0")
    ]
    assert not any(run.tuned for run in quick)
    assert {run.group for run in plan.runs() if run.tuned} == {"arms"}


def test_options_are_the_recipe_s_the_plan_s_and_the_variant_s_in_this_order(tmp_path):
    plan = plan_of(tmp_path, PLAN)
    variants = plan.groups["dial"].variants
    first, second = plan.options(variants["a"], 1)
    assert first["max_steps"] == 20 and first["seed"] == second["seed"] == 1
    assert second["max_steps"] == 5 and second["lora_dropout"] == 0.0 and "recipe" not in second
    assert plan.options(variants["b"], 0)[1]["max_steps"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tsks": []}, "the plan has tsks, which it cannot have"),
        ({"seeds": None}, "seeds must be a list of whole numbers"),
        ({"quick": ["dail"]}, "quick names 'dail', which is no group"),
        ({"tuning": None}, "group arms is tuned, and tuning has no gwc, none"),
        ({"groups": {"x": {"question": "?", "against": "b", "variants": {"a": None}}}}, "x: against names 'b'"),
        (
            {"groups": {"x": {"question": "?", "against": {"a": ["a", "c"]}, "variants": {"a": None}}}},
            "against names 'c'",
        ),
        ({"groups": {"x": {"against": "a", "variants": {"a": None}}}}, "x lacks 'question'"),
        ({"groups": {"x": {"question": "?", "against": "a"}}}, "x has no variants"),
        (
            {"groups": {"x": {"question": "?", "against": "a", "variants": {"a": {"arm": "gain"}}}}},
            "x.a: arm 'gain' is none of none, unit, aligned, gwc",
        ),
        (
            {"groups": {"x": {"question": "?", "against": "a", "variants": {"a": {"compensation_power": 1}}}}},
            "compensation_power is for arm aligned, not gwc",
        ),
        (
            {
                "groups": {
                    "x": {
                        "question": "?",
                        "against": "a",
                        "variants": {"a": {"arm": "aligned", "compensation_power": 1, "enters_at": 4}},
                    }
                }
            },
            "leave enters_at out",
        ),
        ({"stage2": {"max_steps": 5}}, "stage2 names no recipe"),
        ({"stage2": {"recipe": "quickstart-tune", "max_step": 5}}, "max_step"),
    ],
)
def test_what_a_plan_cannot_say_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match="plan.yaml") as error:
        plan_of(tmp_path, {**PLAN, "quick": [] if "groups" in change else PLAN["quick"], **change})
    assert message in str(error.value)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_plan(tmp_path / "none.yaml")


def test_the_committed_plan_can_be_read():
    plan = read_plan(ROOT / "experiments" / "small.yaml")
    keys = [run.key for run in plan.runs()]
    assert len(keys) == len(set(keys)) == 114 and len(plan.runs(quick=True)) == 14


def test_a_variant_is_compared_with_one_several_or_none(tmp_path):
    groups = {"x": {"question": "?", "against": {"b": "a", "c": ["a", "b"]}, "variants": dict.fromkeys("abc")}}
    several = plan_of(tmp_path, {**PLAN, "quick": [], "groups": groups}).groups["x"]
    assert [several.references(name) for name in "abc"] == [[], ["a"], ["a", "b"]]
    groups["x"]["against"] = "a"
    one = plan_of(tmp_path, {**PLAN, "quick": [], "groups": groups}).groups["x"]
    assert [one.references(name) for name in "abc"] == [[], ["a"], ["a"]]
