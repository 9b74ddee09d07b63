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
SHORT = {
    "max_steps": 20,
    "global_batch_size": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 10,
    "save_steps": 10,
    "probe_steps": None,
}
VARIANTS = """
none:
  arm: none
  enters_at: 1
gwc:
  gradient: 1.002
  stage2: {use_peft: null, lora_r: null, lora_dropout: null, lora_target_modules: null}
wild:
  stage2: {learning_rate: 1.0e+39, warmup_steps: 0}
"""


def tiny_plan():
    return {
        "vision": tiny_parts.vision("vision", "dinov2"),
        "language": tiny_parts.language("language"),
        "tasks": ["offline_emoji"],
        "feature_layer": -2,
        "diagnosed": 2,
        "stage1": {"recipe": "quickstart-align", **SHORT},
        "stage2": {"recipe": "quickstart-tune", **SHORT, "lora_r": 2},
        "decisions": {"H1": ["tiny/gwc", "tiny/none"]},
        "groups": {
            "tiny": {
                "question": "?",
                "seeds": [5],
                "variants": yaml.safe_load(VARIANTS),
            },
        },
    }


@pytest.mark.nightly
def test_an_experiment_from_plan_to_report(archives, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("experiments_main", EXPERIMENTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    plan_content = tiny_plan()
    plan_path = tmp_path / "plan.yaml"
    plan_path.write_text(yaml.safe_dump(plan_content))
    plan = read_plan(plan_path)
    module.main(["run", str(plan_path)])

    result_paths = {run.name: plan.results / f"{run.key}.json" for run in plan.runs()}
    results = {}
    for name, result_path in result_paths.items():
        results[name] = json.loads(result_path.read_text())
    assert "inite" in results["wild"]["failed"]
    without_norm = results["none"]
    with_norm = results["gwc"]
    assert without_norm["data"] == with_norm["data"]
    assert len(without_norm["curves"]["stage2"]["loss"]) == 2
    for result in (without_norm, with_norm):
        (measured,) = result["information"]
        assert measured["all_steps"] == 40
        assert measured.keys() >= {"information/shape", "wrong_image"}
    tokens = without_norm["tokens"]  # N_text is of frozen embeddings
    assert tokens["untrained"] == pytest.approx(tokens["trained"]["n_text"])
    assert without_norm["multiplier"] != 1
    assert with_norm["multiplier"] == 1
    assert not list((tmp_path / "outputs").rglob("*-seed5"))

    report_text = (plan.results / "report.md").read_text()
    assert "3 of 3 runs are finished, 1 of them failed" in report_text
    assert "| H1 | tiny/gwc - tiny/none | 1 |" in report_text
    with Image.open(plan.results / "information.png") as figure:
        assert figure.width > 300

    # A second time, nothing is run.
    times = [result_path.stat().st_mtime_ns for result_path in result_paths.values()]
    module.main(["run", str(plan_path)])
    times_after = [result_path.stat().st_mtime_ns for result_path in result_paths.values()]
    assert times_after == times

    plan_content["groups"]["tiny"]["variants"]["none"]["enters_at"] = 2
    plan_path.write_text(yaml.safe_dump(plan_content))
    with pytest.raises(SystemExit), pytest.raises(ValueError, match="other settings"):
        module.main(["report", str(plan_path)])


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "gradient_factor"), [(2.0, 4.0), (0.5, 0.25)])
def test_fixed_factors_multiply_tokens_and_gradient_only_in_training(
    checkpoint, factor, gradient_factor
):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    projector = model.model.multi_modal_projector
    features = torch.randn(3, 16)
    plain_tokens = projector(features)
    plain_tokens.square().sum().backward()
    plain_gradient = projector.linear_2.weight.grad.clone()

    callback = FixedFactors(factor, gradient_factor)
    callback.on_train_begin(None, TrainerState(), TrainerControl(), model=model)
    model.zero_grad()
    tokens = projector(features)
    torch.testing.assert_close(tokens, factor * plain_tokens)
    (tokens / factor).square().sum().backward()
    gradient = projector.linear_2.weight.grad
    torch.testing.assert_close(gradient, gradient_factor * plain_gradient)
    with torch.no_grad():  # as while it generates
        torch.testing.assert_close(projector(features), tokens)

    callback.on_train_end(None, TrainerState(), TrainerControl())
    assert torch.equal(projector(features), plain_tokens)


