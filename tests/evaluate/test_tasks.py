"""Each benchmark's task file, run by lm-evaluation-harness on a few rows of the data set's columns, scored by hand.

The model is a script of odd answers, since it is the task that is tested and not a model.
"""

import io

import pytest
from scripted_tasks import Script, picture, run


# Answers to a question with the options "a dog", "a cat", "a red car", "a horse", of which B is right; and the score.
ODD = {"(B)": 1, "The answer is B": 1, "A cat sits there.": 1, "": 0, "A or B": 0, "A dog.": 0, "E": 0}
TEXTS = ["a dog", "a cat", "a red car", "a horse"]
OPTIONS = dict(zip("ABCD", TEXTS, strict=True))
LINES = "A. a dog\nB. a cat\nC. a red car\nD. a horse"
LETTER = "Answer with the option's letter from the given choices directly."
QUESTION = "What is in the picture?"

MMBENCH = {"question": QUESTION, "hint": "nan", "answer": "B", **OPTIONS, "category": "x", "L2-category": "y"}
MMSTAR = {
    "question": f"{QUESTION}\nOptions: A: a dog, B: a cat, C: a red car, D: a horse",
    "answer": "B", "category": "coarse perception", "l2_category": "recognition",
}  # fmt: skip
SEED = {
    "question": QUESTION, "answer": "B", "question_image_type": "chart",
    **{f"choice_{letter}": text for letter, text in OPTIONS.items()},
}  # fmt: skip
SCIENCEQA = {"question": QUESTION, "choices": TEXTS, "answer": 1, "hint": ""}
AI2D = {"question": QUESTION, "options": TEXTS, "answer": "1"}
POPE = {"question": "Is there a cat in the image?", "answer": "yes", "category": "random"}
NEITHER = POPE | {"answer": "maybe"}
OCRBENCH = {"question": "what is written in the image?", "answer": ["CENTRE", "CENTER"],
            "question_type": "Regular Text Recognition", "dataset": "IIIT5K"}  # fmt: skip
CHOICES = {
    "mmbench_en_dev": MMBENCH, "mmstar": MMSTAR, "seedbench_2_plus": SEED, "scienceqa": SCIENCEQA, "ai2d": AI2D,
}  # fmt: skip
ALL = CHOICES | {"pope": POPE, "ocrbench": OCRBENCH}


def scores(folder, task, rows, answers):
    results = run(folder, task, rows, Script(answers))["results"][task]
    return {name[:-5]: score for name, score in results.items() if name.endswith(",none") and "_stderr" not in name}


@pytest.mark.parametrize("task", CHOICES)
def test_odd_answers_to_multiple_choice(task, tmp_path):
    model = Script(list(ODD))
    result = run(tmp_path, task, [CHOICES[task] | {"index": index} for index in range(len(ODD))], model)
    score = {sample["resps"][0][0]: sample["acc"] for sample in result["samples"][task]}
    assert score == ODD
    assert result["results"][task]["acc,none"] == pytest.approx(3 / 7)
    # The standard error of a share: sqrt(p (1 - p) / (n - 1)).
    assert result["results"][task]["acc_stderr,none"] == pytest.approx((3 / 7 * 4 / 7 / 6) ** 0.5)
    assert {sample["target"] for sample in result["samples"][task]} == {"B"}
    for request in model.asked:
        prompt, generation, image = request.args
        assert prompt.startswith("<image>") and prompt.count("<image>") == 1
        assert (generation["do_sample"], generation["temperature"], generation["until"]) == (False, 0.0, [])
        assert [(shown.mode, shown.size) for shown in image["visual"]] == [("RGB", (12, 12))]


