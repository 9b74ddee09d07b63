"""What a plan says: its runs, their options and commands, and what of them is done already."""

import importlib.util
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import runs
import torch
import training
import yaml
from commands import _diagnosis, _stored, own_data, steps
from datasets import Dataset, Features, Image, List, Value, load_from_disk
from paths import ROOT
from plan import Plan, Variant, read_plan
from report import information, read_result, write_report
from runs import curve, data_hash, parts

from normalign_llava.data.rows.parse import MESSAGES
from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.quickstart.train import rows_of, stage
from normalign_llava.train.command import read_recipe, recipe_file


EXPERIMENTS = ROOT / "experiments"
BASE = {
    "stage1": {
        "recipe": "quickstart-align",
        "max_steps": 5,
        "warmup_steps": 1,
    },
    "stage2": {
        "recipe": "quickstart-tune",
        "max_steps": 7,
    },
    "tasks": ["pope", "mmstar"],
    "groups": {
        "one": {
            "question": "First?",
            "seeds": [2, 1],
            "variants": {
                "a": {"arm": "none"},
                "a2": None,
                "b": {"stage1": {"max_steps": 9}},
            },
        },
        "two": {
            "question": "Second?",
            "seeds": [3],
            "variants": {
                "a": {"stage2": {"lora_r": None, "max_steps": 11}},
            },
            "stage1": {"warmup_steps": 4},
            "stage2": {"recipe": "quickstart-align"},
        },
    },
}
OF_OTHER_DATA = {
    "stage1": BASE["stage1"] | {"dataset_name": "some/data"},
    "stage2": BASE["stage2"] | {"dataset_name": "some/data"},
}


def write_plan(folder, **changes):
    """Writes `BASE` with changes, and reads it."""
    plan_path = folder / "mine.yaml"
    plan_path.write_text(yaml.safe_dump(BASE | changes, sort_keys=False))
    return read_plan(plan_path)


def cells_of(plan_runs):
    return [run.cell for run in plan_runs]


def run_of(plan, cell):
    (found,) = plan.runs([cell])
    return found


def options_by_stage(plan, run):
    first_options, second_options = plan.options(run)
    return {"stage1": first_options, "stage2": second_options}


ALL_CELLS = [
    "one/a/2",
    "one/a2/2",
    "one/b/2",
    "one/a/1",
    "one/a2/1",
    "one/b/1",
    "two/a/3",
]


def test_runs_are_in_order_of_groups_and_seeds(tmp_path):
    plan = write_plan(tmp_path)
    assert cells_of(plan.runs()) == ALL_CELLS
    assert plan.runs()[0].key == "one-a-seed2"
    assert plan.results == tmp_path / "results" / "mine"


def test_optional_runs_are_made_if_they_are_named(tmp_path):
    plan = write_plan(tmp_path, optional=["a2"])
    assert cells_of(plan.runs()) == ALL_CELLS
    required = [cell for cell in ALL_CELLS if "a2" not in cell]
    assert cells_of(plan.runs([])) == required
    assert cells_of(plan.runs(["one/a"])) == ["one/a/2", "one/a/1"]
    assert cells_of(plan.runs(["one/a2/1", "two"])) == ["one/a2/1", "two/a/3"]


def test_a_variant_has_the_settings_of_the_plan_that_it_does_not_change(tmp_path):
    plan = write_plan(tmp_path, variant={"arm": "unit", "text": 2.0})
    first_run, second_run = plan.runs()[:2]
    assert first_run.variant == Variant("none", text=2.0)
    assert second_run.variant == Variant("unit", 2.0)


@pytest.mark.parametrize("absent", ["three", "one/c", "one/a/3", "one/"])
def test_a_run_that_the_plan_lacks_is_refused(tmp_path, absent):
    plan = write_plan(tmp_path)
    with pytest.raises(ValueError, match=f"mine has no '{absent}'.* one/a/2"):
        plan.runs([absent])


@pytest.fixture
def align_recipe():
    return read_recipe(recipe_file("quickstart-align"))


@pytest.fixture
def tune_recipe():
    return read_recipe(recipe_file("quickstart-tune"))


def test_options_of_a_variant_come_before_the_plan_s_and_the_recipe_s(
    tmp_path, align_recipe, tune_recipe
):
    plan = write_plan(tmp_path)
    first_options, second_options = plan.options(run_of(plan, "one/b/1"))
    assert first_options == {
        **align_recipe,
        "max_steps": 9,
        "warmup_steps": 1,
        "seed": 1,
    }
    assert second_options == {
        **tune_recipe,
        "max_steps": 7,
        "seed": 1,
    }


