# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Figure 5 and the log of a real run, read back from the folder that training left, and from what was merged of it."""

import json
import math

import pytest
import torch
import train_data
import training
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.names import DYNAMICS, STATE
from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.data.sources.mixtures import load_data
from normalign_llava.diagnose.measure.dynamics import read_dynamics, read_training_log
from normalign_llava.train.batches.collator import ConversationCollator
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    training.checkpoint(folder)
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i * 7 % 13}", "red.png") for i in range(12)]
    (folder / "data").mkdir()
    train_data.write_json(folder / "data", rows)
    return folder


@pytest.fixture(scope="module")
def adapter(parts):
    """What `normalign train` leaves of a run with adapters and the probe."""
    options = {"use_peft": True, "lora_r": 2, "global_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    options |= {"logging_steps": 2, "save_steps": 2, "probe_steps": [0, 2, 4], "probe_rows": 8}
    return main([training.recipe(parts, parts, **options)])


def cosines_by_hand(model, batch):
    """By layer, in float64, from hidden states that are all kept; the last before the final norm."""
    states, final = [], []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: states.append((args[0], output)))
        for layer in model.get_decoder().layers
    ]
    hooks.append(model.get_decoder().norm.register_forward_pre_hook(lambda module, args: final.append(args[0])))
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    assert torch.equal(states[-1][1], final[0])
    image, attended = batch["input_ids"] == model.config.image_token_id, batch["attention_mask"].bool()
    curves = {"visual": [], "text": []}
    for before, after in states:
        before, after = before.double(), after.double()
        cosines = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        for kind, mask in (("visual", image), ("text", attended & ~image)):
            curves[kind].append(cosines[mask].mean().item())
    return curves


def test_a_run_s_cosines_are_those_of_its_model(parts, adapter, tmp_path):
    steps = read_dynamics(adapter)
    assert [step.step for step in steps] == [0, 2, 4]
    merge_adapter(adapter, tmp_path / "merged")
    processor = AutoProcessor.from_pretrained(parts / "model")
    data = load_data(
        DataArguments(dataset_name=str(parts / "data" / "data.json")),
        processor,
        max_length=2048,
        seed=42,
        with_eval=False,
    )
    assert isinstance(data.train, Dataset)
    batch = ConversationCollator(processor)(list(data.train.select(range(8))))
    batch = {name: value for name, value in batch.items() if name != "labels"}
    for folder, step in ((parts / "model", steps[0]), (tmp_path / "merged", steps[2])):
        expected = cosines_by_hand(AutoModelForImageTextToText.from_pretrained(folder), batch)
        assert step.visual == pytest.approx(expected["visual"], abs=1e-5)
        assert step.text == pytest.approx(expected["text"], abs=1e-5)
    assert steps[0].visual != pytest.approx(steps[2].visual, abs=1e-4)


def test_a_run_s_log_over_steps(adapter):
    curves = read_training_log(adapter)
    for name in ("norm/visual", "norm/text", "gain/l2", "gain/mean_abs", "bias/mean_abs", "loss", "cosine/visual"):
        assert [step for step, _ in curves[name]] == [2, 4], name
    assert "step" not in curves and "epoch" not in curves
    steps = {step.step: step for step in read_dynamics(adapter)}
    for kind in ("visual", "text"):
        for step, mean in curves[f"cosine/{kind}"]:
            layers = getattr(steps[step], kind)
            assert mean == pytest.approx(math.fsum(layers) / len(layers), rel=1e-9)
    last = [step for step, _ in curves["train_runtime"]]
    assert last == [4]


def test_merging_keeps_the_curves(adapter, tmp_path):
    merge_adapter(adapter, tmp_path / "merged")
    assert read_dynamics(tmp_path / "merged") == read_dynamics(adapter)
    assert read_training_log(tmp_path / "merged") == read_training_log(adapter)
    # A trainer's own checkpoint has the log up to there; the cosines lie in the run's folder.
    merge_adapter(adapter / "checkpoint-2", tmp_path / "half")
    assert read_dynamics(tmp_path / "half") == []
    assert [step for step, _ in read_training_log(tmp_path / "half")["gain/l2"]] == [2]


@pytest.mark.parametrize("read, name", [(read_dynamics, DYNAMICS), (read_training_log, STATE)])
@pytest.mark.parametrize("content", ['{"step": 2, "visual": [0.', '{"log_history": [[1]], "visual": 0.1}', "[]"])
def test_a_damaged_file_is_named(read, name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is not as training writes it.*Remove it"):
        read(tmp_path)


def test_numbers_that_are_none_are_kept_as_they_were(tmp_path):
    history = [{"step": 1, "loss": math.nan, "note": "words", "epoch": 0.1}, {"step": 2, "loss": 3, "grad_norm": 1.5}]
    (tmp_path / STATE).write_text(json.dumps({"log_history": history}))
    curves = read_training_log(tmp_path)
    assert curves.keys() == {"loss", "grad_norm"}
    assert math.isnan(curves["loss"][0][1]) and curves["loss"][1] == (2, 3.0) and curves["grad_norm"] == [(2, 1.5)]
