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
    "stage1": {"recipe": "quickstart-align", "max_steps": 5, "warmup_steps": 1},
    "stage2": {"recipe": "quickstart-tune", "max_steps": 7},
    "tasks": ["pope", "mmstar"],
    "groups": {
        "one": {
            "question": "First?",
            "seeds": [2, 1],
            "variants": {"a": {"arm": "none"}, "a2": None, "b": {"stage1": {"max_steps": 9}}},
        },
        "two": {
            "question": "Second?",
            "seeds": [3],
            "variants": {"a": {"stage2": {"lora_r": None, "max_steps": 11}}},
            "stage1": {"warmup_steps": 4},
            "stage2": {"recipe": "quickstart-align"},
        },
    },
}


def plan_of(tmp_path, **changes):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(BASE | changes, sort_keys=False))
    return read_plan(tmp_path / "mine.yaml")


def cells(runs):
    return [run.cell for run in runs]


def test_runs_are_in_order_of_groups_and_seeds_and_some_are_optional(tmp_path):
    plan = plan_of(tmp_path, optional=["a2"], variant={"arm": "unit", "text": 2.0})
    every = ["one/a/2", "one/a2/2", "one/b/2", "one/a/1", "one/a2/1", "one/b/1", "two/a/3"]
    assert cells(plan.runs()) == every
    assert cells(plan.runs([])) == [cell for cell in every if "a2" not in cell]
    assert cells(plan.runs(["one/a"])) == ["one/a/2", "one/a/1"]
    assert cells(plan.runs(["one/a2/1", "two"])) == ["one/a2/1", "two/a/3"]
    first, second = plan.runs()[:2]
    assert first.variant == Variant("none", text=2.0) and second.variant == Variant("unit", 2.0)
    assert first.key == "one-a-seed2" and plan.results == tmp_path / "results" / "mine"
    for name in ("three", "one/c", "one/a/3", "one/"):
        with pytest.raises(ValueError, match=f"mine has no '{name}'.* one/a/2"):
            plan.runs([name])


def test_options_are_the_variant_s_before_the_group_s_the_plan_s_and_the_recipe_s(tmp_path):
    plan = plan_of(tmp_path)
    runs = {run.cell: run for run in plan.runs()}
    align, tune = (read_recipe(recipe_file(f"quickstart-{name}")) for name in ("align", "tune"))
    first, second = plan.options(runs["one/b/1"])
    assert first == align | {"max_steps": 9, "warmup_steps": 1, "seed": 1}
    assert second == tune | {"max_steps": 7, "seed": 1}
    first, second = plan.options(runs["two/a/3"])
    assert first == align | {"max_steps": 5, "warmup_steps": 4, "seed": 3}
    assert second == align | {"max_steps": 11, "seed": 3} and "lora_r" not in second
    assert rows_of(first) == 5 * align["global_batch_size"]
    assert stage("quickstart-tune", lora_r=3) == tune | {"lora_r": 3}


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_what_no_plan_has_is_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=rf"mine\.yaml is not a plan of an experiment: .*{said}"):
        plan_of(tmp_path, **changes)
    for file, content in {"gone.yaml": None, "broken.yaml": "a: ["}.items():
        if content:
            (tmp_path / file).write_text(content)
        with pytest.raises(ValueError, match=f"{file} is not a plan"):
            read_plan(tmp_path / file)


def test_a_plan_of_commands_may_change_the_arm_and_the_options(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, commands=True)
    assert len(plan.runs()) == 7
    assert read_plan(tmp_path / "mine.yaml", tmp_path / "x").results == tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    assert read_plan(Path("mine.yaml")).results == tmp_path / "results" / "mine"
    defaults = plan.bf16, plan.diagnosed, plan.feature_layer
    assert defaults == (False, 32, -4)  # as experiments/README.md has them


def values(words):
    """The options of a command line, by name."""
    return dict(zip(words[::2], words[1::2], strict=True))


def made(work, key, *names):
    """Writes what the commands of a run leave behind."""
    for name in names:
        file = work / key / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")


