"""Files of rows by their suffix: JSON, JSON lines, CSV and TSV."""

import codecs
import json

import pytest

from normalign_llava.data.sources.files import READERS, open_files, row_of_json


def read_file(data_path) -> list:
    """Returns the rows of one file."""
    stored_rows = open_files((str(data_path),), streaming=True)
    return [row_of_json(stored_row["json"]) for stored_row in stored_rows]


VALUES_OF_ALL_KINDS = [
    None,
    True,
    -1.5e9,
    10**20,
    'ab"\\]}, \né😀\u2028',
    [],
    {},
    [[1, {"]": ","}], "["],
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("values", "options"),
    [
        pytest.param(VALUES_OF_ALL_KINDS, {"ensure_ascii": True}, id="one-line"),
        pytest.param(VALUES_OF_ALL_KINDS, {"indent": 1, "ensure_ascii": False}, id="indented"),
        pytest.param([], {"ensure_ascii": True}, id="empty"),
    ],
)
def test_a_list_is_what_json_reads(tmp_path, encoding, values, options):
    data_path = tmp_path / "data.json"
    json_text = json.dumps(values, **options)
    data_path.write_text(f" {json_text}\n", encoding=encoding)
    assert read_file(data_path) == values


@pytest.mark.parametrize(
    ("json_text", "reason"),
    [
        pytest.param(
            "",
            "is not valid JSON: Expecting value: line 1 column 1",
            id="empty",
        ),
        pytest.param(
            '[{"a": 1}',
            r"is not valid JSON: Expecting ',' delimiter: line 1 column 10",
            id="open",
        ),
        pytest.param(
            '{"a": 1}',
            "is not a JSON list of rows",
            id="mapping",
        ),
        pytest.param(
            '[1]\n{"a": 2}',
            "is not valid JSON: Extra data",
            id="two-values",
        ),
        pytest.param(
            "[" * 100_000,
            "is not valid JSON",
            id="deep",
        ),
    ],
)
def test_a_broken_list_has_the_error_of_the_whole_file(tmp_path, json_text, reason):
    data_path = tmp_path / "data.json"
    data_path.write_text(json_text)
    with pytest.raises(ValueError, match=f"^{data_path} {reason}"):
        read_file(data_path)


TWO_ROWS = [{"a": 1}, {"b": "x"}]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_in_a_file_of_lines_is_read(tmp_path, indent):
    data_path = tmp_path / "data.jsonl"
    json_text = json.dumps(TWO_ROWS, indent=indent)
    data_path.write_text(json_text, encoding="utf-8-sig")
    assert read_file(data_path) == TWO_ROWS


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_in_utf_16_in_a_file_of_lines_is_read(tmp_path, indent):
    data_path = tmp_path / "data.jsonl"
    data_path.write_text(json.dumps(TWO_ROWS, indent=indent), encoding="utf-16")
    assert read_file(data_path) == TWO_ROWS


@pytest.mark.parametrize("file_name", ["data.jsonl", "data.json"])
def test_indented_rows_one_after_another_are_refused(tmp_path, file_name):
    data_path = tmp_path / file_name
    indented_rows = [json.dumps(row, indent=2) for row in TWO_ROWS]
    data_path.write_text("\n".join(indented_rows))
    with pytest.raises(ValueError, match=f"^{data_path} is not valid JSON: Extra data.*one line"):
        read_file(data_path)


def test_metadata_with_both_names_of_a_column_keeps_both(tmp_path):
    data_path = tmp_path / "metadata.csv"
    data_path.write_text("file_name,caption,image\na.png,A,b.png\nc.png,C,\n")
    with_both, with_one = read_file(data_path)
    assert with_both == {
        "file_name": "a.png",
        "caption": "A",
        "image": "b.png",
    }
    assert with_one == {"image": "c.png", "caption": "C"}


def test_lines_in_utf_16_are_read(tmp_path):
    data_path = tmp_path / "data.jsonl"
    data_path.write_text('{"a": "é"}\n\n{"a": 2}\n', encoding="utf-16")
    assert read_file(data_path) == [{"a": "é"}, {"a": 2}]


UTF_16 = [
    pytest.param(codecs.BOM_UTF16_LE, "utf-16-le", id="little-endian"),
    pytest.param(codecs.BOM_UTF16_BE, "utf-16-be", id="big-endian"),
]


