"""Each benchmark's task file, run by the harness on a few rows of its columns, scored by hand.

The model is a script of odd answers, since the task is tested and not a model.
"""

import io

import pytest
from scripted_tasks import Script, picture, run


# Answers to a question with four options, of which B is right, and the scores.
SCORES_OF_ODD_ANSWERS = {
    "(B)": 1,
    "It is B": 1,
    "A cat sits there.": 1,
    "": 0,
    "A or B": 0,
    "A dog.": 0,
    "E": 0,
}
TEXTS = ["a dog", "a cat", "a red car", "a horse"]
LINES = "A. a dog\nB. a cat\nC. a red car\nD. a horse"
LETTER = "Answer with the option's letter from the given choices directly."
QUESTION = "What is in the picture?"

MMBENCH = {
    "question": QUESTION,
    "hint": "nan",
    "answer": "B",
    "A": "a dog",
    "B": "a cat",
    "C": "a red car",
    "D": "a horse",
    "category": "x",
}
MMSTAR_QUESTION = f"{QUESTION}\nOptions: A: a dog, B: a cat, C: a red car, D: a horse"
MMSTAR = {
    "question": MMSTAR_QUESTION,
    "answer": "B",
    "category": "perception",
    "l2_category": "recognition",
}
SEED = {
    "question": QUESTION,
    "answer": "B",
    "question_image_type": "chart",
    "choice_A": "a dog",
    "choice_B": "a cat",
    "choice_C": "a red car",
    "choice_D": "a horse",
}
SCIENCEQA = {
    "question": QUESTION,
    "choices": TEXTS,
    "answer": 1,
    "hint": "",
}
AI2D = {
    "question": QUESTION,
    "options": TEXTS,
    "answer": "1",
}
POPE = {
    "question": "Is there a cat in the image?",
    "answer": "yes",
    "category": "random",
}
OCRBENCH = {
    "question": "what is written in the image?",
    "answer": ["CENTRE", "CENTER"],
    "question_type": "Regular Text Recognition",
    "dataset": "IIIT5K",
}
MULTIPLE_CHOICE = {
    "mmbench_en_dev": MMBENCH,
    "mmstar": MMSTAR,
    "seedbench_2_plus": SEED,
    "scienceqa": SCIENCEQA,
    "ai2d": AI2D,
}
ROWS = {
    **MULTIPLE_CHOICE,
    "pope": POPE,
    "ocrbench": OCRBENCH,
}


def scores(folder, task, rows, answers):
    """The scores of a task without their standard errors."""
    results = run(folder, task, rows, Script(answers))["results"][task]
    values = {}
    for metric, value in results.items():
        if metric.endswith(",none") and "_std" not in metric:
            values[metric.removesuffix(",none")] = value
    return values


@pytest.mark.parametrize("task", MULTIPLE_CHOICE)
def test_odd_answers_to_multiple_choice(task, tmp_path):
    answers = list(SCORES_OF_ODD_ANSWERS)
    data_rows = [{**MULTIPLE_CHOICE[task], "index": index} for index in range(len(answers))]
    model = Script(answers)
    result = run(tmp_path, task, data_rows, model)

    samples = result["samples"][task]
    score_of_answer = {sample["resps"][0][0]: sample["acc"] for sample in samples}
    assert score_of_answer == SCORES_OF_ODD_ANSWERS
    assert result["results"][task]["acc,none"] == pytest.approx(3 / 7)
    assert {sample["target"] for sample in samples} == {"B"}
    for request in model.asked:
        check_request(request)


def check_request(request):
    prompt, options, multimodal = request.args
    assert prompt.startswith("<image>")
    assert prompt.count("<image>") == 1
    assert options["do_sample"] is False
    assert options["temperature"] == 0.0
    assert options["until"] == []
    (image,) = multimodal["visual"]
    assert image.mode == "RGB"
    assert image.size == (12, 12)


@pytest.mark.parametrize(
    ("task", "changes", "prompt"),
    [
        pytest.param(
            "mmbench_en_dev",
            {},
            f"{QUESTION} There are several options:\n{LINES}\n\n{LETTER}",
            id="mmbench_en_dev",
        ),
        pytest.param(
            "mmbench_en_dev",
            {"hint": "It meows.", "C": "nan", "D": None},
            f"It meows. {QUESTION} There are several options:\nA. a dog\nB. a cat\n\n{LETTER}",
            id="mmbench_en_dev with a hint and two options",
        ),
        pytest.param(
            "mmstar",
            {"question": f"{MMSTAR_QUESTION} Please answer yes or no."},
            f"{MMSTAR_QUESTION}\n{LETTER[:-1]}",
            id="mmstar",
        ),
        pytest.param(
            "scienceqa",
            {"hint": "It meows."},
            f"Context: It meows.\n{QUESTION}\n{LINES}\n{LETTER}",
            id="scienceqa",
        ),
        pytest.param(
            "ai2d",
            {},
            f"{QUESTION}\n{LINES}\n{LETTER}",
            id="ai2d",
        ),
        pytest.param(
            "pope",
            {"question": "?"},
            "?\nAnswer the question using a single word or phrase.",
            id="pope",
        ),
        pytest.param(
            "ocrbench",
            {},
            "what is written in the image?",
            id="ocrbench",
        ),
    ],
)
def test_prompts(task, changes, prompt, tmp_path):
    data_row = {"index": 0, **ROWS[task], **changes}
    model = Script(["B"])
    run(tmp_path, task, [data_row], model)
    assert model.asked[0].args[0] == f"<image>{prompt}"