def test_the_commands_of_a_run_follow_each_other(tmp_path):
    plan = plan_of(
        tmp_path, commands=True, bf16=True, diagnosed=9, feature_layer=-3,
        accelerate={"stage2": "fsdp2"}, evaluate={"limit": 4}, diagnose={"seed": 2},
    )  # fmt: skip
    runs = {run.cell: run for run in plan.runs()}
    work = tmp_path / "work"
    folder = work / "one-b-seed1"
    commands = steps(plan, runs["one/b/1"], "v", "l", work, 1)
    names = ["build", "stage1", "stage2", "merge", "evaluate", "diagnose stage 1", "diagnose"]
    assert list(commands) == names and not any(step.done for step in commands.values())
    said = {name: step.words for name, step in commands.items()}
    assert said["build"][0] == "build" and values(said["build"][1:]) == {
        **{"--vision": "v", "--language": "l", "--arm": "gwc", "--seed": "1"},
        **{"--feature-layer": "-3", "--output": f"{folder}/untrained"},
    }
    first, second = plan.options(runs["one/b/1"])
    assert (
        own_data(plan, runs["one/b/1"], work).name == f"data-1-{rows_of(first)}-{rows_of(second)}"
    )
    data = own_data(plan, runs["one/b/1"], work)
    for name, start, rows in (("stage1", "untrained", "stage1"), ("stage2", "stage1", "stage2")):
        assert said[name][0] == "train"
        text = shlex.join(said[name])
        assert f"--model_name_or_path {folder}/{start} " in text
        assert f"--output_dir {folder}/{name} " in text and f"--dataset_name {data}/{rows} " in text
        assert "--resume_from_checkpoint last" in text and "--bf16 True" in text
        assert "accelerate" not in text and "--seed 1" in text
    assert said["merge"][:2] == ["merge", f"{folder}/stage2"]
    assert values(said["merge"][2:]) == {
        "--output": f"{folder}/model",
        "--base": f"{folder}/stage1",
    }
    asked = {"--tasks": "pope,mmstar", "--limit": "4"}
    assert said["evaluate"][:2] == ["evaluate", f"{folder}/model"]
    assert values(said["evaluate"][2:]) == asked
    for name, model in (("diagnose stage 1", "stage1"), ("diagnose", "model")):
        assert said[name][:2] == ["diagnose", f"{folder}/{model}"]
        assert values(said[name][2:]) == {"--samples": "9", "--seed": "2"}
    for gpus in (2, 4):
        shared = steps(plan, runs["one/b/1"], "v", "l", work, gpus)
        for name, config in (("stage1", "ddp"), ("stage2", "fsdp2")):
            text = shlex.join(shared[name].words)
            assert f"--accelerate_config {config} --num_processes {gpus}" in text


