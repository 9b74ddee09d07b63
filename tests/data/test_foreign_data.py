"""Malicious and broken folders of data: nothing outside of them is read; errors are a sentence."""

import json
import re
import shutil

import pytest
from train_data import inside, llava, parquet_data, write_parquet

from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source


ROWS = [llava("<image>\nWhat is this?", "kept", inside("red"))] * 3


@pytest.fixture
def private(tmp_path):
    """A folder beside the folder of the data."""
    folder = tmp_path / "private"
    write_parquet(folder / "rows.parquet", ROWS)
    return folder


def read_rows(data_path, streaming=False) -> list:
    return list(open_source(DataSource(str(data_path)), streaming))


def assert_is_refused(folder, reason):
    for streaming in (False, True):
        with pytest.raises(ValueError, match=re.escape(reason)):
            read_rows(folder, streaming)


@pytest.mark.parametrize("private_path", ["{}", "../private", "file://{}"])
def test_a_card_cannot_have_files_elsewhere_read(tmp_path, private, private_path):
    folder = tmp_path / "data"
    write_parquet(folder / "rows.parquet", ROWS)
    assert len(read_rows(folder)) == 3

    data_file = {"split": "train", "path": f"{private_path.format(private)}/rows.parquet"}
    configs = [{"config_name": "default", "data_files": [data_file]}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert_is_refused(folder, "private/rows.parquet, outside of the folder")


@pytest.mark.parametrize("kind", ["relative", "absolute", "link"])
def test_a_saved_data_set_cannot_have_files_elsewhere_read(tmp_path, private, kind):
    folder = tmp_path / "data"
    parquet_data(ROWS).save_to_disk(str(folder))
    assert len(read_rows(folder)) == 3

    state_path = folder / "state.json"
    state = json.loads(state_path.read_text())
    (data_file,) = state["_data_files"]
    own_path = folder / data_file["filename"]
    private_path = shutil.move(own_path, private / "rows.arrow")
    if kind == "link":
        own_path.symlink_to(private_path)
    elif kind == "absolute":
        data_file["filename"] = str(private_path)
    else:
        data_file["filename"] = "../private/rows.arrow"
    state_path.write_text(json.dumps(state))
    assert_is_refused(folder, "outside of the folder")


@pytest.mark.parametrize("file_name", ["data.csv", "metadata.jsonl"])
def test_a_file_of_rows_cannot_be_a_link_out_of_the_folder(tmp_path, private, file_name):
    target = private / "kept"
    target.write_text("question,answer\nWhat?,kept\n")
    link = tmp_path / "data" / file_name
    link.parent.mkdir()
    link.symlink_to(target)
    assert_is_refused(link.parent, f"{file_name}, outside of the folder")
    assert read_rows(link)  # if it is named itself
