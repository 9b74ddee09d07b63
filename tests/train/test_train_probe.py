# SPDX-License-Identifier: Apache-2.0
"""Inter-layer cosines: against hidden states that the model returns; training that does not notice."""

import json

import pytest
import tiny
import torch
from measured import logs, make_trainer

from normalign_llava.train.callbacks.depth_probe import DYNAMICS, CosineProbe, layer_cosines
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


def padded(images=2, batch=3):
    inputs = tiny.inputs(images=images, text=7, batch=batch, seed=5)
    inputs["attention_mask"][0, -3:] = 0
    return inputs


def test_cosines_are_those_of_the_hidden_states():
    model, batch = tiny.model(), padded()
    found = layer_cosines(model, batch)
    final = []
    norm = model.model.language_model.norm
    hook = norm.register_forward_pre_hook(lambda module, args: final.append(args[0]))
    with torch.no_grad():
        states = list(model(**batch, output_hidden_states=True).hidden_states)
    hook.remove()
    states[-1] = final[0]  # transformers returns the last state after the final norm
    states = [state.double() for state in states]
    image, attended = batch["input_ids"] == tiny.IMAGE, batch["attention_mask"].bool()
    assert len(found["visual"]) == len(found["text"]) == 2
    for kind, mask in {"visual": image, "text": attended & ~image}.items():
        expected = [
            (torch.linalg.vecdot(a, b) / (a.norm(dim=-1) * b.norm(dim=-1)))[mask].mean().item()
            for a, b in zip(states, states[1:], strict=False)
        ]
        assert found[kind] == pytest.approx(expected, abs=1e-6)
    assert found["visual"] != pytest.approx(found["text"], abs=1e-3)


def test_a_batch_without_images_has_an_empty_visual_curve():
    found = layer_cosines(tiny.model(), tiny.inputs(images=0, batch=2))
    assert found["visual"] == [] and len(found["text"]) == 2


def probed(checkpoint, folder, steps=(0, 1, 3), **kwargs):
    """A trainer with a probe on two of its rows."""
    trainer = make_trainer(checkpoint, folder, **kwargs)
    probe = CosineProbe(steps, trainer.data_collator(list(trainer.train_dataset.select(range(2)))))
    trainer.add_callback(probe)
    trainer.probe = probe
    return trainer, probe


def lines(folder):
    return [json.loads(line) for line in (folder / DYNAMICS).read_text().splitlines()]


@pytest.mark.parametrize("kwargs", [{"rank": 2, "gradient_checkpointing": True}, {"bf16": True}])
def test_the_probe_writes_a_line_for_each_step(checkpoint, tmp_path, kwargs):
    trainer, probe = probed(checkpoint, tmp_path, **kwargs)
    trainer.train()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 1, 3]
    assert all(len(line[kind]) == 2 for line in written for kind in ("visual", "text"))
    batch = probe.batch
    assert "labels" not in batch
    states = {0: trainer.start, 3: trainer.model}
    for line in (written[0], written[2]):
        model = states[line["step"]].eval()
        base_model(model).__dict__.pop("forward", None)  # TRL's is bound to the trained model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in kwargs):
            expected = layer_cosines(base_model(model), batch)
        assert line["visual"] == pytest.approx(expected["visual"], abs=1e-6)
        assert line["text"] == pytest.approx(expected["text"], abs=1e-6)
    assert written[0]["text"] != written[2]["text"]
    _, without, logged = logs(trainer)
    assert not any(key.startswith("cosine/") for key in without)
    for kind, values in expected.items():
        assert logged[f"cosine/{kind}"] == pytest.approx(sum(values) / 2)


def test_a_step_measured_again_replaces_its_line(checkpoint, tmp_path):
    trainer, _ = probed(checkpoint, tmp_path, steps=(0, 2, 3), save_strategy="steps", save_steps=1)
    trainer.train()
    first = lines(tmp_path)
    again, _ = probed(checkpoint, tmp_path, steps=(0, 2, 3))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 3]
    assert lines(tmp_path)[0] == first[0]
    fresh, _ = probed(checkpoint, tmp_path, steps=(0, 1))
    fresh.train()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
