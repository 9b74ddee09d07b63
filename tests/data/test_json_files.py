"""Files of rows by their suffix: JSON, JSON lines, CSV and TSV."""

import json

import pytest

from normalign_llava.data.sources.files import open_files, row_of_json


def rows(file) -> list:
    return [row_of_json(row["json"]) for row in open_files((str(file),), streaming=True)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_is_what_json_reads(tmp_path, encoding):
    kinds = [None, True, -1.5e9, 10**20, 'ab"\\]}, \né😀\u2028', [], {}, [[1, {"]": ","}], "["]]
    for indent, values in ((None, kinds), (1, kinds), (None, [])):
        text = json.dumps(values, indent=indent, ensure_ascii=indent is None)
        (tmp_path / "data.json").write_text(f" {text}\n", encoding=encoding)
        assert rows(tmp_path / "data.json") == values


def test_a_broken_list_has_the_error_of_the_whole_file(tmp_path):
    file = tmp_path / "data.json"
    for text, reason in {
        "": "is not valid JSON: Expecting value: line 1 column 1",
        '[{"a": 1}': r"is not valid JSON: Expecting ',' delimiter: line 1 column 10",
        '{"a": 1}': "is not a JSON list of rows",
        '[1]\n{"a": 2}': "is not valid JSON: Extra data",
        "[" * 100_000: "is not valid JSON",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"^{file} {reason}"):
            rows(file)


def test_other_json_in_a_file_of_lines_is_read_or_refused_in_a_sentence(tmp_path):
    file = tmp_path / "data.jsonl"
    values = [{"a": 1}, {"b": "x"}]
    for indent in (None, 2):
        file.write_text(json.dumps(values, indent=indent), encoding="utf-8-sig")
        assert rows(file) == values
    for other in (file, file.with_suffix(".json")):
        other.write_text("\n".join(json.dumps(row, indent=2) for row in values))
        with pytest.raises(ValueError, match=f"^{other} is not valid JSON: Extra data.*one line"):
            rows(other)


def test_metadata_with_both_names_of_a_column_keeps_both(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,caption,image\na.png,A,b.png\nc.png,C,\n")
    both, one = rows(tmp_path / "metadata.csv")
    assert both == {"file_name": "a.png", "caption": "A", "image": "b.png"}
    assert one == {"image": "c.png", "caption": "C"}


def test_lines_in_utf_16_are_read(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"a": "é"}\n\n{"a": 2}\n', encoding="utf-16")
    assert rows(tmp_path / "data.jsonl") == [{"a": "é"}, {"a": 2}]
    for order in ("le", "be"):
        lines, cells = ("\ufeff" + text for text in ('{"a": "é"}', "a,b\né,\n"))
        (tmp_path / "data.jsonl").write_bytes(lines.encode(f"utf-16-{order}"))
        (tmp_path / "data.csv").write_bytes(cells.encode(f"utf-16-{order}"))
        assert rows(tmp_path / "data.jsonl") == [{"a": "é"}]
        assert rows(tmp_path / "data.csv") == [{"a": "é", "b": None}]


def test_a_line_that_is_no_utf_8_is_no_row(tmp_path):
    assert row_of_json("{\ud83d") == b"{?"
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"a":1}\n{"a": "\xff"}\n\n{"a":"\\u00ff"}')
    marked, invalid, last = rows(tmp_path / "data.jsonl")
    assert marked == {"a": 1} and invalid == rb'{"a": "\xff"}' and last == {"a": "\xff"}
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n' + "[" * 100_000)
    assert rows(tmp_path / "data.jsonl") == [{"a": 1}, b"[" * 100_000]


@pytest.mark.parametrize("name, separator", [("a.csv", ","), ("a.tsv", "\t"), ("a.TSV", "\t")])
def test_tables_of_text_are_separated_as_their_suffix_says(tmp_path, name, separator):
    lines = [["image", "question"], ["a.png", '"one; ""two"",\tthree"'], ["", "Q"], ["b", "c", "d"]]
    (tmp_path / name).write_text("\ufeff" + "\n".join(map(separator.join, lines)), encoding="utf-8")
    first, second, no_row = rows(tmp_path / name)
    assert first == {"image": "a.png", "question": 'one; "two",\tthree'}
    assert second == {"image": None, "question": "Q"} and isinstance(no_row, list)
    for other in (",", ";", "\t", "|"):  # as the first line says, whatever the suffix
        lines = ["image", "question"], ["a.png", '"one, two; three | four\tfive"']
        (tmp_path / name).write_text("\n".join(map(other.join, lines)))
        assert rows(tmp_path / name) == [
            {"image": "a.png", "question": "one, two; three | four\tfive"}
        ]
    (tmp_path / name).write_text("sep=;\r\nimage;question\r\na.png;é\r\n", encoding="utf-16")
    assert rows(tmp_path / name) == [{"image": "a.png", "question": "é"}]
    (tmp_path / name).write_bytes(b"image\n\xff\xfe")
    with pytest.raises(ValueError, match=f"{name} is not valid CSV in UTF-8"):
        rows(tmp_path / name)


@pytest.mark.parametrize("name, usual, other", [("a.csv", ",", "\t"), ("a.tsv", "\t", ",")])
def test_headers_that_two_separators_divide_alike_are_read_as_the_suffix_says(
    tmp_path, name, usual, other
):
    (tmp_path / name).write_text(f"image{usual}question{other} short\na.png{usual}What?\n")
    assert rows(tmp_path / name) == [{"image": "a.png", f"question{other} short": "What?"}]
