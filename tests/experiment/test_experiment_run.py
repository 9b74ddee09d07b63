# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Experiments on tiny parts: made, stopped, failed and resumed; and what sets variants apart."""

import json
import shutil

import numpy as np
import pytest
import tiny_parts
import torch
import training
import yaml
from filelock import FileLock
from paths import ROOT
from PIL import Image
from scipy import stats
from transformers import AutoProcessor, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.cli import app
from normalign_llava.data.easy_vqa import held_out, load_image
from normalign_llava.experiment import make
from normalign_llava.experiment.make import Minutes
from normalign_llava.experiment.plan import TUNING, Variant
from normalign_llava.experiment.plan_file import read_plan
from normalign_llava.experiment.report import write_report
from normalign_llava.experiment.results import options_of, waits
from normalign_llava.experiment.run import START, held
from normalign_llava.experiment.statistics import difference_of, mean_of
from normalign_llava.experiment.variants import FixedCompensation, RoundedNorm, build_variant, scaled_checkpoint


pytestmark = pytest.mark.slow

SHORT = {
    "max_steps": 2,
    "global_batch_size": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_steps": 1,
    "probe_steps": [2],
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    tiny_parts.vision(folder / "vision")
    tiny_parts.language(folder / "language")
    return folder


@pytest.fixture
def plan_file(tmp_path, parts):
    plan = {
        "seeds": [0],
        "tasks": ["offline_emoji"],
        "vision": str(parts / "vision"),
        "language": str(parts / "language"),
        "feature_layer": -2,
        "emoji_count": 3,
        "diagnosed": 2,
        "stage1": {"recipe": "quickstart-align", **SHORT},
        "stage2": {
            "recipe": "quickstart-tune",
            **SHORT,
            "lora_r": 2,
            "lora_target_modules": [".*language_model.*q_proj"],
        },
        "tuning": {"seed": 9, "arms": ["gwc"], "stage1": [1e-3, 1e-1], "stage2": [3e-4]},
        "quick": ["dial"],
        "groups": {
            "dial": {
                "question": "Where?",
                "against": "four",
                "variants": {
                    "four": {"enters_at": 4},
                    "last": {"arm": "none", "enters_at": 0.5},
                    "wild": {"enters_at": 1, "stage2": {"learning_rate": 1e39, "warmup_steps": 0}},
                },
            },
            "arms": {"question": "Which?", "against": "gwc", "tuned": True, "variants": {"gwc": {"arm": "gwc"}}},
        },
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    return tmp_path / "plan.yaml"


def test_an_experiment_from_plan_to_report(archives, plan_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    done = run(app, ["experiment", "run", str(plan_file), "--quick"])
    assert done.exit_code == 1 and "Failed: dial-wild-seed0" in done.stdout, done.output
    plan = read_plan(plan_file)
    files = {file.name: file.stat().st_mtime_ns for file in plan.results.glob("*.json")}
    assert set(files) == {"start.json", "dial-four-seed0.json", "dial-last-seed0.json", "dial-wild-seed0.json"}
    assert "inite" in json.loads((plan.results / "dial-wild-seed0.json").read_text())["failed"]
    four, last = (json.loads((plan.results / f"dial-{name}-seed0.json").read_text()) for name in ("four", "last"))
    assert four["tokens"]["untrained"] / four["tokens"]["trained"]["n_text"] == pytest.approx(4, rel=0.1)  # two images
    assert last["tokens"]["untrained"] / last["tokens"]["trained"]["n_text"] == pytest.approx(0.5, rel=0.1)
    assert four["data"] == last["data"] and len(four["curves"]["stage2"]["loss"]) == 2
    assert four["scores"].keys() == {"offline_emoji acc"} and four["options"]["stage2"]["lora_r"] == 2
    assert not list((tmp_path / "outputs" / "plan").glob("*-seed0/model"))

    (plan.results / "dial-wild-seed0.json").unlink()
    whole = yaml.safe_load(plan_file.read_text())
    del whole["groups"]["dial"]["variants"]["wild"]
    plan_file.write_text(yaml.safe_dump(whole, sort_keys=False))
    done = run(app, ["experiment", "run", str(plan_file)])
    assert done.exit_code == 0, done.output
    kept = ("start.json", "dial-four-seed0.json", "dial-last-seed0.json")
    assert all((plan.results / name).stat().st_mtime_ns == files[name] for name in kept)
    tried = {
        rate: json.loads((plan.results / f"tuning-gwc-{rate:g}-0.0003-seed9.json").read_text())["curves"]["stage2"]
        for rate in (1e-3, 1e-1)
    }
    losses = {rate: curve["loss"][-1] for rate, curve in tried.items()}
    arms = json.loads((plan.results / "arms-gwc-seed0.json").read_text())
    assert arms["options"]["stage1"]["learning_rate"] == min(losses, key=losses.get)
    assert arms["options"]["stage2"]["learning_rate"] == 3e-4
    assert arms["references"]["offline_emoji acc"].keys() == {"blank image", "commonest answer"}
    assert 0 < arms["change"]["gain"] < 1 and "gain" not in last["change"]

    done = run(app, ["experiment", "report", str(plan_file)])
    assert done.exit_code == 0, done.output
    page = (plan.results / "report.md").read_text()
    assert "5 of 5 planned runs are finished" in page
    accuracy = last["scores"]["offline_emoji acc"] - four["scores"]["offline_emoji acc"]
    assert f"| last - four | {accuracy:+.3f} |" in page
    gradients = [np.mean(last["curves"][f"stage{each}"]["grad_norm/projector"]) for each in (1, 2)]
    clipped = [np.mean(last["curves"][f"stage{each}"]["clip/share"]) for each in (1, 2)]
    (row,) = [line for line in page.splitlines() if line.startswith(f"| last | {gradients[0]:.3g} |")]
    assert f"| {clipped[0]:.3g} | {gradients[1]:.3g} |" in row and row.endswith(f"| {clipped[1]:.3g} |")
    assert f" {arms['change']['gain']:.3f} |" in page
    assert f"| **{min(losses.values()):.3f}** |" in page and f"| {max(losses.values()):.3f} |" in page
    assert Image.open(plan.results / "dial.png").size[0] > 500

    for each in plan.results.glob("tuning-*"):
        each.unlink()
    assert run(app, ["experiment", "report", str(plan_file)]).exit_code == 0
    assert "arms-gwc-seed0" in (plan.results / "report.md").read_text()

    whole["groups"]["dial"]["variants"]["four"]["enters_at"] = 3
    plan_file.write_text(yaml.safe_dump(whole, sort_keys=False))
    for command in ("run", "report"):
        refused = run(app, ["experiment", command, str(plan_file)])
        assert refused.exit_code == 1 and "dial-four-seed0.json is of a run with other settings" in refused.stderr
    refused = run(app, ["experiment", "report", str(plan_file), "--results", str(tmp_path / "new")])
    assert refused.exit_code == 1 and "new has no result" in refused.stderr


def test_values_that_an_option_cannot_have_are_refused_before_the_first_run(plan_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(plan_file.read_text())
    content["groups"]["dial"]["variants"]["wild"]["stage2"] = {"max_grad_norm": "large"}
    plan_file.write_text(yaml.safe_dump(content, sort_keys=False))
    refused = CliRunner().invoke(app, ["experiment", "run", str(plan_file)])
    assert refused.exit_code == 1
    assert "dial.wild: argument --max_grad_norm/--max-grad-norm: invalid float value: 'large'" in refused.stderr
    assert not list(read_plan(plan_file).results.glob("*.json"))


class StopAtSave(TrainerCallback):
    """Ctrl-C when a checkpoint has been saved."""

    def on_save(self, *args, **kwargs):
        raise KeyboardInterrupt


def test_a_run_that_was_stopped_ends_as_one_that_was_not(archives, plan_file, tmp_path, monkeypatch):
    content = yaml.safe_load(plan_file.read_text())
    content["groups"] = {"dial": {**content["groups"]["dial"], "variants": {"four": {"enters_at": 4}}}}
    content |= {"tuning": None}
    plan_file.write_text(yaml.safe_dump(content, sort_keys=False))

    def run(name):
        folders = ["--work", str(tmp_path / f"{name}-work"), "--results", str(tmp_path / name)]
        return CliRunner().invoke(app, ["experiment", "run", str(plan_file), *folders])

    assert run("whole").exit_code == 0
    (tmp_path / "stopped").mkdir()
    shutil.copy(tmp_path / "whole" / START, tmp_path / "stopped")  # it says whether bfloat16 pays, by a measurement
    for _ in range(3):  # after each step of stage 1 and the first of stage 2
        with monkeypatch.context() as patch:
            patch.setattr(make, "callbacks_of", lambda variant: [StopAtSave()])
            stopped = run("stopped")
            assert stopped.exit_code == 130 and "Run the same command again" in stopped.stderr
    left = tmp_path / "stopped-work" / "dial-four-seed0"
    assert (left / "stage1").exists() and (left / "stage2-trainer" / "checkpoint-1").exists()  # each start went on
    with monkeypatch.context() as patch:
        patch.setattr(make, "measure_tokens", StopAtSave().on_save)
        assert run("stopped").exit_code == 130
    assert run("stopped").exit_code == 0
    whole, stopped = (
        json.loads((tmp_path / name / "dial-four-seed0.json").read_text()) for name in ("whole", "stopped")
    )
    assert stopped | {"minutes": None} == whole | {"minutes": None}


def test_a_run_that_another_process_holds_is_left_to_it(tmp_path):
    with FileLock(tmp_path / "x.lock"), held(tmp_path / "x.lock") as mine:
        assert not mine
    with held(tmp_path / "x.lock") as mine:
        assert mine


def test_minutes_of_a_stopped_process_count(tmp_path):
    (tmp_path / "minutes.json").write_text('{"wall": 3.0, "processor": 2.0}')
    minutes = Minutes(tmp_path / "minutes.json")
    spent = minutes.keep()
    assert 3 < spent["wall"] < 4 and 2 < spent["processor"] < 3
    assert Minutes(tmp_path / "minutes.json").keep()["wall"] > spent["wall"]


def test_tuned_runs_wait_for_all_tries(plan_file):
    plan = read_plan(plan_file)
    (run,) = [each for each in plan.runs() if each.group == "arms"]
    tries = [each for each in plan.runs() if each.group == TUNING]
    plan.results.mkdir(parents=True)
    for each in tries:
        assert waits(plan, run)
        plan.result_file(each).touch()
    assert len(tries) == 2 and not waits(plan, run)
    with pytest.raises(ValueError, match="cannot be read"):
        options_of(plan, run)


def norm_entering_the_decoder(model, folder) -> float:
    """Mean norm of the visual tokens that the first decoder layer receives, of 60 images."""
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    images = [load_image(question.image) for question in held_out(20, 1)]
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    entering = []
    model.model.language_model.layers[0].register_forward_pre_hook(lambda layer, args: entering.append(args[0]))
    ids = torch.tensor([[5, *[model.config.image_token_id] * 4]]).repeat(len(images), 1)
    with torch.no_grad():
        model(input_ids=ids, pixel_values=pixels)
    return entering[0][:, 1:].norm(dim=-1).mean().item()


@pytest.mark.parametrize("arm", ["gwc", "unit", "none"])
@pytest.mark.parametrize("enters_at", [0.25, 64.0])
def test_visual_tokens_enter_at_the_norm_that_is_wanted(archives, parts, tmp_path, arm, enters_at):
    torch.manual_seed(0)
    build_variant(
        str(parts / "vision"), str(parts / "language"), tmp_path / "built", Variant(arm, enters_at=enters_at), -2
    )
    scaled_checkpoint(tmp_path / "built", 3.0, tmp_path / "scaled")
    found = []
    for folder in ("built", "scaled"):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / folder).eval()
        found.append(norm_entering_the_decoder(model, tmp_path / folder))
    assert found[0] == pytest.approx(enters_at * model.config.text_embedding_norm, rel=0.05)  # of other images
    assert found[1] == pytest.approx(3 * found[0], rel=1e-5)


def gradients(model) -> list[torch.Tensor]:
    """Of the projector's first and last linear layer, and of the gain."""
    model.train()
    ids = torch.tensor([[5, *[model.config.image_token_id] * 4, 6, 7]])
    model(input_ids=ids, pixel_values=torch.ones(1, 3, 16, 16), labels=ids).loss.backward()
    projector = model.model.multi_modal_projector
    return [each.grad for each in (projector.linear_1.weight, projector.linear_2.bias, projector.norm.weight)]


def call(callback, event, model):
    args = TrainingArguments(output_dir="unused", report_to=[])
    getattr(callback, event)(args, TrainerState(), TrainerControl(), model=model)


def test_a_fixed_compensation_of_power_1_is_gwc_as_long_as_the_gain_is_at_its_start(tmp_path):
    folder = training.checkpoint(tmp_path)
    found = {}
    for arm, callback in (
        ("gwc", None),
        ("aligned", None),
        ("fixed", FixedCompensation(1)),
        ("half", FixedCompensation(0.5)),
    ):
        config = {} if arm == "gwc" else {"gradient_compensation": "none"}
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder, **config)
        if callback:
            call(callback, "on_train_begin", model)
        found[arm] = gradients(model)
        if callback:
            call(callback, "on_train_end", model)
            assert not model.model.multi_modal_projector.norm._forward_pre_hooks
    for gwc, fixed, half, aligned in zip(
        found["gwc"][:2], found["fixed"], found["half"], found["aligned"], strict=False
    ):
        torch.testing.assert_close(fixed, gwc, rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(half, (gwc * aligned).abs().sqrt() * gwc.sign(), rtol=1e-3, atol=1e-9)
    assert all(torch.equal(found[arm][2], found["gwc"][2]) for arm in ("fixed", "half"))


def test_a_norm_kept_in_bfloat16_loses_small_updates(tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(training.checkpoint(tmp_path, arm="unit"))
    norm = model.model.multi_modal_projector.norm
    with torch.no_grad():
        norm.weight.add_(1e-3)
        norm.bias.add_(1e-3)
    call(RoundedNorm(), "on_step_end", model)
    assert torch.equal(norm.weight, torch.ones_like(norm.weight)) and norm.weight.dtype == torch.float32
    assert norm.bias.unique().tolist() == [torch.tensor(1e-3).bfloat16().item()]


def test_means_and_differences_against_hand_and_scipy():
    mean = mean_of([0.90, 0.94, 0.98])
    assert mean.value == pytest.approx(0.94)
    assert mean.error == pytest.approx(4.302653 * 0.04 / 3**0.5, rel=1e-5)  # t of 2 degrees of freedom
    assert mean_of([0.5]).error is None
    ours, theirs = {0: 0.9, 1: 0.8, 2: 0.95}, {0: 0.7, 1: 0.7, 2: 0.7}
    found = difference_of(ours, theirs)
    low, high = stats.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval()
    assert found.interval == pytest.approx((low, high)) and found.value == pytest.approx(0.55 / 3)
    assert found.effect == pytest.approx((0.55 / 3) / 0.0763763, rel=1e-5)
    alone = difference_of({0: 0.9}, {0: 0.7})
    assert alone.interval is None and alone.effect is None


def test_the_committed_report_follows_from_the_committed_results(tmp_path):
    plan = read_plan(ROOT / "experiments" / "small.yaml")
    copied = tmp_path / "results" / "small"
    copied.mkdir(parents=True)
    for file in plan.results.glob("*.json"):
        (copied / file.name).write_bytes(file.read_bytes())
    (tmp_path / "small.yaml").write_bytes((ROOT / "experiments" / "small.yaml").read_bytes())
    page = write_report(read_plan(tmp_path / "small.yaml"))
    assert page.read_text() == (plan.results / "report.md").read_text()
    ours, theirs = (Image.open(folder / "dial.png").convert("RGB") for folder in (copied, plan.results))
    assert ours.size == theirs.size
    apart = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max(axis=-1)
    assert (apart > 64).mean() < 2e-4  # a line is more; letters may be drawn otherwise
