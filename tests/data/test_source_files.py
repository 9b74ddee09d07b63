"""Which files, splits and rows a path stands for, and what options of data sets may be."""

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from datasets import ClassLabel, Dataset, Features, IterableDataset, List, Value
from test_shards import shard
from train_data import arguments, image_bytes, images, llava, write_parquet

from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.sources import files as source_files, source as source_module
from normalign_llava.data.sources.arguments import DataArguments, DataSource, check_choices
from normalign_llava.data.sources.files import (
    files_of_folder,
    images_of_folder,
    open_files,
    row_of_json,
)
from normalign_llava.data.sources.filters import Filter, parse_filters
from normalign_llava.data.sources.source import Source, open_held_out, open_source


def rows(file) -> list:
    return [row_of_json(row["json"]) for row in open_files((str(file),), streaming=True)]


def names(folder, *files: str) -> None:
    """Files without content."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


FOLDERS = [
    # files, split, those that are read, others that are not
    (["a.json", "b.csv"], "train", ["a.json", "b.csv"], []),
    (["a.json", "a_test.json"], "train", ["a.json"], []),
    (["a.json", "a_test.json"], "test", ["a_test.json"], []),
    (["a_Train.JSONL", "b.jsonl"], "train", ["a_Train.JSONL"], []),
    (["latest.json", "a-val.json"], "train", ["latest.json"], []),
    (["a.valid.tsv", "a.dev.tsv", "eval.tsv", "validation.tsv", "b.tsv"], "train", ["b.tsv"], []),
    (["rows.json", "metadata.csv"], "train", ["metadata.csv"], ["rows.json"]),
    (["rows.json", "0.tar", "metadata.csv"], "train", ["0.tar"], ["metadata.csv", "rows.json"]),
    (["0.tar", "0.parquet"], "train", ["0.tar"], ["0.parquet"]),
    (["0.tar", "1.tar"], "train", [], []),  # `datasets` reads them
    (["0.parquet", "rows.json"], "train", [], ["rows.json"]),
    (["0.parquet", "sub/metadata.csv"], "train", [], []),
    (["metadata.csv", "0.parquet"], "train", ["metadata.csv"], ["0.parquet"]),
    (["sub/metadata.jsonl", "a.png"], "train", ["sub/metadata.jsonl"], []),
    (["train/metadata.csv", "test/metadata.csv"], "test", ["test/metadata.csv"], []),
    (["rows.json", "sub/metadata.csv"], "train", ["rows.json"], []),
    (["dataset_infos.json", "rows.json"], "train", ["rows.json"], []),
    (["sub/rows.json"], "train", [], []),
    (["sub/metadata.txt"], "train", [], []),
]


@pytest.mark.parametrize(("files", "split", "read", "others"), FOLDERS)
def test_the_files_of_a_folder_and_split(tmp_path, files, split, read, others):
    names(tmp_path, *files)
    (tmp_path / "folder.json").mkdir()
    found, left = files_of_folder(tmp_path, split)
    assert found == [str(tmp_path / name) for name in read]
    assert left == [str(tmp_path / name) for name in others]


def test_a_split_that_no_file_is_named_after(tmp_path):
    names(tmp_path, "a.json", "b.json", "a_test.json")
    with pytest.raises(ValueError, match="has 'dev' in its name: a.json, a_test.json, b.json"):
        files_of_folder(tmp_path, "dev")
    with pytest.raises(ValueError, match="has 'valid' in its name"):
        files_of_folder(tmp_path, "valid")


def test_images_of_a_folder_without_rows(tmp_path):
    names(tmp_path, "b.PNG", "sub/a.jpeg", "notes.txt", "c.webp")
    assert images_of_folder(tmp_path) == ["b.PNG", "c.webp", "sub/a.jpeg"]
    for file in ("sub/x.JSON", "x.parquet", "x.arrow", "x.csv"):
        names(tmp_path, file)
        assert images_of_folder(tmp_path) == []
        (tmp_path / file).unlink()


def test_files_of_rows_in_one_object(tmp_path):
    file = tmp_path / "rows.json"
    caption = {"caption": "A", "image": "a.png"}
    row = {"a": 1}
    for content, expected in (
        (caption, [caption]),
        ({"rows": [row, row], "tags": ["x"], "empty": []}, [row, row]),
        (
            {"images": [{"id": 7, "file_name": "a.png"}], "annotations": [{"image_id": "7"}]},
            [{"image": "a.png"}],
        ),
    ):
        file.write_text(json.dumps(content))
        assert rows(file) == expected
    for content, reason in (
        ({"x": [row], "y": [row]}, r"with 'x, y'. Write .* the first: .*\[\"x\"\]"),
        ({"1": row, "2": row}, r"with '1, 2'. If its values are the rows, .*\.values\(\)"),
        ({"a": 1}, "with 'a'. Correct it, or name another"),
        ({}, "with 'nothing'. Correct it"),
        (3, "but 3. Correct it, or name another"),
        ({"images": [{"id": 7}], "annotations": [{"image_id": 7}]}, "with 'images, annotations'"),
        (
            {"images": [{"id": 7, "file_name": "a.png"}, {"id": 8}], "annotations": [row]},
            "with 'images, annotations'",
        ),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=reason):
            rows(file)


def test_lines_that_begin_as_a_list_are_read_as_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text in ('[{"a": 1},\n{"a": 2}]', '[\n{"a": 1}, {"a": 2}\n]', '{"a": 1}\n\n {"a": 2}\n'):
        file.write_text(text)
        assert rows(file) == [{"a": 1}, {"a": 2}]
    file.write_text('[1]\n{"a": 2}')
    assert rows(file) == [[1], {"a": 2}]
    file.write_text("\n")
    assert rows(file) == []


def test_cells_of_tables(tmp_path):
    file = tmp_path / "rows.csv"
    long = "x" * 200_000  # an image in base64 has more than csv's 131,072
    file.write_text(f'image,question\n{long},"a\tb\nc"\n')
    assert rows(file) == [{"image": long, "question": "a\tb\nc"}]
    file.write_text("sep=ab;question\na,b\n")  # no line that names a separator
    assert rows(file) == [{"sep=ab": "a,b", "question": None}]
    file.write_text('"image";"question, or none"\n"a.png";"Q"\n')  # no comma after the quotes
    assert rows(file) == [{"image": "a.png", "question, or none": "Q"}]
    file.write_text("")
    assert rows(file) == []


def test_files_that_name_several_images(tmp_path):
    line = {"file_names": ["a.png", "b.png"], "question": "Q", "images": []}
    for name, read in (("metadata.jsonl", {"images": ["a.png", "b.png"]}), ("rows.jsonl", line)):
        (tmp_path / name).write_text(json.dumps(line))
        assert rows(tmp_path / name) == [{"question": "Q", **read}]


def test_a_changed_file_is_read_anew_in_memory(tmp_path):
    file = tmp_path / "rows.jsonl"
    for number, text in enumerate(('{"a": 1}', '{"a": 2}', '{"a": 22}', "")):
        file.write_text(text)
        os.utime(file, (number, number))
        stored = open_files((str(file),), streaming=False)
        assert [row["json"] for row in stored] == [text] * bool(text)


def test_rows_of_several_files_have_the_numbers_of_their_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "Q"}\n{"question": "R"}')
    for streaming in (False, True):
        source = open_source(DataSource(str(tmp_path)), streaming)
        places = [(name, number) for name, number, _ in source]
        files = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
        assert places == [(file, number) for file in files for number in (0, 1)]


def test_data_are_named_with_a_configuration_and_a_split(tmp_path, monkeypatch):
    for given, expected in (
        ("user/data", ("user/data", None, "train")),
        ("user/data:test", ("user/data", None, "test")),
        ("user/data:small:test", ("user/data", "small", "test")),
    ):
        source = DataSource.named(given)
        assert (source.path, source.name, source.split) == expected
    kept = DataSource.named("user/data:test", name="small", split="dev", columns="answer=a")
    assert (kept.name, kept.split, kept.columns) == ("small", "test", {"answer": "a"})
    colons = tmp_path / "a:b"
    colons.mkdir()
    assert DataSource.named(str(colons)).path == str(colons)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataSource.named("~/a:b").path == str(colons)
    other = DataSource.named(f"{tmp_path}:test")
    assert (other.path, other.split) == (str(tmp_path), "test")
    with pytest.raises(ValueError, match="user/data:a:b:c has 3 colons"):
        DataSource.named("user/data:a:b:c")


@pytest.mark.parametrize("streaming", [False, True])
def test_paths_that_are_no_data(tmp_path, streaming):
    names(tmp_path, "notes.txt", "a.png", "a::b.zip")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "rows.json").write_text("[]")
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"x")
    for path, folder, reason in (
        (tmp_path / "notes.txt", None, "There is no data file .*notes.txt"),
        (tmp_path / "folder.json", None, "There is no data file .*folder.json"),
        (tmp_path / "none.csv", None, "There is no data file .*none.csv"),
        (tmp_path / "none", None, "none is not a file or folder here"),
        ("a/b/c", None, "a/b/c is not a file or folder here, nor owner/name"),
        (tmp_path / "rows.json", tmp_path / "none", "no image folder or .zip file .*none"),
        (tmp_path / "rows.json", tmp_path / "a.png", "no image folder or .zip file .*a.png"),
        (tmp_path / "rows.json", tmp_path / "a::b.zip", "no image folder or .zip file .*a::b"),
        (tmp_path / "rows.json", broken, "broken.zip cannot be read as a zip file"),
    ):
        folder = str(folder) if folder else None
        with pytest.raises(ValueError, match=reason):
            open_source(DataSource(str(path), image_folder=folder), streaming)
    (tmp_path / "rows.json").write_text('[{"question": "Q"}]')
    with pytest.raises(ValueError, match="is one file, and has no split 'test'"):
        open_source(DataSource(str(tmp_path / "rows.json"), split="test"), streaming)


def test_an_image_folder_may_be_a_zip_file_of_any_case(tmp_path):
    (tmp_path / "rows.json").write_text('[{"question": "Q"}]')
    with zipfile.ZipFile(tmp_path / "IMAGES.ZIP", "w") as file:
        file.writestr("a.png", image_bytes())
    opened = open_source(
        DataSource(str(tmp_path / "rows.json"), image_folder=f"{tmp_path}/IMAGES.ZIP"), False
    )
    shown = opened.rules.image("sub/../a.png")["path"]
    assert shown == f"zip://a.png::{tmp_path}/IMAGES.ZIP"
    (tmp_path / "folder.zip").mkdir()
    folder = ImageRules(str(tmp_path / "folder.zip"))
    assert folder.archive is None
    assert folder.image("a.png")["path"] == str(tmp_path / "folder.zip" / "a.png")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "to say what to train on"),
        ({"dataset_name": "a", "datasets": [{"path": "b"}]}, "not both"),
        ({"datasets": [{"name": "a"}]}, "A data set has path and some of"),
        ({"datasets": [{"path": "a", "weight": 1}]}, "A data set has path and some of"),
        ({"datasets": ["a"]}, "A data set has path and some of"),
        ({"dataset_name": "a", "test_split_size": 0.0}, "test_split_size must be between 0 and 1"),
        ({"dataset_name": "a", "test_split_size": 1.0}, "test_split_size must be between 0 and 1"),
        ({"dataset_name": "a", "shuffle_buffer_size": 0}, "must be 1 or more: 0"),
        ({"dataset_name": "a", "filters": "score"}, "filters has 'score'"),
        ({"dataset_name": "a", "bad_rows": "0"}, "bad_rows must be"),
    ],
)
def test_options_of_data_are_checked_at_once(options, reason):
    with pytest.raises(ValueError, match=reason):
        DataArguments(**options)


def test_data_sets_of_a_mixture_have_the_options_of_all_unless_they_say_otherwise():
    own = {"path": "b", "image_folder": "own", "columns": "answer=b", "filters": "b=2"}
    given = DataArguments(
        datasets=[{"path": "a"}, own], image_folder="all", columns="answer=a", filters="a=1"
    )
    shown = [(each.image_folder, each.columns, each.filters) for each in given.sources]
    assert shown == [("all", {"answer": "a"}, "a=1"), ("own", {"answer": "b"}, "b=2")]
    one = DataArguments(
        dataset_name="a", dataset_config="c", dataset_train_split="s", image_folder="i",
        columns=["answer"], filters="a=1",
    ).sources  # fmt: skip
    expected = DataSource("a", "c", split="s", image_folder="i", columns=["answer"], filters="a=1")
    assert one == [expected]
    (named,) = DataArguments(dataset_name="a:c:s").sources
    assert (named.name, named.split) == ("c", "s")
    assert DataSource("a", fraction="0.5").fraction == 0.5
    spaced = DataSource("a", columns=" image = path , answer=b")
    assert spaced.columns == {"image": "path", "answer": "b"}
    others = {"captions": "said", "options": "list", "option_a": "first"}
    assert DataSource("a", columns=others).columns == others


def test_held_out_data_are_opened_as_the_training_data(tmp_path):
    for split in ("train", "test", "dev"):
        file = {"image": f"{split}.png", "asked": f"{split}?", "answer": "A", "n": 1}
        (tmp_path / f"{split}.json").write_text(json.dumps([file, file | {"n": "2"}]))
    images(tmp_path / "shown", "red.png")
    shared = {"columns": "question=asked,answer=answer,image=image", "filters": "n<2"}
    options = {**shared, "image_folder": str(tmp_path / "shown")}
    for own, split in (
        ({}, "test"),
        ({"dataset_test_split": "dev"}, "dev"),
        ({"eval_dataset_name": f"{tmp_path}:dev"}, "dev"),
        ({"eval_dataset_name": f"{tmp_path}:dev", "dataset_config": "other"}, "dev"),
        ({"eval_dataset_name": str(tmp_path)}, "test"),
        ({"eval_dataset_name": str(tmp_path / "train.json")}, "train"),
    ):
        held = open_held_out(arguments(tmp_path, **options, **own))
        assert [raw["question"] for _, _, raw in held] == [f"{split}?"]
        assert held.rules == ImageRules(str(tmp_path / "shown"))
    streamed = open_held_out(arguments(tmp_path, **options, dataset_streaming=True))
    assert isinstance(streamed.data, IterableDataset)
    (tmp_path / "test.json").unlink()
    own = arguments(tmp_path / "train.json")
    for given in (own, arguments(tmp_path), arguments(tmp_path, dataset_test_split="none")):
        with pytest.raises(ValueError, match="There is no held-out data. .*Give eval_dataset_name"):
            open_held_out(given)
    with pytest.raises(ValueError, match="A mixture has no test split"):
        open_held_out(DataArguments(datasets=[{"path": "a"}]))


def test_a_saved_data_set_without_splits_is_held_out_whole(tmp_path):
    saved = Dataset.from_list([{"question": "Q", "answer": "A"}])
    saved.save_to_disk(str(tmp_path / "saved"))
    held = open_held_out(arguments("other", eval_dataset_name=str(tmp_path / "saved")))
    assert [raw["question"] for _, _, raw in held] == ["Q"]
    with pytest.raises(ValueError, match="it has the splits train"):
        open_source(DataSource(str(tmp_path / "saved"), split="test"), False)


def test_a_folder_of_images_has_no_splits(tmp_path):
    images(tmp_path, "red.png", "sub/blue.png")
    opened = open_source(DataSource(str(tmp_path)), False)
    assert [raw for _, _, raw in opened] == [{"image": "red.png"}, {"image": "sub/blue.png"}]
    assert opened.rules == ImageRules(str(tmp_path))
    with pytest.raises(ValueError, match="a folder of images without splits"):
        open_source(DataSource(str(tmp_path), split="test"), False)


def test_rows_of_columns_that_are_listed_have_these_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "Q", "answer": "A", "more": 1}\n{"answer": "B"}\n[1]')
    for streaming in (False, True):
        source = open_source(DataSource(str(file), columns=["question", "answer"]), streaming)
        assert [raw for _, _, raw in source] == [
            *({"question": "Q", "answer": "A"}, {"answer": "B"}, [1])
        ]
        with pytest.raises(ValueError, match="columns of the data are: answer, more, question"):
            open_source(DataSource(str(file), columns=["question", "none"]), streaming)


def test_columns_of_a_stream_are_looked_for_in_its_first_thousand_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    for place, found in ((999, True), (1000, False)):
        lines = [json.dumps({"a": 1, "b" if number == place else "a": 2}) for number in range(1001)]
        file.write_text("\n".join(lines))
        source = DataSource(str(file), columns=["b"])
        assert len(list(open_source(source, False).rows_at(range(3)))) == 3
        if found:
            open_source(source, True)
        else:
            with pytest.raises(ValueError, match="columns names 'b', but"):
                open_source(source, True)


def test_rows_are_read_from_a_number_on():
    data = Dataset.from_dict({"a": [*range(10)]}, features=Features(a=Value("int64")))
    source = Source("mine", ImageRules(), data)
    assert source.rows_at(range(3, 5)) == [("mine", 3, {"a": 3}), ("mine", 4, {"a": 4})]
    assert [number for _, number, _ in source.rows_at([8, 9])] == [8, 9]
    assert [raw["a"] for _, _, raw in source.rows_at([7, 2, 7])] == [7, 2, 7]
    chosen = source.filtered(parse_filters("a>=4,a!=6,a<9"))
    assert [(number, raw["a"]) for _, number, raw in chosen] == [(n, n) for n in (4, 5, 7, 8)]
    assert source.filtered(()) is source


@pytest.mark.parametrize(
    ("condition", "value", "kept"),
    [
        ("a>=4", 4, True), ("a>4", 4, False), ("a<=4", "4", True), ("a<4", 4.0, False),
        ("a=4", "4.0", True), ("a!=4", 4, False), ("a!=4", None, True), ("a=4", None, False),
        ("a!=4", float("nan"), True), ("a>=4", float("nan"), False), ("a=nan", float("nan"), False),
        ("a=true", True, True), ("a=1", True, False), ("a=True", False, False),
        ("a=Some Thing", "some thing", True), ("a=x", "X ", False), ("a==x", "x", True),
    ],
)  # fmt: skip
def test_a_condition_keeps(condition, value, kept):
    (made,) = parse_filters(condition)
    assert made.keeps({"a": value, "b": 9}) == kept


def test_conditions_are_parsed_at_their_first_comparison():
    assert parse_filters(" a >= 4 , b=c>d") == (Filter("a", ">=", "4"), Filter("b", "=", "c>d"))
    assert parse_filters(["a=x, y"]) == (Filter("a", "=", "x, y"),)
    assert parse_filters(["a=x\ny"]) == (Filter("a", "=", "x\ny"),)
    assert parse_filters(None) == parse_filters([]) == ()
    with pytest.raises(ValueError, match="a is 'x' in a row, not a number"):
        Filter("a", "<", "4").keeps({"a": "x"})
    for wrong in ("", "a=", "=4", "a>=x", ["a", "b=1"]):
        with pytest.raises(ValueError, match="filters (has|compares)"):
            parse_filters(wrong)


def test_files_of_one_folder_may_be_of_several_splits(tmp_path):
    for name, answer in (("train", "A"), ("test", "B")):
        write_parquet(tmp_path / "data" / f"{name}.parquet", [llava("Q", answer)])
    for split, answer in (("train", "A"), ("test", "B")):
        for streaming in (False, True):
            ((_, number, raw),) = open_source(
                DataSource(f"{tmp_path}/data", split=split), streaming
            )
            assert (number, raw["conversations"][1]["value"]) == (0, answer)


def test_what_is_no_row_is_not_filtered(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n[1]\n{"a": 5}\n')
    for streaming in (False, True):
        opened = open_source(DataSource(str(file), filters="a>=4"), streaming)
        assert [raw for _, _, raw in opened] == [[1], {"a": 5}]


def test_classes_have_their_names_and_what_is_no_class_stays():
    kind = ClassLabel(names=["cat", "dog"])
    features = Features(a=Value("int64"), b=kind, c=List(kind))
    columns = {"a": [1, 2, 3], "b": [1, -1, None], "c": [[0, 1], [], None]}
    data = Dataset.from_dict(columns, features=features)
    source = Source("mine", ImageRules(), data)
    expected = [
        {"a": 1, "b": "dog", "c": ["cat", "dog"]},
        {"a": 2, "b": -1, "c": []},
        {"a": 3, "b": None, "c": None},
    ]
    assert [raw for _, _, raw in source] == expected
    filtered = source.filtered(parse_filters("a>=2"))  # by one column, without the classes
    assert [raw for _, _, raw in filtered] == expected[1:]
    shown = Source("mine", ImageRules(), data.with_format("numpy", columns=["a"]))
    assert [raw for _, _, raw in shown] == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_files_and_folders_may_be_named_as_for_datasets(tmp_path, monkeypatch):
    for name, answer in (("top", "A"), ("sub/one", "B"), ("sub/two", "C")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "Q", "answer": answer}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub" / "link.jsonl").symlink_to(tmp_path / "top.jsonl")
    with pytest.raises(ValueError, match="link.jsonl, outside of the folder"):
        open_source(DataSource(str(tmp_path), data_dir="sub"), False)
    (tmp_path / "sub" / "link.jsonl").unlink()
    one = str(tmp_path / "sub" / "one.jsonl")
    for source, expected, folder in (
        (DataSource("json", data_files=one), ["B"], "."),
        (DataSource("json", data_dir=str(tmp_path / "sub")), ["B", "C"], str(tmp_path / "sub")),
        (DataSource(str(tmp_path), data_dir="sub"), ["B", "C"], str(tmp_path)),
        (DataSource(str(tmp_path), data_files={"train": one}), ["B"], str(tmp_path)),
        (DataSource("sub", data_files=str(tmp_path / "top.jsonl")), ["A"], "sub"),
    ):
        opened = open_source(source, False)
        assert [raw["answer"] for _, _, raw in opened] == expected
        assert opened.rules.folder == folder


def test_images_are_beside_a_parquet_file_whose_card_is_wrong_about_rows(tmp_path):
    path = write_parquet(tmp_path / "data" / "train.parquet", [llava("Q", "A")])
    assert open_source(DataSource(str(path)), False).rules.folder == str(path.parent)
    split = {"name": "train", "num_bytes": 1, "num_examples": 99}
    card = json.dumps({"splits": [split]})
    (path.parent / "README.md").write_text(f"---\ndataset_info: {card}\n---\n")
    assert len(list(open_source(DataSource(str(path.parent)), False))) == 1


def test_the_suffix_of_a_shard_may_be_in_capitals(tmp_path):
    path = shard(tmp_path / "0.TAR", {"0.json": {"question": "Q", "answer": "A"}})
    ((_, _, raw),) = open_source(DataSource(str(path)), False)
    assert raw == {"question": "Q", "answer": "A"}
    (tmp_path / "stats.json").write_text("{}")  # which programs write beside
    ((_, _, raw),) = open_source(DataSource(str(tmp_path)), False)
    assert raw == {"question": "Q", "answer": "A"}


@dataclass
class Choices:
    one: Literal["a", "b"] = "a"
    maybe: Literal["c", 4] | None = None
    free: str | None = None


def test_a_choice_is_one_of_those_that_are_named():
    for options in (Choices(), Choices("b", "c", "x"), Choices(maybe=4)):
        check_choices(options)
    for options, reason in (
        (Choices("c"), "one must be one of 'a', 'b', got 'c'"),
        (Choices(None), "one must be one of 'a', 'b', got None"),
        (Choices(maybe="4"), "maybe must be one of 'c', 4, got '4'"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_choices(options)


def test_a_configuration_of_a_folder_is_read_as_its_card_says(tmp_path):
    configs = []
    for name in ("one", "other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "Q", "answer": name}))
        configs.append({"config_name": name, "data_files": f"{name}.jsonl"})
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    ((_, _, raw),) = open_source(DataSource(str(tmp_path), name="other"), False)
    assert raw["answer"] == "other"
    assert len(list(open_source(DataSource(str(tmp_path)), False))) == 2  # all files


def test_a_folder_that_is_named_as_a_data_set_of_the_hub_is_the_folder(tmp_path, monkeypatch):
    (tmp_path / "my" / "data").mkdir(parents=True)
    (tmp_path / "my" / "data" / "rows.json").write_text('[{"question": "Q", "answer": "A"}]')
    monkeypatch.chdir(tmp_path)
    opened = open_source(DataSource("my/data"), False)
    assert [raw["answer"] for _, _, raw in opened] == ["A"]
    assert opened.rules == ImageRules("my/data") and opened.dataset is None


def test_rows_that_other_code_has_read_are_read_anew(tmp_path, monkeypatch):
    (tmp_path / "rows.json").write_text('[{"question": "Q", "answer": "A"}]')
    shard(tmp_path / "rows.tar", {"0.json": {"question": "Q", "answer": "A"}})

    def cached(name):
        return open_source(DataSource(str(tmp_path / name)), False).data.cache_files

    for module, name in ((source_files, "rows.json"), (source_module, "rows.tar")):
        before = cached(name)
        assert cached(name) == before
        copy = tmp_path / f"{name}.py"
        copy.write_text(Path(module.__file__).read_text() + "# changed\n")
        monkeypatch.setattr(module, "__file__", str(copy))
        assert cached(name) != before
