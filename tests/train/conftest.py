import pytest
import train_data
import training


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """A folder with vision/, language/, the checkpoint model/ of both, and data/data.json. Nothing writes to it."""
    folder = tmp_path_factory.mktemp("parts")
    training.checkpoint(folder)
    files = ("red.png", "green.png", "blue.png")
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i * 7 % 13}", files[i % 3]) for i in range(12)]
    train_data.write_json(folder / "data", rows)
    return folder
