"""Which files, splits and rows a path stands for, and what options of data sets may be."""

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from datasets import ClassLabel, Dataset, Features, IterableDataset, List, Value
from test_json_files import read_file
from test_shards import write_shard
from train_data import arguments, image_bytes, images, llava, write_parquet

from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.sources import files as source_files, source as source_module
from normalign_llava.data.sources.arguments import (
    DataArguments,
    DataSource,
    Filter,
    check_choices,
    parse_filters,
)
from normalign_llava.data.sources.files import files_of_folder, images_of_folder, open_files
from normalign_llava.data.sources.source import Source, open_held_out, open_source


def raw_rows(source) -> list:
    """Returns the rows of a source without its names and their numbers."""
    return [raw_row for _, _, raw_row in source]


def open_path(data_path, streaming=False, **options) -> Source:
    return open_source(DataSource(str(data_path), **options), streaming)


def write_empty_files(folder, *file_names: str) -> None:
    for file_name in file_names:
        file_path = folder / file_name
        file_path.parent.mkdir(parents=True, exist_ok=True)
        file_path.touch()


FOLDERS = {
    "files of rows": {
        "files": ["a.json", "b.csv"],
        "split": "train",
        "read": ["a.json", "b.csv"],
    },
    "a file for testing is not trained on": {
        "files": ["a.json", "a_test.json"],
        "split": "train",
        "read": ["a.json"],
    },
    "a file for testing": {
        "files": ["a.json", "a_test.json"],
        "split": "test",
        "read": ["a_test.json"],
    },
    "a file for training in capitals": {
        "files": ["a_Train.JSONL", "b.jsonl"],
        "split": "train",
        "read": ["a_Train.JSONL"],
    },
    "a split within a word": {
        "files": ["latest.json", "a-val.json"],
        "split": "train",
        "read": ["latest.json"],
    },
    "all names of splits": {
        "files": ["a.valid.tsv", "a.dev.tsv", "eval.tsv", "validation.tsv", "b.tsv"],
        "split": "train",
        "read": ["b.tsv"],
    },
    "metadata before rows": {
        "files": ["rows.json", "metadata.csv"],
        "split": "train",
        "read": ["metadata.csv"],
        "others": ["rows.json"],
    },
    "a shard before metadata": {
        "files": ["rows.json", "0.tar", "metadata.csv"],
        "split": "train",
        "read": ["0.tar"],
        "others": ["metadata.csv", "rows.json"],
    },
    "a shard before parquet": {
        "files": ["0.tar", "0.parquet"],
        "split": "train",
        "read": ["0.tar"],
        "others": ["0.parquet"],
    },
    "several shards are read by `datasets`": {
        "files": ["0.tar", "1.tar"],
        "split": "train",
        "read": [],
    },
    "parquet before rows": {
        "files": ["0.parquet", "rows.json"],
        "split": "train",
        "read": [],
        "others": ["rows.json"],
    },
    "parquet before metadata in a folder": {
        "files": ["0.parquet", "sub/metadata.csv"],
        "split": "train",
        "read": [],
    },
    "metadata before parquet": {
        "files": ["metadata.csv", "0.parquet"],
        "split": "train",
        "read": ["metadata.csv"],
        "others": ["0.parquet"],
    },
    "metadata in a folder": {
        "files": ["sub/metadata.jsonl", "a.png"],
        "split": "train",
        "read": ["sub/metadata.jsonl"],
    },
    "metadata in folders of splits": {
        "files": ["train/metadata.csv", "test/metadata.csv"],
        "split": "test",
        "read": ["test/metadata.csv"],
    },
    "rows before metadata in a folder": {
        "files": ["rows.json", "sub/metadata.csv"],
        "split": "train",
        "read": ["rows.json"],
    },
    "a file about the data set": {
        "files": ["dataset_infos.json", "rows.json"],
        "split": "train",
        "read": ["rows.json"],
    },
    "rows in a folder": {
        "files": ["sub/rows.json"],
        "split": "train",
        "read": [],
    },
    "metadata that are text": {
        "files": ["sub/metadata.txt"],
        "split": "train",
        "read": [],
    },
}


@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS)
def test_the_files_of_a_folder_and_split(tmp_path, case):
    write_empty_files(tmp_path, *case["files"])
    (tmp_path / "folder.json").mkdir()
    read_files, other_files = files_of_folder(tmp_path, case["split"])
    assert read_files == [str(tmp_path / file_name) for file_name in case["read"]]
    expected_others = case.get("others", [])
    assert other_files == [str(tmp_path / file_name) for file_name in expected_others]


