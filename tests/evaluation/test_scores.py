"""Prompts, answers and scores of single documents, as the functions of the task files give them."""

import math

import pytest
from datasets import Dataset
from PIL import Image

from normalign_llava.evaluation.answers import chosen_option
from normalign_llava.evaluation.tasks import benchmarks, offline


OPTIONS = {"A": "a dog", "B": "a cat", "C": "a red car", "D": "a horse"}


def test_an_option_without_text_and_two_alike_are_not_chosen_by_text():
    empty = {"A": "", "B": "a cat"}
    assert chosen_option("...", empty) is None and chosen_option("It: a cat", empty) == "B"
    assert chosen_option("a cat", {"A": "a cat", "B": "A cat."}) is None
    assert chosen_option('"Sorry." B', OPTIONS) is None  # a refusal in quotes


def test_mmbench_leaves_out_what_is_empty():
    document = {"question": "What?", "hint": "", "A": "a dog", "B": "a cat", "C": "", "D": "nan"}
    prompt = benchmarks.mmbench_text(document)
    assert prompt.startswith("<image>What? There are several options:\nA. a dog\nB. a cat\n\n")


@pytest.mark.parametrize("answer", [" b ", "B", 1, "1", " 1"])
def test_the_right_option_is_a_letter_or_a_number_from_0(answer):
    assert benchmarks.target({"answer": answer}) == "B"


def test_kinds_and_answers_are_read_in_any_case_and_with_spaces():
    seed = {"answer": "B", "question_image_type": " Chart "}
    seed |= {f"choice_{letter}": text for letter, text in OPTIONS.items()}
    assert benchmarks.results(seed, ["B"]) == {"acc": 1.0, "acc_chart": 1.0}
    pope = {"answer": " Yes", "category": " Random "}
    scores = benchmarks.pope_results(pope, ["yes"])
    assert scores["acc"] == scores["acc_random"] == scores["recall_random"] == 1.0
    absent = benchmarks.pope_results(pope | {"answer": "no"}, ["yes"])
    assert absent["acc"] == 0.0 and not any("recall" in name for name in absent)


@pytest.mark.parametrize(
    ("dataset", "accepted", "answer", "right"),
    [
        ("HME100k", ["x 2"], "x\n2", 1.0),
        ("IIIT5K", "CENTER", "E", 0.0),
        ("IIIT5K", "CENTER", "the\ncenter", 1.0),
        ("IIIT5K", ["two lines"], "two\nlines", 1.0),
    ],
)
def test_an_accepted_answer_of_ocrbench_may_be_alone(dataset, accepted, answer, right):
    document = {"dataset": dataset, "answer": accepted, "question_type": " Doc-oriented VQA"}
    scores = dict.fromkeys(("total", "document_vqa", "acc"), right)
    assert benchmarks.ocrbench_results(document, [answer]) == scores


def test_without_an_answer_yes_precision_and_f1_are_0():
    assert benchmarks.precision([]) == benchmarks.precision([(False, True)]) == 0.0
    assert benchmarks.f1([]) == benchmarks.f1([(False, True)]) == 0.0


def test_images_are_shown_in_rgb_and_a_data_set_needs_them():
    (shown,) = benchmarks.image({"image": Image.new("RGBA", (2, 2))})
    assert shown.mode == "RGB" and benchmarks.image({"image": None}) == []
    with pytest.raises(ValueError, match="new values: image"):
        benchmarks.ai2d(Dataset.from_list([{"question": "?", "options": ["a"], "answer": "0"}]))


def test_the_offline_suite_scores_an_answer_and_that_to_a_white_image():
    blank = [{"answer": answer} for answer in ("red", "blue", "red")]
    asked = {"choices": ["red", "blue"], "answer": "red", "category": "colour", "blank": blank}
    expected = {"acc": 0.0, "commonest": "red", "blank": [2, 3]}
    both = expected | {f"{name}_colour": value for name, value in expected.items()}
    assert offline.results(asked, ["red or blue", "red"]) == both
    alone = offline.results(asked | {"category": "", "blank": []}, ["It is red."])
    assert alone == {"acc": 1.0, "commonest": "red"}
    assert offline.blank([[2, 3], [1, 1]]) == 3 / 4
    assert offline.commonest(["a", "b", "a"]) == 2 / 3


def test_bits_are_of_bytes_and_perplexity_of_words():
    scores = offline.passage_results({"text": "ä b"}, [-8 * math.log(2)])  # four bytes
    assert scores["bits_per_byte"] == pytest.approx(2.0)
    assert scores["word_perplexity"] == (-8 * math.log(2), 2)
