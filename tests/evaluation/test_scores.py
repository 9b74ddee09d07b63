"""Prompts, answers and scores of single documents, as the functions of the task files give them."""

import math

import pytest
from datasets import Dataset, Image as ImageFeature
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
    assert benchmarks.mmbench_text(document | {"hint": None}) == prompt


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


COLUMNS = {
    "mmbench": ["index", "question", "hint", "answer", *"ABCD"],
    "mmstar": ["question", "answer", "l2_category"],
    "seedbench": ["question", "answer", *(f"choice_{letter}" for letter in "ABCD")],
    "scienceqa": ["question", "choices", "answer", "hint"],
    "ai2d": ["question", "options", "answer"],
    "pope": ["question", "category", "answer"],
    "ocrbench": ["question", "answer", "dataset", "question_type"],
}


@pytest.mark.parametrize("task", COLUMNS)
def test_a_data_set_without_a_column_of_its_task_is_refused(task):
    known = {"category": " Random", "answer": "yes ", "question_type": "Doc-oriented VQA\n"}
    row = {name: known.get(name, "x") for name in COLUMNS[task]} | {"image": None}
    if task == "seedbench":
        row["question_image_type"] = " Chart "
    check = getattr(benchmarks, task)
    assert len(check(with_image(row))) == 1
    for column in COLUMNS[task]:
        without = {name: value for name, value in row.items() if name != column}
        with pytest.raises(ValueError, match=f"new values: {column}\\."):
            check(with_image(without))


def with_image(row):
    return Dataset.from_list([row]).cast_column("image", ImageFeature())


def test_a_list_of_options_may_be_longer_than_four():
    document = {"options": [f"{number} dogs" for number in range(6)], "answer": 5}
    assert benchmarks.results(document, ["F"]) == {"acc": 1.0}
    assert benchmarks.results(document, ["5 dogs"]) == {"acc": 1.0}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which?\nOptions: A: a\ndog, B: a cat", "a dog"),
        ("Which Options: are there?\nOptions: A: a dog, B: a cat", "a dog"),
        ("Choices: which?\nChoices:\n(A) a dog\n(B) a cat", "a dog"),
        ("Which is in the picture?", "A"),  # no options are listed
        ("Which?\nOptions: B: a cat", "A"),
    ],
)
def test_options_of_mmstar_are_found_wherever_they_stand(question, answer):
    document = {"question": question, "answer": "A", "l2_category": "x"}
    assert benchmarks.results(document, [answer])["acc"] == 1.0


@pytest.mark.parametrize("title", ["Options", "Choices"])
def test_what_stands_before_the_options_of_mmstar_is_none_of_them(title):
    """An answer may be twice as long as all options, of which the question is no part."""
    question = f"Which is at (D) in this picture of animals?\n{title}:\n(A) dog\n(B) cat"
    document = {"question": question, "answer": "A", "l2_category": "x"}
    for answer, right in (("it is a dog", 1.0), ("it is just a dog", 0.0)):
        assert benchmarks.results(document, [answer])["acc"] == right


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