def test_options_of_a_group_come_before_the_plan_s(tmp_path, align_recipe):
    plan = write_plan(tmp_path)
    first_options, second_options = plan.options(run_of(plan, "two/a/3"))
    assert first_options == {
        **align_recipe,
        "max_steps": 5,
        "warmup_steps": 4,
        "seed": 3,
    }
    assert second_options == {
        **align_recipe,
        "max_steps": 11,
        "seed": 3,
    }
    assert "lora_r" not in second_options


def test_rows_of_options_are_those_of_all_steps(tmp_path, align_recipe):
    plan = write_plan(tmp_path)
    first_options, _ = plan.options(run_of(plan, "two/a/3"))
    assert rows_of(first_options) == 5 * align_recipe["global_batch_size"]


def test_a_stage_is_its_recipe_with_changes(tune_recipe):
    assert stage("quickstart-tune", lora_r=3) == tune_recipe | {"lora_r": 3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grups": {}}, "grups"),
        ({"decisions": {"H1": ["one/a"]}}, "H1 must name runs"),
        ({"decisions": {"H1": []}}, "H1 must name runs"),
        ({"groups": ["one"]}, ""),
        ({"differences": {"D": ["one/a", "one/c"]}}, "D must name runs"),
        ({"groups": {"one": {"question": "?", "variants": {"a": None}}}}, "seeds"),
        ({"variant": {"arn": "gwc"}}, "arn"),
        ({"commands": True, "variant": {"gradient": 2.0}}, "one/a/2 changes more than arm"),
        ({"commands": True, "variant": {"enters_at": 1}}, "one/a/2 changes more than arm"),
    ],
    ids=str,
)
def test_content_that_no_plan_has_is_refused(tmp_path, changes, reason):
    message = rf"mine\.yaml is not a plan of an experiment: .*{reason}"
    with pytest.raises(ValueError, match=message):
        write_plan(tmp_path, **changes)


def test_an_absent_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gone.yaml is not a plan"):
        read_plan(tmp_path / "gone.yaml")


def test_a_plan_that_is_not_yaml_is_refused(tmp_path):
    plan_path = tmp_path / "broken.yaml"
    plan_path.write_text("a: [")
    with pytest.raises(ValueError, match="broken.yaml is not a plan"):
        read_plan(plan_path)


def test_a_plan_of_commands_may_change_the_arm_and_the_options(tmp_path):
    plan = write_plan(tmp_path, commands=True)
    assert len(plan.runs()) == 7


def test_results_are_beside_the_plan_or_where_they_are_asked_for(tmp_path, monkeypatch):
    write_plan(tmp_path)
    asked_for = tmp_path / "x"
    assert read_plan(tmp_path / "mine.yaml", asked_for).results == asked_for
    monkeypatch.chdir(tmp_path)
    assert read_plan(Path("mine.yaml")).results == tmp_path / "results" / "mine"


def test_defaults_of_a_plan_are_as_the_readme_of_experiments_has_them(tmp_path):
    plan = write_plan(tmp_path, commands=True)
    assert plan.bf16 is False
    assert plan.diagnosed == 32
    assert plan.feature_layer == -4


def options_of(words):
    """Returns the options of a command line by name."""
    return dict(zip(words[::2], words[1::2], strict=True))


def write_files(run_folder, *names):
    """Writes what the commands of a run leave behind."""
    for file_name in names:
        written = run_folder / file_name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("{}")


STEP_NAMES = [
    "build",
    "stage1",
    "stage2",
    "merge",
    "evaluate",
    "diagnose stage 1",
    "diagnose",
]


@pytest.fixture
def detailed_plan(tmp_path):
    """A plan of commands that sets all that commands depend on."""
    return write_plan(
        tmp_path,
        commands=True,
        bf16=True,
        diagnosed=9,
        feature_layer=-3,
        accelerate={"stage2": "fsdp2"},
        evaluate={"limit": 4},
        diagnose={"seed": 2},
    )


@pytest.fixture
def detailed_run(detailed_plan):
    return run_of(detailed_plan, "one/b/1")


@pytest.fixture
def work(tmp_path):
    """The folder of the runs' folders."""
    return tmp_path / "work"


@pytest.fixture
def run_folder(work, detailed_run):
    return work / detailed_run.key


@pytest.fixture
def words_of_steps(detailed_plan, detailed_run, work):
    """The words of each command after `normalign`."""
    run_steps = steps(detailed_plan, detailed_run, "v", "l", work, 1)
    return {step_name: step.words for step_name, step in run_steps.items()}


def test_the_commands_of_a_run_follow_each_other(detailed_plan, detailed_run, work):
    run_steps = steps(detailed_plan, detailed_run, "v", "l", work, 1)
    assert list(run_steps) == STEP_NAMES
    for step in run_steps.values():
        assert not step.done


def test_the_command_that_builds(words_of_steps, run_folder):
    command, *options = words_of_steps["build"]
    assert command == "build"
    assert options_of(options) == {
        "--vision": "v",
        "--language": "l",
        "--arm": "gwc",
        "--seed": "1",
        "--feature-layer": "-3",
        "--output": f"{run_folder}/untrained",
    }