@pytest.mark.parametrize(
    ("task", "change", "prompt"),
    [
        ("mmbench_en_dev", {"index": 0}, f"{QUESTION} There are several options:\n{LINES}\n\n{LETTER}"),
        (
            "mmbench_en_dev",
            {"index": 0, "hint": "It meows.", "C": "nan", "D": None},
            f"It meows. {QUESTION} There are several options:\nA. a dog\nB. a cat\n\n{LETTER}",
        ),
        ("mmstar", {}, f"{MMSTAR['question']}\n{LETTER[:-1]}"),
        ("scienceqa", {"hint": "It meows."}, f"Context: It meows.\n{QUESTION}\n{LINES}\n{LETTER}"),
        ("ai2d", {}, f"{QUESTION}\n{LINES}\n{LETTER}"),
        ("pope", {}, "Is there a cat in the image?\nAnswer the question using a single word or phrase."),
        ("ocrbench", {}, "what is written in the image?"),
    ],
)
def test_prompts(task, change, prompt, tmp_path):
    model = Script(["B"])
    run(tmp_path, task, [ALL[task] | change], model)
    assert model.asked[0].args[0] == f"<image>{prompt}"


def test_mmbench_counts_a_question_if_all_its_rotations_are_right(tmp_path):
    rows, answers = [], []

    def ask(index, right, answer, **options):
        rows.append(MMBENCH | {"index": index, "answer": right} | options)
        answers.append(answer)

    two = {"C": "nan", "D": "nan"}
    for rotation, letter in enumerate("BADC"):  # the first question: right in all four
        ask(241 + rotation * 1_000_000, letter, f"The answer is {letter}.")
    for rotation, letter in enumerate("BADC"):  # the second: wrong in one
        ask(252 + rotation * 1_000_000, letter, "A or D" if rotation == 2 else letter)
    ask(263, "B", "a cat", **two)  # the third has two options, right in both, once by its text
    ask(1_000_263, "A", "(a)", **two)
    ask(274, "C", "A red dog", **two)  # the fourth is wrong
    ask(1_000_999, "B", "B")  # a rotation without its first question: counts in acc alone
    result = scores(tmp_path, "mmbench_en_dev", rows, answers)
    assert result == pytest.approx({"acc_circular": 2 / 4, "acc": 10 / 12})


def test_mmstar_is_the_mean_of_its_categories(tmp_path):
    # Of three questions on counting one is right, of one on emotion one: (1/3 + 1) / 2, where 2 of 4 are right.
    rows = [MMSTAR | {"l2_category": category} for category in ["object counting"] * 3 + ["image emotion"]]
    result = scores(tmp_path, "mmstar", rows, ["B", "A", "A or B", "B. a cat"])
    assert result == pytest.approx({"acc_by_category": 2 / 3, "acc": 1 / 2})


def test_mmstar_finds_the_options_in_the_question(tmp_path):
    options = "Choices:\n(A) a dog\n(B) a cat\n(C) a red car\n(D) a horse"
    rows = [MMSTAR | {"question": f"{QUESTION}\n{options}"}] * 3
    assert scores(tmp_path, "mmstar", rows, ["a cat", "I see a cat", "a horse"])["acc"] == pytest.approx(2 / 3)


def test_seedbench_by_kind_of_image(tmp_path):
    rows = [SEED | {"question_image_type": kind} for kind in ["chart", "chart", "map", "web", "web", "web"]]
    result = scores(tmp_path, "seedbench_2_plus", rows, ["B", "C", "Both", "(B)", "B.", "I can't"])
    assert result == pytest.approx({"acc": 3 / 6, "acc_chart": 1 / 2, "acc_map": 0, "acc_web": 2 / 3})


def test_scienceqa_without_an_image_asks_in_text(tmp_path):
    model = Script(["B", "B"])
    result = run(tmp_path, "scienceqa", [SCIENCEQA, SCIENCEQA | {"image": None}], model)
    assert [request.args[0][:7] for request in model.asked] == ["<image>", QUESTION[:7]]
    assert [len(request.args[2]["visual"]) for request in model.asked] == [1, 0]
    assert result["results"]["scienceqa"]["acc,none"] == 1


