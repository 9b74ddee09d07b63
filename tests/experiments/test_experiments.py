"""Experiments: the plan, runs on tiny parts, and the statistics of the report."""

import importlib.util
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import stored
import tiny_parts
import torch
import training
import yaml
from paths import ROOT
from PIL import Image
from plan import read_plan
from report import difference, holm, read_result, write_report
from runs import FixedFactors, write_multiplied
from scipy import stats
from transformers import AutoProcessor, TrainerControl, TrainerState

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.evaluation.engine import SUITES
from normalign_llava.evaluation.results import Evaluation, Metric


EXPERIMENTS = ROOT / "experiments"
SHORT = {"max_steps": 20, "global_batch_size": 2, "per_device_train_batch_size": 2}
SHORT |= {"logging_steps": 10, "save_steps": 10, "probe_steps": None}
VARIANTS = """
none: {arm: none, enters_at: 1}
gwc: {gradient: 1.002,
      stage2: {use_peft: null, lora_r: null, lora_dropout: null, lora_target_modules: null}}
wild: {stage2: {learning_rate: 1.0e+39, warmup_steps: 0}}
"""
PLAN = {
    "tasks": ["offline_emoji"],
    "feature_layer": -2,
    "diagnosed": 2,
    "stage1": {"recipe": "quickstart-align", **SHORT},
    "stage2": {"recipe": "quickstart-tune", **SHORT, "lora_r": 2},
    "decisions": {"H1": ["tiny/gwc", "tiny/none"]},
    "groups": {"tiny": {"question": "?", "seeds": [5], "variants": yaml.safe_load(VARIANTS)}},
}


@pytest.mark.nightly
def test_an_experiment_from_plan_to_report(archives, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("experiments_main", EXPERIMENTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    PLAN["vision"] = tiny_parts.vision("vision", "dinov2")
    PLAN["language"] = tiny_parts.language("language")
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(PLAN))
    plan = read_plan(file)
    module.main(["run", str(file)])
    files = {run.name: plan.results / f"{run.key}.json" for run in plan.runs()}
    results = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert "inite" in results["wild"]["failed"]
    none = results["none"]
    gwc = results["gwc"]
    assert none["data"] == gwc["data"] and len(none["curves"]["stage2"]["loss"]) == 2
    for result in (none, gwc):
        (measured,) = result["information"]
        assert measured["all_steps"] == 40
        assert measured.keys() >= {"information/shape", "wrong_image"}
    tokens = none["tokens"]  # N_text is of frozen embeddings
    assert tokens["untrained"] == pytest.approx(tokens["trained"]["n_text"])
    assert none["multiplier"] != 1 == gwc["multiplier"]
    assert not list((tmp_path / "outputs").rglob("*-seed5"))
    page = (plan.results / "report.md").read_text()
    assert "3 of 3 runs are finished, 1 of them failed" in page
    assert "| H1 | tiny/gwc - tiny/none | 1 |" in page
    with Image.open(plan.results / "information.png") as figure:
        assert figure.width > 300

    written = {path: path.stat().st_mtime_ns for path in files.values()}
    module.main(["run", str(file)])
    assert {path: path.stat().st_mtime_ns for path in written} == written
    PLAN["groups"]["tiny"]["variants"]["none"]["enters_at"] = 2
    file.write_text(yaml.safe_dump(PLAN))
    with pytest.raises(SystemExit), pytest.raises(ValueError, match="other settings"):
        module.main(["report", str(file)])


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "of_gradient"), [(2.0, 4.0), (0.5, 0.25)])
def test_fixed_factors_multiply_tokens_and_gradient_in_training_alone(
    checkpoint, factor, of_gradient
):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    projector = model.model.multi_modal_projector
    features = torch.randn(3, 16)
    before = projector(features)
    before.square().sum().backward()
    plain = projector.linear_2.weight.grad.clone()
    callback = FixedFactors(factor, of_gradient)
    callback.on_train_begin(None, TrainerState(), TrainerControl(), model=model)
    model.zero_grad()
    tokens = projector(features)
    torch.testing.assert_close(tokens, factor * before)
    (tokens / factor).square().sum().backward()
    torch.testing.assert_close(projector.linear_2.weight.grad, of_gradient * plain)
    with torch.no_grad():  # as while it generates
        torch.testing.assert_close(projector(features), tokens)
    callback.on_train_end(None, TrainerState(), TrainerControl())
    assert torch.equal(projector(features), before)


def test_a_fixed_factor_becomes_part_of_the_projector(tmp_path):
    plain = training.checkpoint(tmp_path / "none", arm="none")
    trained = stored.weights(plain)
    trained["model.multi_modal_projector.linear_2.bias"] += 1
    stored.store(plain, trained)
    write_multiplied(plain, 2.5, tmp_path / "model")
    folders = plain, tmp_path / "model"
    before, after = map(NormAlignLlavaForConditionalGeneration.from_pretrained, folders)
    features = torch.randn(3, 16)
    tokens = before.model.multi_modal_projector(features)
    torch.testing.assert_close(after.model.multi_modal_projector(features), 2.5 * tokens)
    for name, value in before.model.language_model.state_dict().items():
        assert torch.equal(after.model.language_model.state_dict()[name], value)
    assert AutoProcessor.from_pretrained(tmp_path / "model").tokenizer.chat_template


