"""Malicious and broken folders of data: nothing outside of them is read; errors are a sentence."""

import json
import shutil

import pytest
from train_data import inside, llava, parquet_data, write_parquet

from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source


ROWS = [llava("<image>\nWhat is this?", "kept", inside("red"))] * 3


@pytest.fixture
def private(tmp_path):
    """A folder beside that of the data."""
    write_parquet(tmp_path / "private" / "rows.parquet", ROWS)
    return tmp_path / "private"


def refused(folder) -> str:
    for streaming in (False, True):
        with pytest.raises(ValueError) as error:
            list(open_source(DataSource(str(folder)), streaming))
    return str(error.value)


@pytest.mark.parametrize("path", ["{}", "../private", "file://{}"])
def test_a_card_cannot_have_files_elsewhere_read(tmp_path, private, path):
    write_parquet(tmp_path / "data" / "rows.parquet", ROWS)
    assert len(list(open_source(DataSource(str(tmp_path / "data")), False))) == 3
    files = [{"split": "train", "path": f"{path.format(private)}/rows.parquet"}]
    configs = json.dumps([{"config_name": "default", "data_files": files}])
    (tmp_path / "data" / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    assert "private/rows.parquet, outside of the folder" in refused(tmp_path / "data")


@pytest.mark.parametrize("how", ["relative", "absolute", "link"])
def test_a_saved_data_set_cannot_have_files_elsewhere_read(tmp_path, private, how):
    folder = tmp_path / "data"
    state = tmp_path / "data" / "state.json"
    parquet_data(ROWS).save_to_disk(str(folder))
    assert len(list(open_source(DataSource(str(folder)), False))) == 3
    content = json.loads(state.read_text())
    (file,) = content["_data_files"]
    moved = shutil.move(folder / file["filename"], private / "rows.arrow")
    if how == "link":
        (folder / file["filename"]).symlink_to(moved)
    else:
        file["filename"] = {"absolute": str(moved), "relative": "../private/rows.arrow"}[how]
    state.write_text(json.dumps(content))
    assert "outside of the folder" in refused(folder)


@pytest.mark.parametrize("name", ["data.csv", "metadata.jsonl"])
def test_a_file_of_rows_cannot_be_a_link_out_of_the_folder(tmp_path, private, name):
    (private / "kept").write_text("question,answer\nWhat?,kept\n")
    link = tmp_path / "data" / name
    link.parent.mkdir()
    link.symlink_to(private / "kept")
    assert f"{name}, outside of the folder" in refused(link.parent)
    assert list(open_source(DataSource(str(link)), False))  # if it is named itself