@pytest.mark.parametrize(("name", "start"), [("stage1", "untrained"), ("stage2", "stage1")])
def test_the_command_that_trains(
    words_of_steps, detailed_plan, detailed_run, work, run_folder, name, start
):
    command, *options = words_of_steps[name]
    assert command == "train"
    command_text = shlex.join(options)
    assert f"--model_name_or_path {run_folder}/{start} " in command_text
    assert f"--output_dir {run_folder}/{name} " in command_text
    data_folder = own_data(detailed_plan, detailed_run, work)
    assert f"--dataset_name {data_folder}/{name} " in command_text
    assert "--resume_from_checkpoint last" in command_text
    assert "--bf16 True" in command_text
    assert "accelerate" not in command_text
    assert "--seed 1" in command_text


def test_the_command_that_merges(words_of_steps, run_folder):
    command, adapter, *options = words_of_steps["merge"]
    assert command == "merge"
    assert adapter == f"{run_folder}/stage2"
    assert options_of(options) == {
        "--output": f"{run_folder}/model",
        "--base": f"{run_folder}/stage1",
    }


def test_the_command_that_evaluates(words_of_steps, run_folder):
    command, model, *options = words_of_steps["evaluate"]
    assert command == "evaluate"
    assert model == f"{run_folder}/model"
    assert options_of(options) == {
        "--tasks": "pope,mmstar",
        "--limit": "4",
    }


@pytest.mark.parametrize(
    ("name", "diagnosed"),
    [
        ("diagnose stage 1", "stage1"),
        ("diagnose", "model"),
    ],
)
def test_the_command_that_diagnoses(words_of_steps, run_folder, name, diagnosed):
    command, model, *options = words_of_steps[name]
    assert command == "diagnose"
    assert model == f"{run_folder}/{diagnosed}"
    assert options_of(options) == {
        "--samples": "9",
        "--seed": "2",
    }


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(("name", "config"), [("stage1", "ddp"), ("stage2", "fsdp2")])
def test_training_on_several_devices_is_started_by_accelerate(
    detailed_plan, detailed_run, work, gpus, name, config
):
    run_steps = steps(detailed_plan, detailed_run, "v", "l", work, gpus)
    command_text = shlex.join(run_steps[name].words)
    assert f"--accelerate_config {config} --num_processes {gpus}" in command_text


def test_the_folder_of_own_data_has_the_seed_and_the_rows_of_both_stages(
    detailed_plan, detailed_run, work
):
    first_options, second_options = detailed_plan.options(detailed_run)
    data_folder = own_data(detailed_plan, detailed_run, work)
    assert data_folder.name == f"data-1-{rows_of(first_options)}-{rows_of(second_options)}"


@pytest.fixture
def written_data(monkeypatch):
    """The arguments with which data would be written."""
    recorded_calls = []

    def write_stage_data(*arguments):
        recorded_calls.append(arguments)

    monkeypatch.setattr(commands, "write_stage_data", write_stage_data)
    return recorded_calls


def test_own_data_of_a_run_are_of_its_seed_and_of_both_its_stages(tmp_path, written_data):
    plan = write_plan(tmp_path, commands=True)
    first_run = plan.runs()[0]
    first_options, second_options = plan.options(first_run)
    first_rows = rows_of(first_options)
    second_rows = rows_of(second_options)
    assert first_rows != second_rows

    commands.write_own_data(plan, first_run, tmp_path)
    data_folder = tmp_path / f"data-2-{first_rows}-{second_rows}"
    assert written_data == [(data_folder, first_rows, second_rows, 2)]


def test_nothing_is_written_where_stages_name_data(tmp_path, written_data):
    plan = write_plan(tmp_path, commands=True, **OF_OTHER_DATA)
    commands.write_own_data(plan, plan.runs()[0], tmp_path)
    assert written_data == []


def test_bf16_is_passed_on_if_it_is_false(tmp_path, work):
    plan = write_plan(tmp_path, commands=True)
    run_steps = steps(plan, plan.runs()[0], "v", "l", work, 1)
    assert "--bf16 False" in shlex.join(run_steps["stage1"].words)


def names_left(run_steps):
    return [step_name for step_name, step in run_steps.items() if not step.done]


def test_a_command_is_done_if_what_it_writes_is_there(tmp_path, work):
    plan = write_plan(tmp_path, commands=True)
    first_run = plan.runs()[0]
    run_folder = work / first_run.key
    # These are written before a command has ended.
    write_files(
        run_folder,
        "stage1/diagnostics/interface.png",
        "stage1/checkpoint-1/config.json",
    )
    steps_left = list(STEP_NAMES)
    for step_name, written in (
        ("build", "untrained/config.json"),
        ("stage1", "stage1/training.json"),
        ("stage2", "stage2/training.json"),
        ("merge", "model/config.json"),
        ("diagnose stage 1", "stage1/diagnostics/report.json"),
        ("diagnose", "model/diagnostics/report.json"),
    ):
        write_files(run_folder, written)
        steps_left.remove(step_name)
        assert names_left(steps(plan, first_run, "v", "l", work, 1)) == steps_left


