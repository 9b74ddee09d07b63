import shutil

import pytest
import train_data
import training

from normalign_llava import NormAlignLlavaForConditionalGeneration


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """A folder with vision/, language/, the checkpoint model/ of both, and data/data.json. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("parts")
    training.checkpoint(folder)
    files = ("red.png", "green.png", "blue.png")
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i * 7 % 13}", files[i % 3]) for i in range(12)]
    train_data.write_json(folder / "data", rows)
    return folder


@pytest.fixture(scope="session")
def half(checkpoint, tmp_path_factory):
    """The checkpoint as `build` writes it from parts in bfloat16, but the projector. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("half") / "model"
    shutil.copytree(checkpoint, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="bfloat16")
    stored = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    model.model.multi_modal_projector = stored.model.multi_modal_projector
    model.save_pretrained(folder)
    return folder
