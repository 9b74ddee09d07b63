import shutil

import pytest
import train_data
import training

from normalign_llava import NormAlignLlavaForConditionalGeneration


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """vision/, language/, model/ made of both, and three data sets, to which nothing writes."""
    folder = tmp_path_factory.mktemp("parts")
    training.checkpoint(folder)
    for name, count in {"data": 12, "first": 11, "second": 9}.items():
        rows = []
        for i in range(count):
            image = ("red.png", "green.png", "blue.png")[i % 3]
            rows.append(train_data.llava(f"<image>\nwhat is {i}?", f"it is {i * 7 % 13}", image))
        rows[4] = train_data.llava("and without an image?", "it is words")
        train_data.write_json(folder / name, rows)
    return folder


@pytest.fixture(scope="session")
def half(checkpoint, tmp_path_factory):
    """The checkpoint as built of parts in bfloat16, but the projector. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("half") / "model"
    shutil.copytree(checkpoint, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="bfloat16")
    stored = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    model.model.multi_modal_projector = stored.model.multi_modal_projector
    model.save_pretrained(folder)
    return folder