def test_a_split_that_no_file_is_named_after(tmp_path):
    write_empty_files(tmp_path, "a.json", "b.json", "a_test.json")
    with pytest.raises(ValueError, match="has 'dev' in its name: a.json, a_test.json, b.json"):
        files_of_folder(tmp_path, "dev")
    with pytest.raises(ValueError, match="has 'valid' in its name"):
        files_of_folder(tmp_path, "valid")


def test_a_folder_of_only_images_has_these(tmp_path):
    write_empty_files(tmp_path, "b.PNG", "sub/a.jpeg", "notes.txt", "c.webp")
    assert images_of_folder(tmp_path) == ["b.PNG", "c.webp", "sub/a.jpeg"]


@pytest.mark.parametrize("file_name", ["sub/x.JSON", "x.parquet", "x.arrow", "x.csv"])
def test_a_folder_with_rows_is_not_one_of_only_images(tmp_path, file_name):
    write_empty_files(tmp_path, "b.PNG", "sub/a.jpeg", "notes.txt", "c.webp", file_name)
    assert images_of_folder(tmp_path) == []


ONE_COLUMN = {"a": 1}
CAPTION = {"caption": "A", "image": "a.png"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(CAPTION, [CAPTION], id="one-row"),
        pytest.param(
            {
                "rows": [ONE_COLUMN, ONE_COLUMN],
                "tags": ["x"],
                "empty": [],
            },
            [ONE_COLUMN, ONE_COLUMN],
            id="one-list-of-rows",
        ),
        pytest.param(
            {
                "images": [{"id": 7, "file_name": "a.png"}],
                "annotations": [{"image_id": "7"}],
            },
            [{"image": "a.png"}],
            id="COCO",
        ),
    ],
)
def test_rows_in_one_object_are_read(tmp_path, content, expected):
    data_path = tmp_path / "rows.json"
    data_path.write_text(json.dumps(content))
    assert read_file(data_path) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(
            {"x": [ONE_COLUMN], "y": [ONE_COLUMN]},
            r"with 'x, y'. Write .* the first: .*\[\"x\"\]",
            id="two-lists-of-rows",
        ),
        pytest.param(
            {"1": ONE_COLUMN, "2": ONE_COLUMN},
            r"with '1, 2'. If its values are the rows, .*\.values\(\)",
            id="rows-by-number",
        ),
        pytest.param(
            {"a": 1},
            "with 'a'. Correct it, or name another",
            id="no-row",
        ),
        pytest.param(
            {},
            "with 'nothing'. Correct it",
            id="nothing",
        ),
        pytest.param(
            3,
            "but 3. Correct it, or name another",
            id="number",
        ),
        pytest.param(
            {"images": [{"id": 7}], "annotations": [{"image_id": 7}]},
            "with 'images, annotations'",
            id="COCO-without-file-names",
        ),
        pytest.param(
            {"images": [{"id": 7, "file_name": "a.png"}, {"id": 8}], "annotations": [ONE_COLUMN]},
            "with 'images, annotations'",
            id="COCO-with-one-file-name",
        ),
    ],
)
def test_one_object_without_known_rows_is_refused(tmp_path, content, reason):
    data_path = tmp_path / "rows.json"
    data_path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        read_file(data_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('[{"a": 1},\n{"a": 2}]', [{"a": 1}, {"a": 2}], id="list"),
        pytest.param('[\n{"a": 1}, {"a": 2}\n]', [{"a": 1}, {"a": 2}], id="list-in-three-lines"),
        pytest.param('{"a": 1}\n\n {"a": 2}\n', [{"a": 1}, {"a": 2}], id="lines"),
        pytest.param('[1]\n{"a": 2}', [[1], {"a": 2}], id="first-line-is-a-list"),
        pytest.param("\n", [], id="empty-line"),
    ],
)
def test_lines_that_begin_as_a_list_are_read_as_one(tmp_path, text, expected):
    data_path = tmp_path / "rows.jsonl"
    data_path.write_text(text)
    assert read_file(data_path) == expected