def mmbench_row(index, right, **options):
    return {**MMBENCH, "index": index, "answer": right, **options}


def test_mmbench_counts_a_question_if_all_its_rotations_are_right(tmp_path):
    two_options = {"C": "nan", "D": "nan"}
    cases = [
        # The first question is right in all four rotations.
        (mmbench_row(241, "B"), "The answer is B."),
        (mmbench_row(1_000_241, "A"), "The answer is A."),
        (mmbench_row(2_000_241, "D"), "The answer is D."),
        (mmbench_row(3_000_241, "C"), "The answer is C."),
        # The second is wrong in one.
        (mmbench_row(252, "B"), "B"),
        (mmbench_row(1_000_252, "A"), "A"),
        (mmbench_row(2_000_252, "D"), "A or D"),
        (mmbench_row(3_000_252, "C"), "C"),
        # The third has two options, and is right in both, once by its text.
        (mmbench_row(263, "B", **two_options), "a cat"),
        (mmbench_row(1_000_263, "A", **two_options), "(a)"),
        # The fourth is wrong.
        (mmbench_row(274, "C"), "A red dog"),
        # A rotation without its first question counts only in acc.
        (mmbench_row(1_000_999, "B"), "B"),
    ]
    data_rows = [data_row for data_row, _ in cases]
    answers = [answer for _, answer in cases]
    result = scores(tmp_path, "mmbench_en_dev", data_rows, answers)
    assert result == pytest.approx({"acc_circular": 2 / 4, "acc": 10 / 12})


def test_mmstar_is_the_mean_of_its_categories(tmp_path):
    # One of three questions on counting is right, and one of one on emotion: (1/3 + 1) / 2.
    counting_row = {**MMSTAR, "l2_category": "object counting"}
    emotion_row = {**MMSTAR, "l2_category": "image emotion"}
    data_rows = [counting_row, counting_row, counting_row, emotion_row]
    result = scores(tmp_path, "mmstar", data_rows, ["B", "A", "A or B", "B. a cat"])
    assert result == pytest.approx({"acc_by_category": 2 / 3, "acc": 1 / 2})


def test_mmstar_finds_the_options_in_the_question(tmp_path):
    options = "Choices:\n(A) a dog\n(B) a cat\n(C) a red car\n(D) a horse"
    data_rows = [{**MMSTAR, "question": f"{QUESTION}\n{options}"}] * 3
    result = scores(tmp_path, "mmstar", data_rows, ["a cat", "I see a cat", "a horse"])
    assert result["acc"] == pytest.approx(2 / 3)


def test_seedbench_by_kind_of_image(tmp_path):
    cases = [
        ("chart", "B"),
        ("chart", "C"),
        ("map", "Both"),
        ("web", "(B)"),
        ("web", "B."),
        ("web", "I can't"),
    ]
    data_rows = [{**SEED, "question_image_type": image_type} for image_type, _ in cases]
    answers = [answer for _, answer in cases]
    result = scores(tmp_path, "seedbench_2_plus", data_rows, answers)
    expected = {
        "acc": 3 / 6,
        "acc_chart": 1 / 2,
        "acc_map": 0,
        "acc_web": 2 / 3,
    }
    assert result == pytest.approx(expected)


def test_scienceqa_without_an_image_asks_in_text(tmp_path):
    model = Script(["B", "B"])
    data_rows = [SCIENCEQA, {**SCIENCEQA, "image": None}]
    result = run(tmp_path, "scienceqa", data_rows, model)
    with_image, without_image = model.asked
    assert with_image.args[0].startswith("<image>")
    assert len(with_image.args[2]["visual"]) == 1
    assert without_image.args[0].startswith(QUESTION[:7])
    assert len(without_image.args[2]["visual"]) == 0
    assert result["results"]["scienceqa"]["acc,none"] == 1


POPE_CASES = [
    # Category, right answer, what the model says.
    ("random", "yes", "Yes"),
    ("random", "yes", "yes, there is a cat."),
    ("random", "yes", "No"),
    ("random", "no", "No."),
    ("random", "no", "There is no cat."),
    ("random", "no", "Yes."),
    ("popular", "yes", "Yes"),
    ("popular", "yes", "Sorry, I can't see it."),
    ("popular", "no", "No"),
    ("popular", "no", ""),
    ("adversarial", "yes", "Yes and no"),
    ("adversarial", "yes", "Ja"),
    ("adversarial", "no", "YES"),
    ("adversarial", "no", "**No**"),
]

