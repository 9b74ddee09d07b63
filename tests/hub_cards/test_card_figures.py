"""Every figure and sentence of a card, by hand from what `card_folder` writes."""

import card_folder as made
from card_folder import listed, rows, section
from diagnosed import diagnosed

from normalign_llava.evaluate.results import WEIGHT_FILES, files_hash
from normalign_llava.hub_cards.card.write import render_card


STALE = "The diagnosis was made of other weights"


def limits(folder):
    return listed(section(render_card(folder), "Limits"))[:-1]  # the last is the same in every card


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
    table = rows(section(render_card(full), "Training"))
    expected = {
        "": ["stage 1 (align)", "stage 2 (tune)"],
        "Trained, at a peak learning rate": ["projector 0.001, norm 0.002"] * 2,
        "Rows a step: a device × processes × accumulated": ["16 (4 × 2 × 2)"] * 2,
        "Data": ["user/data, 500 of 505 rows (3 bad, 2 too long)", "user/data, 60 of 60 rows"],
        "Hardware": ["2 × NVIDIA H200, x86_64 Linux"] * 2,
        "Time": ["1:30:00", "0:00:42"],
    }
    assert table | expected == table


def test_limits(full):
    def assert_limits(*expected):
        sentences = limits(full)
        assert len(sentences) == len(expected)
        assert all(words in sentence for words, sentence in zip(expected, sentences, strict=True)), sentences

    run = ["one training run, seed 42"]
    measured = ["Bias, safety", "64 samples of easy-VQA, held out, in bfloat16"]
    left_out = "Not measured: Visual embedding tables: this model has none."
    assert_limits(*run, *measured, left_out)
    made.measured(full, baseline=None)
    assert_limits(*run, *measured, "No baseline", left_out)


def test_a_diagnosis_and_results_of_other_weights_are_called_so(full):
    def told():
        return [words for words in (STALE, "Evaluated with other weights") if words in str(limits(full))]

    made.evaluated(full, weights=files_hash(full, WEIGHT_FILES))
    assert not told() and "Diagnose again" not in " ".join(render_card(full).warnings)
    made.normed(full, 3.0)
    assert len(told()) == 2 and "Diagnose again" in " ".join(render_card(full).warnings)
    made.measured(full)
    assert STALE not in told()
    made.edit(full / "config.json", projector_norm="rms_norm")
    assert STALE in told()
