"""Every figure and sentence of a card, by hand from what `card_folder` writes."""

import json
import re

import card_folder as made
import pytest
from card_folder import listed, rows, section
from diagnosed import diagnosed

from normalign_llava.evaluate.results import WEIGHT_FILES, Evaluation, Metric, files_hash
from normalign_llava.hub_cards.card.tables import STALE
from normalign_llava.hub_cards.card.write import render_card


def limits(folder):
    return listed(section(render_card(folder), "Limits"))[:-1]  # the last is the same in every card


def test_at_a_glance(full):
    table = rows(render_card(full).text.partition("<!-- end by hand -->\n")[2].partition("## Use")[0])
    weights = table.pop("Weights")[0]
    assert re.fullmatch(r"\d{2},\d{3} parameters, 0.00 GB in float32", weights)
    assert table == {
        "At a glance": [""],
        "Vision encoder": [
            "[google/encoder](https://huggingface.co/google/encoder) "
            f"([ccccccc](https://huggingface.co/google/encoder/tree/{'c' * 40}))"
        ],
        "Language model": ["[Qwen/decoder](https://huggingface.co/Qwen/decoder)"],
        "An image is": ["4 visual tokens"],
        "Context": ["256 tokens"],
        "Trained on": ["stage 1 (align): 500 rows; stage 2 (tune): 60 rows"],
        "POPE": ["accuracy 0.81 ± 0.02 (blank image 0.500, commonest answer 0.510)"],
        "Licence": ["apache-2.0"],
    }


def test_measured_alignment(full):
    made.normed(full, -0.25, 0.5)
    made.edit(full / "config.json", text_embedding_norm=3.2)  # the language model is 32 wide: 3.2 / 5.657
    made.measured(full, diagnosed(37.0, "layer_norm", "other"))
    table = rows(section(render_card(full), "Measured alignment").partition("A ± ")[0])
    text = "1.23 (σ 0.11)"
    assert float(table.pop("Rotation by layer, visual over text")[1]) < 0.9
    assert table == {
        "": ["this model", "baseline: other"],
        "Mean norm of text embeddings, N_text": ["3.200", "1.080"],
        "Gain at the start, every element": ["0.5657", "0.01970"],
        "Gain now, mean magnitude": ["0.2500", "0.04000"],
        "Bias now, mean magnitude (0 at the start)": ["0.50", "0.015"],
        "Norm of visual tokens as they enter": ["1.10 (σ 0.021)", "40.0 (σ 0.021)"],
        "Norm of text tokens in the same data": [text, text],
        "Norm, visual over N_text": ["1.02", "37.0"],
        "Norm, visual over text in the same data": ["0.893", "32.4"],
    }


def test_training(full):
    part = section(render_card(full), "Training")
    both = {
        "Trained": "projector, norm",
        "Frozen": "vision tower, language model",
        "Learning rate, peak": "projector 0.001, norm 0.002",
        "Steps": "32",
        "Rows a step: a device × processes × accumulated": "16 (4 × 2 × 2)",
        "Hardware": "2 × NVIDIA H200, x86_64 Linux",
        "Software": "torch 2.13.0, normalign_llava 0.1.0",
        "Commit of the code": "d" * 40,
    }
    assert rows(part.partition("| data set")[0]) == {
        "": ["stage 1 (align)", "stage 2 (tune)"],
        **{name: [value, value] for name, value in both.items()},
        "Rows trained on": ["500 rows", "60 rows"],
        "Time": ["1:30:00", "0:00:42"],
    }
    assert part.count("| 505 | 3 | 2 | 500 |") == 1 and part.count("| 60 | 0 | 0 | 60 |") == 1


def test_what_a_short_run_took_and_no_more(full):
    made.edit(full / "training.json", before=None, run=made.run(steps=2))
    record = json.loads((full / "training.json").read_text())
    record["data"][0] |= {"used": 1_200_000, "found": 1_200_000}
    made.edit(full / "training.json", **record)
    text = render_card(full).text
    assert rows(text)["Trained on"] == ["tune: 32 rows"]  # two steps of 16
    assert rows(section(render_card(full), "Training"))["Rows trained on"] == ["32 rows"]
    made.edit(full / "training.json", run=made.run(steps=100_000))
    assert rows(render_card(full).text)["Trained on"] == ["tune: 1,200,000 rows"]


def test_a_run_that_was_cut_short(full):
    made.edit(full / "training.json", before=None, run=made.run(steps=3), steps_done=1)
    table = rows(section(render_card(full), "Training"))
    assert table["Steps"] == ["1 of 3"] and table["Rows trained on"] == ["16 rows"]
    made.edit(full / "training.json", steps_done=3)
    assert rows(section(render_card(full), "Training"))["Steps"] == ["3"]


def test_streams(full):
    record = json.loads((full / "training.json").read_text())
    record["data"].append({"source": "stream", "split": "train", "used": None})
    made.edit(full / "training.json", **record)
    assert rows(render_card(full).text)["Trained on"] == ["stage 1 (align): 500 rows; stage 2 (tune): 512 rows"]
    made.edit(full / "training.json", run=None)
    assert rows(render_card(full).text)["Trained on"] == ["stage 1 (align): 500 rows"]


def test_limits(full):
    def assert_limits(*expected):
        found = limits(full)
        assert len(found) == len(expected)
        assert all(words in sentence for words, sentence in zip(expected, found, strict=True)), found

    run = ["one training run, seed 42"]
    measured = ["Bias, safety", "64 samples of easy-VQA, held out, in bfloat16"]
    left_out = "Not measured: Visual embedding tables: this model has none."
    assert_limits(*run, *measured, left_out)
    made.measured(full, baseline=None)
    assert_limits(*run, *measured, "No baseline", left_out)
    text = Metric("bits_per_byte", 1.6, references={"before training": 1.0})
    Evaluation("offline_perplexity", "texts", [text], 32, 32, []).write(full)
    assert_limits(*run, "bits per byte of a speech rose from 1.00 to 1.60", *measured, "No baseline", left_out)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "In training, its gradients were compensated for the small gain."),
        ({"gradient_compensation": "none"}, "Its gradients were not compensated for the gain."),
        ({"projector_norm": "none"}, "LLaVA's projector alone, without a norm after it."),
    ],
)
def test_what_the_norm_does(full, changes, expected):
    made.edit(full / "config.json", **changes)
    assert expected in " ".join(render_card(full).text.split())


def test_a_diagnosis_of_other_weights_is_no_figure_of_this_model(full):
    assert not [warning for warning in render_card(full).warnings if "report.json" in warning]
    assert STALE not in limits(full)
    made.normed(full, 3.0)
    assert "Diagnose again" in " ".join(render_card(full).warnings) and STALE in limits(full)
    made.measured(full)
    assert STALE not in limits(full)
    made.edit(full / "config.json", projector_norm="rms_norm")
    assert STALE in limits(full)


def test_results_of_other_weights_are_called_so(full):
    made.evaluated(full, weights=files_hash(full, WEIGHT_FILES))
    assert not any("other weights" in sentence for sentence in limits(full))
    made.normed(full, 3.0)
    assert any("Evaluated with other weights" in sentence and "pope" in sentence for sentence in limits(full))


def test_the_snippets_load_the_branch(full):
    card = render_card(full, repo_id="user/model", revision="trial/2").text
    assert card.count('"trial/2"') == 4 and '"main"' not in card
    assert render_card(full, repo_id="user/model").text.count('"main"') == 4
