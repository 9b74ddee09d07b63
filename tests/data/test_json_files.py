"""Files of rows by their suffix; JSON is read piece by piece, with the rows and the errors of the whole."""

import json
import random

import pytest

from normalign_llava.data.sources import files


def value(rng: random.Random, depth=0):
    text = "".join(rng.choices('ab"\\]}, \né😀', k=9))
    kinds = [None, True, rng.random() * 1e9, rng.randint(-(10**20), 10**20), text]
    if depth < 3:
        kinds += [[value(rng, depth + 1) for _ in range(rng.randrange(4))]]
        kinds += [{str(n): value(rng, depth + 1) for n in range(rng.randrange(4))}]
    return rng.choice(kinds)


@pytest.mark.parametrize("piece", [1, 7, 64, 10**6])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_is_what_json_reads(tmp_path, monkeypatch, piece, encoding):
    monkeypatch.setattr(files, "_PIECE", piece)
    rng = random.Random(piece)
    for indent, count in ((None, 40), (1, 40), (None, 0)):
        rows = [value(rng) for _ in range(count)]
        text = json.dumps(rows, indent=indent, ensure_ascii=indent is None)
        (tmp_path / "data.json").write_text(f" {text}\n", encoding=encoding)
        assert [files.loaded(row) for row in files.rows_of_file(str(tmp_path / "data.json"))] == rows


@pytest.mark.parametrize("piece", [2, 10**6])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not valid JSON: Expecting value: line 1 column 1"),
        ('[{"a": 1}', r"is not valid JSON: Expecting ',' delimiter: line 1 column 10 \(char 9\)"),
        ("[1 2]", r"is not valid JSON: Expecting ',' delimiter: line 1 column 4 \(char 3\)"),
        ("[1,]", "is not valid JSON: "),
        ("[1] 2", r"is not valid JSON: Extra data: line 1 column 5 \(char 4\)"),
        ('{"a": 1}', "must be a JSON list of rows, or have one row a line, got one object with a"),
        ("7", "must be a JSON list of rows, or have one row a line, got int"),
        ("[" * 100_000, "is nested too deeply to be rows of data"),
    ],
)
def test_a_broken_list_has_the_error_of_the_whole_file(tmp_path, monkeypatch, piece, text, reason):
    monkeypatch.setattr(files, "_PIECE", piece)
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{file} {reason}"):
        list(files.rows_of_file(str(file)))


def test_other_json_in_a_file_of_lines_is_read_or_refused_in_a_sentence(tmp_path):
    file, rows = tmp_path / "data.jsonl", [{"a": 1}, {"b": "x"}]
    for indent in (None, 2):
        file.write_text(json.dumps(rows, indent=indent), encoding="utf-8-sig")
        assert [files.loaded(text) for text in files.rows_of_file(str(file))] == rows
    for suffix, reason in (
        (".jsonl", "has rows of several lines"),
        (".json", "is not valid JSON: Extra data: line 4 .*"),
    ):
        other = file.with_suffix(suffix)
        other.write_text("\n".join(json.dumps(row, indent=2) for row in rows))
        with pytest.raises(ValueError, match=f"^{other} {reason}. Write each row in one line, as `jq -c .` does.$"):
            list(files.rows_of_file(str(other)))


def test_a_line_that_is_no_utf_8_is_no_row(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n\n{"a": "\\u00ff"}\n')
    marked, invalid, last = map(files.loaded, files.rows_of_file(str(tmp_path / "data.jsonl")))
    assert marked == {"a": 1} and invalid == rb'{"a": "\xff"}' and last == {"a": "\xff"}


@pytest.mark.parametrize("name, separator", [("data.csv", ","), ("data.tsv", "\t"), ("data.TSV", "\t")])
def test_tables_of_text_are_separated_as_their_suffix_says(tmp_path, name, separator):
    lines = [["image", "question"], ["a.png", '"one; two,\tthree|"'], ["", "Q"]]
    (tmp_path / name).write_text("\n".join(map(separator.join, lines)))
    rows = [files.loaded(text) for text in files.rows_of_file(str(tmp_path / name))]
    assert rows == [{"image": "a.png", "question": "one; two,\tthree|"}, {"image": None, "question": "Q"}]


@pytest.mark.parametrize(
    "name, separator, seems",
    [
        ("data.csv", ";", "';'"),
        ("data.csv", "\t", r"'\\t'"),
        ("data.csv", "|", r"'\|'"),
        ("data.tsv", ",", "','"),
    ],
)
def test_other_separators_are_named(tmp_path, name, separator, seems):
    file = tmp_path / name
    file.write_text(separator.join(["image", "question", "answer"]) + "\n")
    with pytest.raises(
        ValueError, match=f"^{file} has one column, .* seems to be {seems}. Save it with commas as .csv"
    ):
        list(files.rows_of_file(str(file)))
    file.write_text("caption\na; b | c\n")
    assert [files.loaded(text) for text in files.rows_of_file(str(file))] == [{"caption": "a; b | c"}]
