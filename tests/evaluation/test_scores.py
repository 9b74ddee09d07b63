"""Prompts, answers and scores of single documents, as the functions of the task files give them."""

import math

import pytest
from datasets import Dataset, Image as ImageFeature
from PIL import Image

from normalign_llava.evaluation.answers import chosen_option
from normalign_llava.evaluation.tasks import benchmarks, offline


OPTIONS = {
    "A": "a dog",
    "B": "a cat",
    "C": "a red car",
    "D": "a horse",
}


def test_an_option_without_text_is_not_chosen_by_text():
    options = {"A": "", "B": "a cat"}
    assert chosen_option("...", options) is None
    assert chosen_option("It: a cat", options) == "B"


def test_of_two_options_that_are_alike_none_is_chosen_by_text():
    assert chosen_option("a cat", {"A": "a cat", "B": "A cat."}) is None


def test_a_refusal_in_quotes_chooses_nothing():
    assert chosen_option('"Sorry." B', OPTIONS) is None


def test_mmbench_leaves_out_what_is_empty():
    document = {
        "question": "What?",
        "A": "a dog",
        "B": "a cat",
        "C": "",
        "D": "nan",
    }
    prompt = benchmarks.mmbench_text({**document, "hint": ""})
    assert prompt.startswith("<image>What? There are several options:\nA. a dog\nB. a cat\n\n")
    assert benchmarks.mmbench_text({**document, "hint": None}) == prompt


@pytest.mark.parametrize("answer", [" b ", "B", 1, "1", " 1"])
def test_the_right_option_is_a_letter_or_a_number_from_0(answer):
    assert benchmarks.target({"answer": answer}) == "B"


def test_kinds_of_seedbench_are_read_in_any_case_and_with_spaces():
    document = {
        "answer": "B",
        "question_image_type": " Chart ",
        "choice_A": "a dog",
        "choice_B": "a cat",
        "choice_C": "a red car",
        "choice_D": "a horse",
    }
    assert benchmarks.results(document, ["B"]) == {"acc": 1.0, "acc_chart": 1.0}


def test_kinds_and_answers_of_pope_are_read_in_any_case_and_with_spaces():
    document = {"answer": " Yes", "category": " Random "}
    scores = benchmarks.pope_results(document, ["yes"])
    assert scores["acc"] == 1.0
    assert scores["acc_random"] == 1.0
    assert scores["recall_random"] == 1.0


def test_an_absent_object_of_pope_does_not_count_in_recall():
    document = {"answer": "no", "category": " Random "}
    scores = benchmarks.pope_results(document, ["yes"])
    assert scores["acc"] == 0.0
    for metric in scores:
        assert "recall" not in metric


@pytest.mark.parametrize(
    ("dataset", "accepted", "answer", "score"),
    [
        ("HME100k", ["x 2"], "x\n2", 1.0),
        ("IIIT5K", "CENTER", "E", 0.0),
        ("IIIT5K", "CENTER", "the\ncenter", 1.0),
        ("IIIT5K", ["two lines"], "two\nlines", 1.0),
    ],
)
def test_an_accepted_answer_of_ocrbench_may_be_a_single_text(dataset, accepted, answer, score):
    document = {
        "dataset": dataset,
        "answer": accepted,
        "question_type": " Doc-oriented VQA",
    }
    expected = {
        "total": score,
        "document_vqa": score,
        "acc": score,
    }
    assert benchmarks.ocrbench_results(document, [answer]) == expected


ROWS = {
    "mmbench": {
        "index": "x",
        "question": "x",
        "hint": "x",
        "answer": "yes ",
        "A": "x",
        "B": "x",
        "C": "x",
        "D": "x",
    },
    "mmstar": {
        "question": "x",
        "answer": "yes ",
        "l2_category": "x",
    },
    "seedbench": {
        "question": "x",
        "answer": "yes ",
        "choice_A": "x",
        "choice_B": "x",
        "choice_C": "x",
        "choice_D": "x",
    },
    "scienceqa": {
        "question": "x",
        "choices": "x",
        "answer": "yes ",
        "hint": "x",
    },
    "ai2d": {
        "question": "x",
        "options": "x",
        "answer": "yes ",
    },
    "pope": {
        "question": "x",
        "category": " Random",
        "answer": "yes ",
    },
    "ocrbench": {
        "question": "x",
        "answer": "yes ",
        "dataset": "x",
        "question_type": "Doc-oriented VQA\n",
    },
}