def test_pope(tmp_path):
    said = {
        # (category, right answer): what the model says
        ("random", "yes"): ["Yes", "yes, there is a cat.", "No"],
        ("random", "no"): ["No.", "There is no cat.", "Yes."],
        ("popular", "yes"): ["Yes", "Sorry, I can't see it."],
        ("popular", "no"): ["No", ""],
        ("adversarial", "yes"): ["Yes and no", "Ja"],
        ("adversarial", "no"): ["YES", "**No**"],
    }
    rows = [POPE | {"category": c, "answer": a} for (c, a), answers in said.items() for _ in answers]
    result = scores(tmp_path, "pope", rows, [answer for answers in said.values() for answer in answers])
    assert result == pytest.approx(
        {
            # Found 2 of 3 objects, and one that is not there: 2/3 each, 3 of 6 answers are yes.
            "acc_random": 4 / 6, "precision_random": 2 / 3, "recall_random": 2 / 3, "f1_random": 2 / 3,
            "yes_ratio_random": 3 / 6,
            # The refusal finds nothing; the empty answer is wrong, but no yes. F1 = 2 * 1 * 1/2 / (3/2).
            "acc_popular": 2 / 4, "precision_popular": 1, "recall_popular": 1 / 2, "f1_popular": 2 / 3,
            "yes_ratio_popular": 1 / 4,
            # "Yes and no" and "Ja" are no answers; the one yes is wrong.
            "acc_adversarial": 1 / 4, "precision_adversarial": 0, "recall_adversarial": 0, "f1_adversarial": 0,
            "yes_ratio_adversarial": 1 / 4,
            # Over all: 3 right and 2 wrong yes, 7 objects. F1 = 2 * 3/5 * 3/7 / (3/5 + 3/7) = 1/2.
            "acc": 7 / 14, "precision": 3 / 5, "recall": 3 / 7, "f1": 1 / 2, "yes_ratio": 5 / 14,
        }
    )  # fmt: skip


def test_ocrbench(tmp_path):
    formula = {"question_type": "Handwritten Mathematical Expression Recognition", "dataset": "HME100k"}
    cases = [
        # question, answer, right
        ({}, "The word is center.", 1),  # one of two accepted texts, within the answer, in any case
        ({"question_type": "Irregular Text Recognition", "answer": ["two\nlines"]}, "Two lines", 1),
        ({"question_type": "Artistic Text Recognition"}, "", 0),
        ({"question_type": "Handwriting Recognition"}, "C E N T R E", 0),
        ({"question_type": "Digit String Recognition", "answer": ["1234"]}, "It says 12345.", 1),  # as in lmms-eval
        ({"question_type": "Non-Semantic Text Recognition", "answer": ["ｘ"]}, "x", 0),  # full width
        ({"question_type": "Scene Text-centric VQA"}, "Sorry, I can't read it.", 0),
        ({"question_type": "Doc-oriented VQA", "answer": ["$ 12"]}, "$ 12.00", 1),
        ({"question_type": "Key Information Extraction", "answer": ["12/05/2018"]}, "12/05/2018", 1),
        ({"question_type": "Key Information Extraction"}, "中心", 0),
        (formula | {"answer": ["x ^ { 2 } + Y"]}, "$x^{2}+Y$", 1),  # spaces mean nothing
        (formula | {"answer": ["x ^ { 2 } + Y"]}, "x^{2}+y", 0),  # case does
    ]
    rows, answers = [OCRBENCH | change for change, _, _ in cases], [answer for _, answer, _ in cases]
    assert scores(tmp_path, "ocrbench", rows, answers) == pytest.approx(
        {
            "text_recognition": 3, "scene_text_vqa": 0, "document_vqa": 1, "key_information": 1, "handwritten_math": 1,
            "total": 6, "acc": 6 / 12,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "row", "changes"),
    [
        ("mmbench_en_dev", {"question": "?", "answer": "B"}, "A, B, C, D, hint, index"),
        ("pope", NEITHER, "answer=maybe"),
    ],
)
def test_data_sets_that_changed_are_refused(task, row, changes, tmp_path):
    with pytest.raises(ValueError, match=f"missing columns or new values: {changes}."):
        run(tmp_path, task, [row], Script(["B"]))


def test_images_are_opened_in_the_formats_of_training_alone(tmp_path):
    picture().convert("RGB").save(file := io.BytesIO(), "EPS")
    row = POPE | {"image": {"bytes": file.getvalue(), "path": "cat.jpg"}}
    with pytest.raises(ValueError, match="cat.jpg: cannot identify image file; it is broken, or not one of PNG"):
        run(tmp_path, "pope", [row], Script(["B"]))
