"""The text of a report's numbers, the ratios of the paper, and the tables of the page."""

import json
import math

import pytest
from diagnosed import diagnosed, embeddings_of

from normalign_llava.diagnose.page import tables_of
from normalign_llava.diagnose.report import (
    Gain,
    Moments,
    number,
    paper_ratios,
    report_json,
    spread,
    with_error,
)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (37.0, 4, "37.00"),
        (0.05, 4, "0.05000"),
        (0.0, 4, "0.000"),
        (9.99996, 4, "10.00"),
        (37.4, 2, "37"),
        (1234.56, 2, "1,235"),
        (1234567.0, 4, "1,234,567"),
        (0.000123456, 4, "0.0001235"),
        (0.0000123456, 4, "1.235e−05"),
        (-1.5, 3, "−1.50"),
        (math.nan, 4, "–"),
        (-math.inf, 4, "–"),
        (None, 4, "–"),
    ],
)
def test_numbers_have_significant_digits(value, digits, text):
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.404, 0.012, "0.40 ± 0.01"),
        (0.4, 0.2, "0.4 ± 0.2"),
        (0.4, 1.0, "0 ± 1"),
        (123.4, 15.0, "123 ± 15"),
        (0.404, None, "0.40"),
        (0.404, 0.0, "0.40"),
        (None, 0.1, "–"),
    ],
)
def test_a_value_has_as_many_places_as_its_error(value, error, text):
    assert with_error(value, error) == text


def test_a_mean_has_its_deviation():
    assert spread(Moments(71.784, 13.952, 5)) == "71.78 ± 13.95"
    assert spread(None) == "–"


def test_the_paper_s_ratios_are_of_its_tables_2_and_3():
    expected = {
        "LLaVA-v1.5": 39.96 / 1.08,
        "Qwen-2.5-VL": 56.88 / 0.86,
        "KimiVL": 4.78 / 0.85,
        "GLM-4.1V": 4.58 / 0.80,
        "Ovis2.5": 64.0 / 1.38,
    }
    assert paper_ratios() == pytest.approx(expected)


def test_what_json_lacks_is_null_and_each_key_has_a_line():
    text = report_json({"values": [math.nan, 1.5, math.inf], "name": "ä"})
    assert json.loads(text) == {"values": [None, 1.5, None], "name": "ä"}
    assert len(text.splitlines()) == 4
    assert "ä" in text


def cells_by_label(table):
    """The further cells of each row by its first cell."""
    return {label: cells for label, *cells in table["rows"]}


@pytest.fixture
def compared_tables():
    """Tables of a model with the norm and of its baseline."""
    report = diagnosed(
        1.02,
        "layer_norm",
        "ours",
        dtype="float32",
        layers=28,
        tokens={"visual": 1024, "newline": 3},
    )
    return tables_of([diagnosed(model="base"), report])


def test_the_table_of_the_interface_has_the_numbers_of_each_model_in_its_column(compared_tables):
    (table,) = compared_tables["interface"]
    assert table["columns"][1:] == ["base (baseline)", "ours"]
    assert table["numeric"] == [False, True, True]
    assert "5.6 to 66" in table["caption"]

    cells = cells_by_label(table)
    assert cells["visual tokens, as received"] == ["39.96 ± 45.58", "1.102 ± 0.02130"]
    assert cells["input of the norm"] == ["–", "12.34 ± 5.678"]
    assert cells["visual tokens / vocabulary"] == ["37.00", "1.020"]
    assert cells["visual tokens / text in the data"] == ["32.38", "0.8927"]
    assert cells["text as received / text as stored"] == ["1.000", "1.000"]
    for label in cells:
        assert "newline" not in label
        assert "indicator" not in label


def test_the_table_of_the_gain_has_the_model_with_the_norm(compared_tables):
    (table,) = compared_tables["gain"]
    expected_cells = ["2.281", "0.04000", "0.01520", "0.01970", "0.8765", "0.4321"]
    assert cells_by_label(table) == {"ours": expected_cells}


def test_the_table_of_the_data_says_what_was_measured(compared_tables):
    (table,) = compared_tables["data"]
    assert table["columns"][1:] == ["base (baseline)", "ours"]
    assert table["numeric"] == [False, False, False]

    cells = cells_by_label(table)
    assert cells["Norm after the projector"] == ["none", "layer_norm"]
    assert cells["Precision of the decoder"] == ["bfloat16", "float32"]
    assert cells["Layers L of the decoder"] == ["30", "28"]
    assert cells["Visual tokens"] == ["1,024", "1,024"]
    assert cells["Newline tokens"] == ["0", "3"]
    assert "Indicator tokens" not in cells


def test_a_norm_without_a_bias_has_none_in_the_table_of_the_gain():
    gain = Gain(2.0, 0.5, None, 0.25, 1.5, None)
    report = diagnosed(1.02, "rms_norm", "ours", gain=gain)
    (table,) = tables_of([diagnosed(model="base"), report])["gain"]
    assert cells_by_label(table) == {"ours": ["2.000", "0.5000", "–", "0.2500", "1.500", "–"]}
    assert table["numeric"] == [False, True, True, True, True, True, True]


def test_embeddings_that_were_not_read_have_no_table():
    report = diagnosed(1.02, "rms_norm", "ours", embeddings=None)
    baseline = diagnosed(model="base", embeddings=None)
    assert tables_of([baseline, report])["embeddings"] == []


@pytest.fixture
def tables_of_one_model():
    embeddings = embeddings_of("Tiny", [(7, None, 2.5), (8, " a", 2.0), (9, "", 1.0)])
    tokens = {"visual": 4, "newline": 2}
    return tables_of([diagnosed(embeddings=embeddings, data=None, tokens=tokens)])


def test_tables_of_one_model_have_one_column_of_values(tables_of_one_model):
    (table,) = tables_of_one_model["interface"]
    assert table["columns"] == ["Tokens", "llava-baseline"]


def test_a_model_without_the_norm_has_no_table_of_the_gain(tables_of_one_model):
    assert tables_of_one_model["gain"] == []


def test_the_table_of_embeddings_shows_texts_of_tokens_in_quotes(tables_of_one_model):
    (table,) = tables_of_one_model["embeddings"]
    assert table["rows"] == [
        ["7", "–", "2.500"],
        ["8", "' a'", "2.000"],
        ["9", "''", "1.000"],
    ]
    assert table["caption"].startswith("Tiny: 0.6908 ± 0.1610")


def test_kinds_of_token_that_do_not_occur_are_not_in_the_table_of_the_data(tables_of_one_model):
    cells = cells_by_label(tables_of_one_model["data"][0])
    assert cells["Data"] == ["–"]
    assert cells["Newline tokens"] == ["2"]
    assert "Text tokens" not in cells