def test_evaluation_is_done_if_all_tasks_are(tmp_path, work):
    plan = write_plan(tmp_path, commands=True)
    first_run = plan.runs()[0]
    model = work / first_run.key / "model"
    for task, evaluated in (("pope", False), ("mmstar", True)):
        Evaluation(task, task, [Metric("acc", 0.5)], 9, 9, []).write(model)
        assert steps(plan, first_run, "v", "l", work, 1)["evaluate"].done == evaluated


@pytest.fixture
def all_trained_plan(tmp_path):
    """A plan without adapters."""
    all_trained = {
        **BASE["stage2"],
        "use_peft": None,
        "dataset_name": "some/data",
    }
    return write_plan(
        tmp_path,
        commands=True,
        stage1=BASE["stage1"] | all_trained,
        stage2=all_trained,
        bf16=None,
    )


def test_where_everything_is_trained_nothing_is_merged(all_trained_plan, work):
    run = all_trained_plan.runs()[1]
    run_steps = steps(all_trained_plan, run, "v", "l", work, 1)
    assert "merge" not in run_steps
    for step_name in ("evaluate", "diagnose"):
        assert run_steps[step_name].words[1] == str(work / run.key / "stage2")


def test_named_data_are_not_made_and_bf16_is_left_to_train_if_it_is_not_set(all_trained_plan, work):
    run = all_trained_plan.runs()[1]
    assert own_data(all_trained_plan, run, work) is None
    run_steps = steps(all_trained_plan, run, "v", "l", work, 1)
    command_text = shlex.join(run_steps["stage2"].words)
    assert "--dataset_name some/data" in command_text
    assert "bf16" not in command_text


def test_answers_are_kept_in_the_order_of_their_questions():
    answers = {
        ("pope", 10, "x"): 0.0,
        ("pope", 2, "y"): 1 / 3,
    }
    other_questions = {
        ("pope", 2, "y"): 1.0,
        ("pope", 10, "z"): 0.0,
    }
    stored = _stored(answers)
    assert stored["scores"] == [0.333333, 0.0]
    in_another_order = dict(reversed(answers.items()))
    assert _stored(in_another_order)["asked"] == stored["asked"]
    assert _stored(other_questions)["asked"] != stored["asked"]


@pytest.fixture
def diagnosed_report():
    """A report of a diagnosis, with more than is kept."""
    rotation = {
        "visual": {"mean": [0.1, 0.2], "sd": [1]},
        "text": {"mean": [0.3, 0.4], "sd": [1]},
    }
    return {
        "interface": {"ratio": 1.5, "ratio_data": 9.0},
        "depth": {"asymmetry": 0.7, "rotation": rotation},
        "gain": None,
    }


def test_of_a_diagnosis_what_the_report_needs_is_kept(diagnosed_report):
    assert _diagnosis(diagnosed_report) == {
        "entry": 1.5,
        "rotation": 0.7,
        "gain": None,
        "rotations": {"visual": [0.1, 0.2], "text": [0.3, 0.4]},
    }


def test_of_a_gain_its_size_and_start_are_kept(diagnosed_report):
    diagnosed_report["gain"] = {"mean_abs": 0.25, "start": 0.5, "n_text": 3.0}
    assert _diagnosis(diagnosed_report)["gain"] == {"mean_abs": 0.25, "start": 0.5}


def test_information_is_the_mean_of_the_last_160_steps():
    logged = []
    for step, nats in (
        (40, 100.0),
        (80, 100.0),
        (120, 1.0),
        (160, 2.0),
        (200, 3.0),
        (240, 6.0),
    ):
        logged.append({"all_steps": step, "information": nats, "information/shape": -nats})
    assert information({"information": logged}) == 3.0
    assert information({"information": logged}, "information/shape") == -3.0


@pytest.fixture
def stored_run(tmp_path):
    """A plan, its first run, and where the run's result is stored."""
    plan = write_plan(tmp_path)
    first_run = plan.runs()[0]
    return plan, first_run, plan.results / f"{first_run.key}.json"


def test_a_run_may_have_no_result_yet_but_a_report_needs_one(stored_run):
    plan, first_run, _ = stored_run
    assert read_result(plan, first_run) is None
    with pytest.raises(ValueError, match=r"has no result\. Run"):
        write_report(plan)


