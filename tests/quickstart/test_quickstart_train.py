# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's recipes on a tiny real model: what changes and what does not, and resuming after a kill."""

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import datasets
import pytest
import tiny_parts as parts
import torch
from PIL import Image
from safetensors.torch import load_file

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.data.easy_vqa import FEATURES, png
from normalign_llava.quickstart.time_left import TimeLeft, TrainingPace
from normalign_llava.quickstart.train import rows_of, stage, train_stage, words
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


COLOURS = ("red", "green", "blue")
SHORT = {"max_steps": 3, "global_batch_size": 8, "per_device_train_batch_size": 4, "save_steps": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    vision = parts.vision(folder / "vision", "dinov2")
    build_checkpoint(vision, parts.language(folder / "language"), folder / "untrained")
    return folder / "untrained"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    datasets.Dataset.from_list([row(number) for number in range(48)], features=FEATURES).save_to_disk(
        folder / "colours"
    )
    return folder / "colours"


def row(number):
    colour = COLOURS[number % 3]
    user = [{"type": "image"}, {"type": "text", "text": "which colour"}]
    answer = [{"type": "text", "text": colour}]
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"images": [{"bytes": png(Image.new("RGB", (16, 16), colour))}], "messages": messages}


def changed(before: Path, after: Path) -> set[str]:
    old, new = (load_file(next(folder.glob("*model.safetensors"))) for folder in (before, after))
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_a_stage_is_its_recipe_with_changes():
    recipe = stage("quickstart-align")
    assert recipe["stage"] == "align" and rows_of(recipe) == 160
    assert stage("quickstart-align", max_steps=3) == {**recipe, "max_steps": 3}
    assert rows_of(stage("quickstart-tune")) == 1760
    with pytest.raises(ValueError, match="no recipe of that name"):
        stage("quickstart-rest")


def test_stage_1_changes_the_projector_and_nothing_else(untrained, data, tmp_path):
    trained, left = tmp_path / "stage1", TimeLeft({"stage 1": 1e6, "stage 2": 1e6})
    pace = TrainingPace(left, "stage 1")
    train_stage(stage("quickstart-align", **SHORT), untrained, data, trained, callbacks=[pace])
    assert 0 < left.seconds() < 1e6  # stage 1 is done, and stage 2 will not take 12 days either
    names = changed(untrained, trained)
    assert all(name.startswith("model.multi_modal_projector.") for name in names)
    assert len(names) == 6  # two linear layers and the norm, each with weight and bias
    assert {tensor.dtype for tensor in load_file(trained / "model.safetensors").values()} == {torch.float32}
    record = json.loads((trained / "training.json").read_text())
    assert (record["stage"], record["options"]["max_steps"], record["options"]["bf16"]) == ("align", 3, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "stage1"]
    assert all(path.is_file() for path in trained.iterdir())


def test_stage_2_adapts_the_language_model_and_the_projector_and_not_the_vision_tower(untrained, data, tmp_path):
    train_stage(stage("quickstart-tune", **SHORT), untrained, data, tmp_path / "adapter", bf16=True)
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (16, 32, 0.0)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    names = changed(untrained, tmp_path / "merged")
    adapted = tuple(f".{name}_proj.weight" for name in ("q", "v"))
    tensors = load_file(untrained / "model.safetensors")
    of_language = {name for name in tensors if "language_model" in name and name.endswith(adapted)}
    assert {name for name in names if "multi_modal_projector" not in name} == of_language
    assert len(of_language) == 2 * 2 and len(names) == 2 * 2 + 6


RUN = """
    from pathlib import Path
    from normalign_llava.quickstart.train import stage, train_stage
    options = stage({recipe!r}, **{options!r})
    train_stage(options, Path({untrained!r}), Path({data!r}), Path({output!r}))
"""


def test_a_killed_stage_is_resumed_and_ends_with_the_same_weights(prepared, untrained, data, tmp_path):
    options = {**SHORT, "max_steps": 12, "disable_tqdm": True}
    killed, run, recipe = tmp_path / "killed", tmp_path / "killed-trainer", "quickstart-tune"
    source = RUN.format(recipe=recipe, options=options, untrained=str(untrained), data=str(data), output=str(killed))
    process = prepared.start(["-c", textwrap.dedent(source)])
    while process.poll() is None and not list(run.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not killed.exists() and run.exists()
    for output in (killed, tmp_path / "straight"):
        train_stage(stage(recipe, **options), untrained, data, output)
    assert changed(tmp_path / "straight", killed) == set()
    assert not run.exists()


def test_a_stage_that_was_killed_while_its_result_was_moved_is_finished(untrained, data, tmp_path):
    options = stage("quickstart-align", **SHORT)
    given = {"model_name_or_path": untrained, "dataset_name": data, "output_dir": tmp_path / "cut-trainer"}
    main(words({**options, **given, "bf16": False}))
    (tmp_path / "cut-trainer" / "model.safetensors").rename(tmp_path / "straight.model.safetensors")
    train_stage(options, untrained, data, tmp_path / "cut")
    assert changed(tmp_path, tmp_path / "cut") == set()