def test_a_task_that_failed_is_no_score(tmp_path, monkeypatch):
    failed = SimpleNamespace(failed={"pope": "No rows."})
    monkeypatch.setattr(runs, "evaluate", lambda *args, **options: failed)
    with pytest.raises(ValueError, match=r"pope could not be run: No rows\."):
        runs.scores(tmp_path, ["pope"])
    Evaluation("pope", "POPE", [Metric("acc", 0.25), Metric("f1", 0.5)], 9, 9, []).write(tmp_path)
    asked = {}

    def evaluate(model, **options):
        asked.update(options)
        return SimpleNamespace(failed={})

    monkeypatch.setattr(runs, "evaluate", evaluate)
    assert runs.scores(tmp_path, ["pope"]) == {"pope acc": 0.25, "pope f1": 0.5}
    assert asked["tasks"] == ["pope"] and asked["dtype"] == "float32"


def test_differences_are_paired_and_corrected_as_by_hand():
    values = np.random.default_rng(0).normal(size=(4, 6))

    def result(seed, nats):
        earlier = {"all_steps": 40, "information": 9.0}
        return {"data": seed, "information": [earlier, {"all_steps": 200, "information": nats}]}

    results = {}
    for name, row in zip("abcd", values, strict=True):
        results[name] = {seed: result(seed, nats) for seed, nats in enumerate(row)}
    apart, interval, p = difference(results, ["a", "b", "c", "d"])
    by_hand = values[0] - values[1] + values[2] - values[3]
    error = by_hand.std(ddof=1) / 6**0.5
    half = stats.t.ppf(0.975, 5) * error
    assert apart == pytest.approx(by_hand)
    assert interval == pytest.approx((by_hand.mean() - half, by_hand.mean() + half))
    assert p == pytest.approx(2 * stats.t.sf(abs(by_hand.mean()) / error, 5))
    same = {
        name: {seed: result(seed, nats) for seed, nats in enumerate(row)}
        for name, row in {"a": (0.9, 0.8), "b": (0.88, 0.78)}.items()
    }
    apart, *unknown = difference(same, ["a", "b"])
    assert apart == pytest.approx([0.02, 0.02]) and unknown == [None, None]
    results["a"][0]["data"] = "other"
    with pytest.raises(ValueError, match="seed 0 has other data"):
        difference(results, ["a", "b"])
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


@pytest.mark.parametrize("name", ["regime", "table4-small"])
def test_stored_results_make_the_report_that_is_stored(tmp_path, name):
    folder = EXPERIMENTS / "results" / name
    copied = shutil.copytree(folder, tmp_path / name)
    plan = read_plan(EXPERIMENTS / f"{name}.yaml", copied)
    (copied / "report.md").unlink()
    assert write_report(plan).read_text() == (folder / "report.md").read_text()


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_plan_can_be_read_and_names_tasks_that_there_are(file):
    plan = read_plan(file)
    assert plan.runs() and set(plan.tasks) <= {*SUITES["paper"], *SUITES["offline"]}
    assert all(plan.options(run) for run in plan.runs())


def test_results_of_a_plan_that_has_changed_are_kept_and_their_figures_are_the_pages():
    plan = read_plan(EXPERIMENTS / "small.yaml")
    with pytest.raises(ValueError, match="keep the results of the changed plan in another folder"):
        [read_result(plan, run) for run in plan.runs()]
    page = (EXPERIMENTS / "first.md").read_text()
    arms = {"none": "no norm", "unit": "gain 1", "aligned": "aligned", "gwc": "aligned, GWC"}
    for arm, name in arms.items():
        files = [plan.results / f"arms-{arm}-seed{seed}.json" for seed in range(5)]
        scores = [json.loads(file.read_text())["scores"]["offline_easy_vqa acc"] for file in files]
        row = re.search(rf"^\| {name} \| 0\.\d+, 0\.\d+ \|.*", page, re.MULTILINE)[0]
        assert ", ".join(f"{score:.2f}" for score in scores) in row


def clipping(plan, arm):
    """In percent of stage 2, means over seeds: clipped steps; projector, adapters, gain and bias.

    The last three are shares of the squared norm of the gradient.
    """
    groups = (("projector",), ("language_model",), ("gain", "bias"))
    rows = []
    for seed in range(200, 206):
        stored = json.loads((plan.results / f"regime-{arm}-seed{seed}.json").read_text())
        assert np.mean(stored["curves"]["stage1"]["clip/share"]) == 1
        curves = stored["curves"]["stage2"]
        squares = {key: np.square(curves[key]) for key in curves if "grad_norm/" in key}
        total = sum(squares.values())
        row = [np.mean(curves["clip/share"])]
        for group in groups:
            parts = [squares.get(f"grad_norm/{part}", 0.0) for part in group]
            row.append(np.mean(sum(parts) / total))
        rows.append(row)
    return 100 * np.mean(rows, axis=0)


def test_shares_of_clipping_on_the_page_are_those_of_the_stored_results():
    plan = read_plan(EXPERIMENTS / "regime.yaml")
    page = (EXPERIMENTS / "README.md").read_text().partition("## Clipping")[2]
    for arm, name, within in (
        ("none", "no norm", 0.5),
        ("aligned", "aligned", 0.5),
        ("gwc", "GWC", 0.05),
    ):
        row = re.search(rf"^\| {name} \|(.+)\|$", page, re.MULTILINE)[1].split("|")
        shown = [float(cell.strip().removesuffix(" %") or 0) for cell in row]
        assert shown == pytest.approx(clipping(plan, arm), abs=within)