LONG_CELL = "x" * 200_000  # An image in base64 has more than the 131,072 letters of csv.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            f'image,question\n{LONG_CELL},"a\tb\nc"\n',
            [{"image": LONG_CELL, "question": "a\tb\nc"}],
            id="long",
        ),
        pytest.param(
            "sep=ab;question\na,b\n",
            [{"sep=ab": "a,b", "question": None}],
            id="not-a-line-that-names-a-separator",
        ),
        pytest.param(
            '"image";"question, or none"\n"a.png";"Q"\n',
            [{"image": "a.png", "question, or none": "Q"}],
            id="comma-within-quotes",
        ),
        pytest.param("", [], id="empty"),
    ],
)
def test_cells_of_tables(tmp_path, text, expected):
    data_path = tmp_path / "rows.csv"
    data_path.write_text(text)
    assert read_file(data_path) == expected


SEVERAL_IMAGES = {
    "file_names": ["a.png", "b.png"],
    "question": "Q",
    "images": [],
}


@pytest.mark.parametrize(
    ("file_name", "expected"),
    [
        ("metadata.jsonl", {"question": "Q", "images": ["a.png", "b.png"]}),
        ("rows.jsonl", SEVERAL_IMAGES),
    ],
)
def test_only_metadata_name_several_images(tmp_path, file_name, expected):
    data_path = tmp_path / file_name
    data_path.write_text(json.dumps(SEVERAL_IMAGES))
    assert read_file(data_path) == [expected]


def test_a_changed_file_is_read_anew_in_memory(tmp_path):
    data_path = tmp_path / "rows.jsonl"
    for modified_time, (text, expected) in enumerate(
        [
            ('{"a": 1}', ['{"a": 1}']),
            ('{"a": 2}', ['{"a": 2}']),
            ('{"a": 22}', ['{"a": 22}']),
            ("", []),
        ]
    ):
        data_path.write_text(text)
        os.utime(data_path, (modified_time, modified_time))
        stored = open_files((str(data_path),), streaming=False)
        assert [stored_row["json"] for stored_row in stored] == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_several_files_have_the_numbers_of_their_own(tmp_path, streaming):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "Q"}\n{"question": "R"}')
    source = open_path(tmp_path, streaming)
    places = [(file_name, number) for file_name, number, _ in source]
    assert places == [
        (str(tmp_path / "a.jsonl"), 0),
        (str(tmp_path / "a.jsonl"), 1),
        (str(tmp_path / "b.jsonl"), 0),
        (str(tmp_path / "b.jsonl"), 1),
    ]


@pytest.mark.parametrize(
    ("given", "name", "split"),
    [
        ("user/data", None, "train"),
        ("user/data:test", None, "test"),
        ("user/data:small:test", "small", "test"),
    ],
)
def test_data_are_named_with_a_configuration_and_a_split(given, name, split):
    source = DataSource.named(given)
    assert source.path == "user/data"
    assert source.name == name
    assert source.split == split


def test_a_split_of_the_name_takes_precedence_over_the_option():
    source = DataSource.named(
        "user/data:test",
        name="small",
        split="dev",
        columns="answer=a",
    )
    assert source.name == "small"
    assert source.split == "test"
    assert source.columns == {"answer": "a"}