def test_a_result_that_cannot_be_read_is_refused(stored_run):
    plan, first_run, result_path = stored_run
    plan.results.mkdir(parents=True)
    result_path.write_text("{")
    with pytest.raises(ValueError, match=rf"{result_path.name} cannot be read"):
        read_result(plan, first_run)


def test_a_result_of_other_settings_is_refused(stored_run):
    plan, first_run, result_path = stored_run
    plan.results.mkdir(parents=True)
    stored = {
        "settings": {"arm": "none"},
        "options": options_by_stage(plan, first_run),
        "bf16": False,
    }
    # It was stored before other settings were known.
    result_path.write_text(json.dumps(stored))
    assert read_result(plan, first_run) == stored

    for changes in (
        {"settings": {"arm": "gwc"}},
        {"bf16": True},
        {"options": {}},
    ):
        result_path.write_text(json.dumps(stored | changes))
        with pytest.raises(ValueError, match="other settings than mine"):
            read_result(plan, first_run)


def test_what_training_logged_is_kept_for_each_step(tmp_path):
    log_history = [
        {"step": 1, "loss": 2.123456, "grad_norm": 1.0, "grad_norm/gain": 0.5, "epoch": 0.1},
        {"step": 1, "information": 1.0},
        {"step": 2, "loss": 1.0, "learning_rate": 0.0, "norm/visual": 3.0, "grad_norm": None},
        {"loss": 1.0, "clip/share": 0.5, "norm/text": 2.0, "gain/mean_abs": 0.25},
    ]
    trainer_state = {"log_history": log_history}
    (tmp_path / "trainer_state.json").write_text(json.dumps(trainer_state))
    assert curve(tmp_path) == {
        "step": [1.0, 2.0, None],
        "loss": [2.1235, 1.0, 1.0],
        "learning_rate": [None, 0.0, None],
        "grad_norm": [1.0, None, None],
        "grad_norm/gain": [0.5, None, None],
        "norm/visual": [None, 3.0, None],
        "clip/share": [None, None, 0.5],
        "norm/text": [None, None, 2.0],
        "gain/mean_abs": [None, None, 0.25],
    }


@pytest.fixture(scope="module")
def main():
    """The command's module."""
    main_path = EXPERIMENTS / "__main__.py"
    module_spec = importlib.util.spec_from_file_location("experiments_main", main_path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan_of_parts(tmp_path):
    """A plan that names its vision tower and language model."""
    return write_plan(tmp_path, vision="v", language="l")


@pytest.fixture
def tried_cells(main, plan_of_parts, work, monkeypatch):
    """The runs that are tried. Those of `b` fail; those that are made tell of divergence."""
    tried_runs = []

    def make_run(plan, run, vision, language, work_folder):
        tried_runs.append(run.cell)
        if run.name == "b":
            raise RuntimeError("no luck")
        assert vision == Path("v")
        assert language == Path("l")
        assert work_folder == work
        return {
            "settings": vars(run.variant),
            "options": options_by_stage(plan, run),
            "bf16": plan.bf16,
            "minutes": 30,
            "failed": f"{run.cell} diverged",
        }

    monkeypatch.setattr(main, "make_run", make_run)
    return tried_runs


@pytest.fixture
def first_results(main, plan_of_parts, tried_cells, work):
    """The runs of a group that failed. Another process makes one of them, which is left to it."""
    locks_folder = plan_of_parts.results / ".locks"
    locks_folder.mkdir(parents=True)
    with main.FileLock(locks_folder / "one-a2-seed2.lock"):
        return main.run_plan(plan_of_parts, work, only=["one"])


def test_a_run_that_fails_does_not_stop_the_others(
    capsys, plan_of_parts, tried_cells, first_results
):
    failed = first_results
    assert failed == {
        "one/b/2": "RuntimeError: no luck",
        "one/b/1": "RuntimeError: no luck",
    }
    assert tried_cells == ["one/a/2", "one/b/2", "one/a/1", "one/a2/1", "one/b/1"]
    assert "one/b/2 failed. RuntimeError: no luck" in capsys.readouterr().out
    stored = {result_path.stem for result_path in plan_of_parts.results.glob("*.json")}
    assert stored == {"one-a-seed2", "one-a-seed1", "one-a2-seed1"}


def test_a_stored_result_has_a_line_for_each_key(plan_of_parts, first_results):
    printed_lines = (plan_of_parts.results / "one-a-seed2.json").read_text().splitlines()
    assert [line.split(":")[0].strip('"') for line in printed_lines] == [
        "{",
        "settings",
        "options",
        "bf16",
        "minutes",
        "failed",
        "}",
    ]


def test_a_run_that_has_a_result_is_not_made_again(
    main, plan_of_parts, tried_cells, first_results, work
):
    tried_cells.clear()
    main.run_plan(plan_of_parts, work, only=["one/a", "one/a2"])
    assert tried_cells == ["one/a2/2"]


def test_the_command_fails_if_a_run_does_and_reports_the_others(
    main, plan_of_parts, first_results, tmp_path, work, capsys
):
    plan_path = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit) as exit_info:
        main.main(["run", str(plan_path), "--work", str(work)])
    assert exit_info.value.code == 1
    assert "Failed: one/b/2, one/b/1." in capsys.readouterr().err
    report_text = (plan_of_parts.results / "report.md").read_text()
    assert "5 of 7 runs are finished, 5 of them failed. They took 2.5 hours" in report_text
    assert "\ntwo-a-seed3 failed: two/a/3 diverged\n" in report_text