def test_a_fixed_factor_becomes_part_of_the_projector(tmp_path):
    plain_folder = training.checkpoint(tmp_path / "none", arm="none")
    trained_weights = stored.weights(plain_folder)
    trained_weights["model.multi_modal_projector.linear_2.bias"] += 1
    stored.store(plain_folder, trained_weights)

    output = tmp_path / "model"
    write_multiplied(plain_folder, 2.5, output)
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(plain_folder)
    multiplied = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
    features = torch.randn(3, 16)
    tokens = plain.model.multi_modal_projector(features)
    torch.testing.assert_close(multiplied.model.multi_modal_projector(features), 2.5 * tokens)
    language_weights = multiplied.model.language_model.state_dict()
    for name, expected in plain.model.language_model.state_dict().items():
        assert torch.equal(language_weights[name], expected)
    assert AutoProcessor.from_pretrained(output).tokenizer.chat_template


def test_a_task_that_failed_is_refused(tmp_path, monkeypatch):
    failed = SimpleNamespace(failed={"pope": "No rows."})
    monkeypatch.setattr(runs, "evaluate", lambda *arguments, **options: failed)
    with pytest.raises(ValueError, match=r"pope could not be run: No rows\."):
        runs.scores(tmp_path, ["pope"])


def test_scores_are_named_by_task_and_metric(tmp_path, monkeypatch):
    evaluate_options = {}

    def evaluate(model, **options):
        evaluate_options.update(options)
        return SimpleNamespace(failed={})

    monkeypatch.setattr(runs, "evaluate", evaluate)
    metrics = [Metric("acc", 0.25), Metric("f1", 0.5)]
    Evaluation("pope", "POPE", metrics, 9, 9, []).write(tmp_path)
    assert runs.scores(tmp_path, ["pope"]) == {"pope acc": 0.25, "pope f1": 0.5}
    assert evaluate_options["tasks"] == ["pope"]
    assert evaluate_options["dtype"] == "float32"


def information_by_seed(nats_by_seed):
    """Returns results that differ in their data from seed to seed."""
    results = {}
    for seed, nats in enumerate(nats_by_seed):
        logged = [
            {"all_steps": 40, "information": 9.0},
            {"all_steps": 200, "information": nats},
        ]
        results[seed] = {"data": seed, "information": logged}
    return results


@pytest.fixture
def random_nats():
    """The information of four variants with six seeds."""
    return np.random.default_rng(0).normal(size=(4, 6))


@pytest.fixture
def random_results(random_nats):
    results = {}
    for variant, nats_by_seed in zip("abcd", random_nats, strict=True):
        results[variant] = information_by_seed(nats_by_seed)
    return results


def test_differences_are_paired_by_seed(random_nats, random_results):
    differences, interval, p_value = difference(random_results, ["a", "b", "c", "d"])
    expected = random_nats[0] - random_nats[1] + random_nats[2] - random_nats[3]
    mean = expected.mean()
    standard_error = expected.std(ddof=1) / 6**0.5
    half_width = stats.t.ppf(0.975, 5) * standard_error
    assert differences == pytest.approx(expected)
    assert interval == pytest.approx((mean - half_width, mean + half_width))
    assert p_value == pytest.approx(2 * stats.t.sf(abs(mean) / standard_error, 5))


def test_equal_differences_have_no_interval():
    results = {
        "a": information_by_seed((0.9, 0.8)),
        "b": information_by_seed((0.88, 0.78)),
    }
    differences, interval, p_value = difference(results, ["a", "b"])
    assert differences == pytest.approx([0.02, 0.02])
    assert interval is None
    assert p_value is None


def test_runs_of_other_data_are_not_compared(random_results):
    random_results["a"][0]["data"] = "other"
    with pytest.raises(ValueError, match="seed 0 has other data"):
        difference(random_results, ["a", "b"])