EXPECTED_POPE = {
    # Found 2 of 3 objects, and one that is not there: 2/3 each, 3 of 6 answers are yes.
    "acc_random": 4 / 6,
    "precision_random": 2 / 3,
    "recall_random": 2 / 3,
    "f1_random": 2 / 3,
    "yes_ratio_random": 3 / 6,
    # The refusal finds nothing; the empty answer is wrong, but no yes. F1 = 2 * 1/2 / (3/2).
    "acc_popular": 2 / 4,
    "precision_popular": 1,
    "recall_popular": 1 / 2,
    "f1_popular": 2 / 3,
    "yes_ratio_popular": 1 / 4,
    # "Yes and no" and "Ja" are no answers; the one yes is wrong.
    "acc_adversarial": 1 / 4,
    "precision_adversarial": 0,
    "recall_adversarial": 0,
    "f1_adversarial": 0,
    "yes_ratio_adversarial": 1 / 4,
    # Over all: 3 right and 2 wrong yes, 7 objects. F1 = 2 * 3/5 * 3/7 / (3/5 + 3/7) = 1/2.
    "acc": 7 / 14,
    "precision": 3 / 5,
    "recall": 3 / 7,
    "f1": 1 / 2,
    "yes_ratio": 5 / 14,
}


def test_pope(tmp_path):
    data_rows = []
    answers = []
    for category, right_answer, answer in POPE_CASES:
        data_rows.append({**POPE, "category": category, "answer": right_answer})
        answers.append(answer)
    result = scores(tmp_path, "pope", data_rows, answers)
    assert result == pytest.approx(EXPECTED_POPE)


FORMULA = "Handwritten Mathematical Expression Recognition"
CENTRE = ["CENTRE", "CENTER"]
OCRBENCH_CASES = [
    # Kind of question, accepted answers, answer. Six are right.
    # Right: within it, in any case.
    ("Regular Text Recognition", CENTRE, "The word is center."),
    ("Irregular Text Recognition", ["two\nlines"], "Two lines"),
    # Wrong.
    ("Artistic Text Recognition", CENTRE, ""),
    ("Handwriting Recognition", CENTRE, "C E N T R E"),
    # Right, as in lmms-eval.
    ("Digit String Recognition", ["1234"], "It says 12345."),
    # Wrong: full width.
    ("Non-Semantic Text Recognition", ["ｘ"], "x"),
    # Wrong.
    ("Scene Text-centric VQA", CENTRE, "Sorry, I can't read it."),
    # Right.
    ("Doc-oriented VQA", ["$ 12"], "$ 12.00"),
    ("Key Information Extraction", ["12/05/2018"], "12/05/2018"),
    # Wrong.
    ("Key Information Extraction", CENTRE, "中心"),
    # Right: spaces mean nothing.
    (FORMULA, ["x ^ { 2 } + Y"], "$x^{2}+Y$"),
    # Wrong: case does.
    (FORMULA, ["x ^ { 2 } + Y"], "x^{2}+y"),
]


def test_ocrbench(tmp_path):
    data_rows = []
    answers = []
    for question_type, accepted, answer in OCRBENCH_CASES:
        data_row = {**OCRBENCH, "question_type": question_type, "answer": accepted}
        if question_type == FORMULA:
            data_row["dataset"] = "HME100k"
        data_rows.append(data_row)
        answers.append(answer)
    result = scores(tmp_path, "ocrbench", data_rows, answers)
    expected = {
        "text_recognition": 3,
        "scene_text_vqa": 0,
        "document_vqa": 1,
        "key_information": 1,
        "handwritten_math": 1,
        "total": 6,
        "acc": 6 / 12,
    }
    assert result == pytest.approx(expected)


def test_a_data_set_that_lacks_columns_is_refused(tmp_path):
    data_row = {"question": "?", "answer": "B"}
    with pytest.raises(ValueError, match="missing columns or new values: A, B, C, D, hint, index."):
        run(tmp_path, "mmbench_en_dev", [data_row], Script(["B"]))


def test_a_data_set_with_new_values_is_refused(tmp_path):
    data_row = {**POPE, "answer": "maybe"}
    with pytest.raises(ValueError, match="missing columns or new values: answer=maybe."):
        run(tmp_path, "pope", [data_row], Script(["B"]))


def test_images_are_opened_only_in_the_formats_of_training(tmp_path):
    postscript = io.BytesIO()
    picture().convert("RGB").save(postscript, "EPS")
    data_row = {**POPE, "image": {"bytes": postscript.getvalue(), "path": "cat.jpg"}}
    with pytest.raises(ValueError, match="cat.jpg: cannot identify image file; it is broken, or "):
        run(tmp_path, "pope", [data_row], Script(["B"]))
