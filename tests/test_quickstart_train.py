# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The two stages on tiny real models: what changes and what does not, and going on after a kill."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tiny_parts as parts
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from trl import SFTTrainer

from normalign_llava.build import build_checkpoint
from normalign_llava.quickstart.data import FEATURES, png
from normalign_llava.quickstart.train import (
    AnswerLossTrainer,
    Stage,
    last_complete_checkpoint,
    make_trainer,
    train_stage,
)


COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    vision = parts.vision(folder / "vision", "dinov2")
    build_checkpoint(vision, parts.language(folder / "language"), folder / "untrained")
    return folder / "untrained"


def colours(rows: int) -> Dataset:
    def row(number):
        colour = COLOURS[number % 3]
        user = [{"type": "image"}, {"type": "text", "text": "which colour"}]
        answer = [{"type": "text", "text": colour}]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"images": [{"bytes": png(Image.new("RGB", (16, 16), colour))}], "messages": messages}

    return Dataset.from_list([row(number) for number in range(rows)], features=FEATURES)


def changed(before: Path, after: Path) -> set[str]:
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize("bf16", [False, True])
def test_stage_1_changes_the_projector_and_nothing_else(untrained, tmp_path, bf16):
    stage = Stage(steps=3, learning_rate=1e-2, batch_size=4)
    trained = train_stage(stage, untrained, tmp_path / "stage1", colours(12), bf16=bf16)
    names = changed(untrained, trained)
    assert all(name.startswith("model.multi_modal_projector.") for name in names)
    assert len(names) == 6  # two linear layers and the norm, each with weight and bias
    saved = load_file(trained / "model.safetensors")
    assert {saved[f"model.multi_modal_projector.norm.{name}"].dtype for name in ("weight", "bias")} == {torch.float32}
    assert not (tmp_path / "stage1-trainer").exists()


def test_stage_2_adapts_the_language_model_and_the_projector_and_not_the_vision_tower(untrained, tmp_path):
    stage = Stage(steps=3, learning_rate=1e-2, lora_rank=2, batch_size=4)
    trainer = make_trainer(stage, untrained, tmp_path / "t", colours(12))
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(("lora_" in n and "language_model" in n) or "multi_modal_projector" in n for n in trainable)
    assert len([name for name in trainable if "lora_" in name]) == 2 * 7 * 2  # A and B, seven linears, two layers
    trained = train_stage(stage, untrained, tmp_path / "stage2", colours(12))
    names = changed(untrained, trained)
    linears = {name for name in load_file(trained / "model.safetensors") if ".layers." in name and "_proj." in name}
    of_language = {name for name in linears if "language_model" in name}
    assert {name for name in names if "multi_modal_projector" not in name} == of_language
    assert len(names) == len(of_language) + 6


@pytest.mark.parametrize("rank", [0, 2])
def test_loss_and_gradients_are_those_of_the_plain_trainer(untrained, tmp_path, rank):
    stage = Stage(steps=1, learning_rate=1e-2, lora_rank=rank, batch_size=6)
    found = []
    for loss_of in (AnswerLossTrainer.compute_loss, SFTTrainer.compute_loss):
        trainer = make_trainer(stage, untrained, tmp_path / "t", colours(6))
        batch = trainer.data_collator(list(trainer.train_dataset))
        loss = loss_of(trainer, trainer.model, dict(batch), num_items_in_batch=torch.tensor(31))
        loss.backward()
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((loss.detach(), gradients))
    (ours, our_gradients), (reference, reference_gradients) = found
    torch.testing.assert_close(ours, reference)
    assert our_gradients.keys() == reference_gradients.keys()
    for name, gradient in reference_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, msg=name)


def test_bfloat16_reaches_the_forward(untrained, tmp_path):
    stage = Stage(steps=1, learning_rate=1e-2, batch_size=6, accumulation=1)
    seen = []
    for bf16 in (False, True):
        trainer = make_trainer(stage, untrained, tmp_path / "t", colours(6), bf16=bf16)
        layer = trainer.model.model.language_model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        trainer.train()
    assert seen == [torch.float32, torch.bfloat16]


RUN = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_quickstart_train import Stage, colours, train_stage
    stage = Stage(steps=12, learning_rate=1e-2, lora_rank={rank}, batch_size=4, save_steps=2)
    train_stage(stage, Path({untrained!r}), Path(sys.argv[1]), colours(48))
"""


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_stage_goes_on_and_ends_with_the_same_weights(untrained, tmp_path, rank):
    source = textwrap.dedent(RUN).format(tests=str(Path(__file__).parent), untrained=str(untrained), rank=rank)

    def start(output):
        return subprocess.Popen([sys.executable, "-c", source, str(output)], stderr=subprocess.PIPE, text=True)

    killed = tmp_path / "killed"
    process = start(killed)
    trainer_folder = tmp_path / "killed-trainer"
    while process.poll() is None and not list(trainer_folder.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not killed.exists() and trainer_folder.exists()
    # What a kill in the middle of writing leaves behind: a newer checkpoint without its end.
    unfinished = trainer_folder / "checkpoint-11"
    unfinished.mkdir()
    (unfinished / "trainer_state.json").write_text('{"global_step": 1')
    resumed = start(killed)
    said = resumed.communicate()[1]
    assert resumed.returncode == 0, said
    straight = start(tmp_path / "straight")
    assert straight.wait() == 0
    assert changed(tmp_path / "straight", killed) == set()
    assert changed(untrained, killed)


def test_only_checkpoints_written_to_their_end_count(tmp_path):
    assert last_complete_checkpoint(tmp_path / "none") is None
    for step, state in {9: '{"global_step": 9}', 20: '{"global_step": 20}', 30: '{"glob', 40: None}.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state:
            (folder / "trainer_state.json").write_text(state)
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-9"]
