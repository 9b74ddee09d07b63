# SPDX-License-Identifier: Apache-2.0
"""What is measured of the modules while TRL's trainer trains a tiny model, against figures found by other means."""

import math

import pytest
import torch
import training
from measured import logs, make_trainer, rows

from normalign_llava.train.callbacks.depth_probe import CosineProbe
from normalign_llava.train.callbacks.measurements import PARTS
from normalign_llava.train.callbacks.samples import SampleCallback
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


def part_of(name: str) -> str:
    """By hand, and stricter than what is tested: the names are spelled out."""
    name = name.removeprefix("base_model.model.")
    if name.startswith("model.vision_tower."):
        return "vision_tower"
    if name.startswith("model.multi_modal_projector."):
        norm = {"norm.weight": "gain", "norm.bias": "bias"}
        return norm.get(
            name.removeprefix("model.multi_modal_projector.").replace("modules_to_save.default.", ""), "projector"
        )
    assert name.startswith("model.language_model.")
    return "language_model"


def trained(model) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(part_of(name), {})[name] = parameter
    return found


def test_token_norms_are_those_of_the_decoders_input_over_all_micro_batches(checkpoint, tmp_path):
    plain = make_trainer(checkpoint, tmp_path, max_steps=1)
    plain.train()
    model = plain.start.double().eval()
    image = model.config.image_token_id
    norms = {"visual": [], "text": []}
    assert len(plain.batches) == 2 and any((batch["attention_mask"] == 0).any() for batch in plain.batches)
    for batch in plain.batches:
        with torch.no_grad():
            states = model.get_input_embeddings()(batch["input_ids"])
            pixels = batch["pixel_values"].double()
            features = model.model.get_image_features(pixels, return_dict=True).pooler_output
            states[batch["input_ids"] == image] = torch.cat(tuple(features))
        lists = (states.flatten(0, 1), batch["input_ids"].flatten(), batch["attention_mask"].flatten())
        for token, number, attended in zip(*(values.tolist() for values in lists), strict=True):
            if attended:
                norms["visual" if number == image else "text"].append(math.sqrt(sum(v * v for v in token)))
    expected = {f"norm/{kind}": sum(found) / len(found) for kind, found in norms.items()}
    assert abs(expected["norm/visual"] - expected["norm/text"]) > 1e-3
    assert {key: logs(plain)[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    other = make_trainer(checkpoint, tmp_path, max_steps=1, rank=2, gradient_checkpointing=True)
    other.train()
    assert {key: logs(other)[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rank, max_grad_norm", [(0, 0.1), (2, 0.0)])
def test_gradient_norms_are_those_before_clipping(checkpoint, tmp_path, rank, max_grad_norm):
    trainer = make_trainer(checkpoint, tmp_path, rank=rank, max_grad_norm=max_grad_norm, max_steps=1)
    trainer.train()
    model = trainer.start.double().train()
    for module in model.modules():
        module._forward_pre_hooks.clear()  # inputs of a projector beside adapters become float32
    # TRL's forward is a closure over the model it was made for, so the copy's is the class's own.
    del base_model(model).forward
    count = sum((batch["labels"] != -100).sum() for batch in trainer.batches)
    for batch in trainer.batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = base_model(model)(**inputs, pixel_values=batch["pixel_values"].double()).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="sum")
        (losses / count).backward()
    expected = {}
    for part, parameters in trained(model).items():
        gradients = [p.grad.flatten() for p in parameters.values() if p.grad is not None]
        expected[part] = torch.cat(gradients).norm().item()
    assert set(expected) == set(PARTS) - ({"vision_tower"} if rank else set())
    entry = logs(trainer)[0]
    found = {key.removeprefix("grad_norm/"): value for key, value in entry.items() if key.startswith("grad_norm/")}
    assert found == pytest.approx(expected, rel=1e-4)
    assert math.hypot(*found.values()) == pytest.approx(entry["grad_norm"], rel=1e-5)


def test_clip_share_counts_the_steps_since_the_last_log(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=6, logging_steps=3, learning_rate=1e-4)
    trainer.measurements.max_grad_norm = trainer.args.max_grad_norm = 3.0
    trainer.train()
    assert len(trainer.totals) == 6
    for entry, totals in zip(logs(trainer), (trainer.totals[:3], trainer.totals[3:]), strict=True):
        assert entry["clip/share"] == pytest.approx(sum(total > 3.0 for total in totals) / 3)
    assert 0 < sum(total > 3.0 for total in trainer.totals) < 6
    unclipped = make_trainer(checkpoint, tmp_path, max_steps=1, max_grad_norm=0.0)
    unclipped.train()
    assert "clip/share" not in logs(unclipped)[0]


@pytest.mark.parametrize("arm", ["aligned", "rms", "none"])
def test_the_size_of_gain_and_bias_and_the_factor_of_compensation(tmp_path, arm):
    options = {"norm": "rms_norm"} if arm == "rms" else {"arm": arm}
    trainer = make_trainer(training.checkpoint(tmp_path, **options), tmp_path / "run")
    trainer.train()
    entry = logs(trainer)[-1]
    shown = {name: value for name, value in entry.items() if name.split("/")[0] in ("gain", "bias", "gwc")}
    expected = {"gwc/factor": 1.0}
    if arm != "none":
        gain = trainer.model.model.multi_modal_projector.norm.weight.double().tolist()
        mean = sum(map(abs, gain)) / len(gain)
        expected.update({"gain/l2": math.sqrt(sum(g * g for g in gain)), "gain/mean_abs": mean})
        if arm != "aligned":
            expected["gwc/factor"] = 1 / mean
        if arm != "rms":
            bias = trainer.model.model.multi_modal_projector.norm.bias.double().tolist()
            expected["bias/mean_abs"] = sum(map(abs, bias)) / len(bias)
    assert shown == pytest.approx(expected, rel=1e-5)


def test_frozen_parts_and_absent_images_have_no_entry(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, frozen=("vision", "language"), max_steps=1)
    trainer.train()
    names = {name for name in logs(trainer)[0] if name.startswith("grad_norm/")}
    assert names == {f"grad_norm/{part}" for part in ("projector", "gain", "bias")}
    text = make_trainer(checkpoint, tmp_path, images=False, max_steps=1)
    text.train()
    assert "norm/visual" not in logs(text)[0] and logs(text)[0]["norm/text"] > 0


def test_evaluation_does_not_count(checkpoint, tmp_path):
    entries = []
    for kwargs in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_rows": rows(4)}):
        trainer = make_trainer(checkpoint, tmp_path, **kwargs)
        trainer.train()
        entries.append([{k: v for k, v in entry.items() if "/" in k} for entry in logs(trainer)])
    assert entries[0] == entries[1] and len(entries[0]) == 3
    assert not any("/" in name for entry in trainer.state.log_history if "eval_loss" in entry for name in entry)


def test_training_is_bitwise_the_same_with_all_that_watches_it(checkpoint, tmp_path):
    runs = []
    for measure in (False, True):
        evaluated = dict(eval_strategy="steps", eval_steps=1, eval_rows=rows(2))
        torch.manual_seed(0)  # for adapters
        trainer = make_trainer(checkpoint, tmp_path, rank=2, dropout=0.3, **evaluated)
        if not measure:
            trainer.remove_callback(trainer.measurements)
        else:
            batch = trainer.data_collator(list(trainer.train_dataset.select(range(2))))
            trainer.add_callback(CosineProbe((0, 1, 2), batch))
            trainer.add_callback(SampleCallback(training.rows(2), 8, 1000))
        trainer.train()
        runs.append((trainer.model.state_dict(), [entry["loss"] for entry in logs(trainer)]))
    assert (tmp_path / "samples").exists() and (tmp_path / "dynamics.jsonl").exists()
    (plain, losses), (watched, same_losses) = runs
    assert losses == same_losses and plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