@pytest.mark.parametrize(("byte_order_mark", "encoding"), UTF_16)
def test_lines_in_utf_16_of_any_byte_order_are_read(tmp_path, byte_order_mark, encoding):
    data_path = tmp_path / "data.jsonl"
    data_path.write_bytes(byte_order_mark + '{"a": "é"}'.encode(encoding))
    assert read_file(data_path) == [{"a": "é"}]


@pytest.mark.parametrize(("byte_order_mark", "encoding"), UTF_16)
def test_tables_in_utf_16_of_any_byte_order_are_read(tmp_path, byte_order_mark, encoding):
    data_path = tmp_path / "data.csv"
    data_path.write_bytes(byte_order_mark + "a,b\né,\n".encode(encoding))
    assert read_file(data_path) == [{"a": "é", "b": None}]


def test_half_a_letter_is_not_a_row():
    assert row_of_json("{\ud83d") == b"{?"


def test_a_line_that_is_not_utf_8_is_not_a_row(tmp_path):
    data_path = tmp_path / "data.jsonl"
    data_path.write_bytes(b'\xef\xbb\xbf{"a":1}\n{"a": "\xff"}\n\n{"a":"\\u00ff"}')
    assert read_file(data_path) == [
        {"a": 1},
        rb'{"a": "\xff"}',
        {"a": "\xff"},
    ]


def test_a_line_that_is_nested_too_deeply_is_not_a_row(tmp_path):
    data_path = tmp_path / "data.jsonl"
    deep_line = "[" * 100_000
    data_path.write_text('{"a": 1}\n' + deep_line)
    assert read_file(data_path) == [{"a": 1}, deep_line.encode()]


TABLE_NAMES = ["a.csv", "a.tsv", "a.TSV"]


@pytest.mark.parametrize(
    ("file_name", "separator"),
    [
        ("a.csv", ","),
        ("a.tsv", "\t"),
        ("a.TSV", "\t"),
    ],
)
def test_tables_of_text_are_separated_as_their_suffix_says(tmp_path, file_name, separator):
    table_rows = [
        ["image", "question"],
        ["a.png", '"one; ""two"",\tthree"'],
        ["", "Q"],
        ["b", "c", "d"],
    ]
    lines = [separator.join(cells) for cells in table_rows]
    data_path = tmp_path / file_name
    data_path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")

    with_image, without_image, with_too_many_cells = read_file(data_path)
    assert with_image == {"image": "a.png", "question": 'one; "two",\tthree'}
    assert without_image == {"image": None, "question": "Q"}
    assert isinstance(with_too_many_cells, list)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("file_name", TABLE_NAMES)
def test_tables_are_separated_as_their_first_line_says(tmp_path, file_name, separator):
    question = "one, two; three | four\tfive"
    header = separator.join(["image", "question"])
    cells = separator.join(["a.png", f'"{question}"'])
    data_path = tmp_path / file_name
    data_path.write_text(f"{header}\n{cells}")
    assert read_file(data_path) == [{"image": "a.png", "question": question}]


@pytest.mark.parametrize("file_name", TABLE_NAMES)
def test_a_first_line_may_name_the_separator(tmp_path, file_name):
    data_path = tmp_path / file_name
    data_path.write_text("sep=;\r\nimage;question\r\na.png;é\r\n", encoding="utf-16")
    assert read_file(data_path) == [{"image": "a.png", "question": "é"}]


@pytest.mark.parametrize("file_name", TABLE_NAMES)
def test_a_table_that_is_not_utf_8_is_refused(tmp_path, file_name):
    data_path = tmp_path / file_name
    data_path.write_bytes(b"image\n\xff\xfe")
    with pytest.raises(ValueError, match=f"{file_name} is not valid CSV in UTF-8"):
        read_file(data_path)


@pytest.mark.parametrize(
    ("file_name", "separator", "other_separator"),
    [
        ("a.csv", ",", "\t"),
        ("a.tsv", "\t", ","),
    ],
)
def test_headers_that_two_separators_divide_alike_are_read_as_the_suffix_says(
    tmp_path, file_name, separator, other_separator
):
    long_name = f"question{other_separator} short"
    data_path = tmp_path / file_name
    data_path.write_text(f"image{separator}{long_name}\na.png{separator}What?\n")
    assert read_file(data_path) == [{"image": "a.png", long_name: "What?"}]


def test_a_line_of_zeros_is_one_bad_line(tmp_path):
    """As a write that was cut off leaves it."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\0\0\0\n{"a": 1}\n{"a": 2}\n')
    assert list(READERS[".jsonl"](str(file))) == ["\0\0\0", '{"a": 1}', '{"a": 2}']
