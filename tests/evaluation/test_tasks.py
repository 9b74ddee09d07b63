"""Each benchmark's task file, run by the harness on a few rows of its columns, scored by hand.

The model is a script of odd answers, since it is the task that is tested and not a model.
"""

import io

import pytest
from scripted_tasks import Script, picture, run


# Answers to a question with four options, of which B is right, and the scores.
ODD = {"(B)": 1, "It is B": 1, "A cat sits there.": 1, "": 0, "A or B": 0, "A dog.": 0, "E": 0}
TEXTS = ["a dog", "a cat", "a red car", "a horse"]
OPTIONS = dict(zip("ABCD", TEXTS, strict=True))
LINES = "A. a dog\nB. a cat\nC. a red car\nD. a horse"
LETTER = "Answer with the option's letter from the given choices directly."
QUESTION = "What is in the picture?"

MMBENCH = {"question": QUESTION, "hint": "nan", "answer": "B", **OPTIONS, "category": "x"}
LISTED = f"{QUESTION}\nOptions: A: a dog, B: a cat, C: a red car, D: a horse"
MMSTAR = {"question": LISTED, "answer": "B", "category": "perception", "l2_category": "recognition"}
SEED = {"question": QUESTION, "answer": "B", "question_image_type": "chart"}
SEED |= {f"choice_{letter}": text for letter, text in OPTIONS.items()}
SCIENCEQA = {"question": QUESTION, "choices": TEXTS, "answer": 1, "hint": ""}
AI2D = {"question": QUESTION, "options": TEXTS, "answer": "1"}
POPE = {"question": "Is there a cat in the image?", "answer": "yes", "category": "random"}
OCRBENCH = {"question": "what is written in the image?", "answer": ["CENTRE", "CENTER"]}
OCRBENCH |= {"question_type": "Regular Text Recognition", "dataset": "IIIT5K"}
CHOICES = {"mmbench_en_dev": MMBENCH, "mmstar": MMSTAR, "seedbench_2_plus": SEED}
CHOICES |= {"scienceqa": SCIENCEQA, "ai2d": AI2D}
ALL = CHOICES | {"pope": POPE, "ocrbench": OCRBENCH}


def scores(folder, task, rows, answers):
    raw = run(folder, task, rows, Script(answers))["results"][task].items()
    return {key[:-5]: score for key, score in raw if key.endswith(",none") and "_std" not in key}


@pytest.mark.parametrize("task", CHOICES)
def test_odd_answers_to_multiple_choice(task, tmp_path):
    model = Script(list(ODD))
    rows = [CHOICES[task] | {"index": index} for index in range(len(ODD))]
    result = run(tmp_path, task, rows, model)
    score = {sample["resps"][0][0]: sample["acc"] for sample in result["samples"][task]}
    assert score == ODD
    assert result["results"][task]["acc,none"] == pytest.approx(3 / 7)
    assert {sample["target"] for sample in result["samples"][task]} == {"B"}
    for request in model.asked:
        prompt, options, image = request.args
        assert prompt.startswith("<image>") and prompt.count("<image>") == 1
        assert (options["do_sample"], options["temperature"], options["until"]) == (False, 0.0, [])
        assert [(shown.mode, shown.size) for shown in image["visual"]] == [("RGB", (12, 12))]


SEVERAL = "There are several options:"
TWO = {"hint": "It meows.", "C": "nan", "D": None}


@pytest.mark.parametrize(
    ("task", "change", "prompt"),
    [
        ("mmbench_en_dev", {}, f"{QUESTION} {SEVERAL}\n{LINES}\n\n{LETTER}"),
        ("mmbench_en_dev", TWO, f"It meows. {QUESTION} {SEVERAL}\nA. a dog\nB. a cat\n\n{LETTER}"),
        ("mmstar", {"question": f"{LISTED} Please answer yes or no."}, f"{LISTED}\n{LETTER[:-1]}"),
        ("scienceqa", {"hint": "It meows."}, f"Context: It meows.\n{QUESTION}\n{LINES}\n{LETTER}"),
        ("ai2d", {}, f"{QUESTION}\n{LINES}\n{LETTER}"),
        ("pope", {"question": "?"}, "?\nAnswer the question using a single word or phrase."),
        ("ocrbench", {}, "what is written in the image?"),
    ],
)
def test_prompts(task, change, prompt, tmp_path):
    model = Script(["B"])
    run(tmp_path, task, [{"index": 0} | ALL[task] | change], model)
    assert model.asked[0].args[0] == f"<image>{prompt}"


def test_mmbench_counts_a_question_if_all_its_rotations_are_right(tmp_path):
    rows = []
    answers = []

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
    # Of three questions on counting one is right, of one on emotion one: (1/3 + 1) / 2.
    kinds = ["object counting"] * 3 + ["image emotion"]
    rows = [MMSTAR | {"l2_category": kind} for kind in kinds]
    result = scores(tmp_path, "mmstar", rows, ["B", "A", "A or B", "B. a cat"])
    assert result == pytest.approx({"acc_by_category": 2 / 3, "acc": 1 / 2})


def test_mmstar_finds_the_options_in_the_question(tmp_path):
    options = "Choices:\n(A) a dog\n(B) a cat\n(C) a red car\n(D) a horse"
    rows = [MMSTAR | {"question": f"{QUESTION}\n{options}"}] * 3
    result = scores(tmp_path, "mmstar", rows, ["a cat", "I see a cat", "a horse"])
    assert result["acc"] == pytest.approx(2 / 3)


