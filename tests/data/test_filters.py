"""Filters on columns: which rows are read, with the numbers that they have in their file."""

import json
from itertools import islice

import pytest
from datasets import Dataset, Features, Image, List, Value
from train_data import answers, image_bytes, read

from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.filters import parse_filters


ROWS = [
    {"question": "Q", "answer": f"A{number}", "score": score, "kind": kind}
    for number, (score, kind) in enumerate([(5, "x"), (4, "y"), (3.5, "x"), (None, None), (2, "X")])
]
KEPT = {
    "score>=4": [0, 1],
    "score > 3.5": [0, 1],
    "score<4": [2, 4],
    "score<=2": [4],
    "score=5": [0],
    "score==5.0": [0],
    "score!=5": [1, 2, 3, 4],
    "kind=x": [0, 2, 4],
    "kind!=x": [1, 3],
    "score>=3,kind=x": [0, 2],
    "score>=3, score<5": [1, 2],
}


def write(folder, form):
    path = folder / f"rows.{form}"
    if form == "parquet":
        Dataset.from_list(ROWS).to_parquet(str(path))
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        lines = [",".join(str(value or "") for value in row.values()) for row in ROWS]
        path.write_text("\n".join([",".join(ROWS[0]), *lines]))
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_meet_all_conditions_are_read(processor, tmp_path, form, streamed):
    path = write(tmp_path, form)
    for filters, numbers in KEPT.items():
        rows = read(path, processor, filters=filters, streamed=streamed).train
        rows = list(islice(rows, len(numbers)))
        assert answers(rows) == [f"A{number}" for number in numbers], filters
        assert [row["row"] for row in rows] == numbers
    listed = [{"path": str(path), "filters": ["score>=4", "kind=y"]}]
    rows = read(None, processor, datasets=listed, streamed=streamed).train
    assert answers(islice(rows, 1)) == ["A1"]


def test_names_are_the_data_s_own_and_columns_need_not_be_read(processor, tmp_path):
    path = write(tmp_path, "parquet")
    for columns in ("question=kind", ["question", "answer"]):
        rows = read(path, processor, filters="score>=5", columns=columns).train
        assert answers(rows) == ["A0"]


def test_images_are_not_read_to_filter_rows(processor, tmp_path, caplog):
    images = [[{"bytes": image_bytes(), "path": None}] for _ in ROWS]
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]} | {"images": images}
    kinds = {name: Value("string") for name in ROWS[0]}
    features = Features(kinds | {"score": Value("float32"), "images": List(Image())})
    path = tmp_path / "rows.parquet"
    Dataset.from_dict(columns, features=features).to_parquet(str(path))
    data = read(path, processor, filters="score>=3.5", columns={"answer": "score"})
    assert answers(data.train) == ["5", "4", "3.5"]
    assert [row["image_count"] for row in data.train] == [1, 1, 1]
    assert "3 of 5 rows have score>=3.5" in caplog.text


def test_what_cannot_be_compared_is_an_error(processor, tmp_path):
    path = write(tmp_path, "jsonl")
    for filters, reason in {
        "scor>=4": "filters names 'scor', but the columns of the data are: answer, kind",
        "kind>=4": "kind is 'x' in a row, not a number",
        "score>=high": "'high', not with a number",
        "score": "'score', not a condition. Write filters as",
        "score>=9": "none of its 5 rows has score>=9",
    }.items():
        with pytest.raises(ValueError, match=reason):
            read(path, processor, filters=filters)
    with pytest.raises(ValueError, match="not a condition"):
        DataSource("data.json", filters=[4])
    assert [str(each) for each in parse_filters("a b >= 4,c==d=e")] == ["a b>=4", "c=d=e"]