def test_a_stored_result_of_other_settings_ends_a_plan_before_anything_is_made(
    main, plan_of_parts, tried_cells, work
):
    plan_of_parts.results.mkdir(parents=True)
    last_run = plan_of_parts.runs()[-1]
    result_path = plan_of_parts.results / f"{last_run.key}.json"
    result_path.write_text('{"settings": {}, "options": {}, "bf16": true}')
    with pytest.raises(ValueError, match="other settings than mine"):
        main.run_plan(plan_of_parts, work)
    assert tried_cells == []


@pytest.fixture
def plan_calls(main, monkeypatch):
    """The arguments with which plans would be run."""
    recorded_calls = []

    def run_plan(plan, *arguments):
        recorded_calls.append((plan.results, *arguments))
        return {}

    monkeypatch.setattr(main, "run_plan", run_plan)
    monkeypatch.setattr(main, "write_report", lambda plan: plan.results / "report.md")
    return recorded_calls


def test_the_words_of_the_command_reach_the_runs(main, plan_calls, tmp_path, capsys):
    write_plan(tmp_path)
    results_folder = tmp_path / "r"
    work = tmp_path / "w"
    arguments = [
        str(tmp_path / "mine.yaml"),
        *("--results", str(results_folder)),
        *("--work", str(work)),
        *("--only", "one/a", "two"),
        *("--gpus", "3"),
    ]
    main.main(["run", *arguments])
    assert plan_calls == [(results_folder, work, ["one/a", "two"], 3)]
    assert capsys.readouterr().out == f"Report: {results_folder / 'report.md'}\n"

    plan_calls.clear()
    main.main(["report", *arguments])
    assert plan_calls == []


def test_by_default_all_devices_are_used(main):
    parsed = main.command_parser().parse_args(["run", "p"])
    assert parsed.gpus == (torch.cuda.device_count() or 1)


@pytest.fixture
def plan_of_commands(tmp_path):
    """A plan of commands on data of others."""
    return write_plan(
        tmp_path,
        commands=True,
        vision="v",
        language="l",
        **OF_OTHER_DATA,
    )


def print_commands(main, folder, work, cell, gpus):
    main.main(
        [
            "run",
            str(folder / "mine.yaml"),
            *("--work", str(work)),
            *("--gpus", gpus),
            "--print",
            *("--only", cell),
        ]
    )


def test_commands_are_printed_that_are_still_needed(main, plan_of_commands, tmp_path, work, capsys):
    write_files(
        work / "one-a-seed1",
        "untrained/config.json",
        "stage1/training.json",
    )
    print_commands(main, tmp_path, work, "one/a/1", "1")
    first_line, *printed_lines, last_line = capsys.readouterr().out.splitlines()
    assert first_line == "# one/a/1"
    printed_commands = []
    for line in printed_lines:
        assert line.startswith("normalign ")
        printed_commands.append(shlex.split(line)[1])
    assert printed_commands == ["train", "merge", "evaluate", "diagnose", "diagnose"]
    assert last_line.startswith("python ")
    assert shlex.split(last_line)[-1] == "one/a/1"


def test_of_a_finished_run_nothing_is_printed(main, plan_of_commands, tmp_path, work, capsys):
    finished = run_of(plan_of_commands, "one/a/1")
    stored = {
        "settings": vars(finished.variant),
        "options": options_by_stage(plan_of_commands, finished),
        "bf16": plan_of_commands.bf16,
    }
    plan_of_commands.results.mkdir(parents=True)
    result_path = plan_of_commands.results / f"{finished.key}.json"
    result_path.write_text(json.dumps(stored))

    print_commands(main, tmp_path, work, "one/a", "2")
    printed = capsys.readouterr().out
    assert "# one/a/2" in printed
    assert "# one/a/1" not in printed
    assert "--num_processes 2" in printed
    assert work.is_dir()


def test_the_command_says_if_the_plan_is_absent(main, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["run", str(tmp_path / "gone.yaml")])
    assert exit_info.value.code == 1
    assert "Error: " in capsys.readouterr().err