def test_seedbench_by_kind_of_image(tmp_path):
    kinds = ["chart", "chart", "map", "web", "web", "web"]
    rows = [SEED | {"question_image_type": kind} for kind in kinds]
    result = scores(tmp_path, "seedbench_2_plus", rows, ["B", "C", "Both", "(B)", "B.", "I can't"])
    expected = {"acc": 3 / 6, "acc_chart": 1 / 2, "acc_map": 0, "acc_web": 2 / 3}
    assert result == pytest.approx(expected)


def test_scienceqa_without_an_image_asks_in_text(tmp_path):
    model = Script(["B", "B"])
    result = run(tmp_path, "scienceqa", [SCIENCEQA, SCIENCEQA | {"image": None}], model)
    assert [request.args[0][:7] for request in model.asked] == ["<image>", QUESTION[:7]]
    assert [len(request.args[2]["visual"]) for request in model.asked] == [1, 0]
    assert result["results"]["scienceqa"]["acc,none"] == 1


def test_pope(tmp_path):
    said = [
        # category, right answer, what the model says
        ("random", "yes", ["Yes", "yes, there is a cat.", "No"]),
        ("random", "no", ["No.", "There is no cat.", "Yes."]),
        ("popular", "yes", ["Yes", "Sorry, I can't see it."]),
        ("popular", "no", ["No", ""]),
        ("adversarial", "yes", ["Yes and no", "Ja"]),
        ("adversarial", "no", ["YES", "**No**"]),
    ]
    asked = [(kind, right, answer) for kind, right, answers in said for answer in answers]
    rows = [POPE | {"category": kind, "answer": right} for kind, right, _ in asked]
    result = scores(tmp_path, "pope", rows, [answer for _, _, answer in asked])
    names = ("acc", "precision", "recall", "f1", "yes_ratio")
    expected = {
        # Found 2 of 3 objects, and one that is not there: 2/3 each, 3 of 6 answers are yes.
        "_random": (4 / 6, 2 / 3, 2 / 3, 2 / 3, 3 / 6),
        # The refusal finds nothing; the empty answer is wrong, but no yes. F1 = 2 * 1/2 / (3/2).
        "_popular": (2 / 4, 1, 1 / 2, 2 / 3, 1 / 4),
        # "Yes and no" and "Ja" are no answers; the one yes is wrong.
        "_adversarial": (1 / 4, 0, 0, 0, 1 / 4),
        # Over all: 3 right and 2 wrong yes, 7 objects. F1 = 2 * 3/5 * 3/7 / (3/5 + 3/7) = 1/2.
        "": (7 / 14, 3 / 5, 3 / 7, 1 / 2, 5 / 14),
    }
    assert len(result) == 20
    for setting, values in expected.items():
        assert [result[f"{name}{setting}"] for name in names] == pytest.approx(values), setting


def test_ocrbench(tmp_path):
    formula = "Handwritten Mathematical Expression Recognition"
    centre = ["CENTRE", "CENTER"]
    cases = [
        # kind of question, accepted answers, answer; right are six
        ("Regular Text Recognition", centre, "The word is center."),  # within it, in any case
        ("Irregular Text Recognition", ["two\nlines"], "Two lines"),
        ("Artistic Text Recognition", centre, ""),  # wrong
        ("Handwriting Recognition", centre, "C E N T R E"),  # wrong
        ("Digit String Recognition", ["1234"], "It says 12345."),  # right, as in lmms-eval
        ("Non-Semantic Text Recognition", ["ｘ"], "x"),  # wrong: full width
        ("Scene Text-centric VQA", centre, "Sorry, I can't read it."),  # wrong
        ("Doc-oriented VQA", ["$ 12"], "$ 12.00"),
        ("Key Information Extraction", ["12/05/2018"], "12/05/2018"),
        ("Key Information Extraction", centre, "中心"),  # wrong
        (formula, ["x ^ { 2 } + Y"], "$x^{2}+Y$"),  # spaces mean nothing
        (formula, ["x ^ { 2 } + Y"], "x^{2}+y"),  # wrong: case does
    ]
    rows = [OCRBENCH | {"question_type": kind, "answer": right} for kind, right, _ in cases]
    for row in rows[-2:]:
        row["dataset"] = "HME100k"
    result = scores(tmp_path, "ocrbench", rows, [answer for _, _, answer in cases])
    expected = {"text_recognition": 3, "scene_text_vqa": 0, "document_vqa": 1, "key_information": 1}
    expected |= {"handwritten_math": 1, "total": 6, "acc": 6 / 12}
    assert result == pytest.approx(expected)


def test_data_sets_that_changed_are_refused(tmp_path):
    with pytest.raises(ValueError, match="missing columns or new values: A, B, C, D, hint, index."):
        run(tmp_path, "mmbench_en_dev", [{"question": "?", "answer": "B"}], Script(["B"]))
    with pytest.raises(ValueError, match="missing columns or new values: answer=maybe."):
        run(tmp_path, "pope", [POPE | {"answer": "maybe"}], Script(["B"]))


def test_images_are_opened_in_the_formats_of_training_alone(tmp_path):
    picture().convert("RGB").save(file := io.BytesIO(), "EPS")
    row = POPE | {"image": {"bytes": file.getvalue(), "path": "cat.jpg"}}
    with pytest.raises(ValueError, match="cat.jpg: cannot identify image file; it is broken, or "):
        run(tmp_path, "pope", [row], Script(["B"]))
