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
    write_rows(folder / "data", 12)
    write_rows(folder / "first", 11)
    write_rows(folder / "second", 9)
    return folder


def write_rows(data_folder, row_count: int) -> None:
    """Rows with an image, but the fifth."""
    data_rows = []
    for number in range(row_count):
        image = ("red.png", "green.png", "blue.png")[number % 3]
        question = f"<image>\nwhat is {number}?"
        answer = f"it is {number * 7 % 13}"
        data_rows.append(train_data.llava(question, answer, image))
    data_rows[4] = train_data.llava("and without an image?", "it is words")
    train_data.write_json(data_folder, data_rows)


@pytest.fixture(scope="session")
def half(checkpoint, tmp_path_factory):
    """The checkpoint as built of parts in bfloat16, but the projector. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("half") / "model"
    shutil.copytree(checkpoint, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="bfloat16")
    float32_model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    model.model.multi_modal_projector = float32_model.model.multi_modal_projector
    model.save_pretrained(folder)
    return folder