def test_the_name_of_a_folder_may_have_a_colon(tmp_path, monkeypatch):
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert DataSource.named(str(folder)).path == str(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataSource.named("~/a:b").path == str(folder)


def test_a_folder_is_named_with_a_split(tmp_path):
    source = DataSource.named(f"{tmp_path}:test")
    assert source.path == str(tmp_path)
    assert source.split == "test"


@pytest.mark.parametrize("written", ["my-data/", "./my-data", "my-data//"])
def test_a_folder_has_one_name_however_it_is_written(tmp_path, monkeypatch, written):
    """Records name data by their path, and a run is resumed only with the same data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-data"
    folder.mkdir()
    assert DataSource(written).path == "my-data"
    assert DataSource.named(written).path == "my-data"
    source = DataSource.named(f"{written}:test")
    assert source.path == "my-data"
    assert source.split == "test"


def test_a_name_with_too_many_colons_is_refused():
    with pytest.raises(ValueError, match="user/data:a:b:c has 3 colons"):
        DataSource.named("user/data:a:b:c")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("data_name", "reason"),
    [
        ("notes.txt", "There is no data file .*notes.txt"),
        ("folder.json", "There is no data file .*folder.json"),
        ("none.csv", "There is no data file .*none.csv"),
        ("none", "none is not a file or folder here"),
    ],
)
def test_paths_that_are_not_data(tmp_path, data_name, reason, streaming):
    write_empty_files(tmp_path, "notes.txt")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=reason):
        open_path(tmp_path / data_name, streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_path_that_cannot_be_on_the_hub(streaming):
    reason = "a/b/c is not a file or folder here, nor owner/name"
    with pytest.raises(ValueError, match=reason):
        open_path("a/b/c", streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("folder_name", "reason"),
    [
        ("none", "no image folder or .zip file .*none"),
        ("a.png", "no image folder or .zip file .*a.png"),
        ("a::b.zip", "no image folder or .zip file .*a::b"),
        ("broken.zip", "broken.zip cannot be read as a zip file"),
    ],
)
def test_paths_that_are_not_image_folders(tmp_path, folder_name, reason, streaming):
    write_empty_files(tmp_path, "a.png", "a::b.zip")
    (tmp_path / "broken.zip").write_bytes(b"x")
    data_path = tmp_path / "rows.json"
    data_path.write_text("[]")
    with pytest.raises(ValueError, match=reason):
        open_path(data_path, streaming, image_folder=str(tmp_path / folder_name))


@pytest.mark.parametrize("streaming", [False, True])
def test_one_file_has_no_splits(tmp_path, streaming):
    data_path = tmp_path / "rows.json"
    data_path.write_text('[{"question": "Q"}]')
    with pytest.raises(ValueError, match="is one file, and has no split 'test'"):
        open_path(data_path, streaming, split="test")


def test_an_image_folder_may_be_a_zip_file_of_any_case(tmp_path):
    data_path = tmp_path / "rows.json"
    data_path.write_text('[{"question": "Q"}]')
    archive_path = tmp_path / "IMAGES.ZIP"
    with zipfile.ZipFile(archive_path, "w") as archive:
        archive.writestr("a.png", image_bytes())
    source = open_path(data_path, image_folder=str(archive_path))
    image_path = source.rules.image("sub/../a.png")["path"]
    assert image_path == f"zip://a.png::{archive_path}"


def test_a_folder_named_as_a_zip_file_is_a_folder(tmp_path):
    folder = tmp_path / "folder.zip"
    folder.mkdir()
    rules = ImageRules(str(folder))
    assert rules.archive is None
    assert rules.image("a.png")["path"] == str(folder / "a.png")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {},
            "to say what to train on",
        ),
        (
            {"dataset_name": "a", "datasets": [{"path": "b"}]},
            "not both",
        ),
        (
            {"datasets": [{"name": "a"}]},
            "A data set has path and some of",
        ),
        (
            {"datasets": [{"path": "a", "weight": 1}]},
            "A data set has path and some of",
        ),
        (
            {"datasets": ["a"]},
            "A data set has path and some of",
        ),
        (
            {"dataset_name": "a", "test_split_size": 0.0},
            "test_split_size must be between 0 and 1",
        ),
        (
            {"dataset_name": "a", "test_split_size": 1.0},
            "test_split_size must be between 0 and 1",
        ),
        (
            {"dataset_name": "a", "shuffle_buffer_size": 0},
            "must be 1 or more: 0",
        ),
        (
            {"dataset_name": "a", "filters": "score"},
            "filters has 'score'",
        ),
        (
            {"dataset_name": "a", "bad_rows": ["skip"]},
            "bad_rows must be",
        ),
        (
            {"dataset_name": "a", "bad_rows": "0"},
            "bad_rows must be",
        ),
    ],
)
def test_options_of_data_are_checked_at_once(options, reason):
    with pytest.raises(ValueError, match=reason):
        DataArguments(**options)


def test_data_sets_of_a_mixture_have_the_options_of_all_unless_they_say_otherwise():
    with_own_options = {
        "path": "b",
        "image_folder": "own",
        "columns": "answer=b",
        "filters": "b=2",
    }
    data_options = DataArguments(
        datasets=[{"path": "a"}, with_own_options],
        image_folder="all",
        columns="answer=a",
        filters="a=1",
    )
    first_source, second_source = data_options.sources
    assert first_source.image_folder == "all"
    assert first_source.columns == {"answer": "a"}
    assert first_source.filters == "a=1"
    assert second_source.image_folder == "own"
    assert second_source.columns == {"answer": "b"}
    assert second_source.filters == "b=2"


def test_one_data_set_has_the_options_of_all():
    data_options = DataArguments(
        dataset_name="a",
        dataset_config="c",
        dataset_train_split="s",
        image_folder="i",
        columns=["answer"],
        filters="a=1",
    )
    expected = DataSource(
        "a",
        "c",
        split="s",
        image_folder="i",
        columns=["answer"],
        filters="a=1",
    )
    assert data_options.sources == [expected]


def test_the_name_of_one_data_set_may_have_its_configuration_and_split():
    (source,) = DataArguments(dataset_name="a:c:s").sources
    assert source.name == "c"
    assert source.split == "s"


def test_a_fraction_may_be_a_text():
    assert DataSource("a", fraction="0.5").fraction == 0.5


def test_names_of_columns_may_have_spaces_around_them():
    source = DataSource("a", columns=" image = path , answer=b")
    assert source.columns == {"image": "path", "answer": "b"}


def test_columns_of_other_known_names_are_kept():
    columns = {
        "captions": "said",
        "options": "list",
        "option_a": "first",
    }
    assert DataSource("a", columns=columns).columns == columns


@pytest.fixture
def three_splits(tmp_path):
    """A folder of train.json, test.json and dev.json. One of each two rows passes `n<2`."""
    for split_name in ("train", "test", "dev"):
        sample_row = {
            "image": f"{split_name}.png",
            "asked": f"{split_name}?",
            "answer": "A",
            "n": 1,
        }
        rows = [sample_row, sample_row | {"n": "2"}]
        (tmp_path / f"{split_name}.json").write_text(json.dumps(rows))
    images(tmp_path / "shown", "red.png")
    return tmp_path


def held_out_options(folder) -> dict:
    return {
        "columns": "question=asked,answer=answer,image=image",
        "filters": "n<2",
        "image_folder": str(folder / "shown"),
    }


@pytest.mark.parametrize(
    ("own_options", "split"),
    [
        ({}, "test"),
        ({"dataset_test_split": "dev"}, "dev"),
        ({"eval_dataset_name": "{folder}:dev"}, "dev"),
        ({"eval_dataset_name": "{folder}:dev", "dataset_config": "other"}, "dev"),
        ({"eval_dataset_name": "{folder}"}, "test"),
        ({"eval_dataset_name": "{folder}/train.json"}, "train"),
    ],
)
def test_held_out_data_are_opened_as_the_training_data(three_splits, own_options, split):
    options = held_out_options(three_splits)
    for name, value in own_options.items():
        options[name] = value.format(folder=three_splits)
    held_out = open_held_out(arguments(three_splits, **options))
    questions = [raw_row["question"] for raw_row in raw_rows(held_out)]
    assert questions == [f"{split}?"]
    assert held_out.rules == ImageRules(str(three_splits / "shown"))


def test_held_out_data_are_streamed_as_the_training_data(three_splits):
    options = held_out_options(three_splits)
    held_out = open_held_out(arguments(three_splits, **options, dataset_streaming=True))
    assert isinstance(held_out.data, IterableDataset)


@pytest.mark.parametrize(
    ("data_name", "options"),
    [
        ("train.json", {}),
        (".", {}),
        (".", {"dataset_test_split": "none"}),
    ],
)
def test_data_without_a_test_split_have_nothing_to_hold_out(three_splits, data_name, options):
    (three_splits / "test.json").unlink()
    data_options = arguments(three_splits / data_name, **options)
    with pytest.raises(ValueError, match="There is no held-out data. .*Give eval_dataset_name"):
        open_held_out(data_options)


def test_a_mixture_has_nothing_to_hold_out():
    with pytest.raises(ValueError, match="A mixture has no test split"):
        open_held_out(DataArguments(datasets=[{"path": "a"}]))


def test_a_saved_data_set_without_splits_is_held_out_whole(tmp_path):
    saved_path = tmp_path / "saved"
    dataset = Dataset.from_list([{"question": "Q", "answer": "A"}])
    dataset.save_to_disk(str(saved_path))
    held_out = open_held_out(arguments("other", eval_dataset_name=str(saved_path)))
    assert [raw_row["question"] for raw_row in raw_rows(held_out)] == ["Q"]
    with pytest.raises(ValueError, match="it has the splits train"):
        open_path(saved_path, split="test")


def test_a_folder_of_images_has_no_splits(tmp_path):
    images(tmp_path, "red.png", "sub/blue.png")
    source = open_path(tmp_path)
    assert raw_rows(source) == [{"image": "red.png"}, {"image": "sub/blue.png"}]
    assert source.rules == ImageRules(str(tmp_path))
    with pytest.raises(ValueError, match="a folder of images without splits"):
        open_path(tmp_path, split="test")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_columns_that_are_listed_have_only_these(tmp_path, streaming):
    data_path = tmp_path / "rows.jsonl"
    data_path.write_text('{"question": "Q", "answer": "A", "more": 1}\n{"answer": "B"}\n[1]')
    source = open_path(data_path, streaming, columns=["question", "answer"])
    assert raw_rows(source) == [
        {"question": "Q", "answer": "A"},
        {"answer": "B"},
        [1],
    ]
    with pytest.raises(ValueError, match="columns of the data are: answer, more, question"):
        open_path(data_path, streaming, columns=["question", "none"])


def write_with_late_column(folder, place):
    """Writes 1001 rows, of which only the one at the place has the column `b`."""
    rows = [{"a": 2}] * 1001
    rows[place] = {"b": 2}
    lines = [json.dumps(row) for row in rows]
    data_path = folder / "rows.jsonl"
    data_path.write_text("\n".join(lines))
    return data_path


@pytest.mark.parametrize("place", [999, 1000])
def test_columns_in_memory_are_looked_for_in_all_rows(tmp_path, place):
    data_path = write_with_late_column(tmp_path, place)
    source = open_path(data_path, columns=["b"])
    assert len(list(source.rows_at(range(3)))) == 3


def test_columns_of_a_stream_are_looked_for_in_its_first_thousand_rows(tmp_path):
    data_path = write_with_late_column(tmp_path, 999)
    open_path(
        data_path,
        streaming=True,
        columns=["b"],
    )

    data_path = write_with_late_column(tmp_path, 1000)
    with pytest.raises(ValueError, match="columns names 'b', but"):
        open_path(
            data_path,
            streaming=True,
            columns=["b"],
        )


@pytest.fixture
def ten_rows():
    """A source of the rows {"a": 0} to {"a": 9}."""
    features = Features(a=Value("int64"))
    dataset = Dataset.from_dict({"a": [*range(10)]}, features=features)
    return Source("mine", ImageRules(), dataset)


def test_rows_are_read_from_a_number_on(ten_rows):
    assert ten_rows.rows_at(range(3, 5)) == [
        ("mine", 3, {"a": 3}),
        ("mine", 4, {"a": 4}),
    ]
    last_numbers = [number for _, number, _ in ten_rows.rows_at([8, 9])]
    assert last_numbers == [8, 9]


def test_rows_are_read_by_their_numbers(ten_rows):
    picked = raw_rows(ten_rows.rows_at([7, 2, 7]))
    assert picked == [
        {"a": 7},
        {"a": 2},
        {"a": 7},
    ]


def test_filtered_rows_keep_their_numbers(ten_rows):
    filtered = ten_rows.filtered(parse_filters("a>=4,a!=6,a<9"))
    assert list(filtered) == [
        ("mine", 4, {"a": 4}),
        ("mine", 5, {"a": 5}),
        ("mine", 7, {"a": 7}),
        ("mine", 8, {"a": 8}),
    ]


def test_a_source_without_filters_is_the_same(ten_rows):
    assert ten_rows.filtered(()) is ten_rows


@pytest.mark.parametrize(
    ("condition", "value", "kept"),
    [
        ("a>=4", 4, True),
        ("a>4", 4, False),
        ("a<=4", "4", True),
        ("a<4", 4.0, False),
        ("a=4", "4.0", True),
        ("a!=4", 4, False),
        ("a!=4", None, True),
        ("a=4", None, False),
        ("a!=4", float("nan"), True),
        ("a>=4", float("nan"), False),
        ("a=nan", float("nan"), False),
        ("a=true", True, True),
        ("a=1", True, False),
        ("a=True", False, False),
        ("a=Some Thing", "some thing", True),
        ("a=x", "X ", False),
        ("a==x", "x", True),
    ],
)
def test_a_condition_keeps(condition, value, kept):
    (parsed_filter,) = parse_filters(condition)
    assert parsed_filter.keeps({"a": value, "b": 9}) == kept


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (" a >= 4 , b=c>d", (Filter("a", ">=", "4"), Filter("b", "=", "c>d"))),
        (["a=x, y"], (Filter("a", "=", "x, y"),)),
        (["a=x\ny"], (Filter("a", "=", "x\ny"),)),
        (None, ()),
        ([], ()),
    ],
)
def test_conditions_are_parsed_at_their_first_comparison(conditions, expected):
    assert parse_filters(conditions) == expected


@pytest.mark.parametrize("wrong", ["", "a=", "=4", "a>=x", ["a", "b=1"]])
def test_a_condition_has_a_column_a_comparison_and_a_value(wrong):
    with pytest.raises(ValueError, match="filters (has|compares)"):
        parse_filters(wrong)


def test_a_text_is_not_compared_with_a_number():
    with pytest.raises(ValueError, match="a is 'x' in a row, not a number"):
        Filter("a", "<", "4").keeps({"a": "x"})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("split", "expected"), [("train", "A"), ("test", "B")])
def test_files_of_one_folder_may_be_of_several_splits(tmp_path, split, expected, streaming):
    write_parquet(tmp_path / "data" / "train.parquet", [llava("Q", "A")])
    write_parquet(tmp_path / "data" / "test.parquet", [llava("Q", "B")])
    ((_, number, raw_row),) = open_path(tmp_path / "data", streaming, split=split)
    assert number == 0
    assert raw_row["conversations"][1]["value"] == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_a_row_is_not_filtered(tmp_path, streaming):
    data_path = tmp_path / "rows.jsonl"
    data_path.write_text('{"a": 1}\n[1]\n{"a": 5}\n')
    source = open_path(data_path, streaming, filters="a>=4")
    assert raw_rows(source) == [[1], {"a": 5}]


@pytest.fixture
def dataset_with_classes():
    classes = ClassLabel(names=["cat", "dog"])
    features = Features(
        a=Value("int64"),
        b=classes,
        c=List(classes),
    )
    columns = {
        "a": [1, 2, 3],
        "b": [1, -1, None],
        "c": [[0, 1], [], None],
    }
    return Dataset.from_dict(columns, features=features)


ROWS_WITH_CLASSES = [
    {
        "a": 1,
        "b": "dog",
        "c": ["cat", "dog"],
    },
    {
        "a": 2,
        "b": -1,
        "c": [],
    },
    {
        "a": 3,
        "b": None,
        "c": None,
    },
]


def test_classes_have_their_names_and_what_is_not_a_class_stays(dataset_with_classes):
    source = Source("mine", ImageRules(), dataset_with_classes)
    assert raw_rows(source) == ROWS_WITH_CLASSES


def test_filtered_rows_have_the_names_of_classes(dataset_with_classes):
    """Only the column of the condition is read to filter rows."""
    source = Source("mine", ImageRules(), dataset_with_classes)
    filtered = source.filtered(parse_filters("a>=2"))
    assert raw_rows(filtered) == ROWS_WITH_CLASSES[1:]


def test_hidden_columns_of_classes_are_not_read(dataset_with_classes):
    shown_dataset = dataset_with_classes.with_format("numpy", columns=["a"])
    source = Source("mine", ImageRules(), shown_dataset)
    assert raw_rows(source) == [
        {"a": 1},
        {"a": 2},
        {"a": 3},
    ]


@pytest.fixture
def nested_files(tmp_path, monkeypatch):
    """The files top.jsonl, sub/one.jsonl and sub/two.jsonl, in the working directory."""
    for name, answer in (("top", "A"), ("sub/one", "B"), ("sub/two", "C")):
        data_path = tmp_path / f"{name}.jsonl"
        data_path.parent.mkdir(exist_ok=True)
        data_path.write_text(json.dumps({"question": "Q", "answer": answer}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_source_has(source, answers, image_folder):
    opened = open_source(source, False)
    assert [raw_row["answer"] for raw_row in raw_rows(opened)] == answers
    assert opened.rules.folder == image_folder


def test_files_may_be_named_as_for_datasets(nested_files):
    one_path = str(nested_files / "sub" / "one.jsonl")
    assert_source_has(DataSource("json", data_files=one_path), ["B"], ".")

    by_split = DataSource(str(nested_files), data_files={"train": one_path})
    assert_source_has(by_split, ["B"], str(nested_files))

    outside = DataSource("sub", data_files=str(nested_files / "top.jsonl"))
    assert_source_has(outside, ["A"], "sub")


def test_folders_may_be_named_as_for_datasets(nested_files):
    sub_folder = str(nested_files / "sub")
    assert_source_has(DataSource("json", data_dir=sub_folder), ["B", "C"], sub_folder)

    relative = DataSource(str(nested_files), data_dir="sub")
    assert_source_has(relative, ["B", "C"], str(nested_files))


def test_a_folder_with_a_link_out_of_it_is_refused(nested_files):
    (nested_files / "sub" / "link.jsonl").symlink_to(nested_files / "top.jsonl")
    with pytest.raises(ValueError, match="link.jsonl, outside of the folder"):
        open_path(nested_files, data_dir="sub")


def test_images_are_beside_a_parquet_file(tmp_path):
    data_path = write_parquet(tmp_path / "data" / "train.parquet", [llava("Q", "A")])
    assert open_path(data_path).rules.folder == str(data_path.parent)


def test_a_parquet_file_is_read_although_its_card_is_wrong_about_rows(tmp_path):
    data_path = write_parquet(tmp_path / "data" / "train.parquet", [llava("Q", "A")])
    wrong_split = {
        "name": "train",
        "num_bytes": 1,
        "num_examples": 99,
    }
    card = json.dumps({"splits": [wrong_split]})
    (data_path.parent / "README.md").write_text(f"---\ndataset_info: {card}\n---\n")
    assert len(list(open_path(data_path.parent))) == 1


QUESTION = {"question": "Q", "answer": "A"}


def test_the_suffix_of_a_shard_may_be_in_capitals(tmp_path):
    shard_path = write_shard(tmp_path / "0.TAR", {"0.json": QUESTION})
    assert raw_rows(open_path(shard_path)) == [QUESTION]


def test_a_file_beside_shards_is_not_read(tmp_path):
    """Programs write their counts there."""
    write_shard(tmp_path / "0.TAR", {"0.json": QUESTION})
    (tmp_path / "stats.json").write_text("{}")
    assert raw_rows(open_path(tmp_path)) == [QUESTION]


@dataclass
class Choices:
    one: Literal["a", "b"] = "a"
    maybe: Literal["c", 4] | None = None
    free: str | None = None


@pytest.mark.parametrize(
    "options",
    [
        Choices(),
        Choices("b", "c", "x"),
        Choices(maybe=4),
    ],
)
def test_a_choice_may_be_one_of_those_that_are_named(options):
    check_choices(options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Choices("c"), "one must be one of 'a', 'b', got 'c'"),
        (Choices(None), "one must be one of 'a', 'b', got None"),
        (Choices(maybe="4"), "maybe must be one of 'c', 4, got '4'"),
    ],
)
def test_another_choice_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        check_choices(options)


@pytest.fixture
def configured_folder(tmp_path):
    """A folder of the configurations `one` and `other`, each with a row of its name."""
    configs = []
    for config_name in ("one", "other"):
        file_name = f"{config_name}.jsonl"
        (tmp_path / file_name).write_text(json.dumps({"question": "Q", "answer": config_name}))
        configs.append({"config_name": config_name, "data_files": file_name})
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return tmp_path


def test_a_configuration_of_a_folder_is_read_as_its_card_says(configured_folder):
    (raw_row,) = raw_rows(open_path(configured_folder, name="other"))
    assert raw_row["answer"] == "other"


def test_all_files_of_a_folder_are_read_without_a_configuration(configured_folder):
    assert len(list(open_path(configured_folder))) == 2


def test_a_folder_that_is_named_as_a_data_set_of_the_hub_is_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "my" / "data"
    folder.mkdir(parents=True)
    (folder / "rows.json").write_text(json.dumps([QUESTION]))
    monkeypatch.chdir(tmp_path)
    source = open_path("my/data")
    assert [raw_row["answer"] for raw_row in raw_rows(source)] == ["A"]
    assert source.rules == ImageRules("my/data")
    assert source.dataset is None


@pytest.mark.parametrize(
    ("module", "file_name"),
    [
        (source_files, "rows.json"),
        (source_module, "rows.tar"),
    ],
)
def test_rows_that_other_code_has_read_are_read_anew(tmp_path, monkeypatch, module, file_name):
    data_path = tmp_path / file_name
    if file_name == "rows.json":
        data_path.write_text(json.dumps([QUESTION]))
    else:
        write_shard(data_path, {"0.json": QUESTION})
    cache_files = open_path(data_path).data.cache_files
    assert open_path(data_path).data.cache_files == cache_files

    changed_code = tmp_path / "changed.py"
    changed_code.write_text(Path(module.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(module, "__file__", str(changed_code))
    assert open_path(data_path).data.cache_files != cache_files