def data_set(task, row):
    """A data set of one row, with the columns that the task has besides."""
    whole_row = {**row, "image": None}
    if task == "seedbench":
        whole_row["question_image_type"] = " Chart "
    return Dataset.from_list([whole_row]).cast_column("image", ImageFeature())


@pytest.mark.parametrize("task", ROWS)
def test_a_data_set_with_the_columns_of_its_task_is_taken(task):
    check = getattr(benchmarks, task)
    assert len(check(data_set(task, ROWS[task]))) == 1


@pytest.mark.parametrize("task", ROWS)
def test_a_data_set_without_a_column_of_its_task_is_refused(task):
    check = getattr(benchmarks, task)
    for column in ROWS[task]:
        row = dict(ROWS[task])
        del row[column]
        with pytest.raises(ValueError, match=f"new values: {column}\\."):
            check(data_set(task, row))


@pytest.mark.parametrize("answer", ["F", "5 dogs"])
def test_a_list_of_options_may_be_longer_than_four(answer):
    options = ["0 dogs", "1 dogs", "2 dogs", "3 dogs", "4 dogs", "5 dogs"]
    document = {"options": options, "answer": 5}
    assert benchmarks.results(document, [answer]) == {"acc": 1.0}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which?\nOptions: A: a\ndog, B: a cat", "a dog"),
        ("Which Options: are there?\nOptions: A: a dog, B: a cat", "a dog"),
        ("Choices: which?\nChoices:\n(A) a dog\n(B) a cat", "a dog"),
        pytest.param("Which is in the picture?", "A", id="no options are listed"),
        ("Which?\nOptions: B: a cat", "A"),
    ],
)
def test_options_of_mmstar_are_found_wherever_they_stand(question, answer):
    document = {"question": question, "answer": "A", "l2_category": "x"}
    assert benchmarks.results(document, [answer])["acc"] == 1.0


@pytest.mark.parametrize("title", ["Options", "Choices"])
@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("it is a dog", 1.0),
        ("it is just a dog", 0.0),
    ],
)
def test_what_stands_before_the_options_of_mmstar_is_none_of_them(title, answer, score):
    """An answer may be twice as long as all options. The question is no part of them."""
    question = f"Which is at (D) in this picture of animals?\n{title}:\n(A) dog\n(B) cat"
    document = {"question": question, "answer": "A", "l2_category": "x"}
    assert benchmarks.results(document, [answer])["acc"] == score


@pytest.mark.parametrize("pairs", [[], [(False, True)]])
def test_without_an_answer_yes_precision_and_f1_are_0(pairs):
    assert benchmarks.precision(pairs) == 0.0
    assert benchmarks.f1(pairs) == 0.0


def test_images_are_shown_in_rgb():
    (image,) = benchmarks.image({"image": Image.new("RGBA", (2, 2))})
    assert image.mode == "RGB"


def test_a_document_without_an_image_shows_none():
    assert benchmarks.image({"image": None}) == []


def test_a_data_set_needs_images():
    row = {"question": "?", "options": ["a"], "answer": "0"}
    with pytest.raises(ValueError, match="new values: image"):
        benchmarks.ai2d(Dataset.from_list([row]))


def test_the_offline_suite_scores_the_answers_to_an_image_and_to_a_white_one():
    document = {
        "choices": ["red", "blue"],
        "answer": "red",
        "category": "colour",
        "blank": [{"answer": "red"}, {"answer": "blue"}, {"answer": "red"}],
    }
    assert offline.results(document, ["red or blue", "red"]) == {
        "acc": 0.0,
        "acc_colour": 0.0,
        "commonest": "red",
        "commonest_colour": "red",
        "blank": [2, 3],
        "blank_colour": [2, 3],
    }


def test_the_offline_suite_scores_a_question_without_a_category_or_a_white_image():
    document = {
        "choices": ["red", "blue"],
        "answer": "red",
        "category": "",
        "blank": [],
    }
    assert offline.results(document, ["It is red."]) == {"acc": 1.0, "commonest": "red"}


def test_answers_to_white_images_and_commonest_answers_are_shares():
    assert offline.blank([[2, 3], [1, 1]]) == 3 / 4
    assert offline.commonest(["a", "b", "a"]) == 2 / 3


def test_bits_are_of_bytes_and_perplexity_of_words():
    # The text has four bytes.
    log_likelihood = -8 * math.log(2)
    scores = offline.passage_results({"text": "ä b"}, [log_likelihood])
    assert scores["bits_per_byte"] == pytest.approx(2.0)
    assert scores["word_perplexity"] == (log_likelihood, 2)
