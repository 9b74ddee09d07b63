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
    assert (spread(Moments(71.784, 13.952, 5)), spread(None)) == ("71.78 ± 13.95", "–")


def test_the_paper_s_ratios_are_of_its_tables_2_and_3():
    by_hand = {"LLaVA-v1.5": 39.96 / 1.08, "Qwen-2.5-VL": 56.88 / 0.86, "KimiVL": 4.78 / 0.85}
    by_hand |= {"GLM-4.1V": 4.58 / 0.80, "Ovis2.5": 64.0 / 1.38}
    assert paper_ratios() == pytest.approx(by_hand)


def test_what_json_lacks_is_null_and_each_key_has_a_line():
    text = report_json({"values": [math.nan, 1.5, math.inf], "name": "ä"})
    assert json.loads(text) == {"values": [None, 1.5, None], "name": "ä"}
    assert len(text.splitlines()) == 4 and "ä" in text


def rows(table):
    return {row[0]: row[1:] for row in table["rows"]}


def test_tables_have_the_numbers_of_each_model_in_its_column():
    tokens = {"visual": 1024, "newline": 3}
    ours = diagnosed(1.02, "layer_norm", "ours", dtype="float32", layers=28, tokens=tokens)
    made = tables_of([diagnosed(model="base"), ours])
    (interface,), (gain,), (data,) = (made[name] for name in ("interface", "gain", "data"))
    assert interface["columns"][1:] == data["columns"][1:] == ["base (baseline)", "ours"]
    norms = rows(interface)
    assert norms["visual tokens, as received"] == ["39.96 ± 45.58", "1.102 ± 0.02130"]
    assert norms["input of the norm"] == ["–", "12.34 ± 5.678"]
    assert norms["visual tokens / vocabulary"] == ["37.00", "1.020"]
    assert norms["visual tokens / text in the data"] == ["32.38", "0.8927"]
    assert norms["text as received / text as stored"] == ["1.000", "1.000"]
    assert not any("newline" in label or "indicator" in label for label in norms)
    assert "5.6 to 66" in interface["caption"] and interface["numeric"] == [False, True, True]
    assert rows(gain) == {"ours": ["2.281", "0.04000", "0.01520", "0.01970", "0.8765", "0.4321"]}
    about = rows(data)
    assert about["Norm after the projector"] == ["none", "layer_norm"]
    assert about["Precision of the decoder"] == ["bfloat16", "float32"]
    assert about["Layers L of the decoder"] == ["30", "28"]
    assert about["Visual tokens"] == ["1,024", "1,024"]
    assert about["Newline tokens"] == ["0", "3"] and "Indicator tokens" not in about
    assert data["numeric"] == [False, False, False]


def test_what_a_model_does_not_have_is_in_no_table():
    """A norm without a bias, embeddings that were not read, and a baseline without a norm."""
    gain = Gain(2.0, 0.5, None, 0.25, 1.5, None)
    ours = diagnosed(1.02, "rms_norm", "ours", gain=gain, embeddings=None)
    made = tables_of([diagnosed(model="base", embeddings=None), ours])
    assert rows(made["gain"][0]) == {"ours": ["2.000", "0.5000", "–", "0.2500", "1.500", "–"]}
    assert made["gain"][0]["numeric"] == [False, *[True] * 6] and made["embeddings"] == []


def test_tables_of_a_model_alone():
    read = embeddings_of("Tiny", [(7, None, 2.5), (8, " a", 2.0), (9, "", 1.0)])
    unknown = diagnosed(embeddings=read, data=None, tokens={"visual": 4, "newline": 2})
    made = tables_of([unknown])
    assert made["gain"] == [] and made["interface"][0]["columns"] == ["Tokens", "llava-baseline"]
    (embeddings,) = made["embeddings"]
    assert embeddings["rows"][:2] == [["7", "–", "2.500"], ["8", "' a'", "2.000"]]
    assert embeddings["rows"][2:] == [["9", "''", "1.000"]]
    assert embeddings["caption"].startswith("Tiny: 0.6908 ± 0.1610")
    about = rows(made["data"][0])
    assert about["Data"] == ["–"] and about["Newline tokens"] == ["2"]
    assert "Text tokens" not in about