def test_parts_are_the_group_s_before_the_plan_s():
    plan = Plan(
        "p",
        Path("r"),
        {},
        {},
        {"a": {}, "b": {"language": "own"}},
        [],
    )
    plan = replace(plan, vision="v", language="l")
    assert parts(plan, "a") == ("v", "l")
    assert parts(plan, "b") == ("v", "own")


def write_stage_row(stage_folder, image_number, text):
    content = [{"type": "text", "text": text}]
    sample_row = {
        "images": [{"bytes": training.image(image_number), "path": None}],
        "messages": [{"role": "user", "content": content}],
    }
    features = Features({"images": List(Image()), "messages": MESSAGES})
    Dataset.from_list([sample_row], features=features).save_to_disk(stage_folder)


def hash_of(folder, first, second):
    """Returns the hash of data with a row, an image's number and a text, for each stage."""
    write_stage_row(folder / "stage1", *first)
    write_stage_row(folder / "stage2", *second)
    return data_hash(folder)


def test_a_hash_of_the_data_tells_images_words_and_stages_apart(tmp_path):
    first_row = (0, "a")
    second = (1, "b")
    hashes = {
        hash_of(tmp_path / "one", first_row, second),
        hash_of(tmp_path / "stages-exchanged", second, first_row),
        hash_of(tmp_path / "another-image", first_row, (2, "b")),
        hash_of(tmp_path / "other-words", (0, "c"), second),
    }
    assert len(hashes) == 4


def test_the_hash_of_equal_data_is_equal(tmp_path):
    first_row = (0, "a")
    second = (1, "b")
    first_hash = hash_of(tmp_path / "one", first_row, second)
    assert hash_of(tmp_path / "again", first_row, second) == first_hash


@pytest.fixture
def drawn_images(monkeypatch):
    """The numbers of the images that a seed draws. Recipes have the seeds 0 and 2."""
    by_seed = {
        0: [1, 1, 3],
        2: [3, 4],
    }

    def draw(row_count, emoji_share=None, seed=None):
        assert seed in (0, 2) or emoji_share == 0.0
        numbers = list(by_seed.get(seed, range(row_count)))
        images = [[{"bytes": b"%d" % number, "path": None}] for number in numbers]
        features = Features({"images": List(Image()), "row": Value("int64")})
        return Dataset.from_dict({"images": images, "row": numbers}, features=features)

    monkeypatch.setattr(runs, "training_data", draw)
    return by_seed


def test_an_experiment_s_data_show_no_image_on_which_its_recipes_were_chosen(
    tmp_path, drawn_images
):
    data_folder = tmp_path / "data"
    runs.write_data(data_folder, 3, 2, 7)
    # What is there is not written again.
    runs.write_data(data_folder, 9, 9, 7)
    assert load_from_disk(data_folder / "stage1")["row"][:] == [0, 2, 5]
    assert load_from_disk(data_folder / "stage2")["row"][:] == [6, 7]


def test_too_few_new_images_are_refused(tmp_path, drawn_images):
    drawn_images[7] = [1, 2, 3]
    with pytest.raises(ValueError, match="There are 1 rows of new images; 2 are needed"):
        runs.write_data(tmp_path / "few", 1, 1, 7)


TRAINED_WITH = {
    "hardware": {"devices": ["a CPU"]},
    "versions": {"torch": "2"},
    "commit": "c" * 40,
}


def diagnosis_report(ratio):
    """Returns what a diagnosis stores, as far as a result has it."""
    rotation = {
        "visual": {"mean": [ratio, 2.0]},
        "text": {"mean": [ratio, 2.0]},
    }
    report = {
        "interface": {"ratio": ratio},
        "depth": {"asymmetry": ratio / 2, "rotation": rotation},
        "gain": None,
        "dynamics": [{"step": 0, "of": ratio}],
    }
    return {"report": report}


def option_path(command, option):
    return Path(command[command.index(option) + 1])


class CommandsInPlace:
    """Stands for `subprocess.run`: leaves behind what the package's commands leave."""

    def __init__(self, tasks):
        self.tasks = tasks
        self.statuses = {}
        self.called = []

    def run(self, command):
        assert command[:3] == [sys.executable, "-m", "normalign_llava"]
        step_name = command[3]
        self.called.append(step_name)
        status = self.statuses.get(step_name, 0)
        if status == 0:
            self.write(step_name, command)
        return SimpleNamespace(returncode=status)

    def write(self, name, command):
        if name == "train":
            self.write_training(option_path(command, "--output_dir"))
        elif name == "evaluate":
            for task in self.tasks:
                Evaluation(task, task, [Metric("acc", 0.5)], 9, 9, []).write(Path(command[4]))
        elif name == "diagnose":
            self.write_diagnosis(Path(command[4]))
        else:
            option_path(command, "--output").mkdir(parents=True)

    def write_training(self, stage_folder):
        write_files(stage_folder, "checkpoint-1/a.pt")
        record = {
            "seconds": 5.0,
            "processes": 2,
            "steps": 9,
        }
        if stage_folder.name == "stage2":
            record |= TRAINED_WITH
            record["seconds"] = 7.0
        (stage_folder / "training.json").write_text(json.dumps(record))

    def write_diagnosis(self, model_folder):
        ratio = 3.0
        if model_folder.name == "stage1":
            ratio = 1.0
        write_files(model_folder, "diagnostics/report.json")
        report_path = model_folder / "diagnostics" / "report.json"
        report_path.write_text(json.dumps(diagnosis_report(ratio)))


