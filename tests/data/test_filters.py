"""Filters on columns: which rows are read, with the numbers that they have in their file."""

import json
from itertools import islice

import pytest
from datasets import Dataset, Features, Image, List, Value
from train_data import answers, image_bytes, read

from normalign_llava.data.sources.arguments import DataSource, parse_filters


ROWS = [
    {
        "question": "Q",
        "answer": "A0",
        "score": 5,
        "kind": "x",
    },
    {
        "question": "Q",
        "answer": "A1",
        "score": 4,
        "kind": "y",
    },
    {
        "question": "Q",
        "answer": "A2",
        "score": 3.5,
        "kind": "x",
    },
    {
        "question": "Q",
        "answer": "A3",
        "score": None,
        "kind": None,
    },
    {
        "question": "Q",
        "answer": "A4",
        "score": 2,
        "kind": "X",
    },
]


def write_rows(folder, data_format):
    data_path = folder / f"rows.{data_format}"
    if data_format == "parquet":
        Dataset.from_list(ROWS).to_parquet(str(data_path))
        return data_path

    if data_format == "jsonl":
        lines = [json.dumps(row) for row in ROWS]
    else:
        lines = [",".join(ROWS[0])]
        for row in ROWS:
            cells = [str(value or "") for value in row.values()]
            lines.append(",".join(cells))
    data_path.write_text("\n".join(lines))
    return data_path


FORMATS = ["parquet", "jsonl", "csv"]


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("filters", "expected_numbers"),
    [
        ("score>=4", [0, 1]),
        ("score > 3.5", [0, 1]),
        ("score<4", [2, 4]),
        ("score<=2", [4]),
        ("score=5", [0]),
        ("score==5.0", [0]),
        ("score!=5", [1, 2, 3, 4]),
        ("kind=x", [0, 2, 4]),
        ("kind!=x", [1, 3]),
        ("score>=3,kind=x", [0, 2]),
        ("score>=3, score<5", [1, 2]),
    ],
)
def test_rows_that_meet_all_conditions_are_read(
    processor, tmp_path, filters, expected_numbers, streamed, data_format
):
    data_path = write_rows(tmp_path, data_format)
    train_rows = read(
        data_path,
        processor,
        filters=filters,
        streamed=streamed,
    ).train
    read_rows = list(islice(train_rows, len(expected_numbers)))
    assert answers(read_rows) == [f"A{number}" for number in expected_numbers]
    assert [row["row"] for row in read_rows] == expected_numbers


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_of_a_mixture_has_its_own_filters(processor, tmp_path, data_format, streamed):
    data_path = write_rows(tmp_path, data_format)
    datasets = [{"path": str(data_path), "filters": ["score>=4", "kind=y"]}]
    train_rows = read(
        None,
        processor,
        datasets=datasets,
        streamed=streamed,
    ).train
    assert answers(islice(train_rows, 1)) == ["A1"]


@pytest.mark.parametrize("columns", ["question=kind", ["question", "answer"]])
def test_filters_take_the_names_in_the_data_and_columns_need_not_be_read(
    processor, tmp_path, columns
):
    data_path = write_rows(tmp_path, "parquet")
    train_rows = read(
        data_path,
        processor,
        filters="score>=5",
        columns=columns,
    ).train
    assert answers(train_rows) == ["A0"]


def test_images_are_not_read_to_filter_rows(processor, tmp_path, caplog):
    image = {"bytes": image_bytes(), "path": None}
    rows_with_images = [{**row, "images": [image]} for row in ROWS]
    features = Features(
        {
            "question": Value("string"),
            "answer": Value("string"),
            "score": Value("float32"),
            "kind": Value("string"),
            "images": List(Image()),
        }
    )
    data_path = tmp_path / "rows.parquet"
    Dataset.from_list(rows_with_images, features=features).to_parquet(str(data_path))

    train_rows = read(
        data_path,
        processor,
        filters="score>=3.5",
        columns={"answer": "score"},
    ).train
    assert answers(train_rows) == ["5", "4", "3.5"]
    assert [row["image_count"] for row in train_rows] == [1, 1, 1]
    assert "3 of 5 rows have score>=3.5" in caplog.text


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ("scor>=4", "filters names 'scor', but the columns of the data are: answer, kind"),
        ("kind>=4", "kind is 'x' in a row, not a number"),
        ("score>=high", "'high', not with a number"),
        ("score", "'score', not a condition. Write filters as"),
        ("score>=9", "none of its 5 rows has score>=9"),
    ],
)
def test_what_cannot_be_compared_is_an_error(processor, tmp_path, filters, reason):
    data_path = write_rows(tmp_path, "jsonl")
    with pytest.raises(ValueError, match=reason):
        read(data_path, processor, filters=filters)


def test_a_number_is_not_a_condition():
    with pytest.raises(ValueError, match="not a condition"):
        DataSource("data.json", filters=[4])


def test_conditions_are_printed_without_spaces():
    conditions = [str(condition) for condition in parse_filters("a b >= 4,c==d=e")]
    assert conditions == ["a b>=4", "c=d=e"]