def test_own_data_of_a_run_are_of_its_seed_and_of_both_its_stages(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(commands, "write_stage_data", lambda *args: written.append(args))
    plan = plan_of(tmp_path, commands=True)
    run = plan.runs()[0]
    first, second = map(rows_of, plan.options(run))
    commands.write_own_data(plan, run, tmp_path)
    assert first != second
    assert written == [(tmp_path / f"data-2-{first}-{second}", first, second, 2)]
    named = {name: BASE[name] | {"dataset_name": "some/data"} for name in ("stage1", "stage2")}
    commands.write_own_data(plan_of(tmp_path, commands=True, **named), run, tmp_path)
    assert len(written) == 1


def test_what_a_command_writes_tells_that_it_is_done(tmp_path):
    plan = plan_of(tmp_path, commands=True)
    run = plan.runs()[0]
    work = tmp_path / "work"
    left = ["build", "stage1", "stage2", "merge", "evaluate", "diagnose stage 1", "diagnose"]
    made(work, run.key, "stage1/diagnostics/interface.png", "stage1/checkpoint-1/config.json")
    assert "--bf16 False" in shlex.join(steps(plan, run, "v", "l", work, 1)["stage1"].words)
    for name, file in (
        ("build", "untrained/config.json"),
        ("stage1", "stage1/training.json"),
        ("stage2", "stage2/training.json"),
        ("merge", "model/config.json"),
        ("diagnose stage 1", "stage1/diagnostics/report.json"),
        ("diagnose", "model/diagnostics/report.json"),
    ):
        made(work, run.key, file)
        left.remove(name)
        commands = steps(plan, run, "v", "l", work, 1)
        assert [name for name, step in commands.items() if not step.done] == left
    model = work / run.key / "model"
    for task, is_done in (("pope", False), ("mmstar", True)):
        Evaluation(task, task, [Metric("acc", 0.5)], 9, 9, []).write(model)
        assert steps(plan, run, "v", "l", work, 1)["evaluate"].done == is_done


def test_where_everything_is_trained_nothing_is_merged(tmp_path):
    whole = BASE["stage2"] | {"use_peft": None, "dataset_name": "some/data"}
    plan = plan_of(tmp_path, commands=True, stage1=BASE["stage1"] | whole, stage2=whole, bf16=None)
    run = plan.runs()[1]
    work = tmp_path / "work"
    commands = steps(plan, run, "v", "l", work, 1)
    assert "merge" not in commands and own_data(plan, run, work) is None
    for name in ("evaluate", "diagnose"):
        assert commands[name].words[1] == str(work / run.key / "stage2")
    text = shlex.join(commands["stage2"].words)
    assert "--dataset_name some/data" in text and "bf16" not in text


def test_answers_are_kept_in_the_order_of_their_questions():
    one = {("pope", 10, "x"): 0.0, ("pope", 2, "y"): 1 / 3}
    other = {("pope", 2, "y"): 1.0, ("pope", 10, "z"): 0.0}
    assert _stored(one)["scores"] == [0.333333, 0.0]
    assert _stored(one)["asked"] == _stored(dict(reversed(one.items())))["asked"]
    assert _stored(one)["asked"] != _stored(other)["asked"]


def test_of_a_diagnosis_what_the_report_needs_is_kept():
    curves = {"visual": {"mean": [0.1, 0.2], "sd": [1]}, "text": {"mean": [0.3, 0.4], "sd": [1]}}
    depth = {"asymmetry": 0.7, "rotation": curves}
    report = {"interface": {"ratio": 1.5, "ratio_data": 9.0}, "depth": depth, "gain": None}
    expected = {"entry": 1.5, "rotation": 0.7, "gain": None}
    expected["rotations"] = {"visual": [0.1, 0.2], "text": [0.3, 0.4]}
    assert _diagnosis(report) == expected
    report["gain"] = {"mean_abs": 0.25, "start": 0.5, "n_text": 3.0}
    assert _diagnosis(report)["gain"] == {"mean_abs": 0.25, "start": 0.5}


def test_information_is_the_mean_of_the_last_160_steps():
    entries = [
        {"all_steps": step, "information": nats, "information/shape": -nats}
        for step, nats in ((40, 100.0), (80, 100.0), (120, 1.0), (160, 2.0), (200, 3.0), (240, 6.0))
    ]
    assert information({"information": entries}) == 3.0
    assert information({"information": entries}, "information/shape") == -3.0


def test_a_stored_result_is_that_of_its_run_and_no_other(tmp_path):
    plan = plan_of(tmp_path)
    run = plan.runs()[0]
    file = plan.results / f"{run.key}.json"
    assert read_result(plan, run) is None
    with pytest.raises(ValueError, match=r"has no result\. Run"):
        write_report(plan)
    plan.results.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read"):
        read_result(plan, run)
    options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
    stored = {"settings": {"arm": "none"}, "options": options, "bf16": False}
    file.write_text(json.dumps(stored))  # of before other settings were known
    assert read_result(plan, run) == stored
    for name, other in (("settings", {"arm": "gwc"}), ("bf16", True), ("options", {})):
        file.write_text(json.dumps(stored | {name: other}))
        with pytest.raises(ValueError, match="other settings than mine"):
            read_result(plan, run)


def test_what_training_logged_is_kept_for_each_step(tmp_path):
    log = [
        {"step": 1, "loss": 2.123456, "grad_norm": 1.0, "grad_norm/gain": 0.5, "epoch": 0.1},
        {"step": 1, "information": 1.0},
        {"step": 2, "loss": 1.0, "learning_rate": 0.0, "norm/visual": 3.0, "grad_norm": None},
        {"loss": 1.0, "clip/share": 0.5, "norm/text": 2.0, "gain/mean_abs": 0.25},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert curve(tmp_path) == {
        **{"step": [1.0, 2.0, None], "loss": [2.1235, 1.0, 1.0]},
        **{"learning_rate": [None, 0.0, None], "grad_norm": [1.0, None, None]},
        **{"grad_norm/gain": [0.5, None, None], "norm/visual": [None, 3.0, None]},
        **{"clip/share": [None, None, 0.5], "norm/text": [None, None, 2.0]},
        "gain/mean_abs": [None, None, 0.25],
    }


@pytest.fixture(scope="module")
def main():
    """The command's module."""
    spec = importlib.util.spec_from_file_location("experiments_main", EXPERIMENTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_that_fails_does_not_stop_the_others(main, tmp_path, monkeypatch, capsys):
    plan = plan_of(tmp_path, vision="v", language="l")
    tried = []

    def make_run(plan, run, vision, language, work):
        tried.append(run.cell)
        if run.name == "b":
            raise RuntimeError("no luck")
        assert (vision, language, work) == (Path("v"), Path("l"), tmp_path / "work")
        options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
        settings = {"settings": vars(run.variant), "options": options, "bf16": plan.bf16}
        return {**settings, "minutes": 30, "failed": f"{run.cell} diverged"}

    monkeypatch.setattr(main, "make_run", make_run)
    locks = plan.results / ".locks"
    locks.mkdir(parents=True)
    with main.FileLock(locks / "one-a2-seed2.lock"):  # another process makes it
        failed = main.run_plan(plan, tmp_path / "work", only=["one"])
    assert failed == {"one/b/2": "RuntimeError: no luck", "one/b/1": "RuntimeError: no luck"}
    assert tried == ["one/a/2", "one/b/2", "one/a/1", "one/a2/1", "one/b/1"]
    assert "one/b/2 failed. RuntimeError: no luck" in capsys.readouterr().out
    names = {file.stem for file in plan.results.glob("*.json")}
    assert names == {"one-a-seed2", "one-a-seed1", "one-a2-seed1"}
    lines = (plan.results / "one-a-seed2.json").read_text().splitlines()
    keys = ["settings", "options", "bf16", "minutes", "failed"]
    assert [line.split(":")[0].strip('"') for line in lines] == ["{", *keys, "}"]
    tried.clear()
    main.run_plan(plan, tmp_path / "work", only=["one/a", "one/a2"])
    assert tried == ["one/a2/2"]
    with pytest.raises(SystemExit) as exit:
        main.main(["run", str(tmp_path / "mine.yaml"), "--work", str(tmp_path / "work")])
    assert exit.value.code == 1 and "Failed: one/b/2, one/b/1." in capsys.readouterr().err
    page = (plan.results / "report.md").read_text()
    assert "5 of 7 runs are finished, 5 of them failed. They took 2.5 hours" in page
    assert "\ntwo-a-seed3 failed: two/a/3 diverged\n" in page


def test_a_stored_result_of_other_settings_ends_a_plan_before_anything_is_made(
    main, tmp_path, monkeypatch
):
    plan = plan_of(tmp_path, vision="v", language="l")
    plan.results.mkdir(parents=True)
    last = plan.runs()[-1]
    (plan.results / f"{last.key}.json").write_text('{"settings": {}, "options": {}, "bf16": true}')
    made = []
    monkeypatch.setattr(main, "make_run", lambda *args: made.append(args))
    with pytest.raises(ValueError, match="other settings than mine"):
        main.run_plan(plan, tmp_path / "work")
    assert made == []


def test_the_words_of_the_command_reach_the_runs(main, tmp_path, monkeypatch, capsys):
    plan_of(tmp_path)
    got = []

    def run_plan(plan, *args):
        got.append((plan.results, *args))
        return {}

    monkeypatch.setattr(main, "run_plan", run_plan)
    monkeypatch.setattr(main, "write_report", lambda plan: plan.results / "report.md")
    folders = ["--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")]
    words = [str(tmp_path / "mine.yaml"), *folders, "--only", "one/a", "two", "--gpus", "3"]
    main.main(["run", *words])
    assert got == [(tmp_path / "r", tmp_path / "w", ["one/a", "two"], 3)]
    assert capsys.readouterr().out == f"Report: {tmp_path / 'r' / 'report.md'}\n"
    main.main(["report", *words])
    assert len(got) == 1
    assert main.command_parser().parse_args(["run", "p"]).gpus == (torch.cuda.device_count() or 1)


def test_commands_are_printed_that_are_still_needed(main, tmp_path, capsys):
    options = {"dataset_name": "some/data"}
    changes = {name: BASE[name] | options for name in ("stage1", "stage2")}
    plan_of(tmp_path, commands=True, vision="v", language="l", **changes)
    work = tmp_path / "work"
    made(work, "one-a-seed1", "untrained/config.json", "stage1/training.json")
    words = ["run", str(tmp_path / "mine.yaml"), "--work", str(work), "--gpus", "1", "--print"]
    main.main([*words, "--only", "one/a/1"])
    title, *lines, last = capsys.readouterr().out.splitlines()
    assert title == "# one/a/1"
    commands = [shlex.split(line)[1] for line in lines]
    assert commands == ["train", "merge", "evaluate", "diagnose", "diagnose"]
    assert all(line.startswith("normalign ") for line in lines)
    assert last.startswith("python ") and shlex.split(last)[-1] == "one/a/1"
    plan = read_plan(tmp_path / "mine.yaml")
    run = plan.runs(["one/a/1"])[0]
    options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
    known = {"settings": vars(run.variant), "options": options, "bf16": plan.bf16}
    plan.results.mkdir(parents=True)
    (plan.results / f"{run.key}.json").write_text(json.dumps(known))  # it is finished
    words = [*words[:3], str(tmp_path / "other"), "--gpus", "2", "--print"]
    main.main([*words, "--only", "one/a"])
    printed = capsys.readouterr().out
    assert "# one/a/2" in printed and "# one/a/1" not in printed
    assert "--num_processes 2" in printed and (tmp_path / "other").is_dir()
    with pytest.raises(SystemExit) as exit:
        main.main(["run", str(tmp_path / "gone.yaml")])
    assert exit.value.code == 1 and "Error: " in capsys.readouterr().err


def test_parts_are_the_group_s_before_the_plan_s():
    plan = Plan("p", Path("r"), {}, {}, {"a": {}, "b": {"language": "own"}}, [])
    plan = replace(plan, vision="v", language="l")
    assert parts(plan, "a") == ("v", "l") and parts(plan, "b") == ("v", "own")


def hash_of(folder, *stages):
    """Of a row for each stage: a number of its image, and its words."""
    for name, (number, words) in zip(("stage1", "stage2"), stages, strict=True):
        messages = [{"role": "user", "content": [{"type": "text", "text": words}]}]
        row = {"images": [{"bytes": training.image(number), "path": None}], "messages": messages}
        rows = Dataset.from_list(
            [row], features=Features({"images": List(Image()), "messages": MESSAGES})
        )
        rows.save_to_disk(folder / name)
    return data_hash(folder)


def test_a_hash_of_the_data_tells_images_words_and_stages_apart(tmp_path):
    first = (0, "a")
    second = (1, "b")
    stages = [(first, second), (second, first), (first, (2, "b")), ((0, "c"), second)]
    hashes = [hash_of(tmp_path / str(place), *both) for place, both in enumerate(stages)]
    assert len(set(hashes)) == len(stages)
    assert hash_of(tmp_path / "again", first, second) == hashes[0]


def test_an_experiment_s_data_show_no_image_on_which_its_recipes_were_chosen(tmp_path, monkeypatch):
    shown = {0: [1, 1, 3], 2: [3, 4]}  # by the recipes' seeds

    def drawn(rows, emoji_share=None, seed=None):
        numbers = shown.get(seed, range(rows))
        assert seed in (0, 2) or emoji_share == 0.0
        images = [[{"bytes": b"%d" % number, "path": None}] for number in numbers]
        features = Features({"images": List(Image()), "row": Value("int64")})
        return Dataset.from_dict({"images": images, "row": [*numbers]}, features=features)

    monkeypatch.setattr(runs, "training_data", drawn)
    for first, second in ((3, 2), (9, 9)):
        runs.write_data(tmp_path / "data", first, second, 7)
    stages = [load_from_disk(tmp_path / "data" / name)["row"][:] for name in ("stage1", "stage2")]
    assert stages == [[0, 2, 5], [6, 7]]
    shown[7] = [1, 2, 3]
    with pytest.raises(ValueError, match="There are 1 rows of new images; 2 are needed"):
        runs.write_data(tmp_path / "few", 1, 1, 7)


def report_of(ratio):
    """What a diagnosis stores, as far as a result has it."""
    curves = {kind: {"mean": [ratio, 2.0]} for kind in ("visual", "text")}
    depth = {"asymmetry": ratio / 2, "rotation": curves}
    report = {"interface": {"ratio": ratio}, "depth": depth, "gain": None}
    return {"report": {**report, "dynamics": [{"step": 0, "of": ratio}]}}


@pytest.mark.parametrize("merged", [True, False])
def test_the_result_of_commands_is_read_from_what_they_leave(tmp_path, monkeypatch, merged):
    tune = {} if merged else {"use_peft": None}
    named = {name: BASE[name] | {"dataset_name": "some/data"} for name in ("stage1", "stage2")}
    plan = plan_of(tmp_path, commands=True, stage1=named["stage1"], stage2=named["stage2"] | tune)
    run = plan.runs()[0]
    work = tmp_path / "work"
    folder = work / run.key
    last = "model" if merged else "stage2"
    about = {"hardware": {"devices": ["a CPU"]}, "versions": {"torch": "2"}, "commit": "c" * 40}
    record = {"seconds": 5.0, "processes": 2, "steps": 9}
    statuses = {}
    said = []

    def run_command(command):
        assert command[:3] == [sys.executable, "-m", "normalign_llava"]
        name = command[3]
        said.append(name)
        if status := statuses.get(name):
            return SimpleNamespace(returncode=status)
        target = Path(command[command.index("--output") + 1]) if "--output" in command else None
        if name == "train":
            target = Path(command[command.index("--output_dir") + 1])
            made(target.parent, target.name, "checkpoint-1/a.pt")
            own = record if target.name == "stage1" else record | about | {"seconds": 7.0}
            (target / "training.json").write_text(json.dumps(own))
        elif name == "evaluate":
            for task in plan.tasks:
                Evaluation(task, task, [Metric("acc", 0.5)], 9, 9, []).write(Path(command[4]))
        elif name == "diagnose":
            made(folder, f"{Path(command[4]).name}/diagnostics", "report.json")
            stored = report_of(1.0 if Path(command[4]).name == "stage1" else 3.0)
            (Path(command[4]) / "diagnostics" / "report.json").write_text(json.dumps(stored))
        else:
            target.mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    def read_scores(name):
        assert name == str(folder / last)
        return SimpleNamespace(runs=[{"pope acc": {("pope", 0, "x"): 1.0}}])

    monkeypatch.setattr(commands.subprocess, "run", run_command)
    monkeypatch.setattr(commands, "read_scores", read_scores)
    statuses["evaluate"] = 3
    with pytest.raises(ValueError, match=r"status 3: normalign evaluate .*pope,mmstar"):
        commands.run_commands(plan, run, "v", "l", work, 1)
    steps_before = ["build", "train", "train", *(["merge"] if merged else []), "evaluate"]
    assert said == steps_before
    statuses.clear()
    said.clear()
    times = json.loads((folder / "times.json").read_text())
    times["build"]["seconds"] = 600.0
    (folder / "times.json").write_text(json.dumps(times))
    result = commands.run_commands(plan, run, "v", "l", work, 1)
    assert said == ["evaluate", "diagnose", "diagnose"]  # it goes on from there
    assert result["times"].pop("build")["seconds"] == 600.0
    assert result["minutes"] == pytest.approx(10.0, abs=0.1)
    assert not list(work.rglob("checkpoint-*"))
    assert (result["group"], result["variant"], result["seed"]) == ("one", "a", 2)
    assert result["settings"] == vars(run.variant) and result["bf16"] is False
    assert result["scores"] == {"pope acc": 0.5, "mmstar acc": 0.5} and result["columns"] == {}
    assert result["answers"]["pope acc"]["scores"] == [1.0]
    assert result["diagnosis"]["stage1"]["entry"] == 1.0
    assert result["diagnosis"]["stage2"]["entry"] == 3.0
    assert result["dynamics"] == [{"step": 0, "of": 1.0}]
    trained = {"stage1": 5.0, "stage2": 7.0}
    assert result["training"] == {
        name: {"seconds": seconds, "processes": 2} for name, seconds in trained.items()
    }
    assert {name: result[name] for name in about} == about
    names = ["stage1", "stage2", *(["merge"] if merged else []), "evaluate"]
    assert list(result["times"]) == [*names, "diagnose stage 1", "diagnose"]
    assert all(seconds["seconds"] < 9 for seconds in result["times"].values())