@pytest.fixture(params=[True, False], ids=["merged", "all-trained"])
def merged(request):
    return request.param


@pytest.fixture
def command_plan(tmp_path, merged):
    """A plan of commands, whose adapters are merged or that has none."""
    stages = {stage_name: dict(options) for stage_name, options in OF_OTHER_DATA.items()}
    if not merged:
        stages["stage2"]["use_peft"] = None
    return write_plan(tmp_path, commands=True, **stages)


@pytest.fixture
def command_run(command_plan):
    return command_plan.runs()[0]


@pytest.fixture
def in_place(command_plan, command_run, work, merged, monkeypatch):
    """The commands in place, and scores of the last model of the run."""
    last_name = "stage2"
    if merged:
        last_name = "model"
    last_model = work / command_run.key / last_name

    def read_scores(name):
        assert name == str(last_model)
        return SimpleNamespace(runs=[{"pope acc": {("pope", 0, "x"): 1.0}}])

    stand_in = CommandsInPlace(command_plan.tasks)
    monkeypatch.setattr(commands.subprocess, "run", stand_in.run)
    monkeypatch.setattr(commands, "read_scores", read_scores)
    return stand_in


@pytest.fixture
def called_until_evaluation(in_place, command_plan, command_run, work, merged):
    """What is called until evaluation fails."""
    in_place.statuses["evaluate"] = 3
    with pytest.raises(ValueError, match=r"status 3: normalign evaluate .*pope,mmstar"):
        commands.run_commands(command_plan, command_run, "v", "l", work, 1)
    called = list(in_place.called)
    in_place.called.clear()
    in_place.statuses.clear()
    return called


def test_a_command_that_fails_ends_a_run_and_the_next_run_goes_on_from_there(
    called_until_evaluation, in_place, command_plan, command_run, work, merged
):
    merging = []
    if merged:
        merging = ["merge"]
    assert called_until_evaluation == ["build", "train", "train", *merging, "evaluate"]
    commands.run_commands(command_plan, command_run, "v", "l", work, 1)
    assert in_place.called == ["evaluate", "diagnose", "diagnose"]


@pytest.fixture
def run_result(called_until_evaluation, command_plan, command_run, work):
    """The result of the run, of which building was recorded to have taken ten minutes."""
    times_path = work / command_run.key / "times.json"
    step_times = json.loads(times_path.read_text())
    step_times["build"]["seconds"] = 600.0
    times_path.write_text(json.dumps(step_times))
    return commands.run_commands(command_plan, command_run, "v", "l", work, 1)


def test_the_result_of_commands_names_its_run(run_result, command_run):
    assert run_result["group"] == "one"
    assert run_result["variant"] == "a"
    assert run_result["seed"] == 2
    assert run_result["settings"] == vars(command_run.variant)
    assert run_result["bf16"] is False


def test_the_result_of_commands_has_the_times_of_all_of_them(run_result, merged):
    times = run_result["times"]
    assert times.pop("build")["seconds"] == 600.0
    assert run_result["minutes"] == pytest.approx(10.0, abs=0.1)
    expected = [step_name for step_name in STEP_NAMES if step_name != "build"]
    if not merged:
        expected.remove("merge")
    assert list(times) == expected
    for step_times in times.values():
        assert step_times["seconds"] < 9


def test_the_result_of_commands_has_what_training_recorded(run_result, work):
    assert run_result["training"] == {
        "stage1": {"seconds": 5.0, "processes": 2},
        "stage2": {"seconds": 7.0, "processes": 2},
    }
    for field_name, recorded in TRAINED_WITH.items():
        assert run_result[field_name] == recorded
    # What resuming needed is removed.
    assert not list(work.rglob("checkpoint-*"))


def test_the_result_of_commands_has_what_was_evaluated_and_diagnosed(run_result):
    assert run_result["scores"] == {"pope acc": 0.5, "mmstar acc": 0.5}
    assert run_result["columns"] == {}
    assert run_result["answers"]["pope acc"]["scores"] == [1.0]
    assert run_result["diagnosis"]["stage1"]["entry"] == 1.0
    assert run_result["diagnosis"]["stage2"]["entry"] == 3.0
    assert run_result["dynamics"] == [{"step": 0, "of": 1.0}]
