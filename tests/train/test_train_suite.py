"""Benchmarks in training: the scores are those of `normalign evaluate`, and training does not notice."""

import json
import random

import numpy as np
import pytest
import suite_tasks
import tiny
import torch
import training

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.evaluate.run import evaluate
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory, parts):
    """A checkpoint, data, and two tasks: one with images, whose functions draw random numbers, one of likelihoods."""
    folder = tmp_path_factory.mktemp("room")
    model = training.checkpoint(folder, tied=False)
    tiny.heeding(NormAlignLlavaForConditionalGeneration.from_pretrained(model)).save_pretrained(model)
    (folder / "data").symlink_to(parts / "data")
    suite_tasks.write(folder / "tasks")
    return folder


def trained(room, folder, *words, **options):
    folder.mkdir(exist_ok=True)
    options = {"save_strategy": "no", "max_steps": 4, "seed": 3, **options}
    output = main([training.recipe(folder, room, **options), *words])
    state = json.loads((output / "trainer_state.json").read_text())
    return output, state["log_history"]


def suite(room, every=2):
    return {**suite_tasks.options(room / "tasks"), "eval_steps": every}


LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.3, "gradient_checkpointing": True}


@pytest.mark.parametrize("options", [LORA, {"bf16": True, "dtype": "float32"}], ids=["lora", "bf16"])
def test_training_is_bit_for_bit_the_same_with_a_suite(room, tmp_path, options):
    without, plain = trained(room, tmp_path / "without", **options)
    random_states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    given, logged = trained(room, tmp_path / "with", **options, **suite(room))
    assert random.getstate() == random_states[0] and np.random.get_state()[1].tolist() == random_states[1]
    assert torch.equal(torch.get_rng_state(), random_states[2])
    evaluated = [entry for entry in logged if "eval_tiny_looking_letters" in entry]
    assert [entry["step"] for entry in evaluated] == [2, 4]
    timings = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "time/data_share")
    courses = [
        [{key: value for key, value in entry.items() if key not in timings} for entry in log if entry not in evaluated]
        for log in (plain, logged)
    ]
    assert courses[0] == courses[1] and len(courses[0]) == 5
    for file in without.glob("*.safetensors"):
        assert file.read_bytes() == (given / file.name).read_bytes()


def test_scores_are_those_of_normalign_evaluate(room, tmp_path, capsys):
    output, logged = trained(room, tmp_path / "run", **suite(room, every=0.5), bf16=False)
    (first, last) = (entry for entry in logged if "eval_tiny_looking_letters" in entry)
    done = evaluate(
        str(output), tasks=["tiny_looking", "tiny_choosing"], include_path=room / "tasks", limit=3, output=tmp_path
    )
    expected = {f"eval_{each.task}_{metric.name}": metric.value for each in done.results for metric in each.metrics}
    assert {key: last[key] for key in expected} == expected and last != {**first, "step": 4, "epoch": last["epoch"]}
    assert last.keys() == expected.keys() | {"epoch", "step"} == first.keys()
    assert f" 4/4 tiny_choosing acc {expected['eval_tiny_choosing_acc']:.4g}" in capsys.readouterr().out


def test_a_suite_is_evaluated_once_with_held_out_rows(room, tmp_path):
    held_out = dict(eval_strategy="steps", test_split_size=0.25, sample_count=0)
    _, logged = trained(room, tmp_path, **held_out, **suite(room))
    found = [
        ("eval_loss" if "eval_loss" in entry else "suite")
        for entry in logged
        if not entry.keys() & {"loss", "train_loss"}
    ]
    assert found == ["eval_loss", "suite"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_suite": "mmbench_en_dev"}, "a limit would cut them"),
        ({"eval_suite": "pope"}, "eval_suite: pope cannot be loaded.*lmms-lab-encoder/POPE"),  # no connection here
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(room, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trained(room, tmp_path, **{**suite(room), **options})
    assert not list(tmp_path.rglob("*.safetensors"))