def test_p_values_are_corrected_by_holm():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


@pytest.mark.parametrize("plan_name", ["regime", "table4-small"])
def test_stored_results_make_the_report_that_is_stored(tmp_path, plan_name):
    stored_folder = EXPERIMENTS / "results" / plan_name
    results_folder = shutil.copytree(stored_folder, tmp_path / plan_name)
    plan = read_plan(EXPERIMENTS / f"{plan_name}.yaml", results_folder)
    (results_folder / "report.md").unlink()
    expected = (stored_folder / "report.md").read_text()
    assert write_report(plan).read_text() == expected


@pytest.mark.parametrize(
    "plan_path",
    sorted(EXPERIMENTS.glob("*.yaml")),
    ids=lambda plan_path: plan_path.stem,
)
def test_every_plan_can_be_read_and_names_tasks_that_there_are(plan_path):
    plan = read_plan(plan_path)
    assert set(plan.tasks) <= {*SUITES["paper"], *SUITES["offline"]}
    plan_runs = plan.runs()
    assert plan_runs
    for run in plan_runs:
        assert plan.options(run)


def test_results_of_a_plan_that_has_changed_are_kept():
    plan = read_plan(EXPERIMENTS / "small.yaml")
    with pytest.raises(ValueError, match="keep the results of the changed plan in another folder"):
        for run in plan.runs():
            read_result(plan, run)


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("none", "no norm"),
        ("unit", "gain 1"),
        ("aligned", "aligned"),
        ("gwc", "aligned, GWC"),
    ],
)
def test_the_page_of_the_changed_plan_has_the_stored_scores(arm, label):
    plan = read_plan(EXPERIMENTS / "small.yaml")
    scores = []
    for seed in range(5):
        result = json.loads((plan.results / f"arms-{arm}-seed{seed}.json").read_text())
        scores.append(result["scores"]["offline_easy_vqa acc"])
    expected = ", ".join(f"{score:.2f}" for score in scores)

    page = (EXPERIMENTS / "first.md").read_text()
    table_row = re.search(rf"^\| {label} \| 0\.\d+, 0\.\d+ \|.*", page, re.MULTILINE)[0]
    assert expected in table_row


CLIPPED_PARTS = (("projector",), ("language_model",), ("gain", "bias"))


def clipping_of_seed(curves):
    """Returns the share of clipped steps, and each part's share of the squared gradient norm."""
    squares = {}
    for key, norms in curves.items():
        if "grad_norm/" in key:
            squares[key.removeprefix("grad_norm/")] = np.square(norms)
    total = sum(squares.values())

    shares = [np.mean(curves["clip/share"])]
    for part_names in CLIPPED_PARTS:
        of_part = sum(squares.get(part, 0.0) for part in part_names)
        shares.append(np.mean(of_part / total))
    return shares


def mean_clipping(plan, arm):
    """Returns the shares of stage 2 in percent, means over seeds. Every step of stage 1 clips."""
    by_seed = []
    for seed in range(200, 206):
        result_path = plan.results / f"regime-{arm}-seed{seed}.json"
        curves = json.loads(result_path.read_text())["curves"]
        assert np.mean(curves["stage1"]["clip/share"]) == 1
        by_seed.append(clipping_of_seed(curves["stage2"]))
    return 100 * np.mean(by_seed, axis=0)


@pytest.mark.parametrize(
    ("arm", "label", "tolerance"),
    [
        ("none", "no norm", 0.5),
        ("aligned", "aligned", 0.5),
        ("gwc", "GWC", 0.05),
    ],
)
def test_shares_of_clipping_on_the_page_are_those_of_the_stored_results(arm, label, tolerance):
    plan = read_plan(EXPERIMENTS / "regime.yaml")
    page = (EXPERIMENTS / "README.md").read_text().partition("## Clipping")[2]
    cells = re.search(rf"^\| {label} \|(.+)\|$", page, re.MULTILINE)[1].split("|")
    shown = []
    for cell in cells:
        percent = cell.strip().removesuffix(" %")
        shown.append(float(percent or 0))
    assert shown == pytest.approx(mean_clipping(plan, arm), abs=tolerance)
