# SPDX-License-Identifier: Apache-2.0
"""The quickstart's recipes on a tiny real model."""

import datasets
import pytest
import stored
import tiny_parts as parts
import torch
from PIL import Image

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.fetched.easy_vqa import FEATURES, png
from normalign_llava.quickstart.train import stage, train_stage, words
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


COLOURS = ("red", "green", "blue")
SHORT = {"max_steps": 3, "global_batch_size": 8, "per_device_train_batch_size": 4, "save_steps": 2}


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


def test_a_stage_that_was_killed_while_its_result_was_moved_is_finished(untrained, data, tmp_path):
    options = stage("quickstart-align", **SHORT)
    paths = {"model_name_or_path": untrained, "dataset_name": data, "output_dir": tmp_path / "cut-trainer"}
    main(words({**options, **paths, "bf16": False}))
    (tmp_path / "cut-trainer").rename(tmp_path / "straight")
    train_stage(options, untrained, data, tmp_path / "cut")
    expected, got = (stored.weights(tmp_path / name) for name in ("straight", "cut"))
    assert expected.keys() == got.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
