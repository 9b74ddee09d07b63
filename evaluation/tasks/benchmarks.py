# SPDX-License-Identifier: Apache-2.0
"""The seven benchmarks with images: their rows, columns checked, prompts, answers and scores."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import fmean
from string import ascii_uppercase

import datasets
from datasets import Dataset
from PIL import Image

from normalign_llava.data.rows.images import decode_image
from normalign_llava.evaluation.answers import chosen_option, yes_or_no


ASK_FOR_LETTER = "Answer with the option's letter from the given choices directly."
ROTATION = 1_000_000  # A rotated question of MMBench has the first's index plus a multiple of it.
# MMStar: "Options: A: a dog, B: a cat" and "Choices:\n(A) a dog\n(B) a cat".
OPTION = re.compile(r"(?:^|[\s,])\(?([A-D])[:.)]\s*(.*?)(?=\s+\(?[A-D][:.)]|$)", re.DOTALL)

# OCRBench's five parts, of 300, 200, 200, 200 and 100 questions.
PART_OF_TYPE = {
    "regular text recognition": "text_recognition",
    "irregular text recognition": "text_recognition",
    "artistic text recognition": "text_recognition",
    "handwriting recognition": "text_recognition",
    "digit string recognition": "text_recognition",
    "non-semantic text recognition": "text_recognition",
    "scene text-centric vqa": "scene_text_vqa",
    "doc-oriented vqa": "document_vqa",
    "key information extraction": "key_information",
    "handwritten mathematical expression recognition": "handwritten_math",
}


def checked(*columns: str, **values: Collection[str]) -> Callable[[Dataset], Dataset]:
    """Returns a function that checks a split, and makes it open its images as training does.

    That function raises ValueError if columns are missing or have new values.

    Args:
        columns: Columns that a split must have.
        values: By name of a column that it must have, the values that may be in it, in lower case.
    """

    def documents(split: Dataset) -> Dataset:
        changes = {"image", *columns, *values} - set(split.column_names)
        for column in values.keys() - changes:
            for value in map(str, split.unique(column)):
                if value.strip().lower() not in values[column]:
                    changes.add(f"{column}={value}")
        if changes:
            raise ValueError(
                "The data set changed: missing columns or new values: "
                f"{', '.join(sorted(changes))}."
            )
        # `datasets` would let Pillow open any format.
        undecoded = split.cast_column("image", datasets.Image(decode=False))
        return undecoded.with_transform(_decoded, columns=["image"], output_all_columns=True)

    return documents


def _decoded(batch: dict[str, list]) -> dict[str, list]:
    return {"image": [image and decode_image(image) for image in batch["image"]]}


mmbench = checked("index", "question", "hint", "answer", *"ABCD")
mmstar = checked("question", "answer", "l2_category")
seedbench = checked(
    "question",
    "answer",
    "choice_A",
    "choice_B",
    "choice_C",
    "choice_D",
    question_image_type=("chart", "map", "web"),
)
scienceqa = checked("question", "choices", "answer", "hint")
ai2d = checked("question", "options", "answer")
pope = checked("question", category=("random", "popular", "adversarial"), answer=("yes", "no"))
ocrbench = checked("question", "answer", "dataset", question_type=PART_OF_TYPE)


def image(document: dict) -> list[Image.Image]:
    """Returns the image of a question in RGB, or none: ScienceQA has questions without one."""
    return [document["image"].convert("RGB")] if document["image"] else []


def text(document: dict) -> str:
    """Returns the prompt of SEED-Bench-2-Plus, AI2D and ScienceQA. Some lack image or hint."""
    image_marker = "<image>" if document["image"] else ""
    context = ""
    if document.get("hint"):
        context = f"Context: {document['hint']}\n"
    return f"{image_marker}{context}{document['question']}\n{_listed(document)}\n{ASK_FOR_LETTER}"


def mmbench_text(document: dict) -> str:
    """Returns the prompt of MMBench. Its questions without a hint have "nan" there, or nothing."""
    hint_before = ""
    if document["hint"] not in (None, "", "nan"):
        hint_before = f"{document['hint']} "
    question = f"{hint_before}{document['question']} There are several options:"
    return f"<image>{question}\n{_listed(document)}\n\n{ASK_FOR_LETTER}"


def target(document: dict) -> str:
    """Returns the letter of the right option. ScienceQA and AI2D have its number, from 0."""
    answer = str(document["answer"]).strip().upper()
    return ascii_uppercase[int(answer)] if answer.isdigit() else answer


def results(document: dict, answers: list[str]) -> dict:
    """Returns what the metrics take: `acc` is 1 if the answer names the right option, else 0."""
    right = float(chosen_option(answers[0], _options(document)) == target(document))
    if "l2_category" in document:  # MMStar
        return {"acc_by_category": (document["l2_category"], right), "acc": right}
    if "A" in document:  # MMBench
        return {"acc_circular": (int(document["index"]), right), "acc": right}
    if "question_image_type" in document:  # SEED-Bench-2-Plus
        image_type = document["question_image_type"].strip().lower()
        return {"acc": right, f"acc_{image_type}": right}
    return {"acc": right}


def whole_questions(rows: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Returns for each question of MMBench 1 if it is right in all rotations, else 0.

    Args:
        rows: Index and score of each rotation. Rotations without their first do not count.

    Returns:
        The scores by index of the first rotation.
    """
    rotations = defaultdict(list)
    for index, right in rows:
        rotations[index % ROTATION].append(right)
    return {index: float(all(rotations[index])) for index, _ in rows if index < ROTATION}


def circular(rows: list[tuple[int, float]]) -> float:
    """Returns the share of the questions of MMBench that are right in every rotation."""
    return fmean(whole_questions(rows).values())


def by_category(rows: Sequence[tuple[str, float]]) -> list[float]:
    """Returns the scores of rows (category, score), weighted so that categories count alike.

    Their mean is the mean over the categories.
    """
    category_sizes = Counter(category for category, _ in rows)
    return [
        right * len(rows) / (len(category_sizes) * category_sizes[category])
        for category, right in rows
    ]


def mean_of_categories(rows: list[tuple[str, float]]) -> float:
    """Returns the mean over the 18 fine categories of MMStar of the share of right answers."""
    return fmean(by_category(rows))


def _listed(document: dict) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in _options(document).items())


def _options(document: dict) -> dict[str, str]:
    """Returns the texts of the options, by letter."""
    listed_options = document.get("options") or document.get("choices")
    if listed_options:
        return dict(zip(ascii_uppercase, listed_options, strict=False))
    options = {}
    for letter in "ABCD":
        option_text = document.get(f"choice_{letter}", document.get(letter))
        # Questions of MMBench with fewer options have "nan" or nothing there.
        if option_text not in (None, "", "nan"):
            options[letter] = option_text
    if not options:
        # Questions of MMStar list them at their end. An option that is not listed has no text.
        options = dict.fromkeys("ABCD", "")
        after_title = re.split(r"\b(?:Options|Choices):", document["question"])[-1]
        for letter, option_text in OPTION.findall(after_title.strip()):
            options[letter] = option_text.strip()
    return options


def pope_results(document: dict, answers: list[str]) -> dict:
    """Returns scores for the metrics of all questions and of the row's setting.

    An answer with neither yes nor no counts as no object.
    """
    answer = yes_or_no(answers[0])
    true_answer = document["answer"].strip().lower()
    says_yes = answer == "yes"
    is_there = true_answer == "yes"
    scores = {"acc": float(answer == true_answer), "precision": (says_yes, is_there)}
    if is_there:
        scores["recall"] = float(says_yes)
    scores["f1"] = (says_yes, is_there)
    scores["yes_ratio"] = float(says_yes)
    setting = document["category"].strip().lower()
    return scores | {f"{metric_name}_{setting}": score for metric_name, score in scores.items()}


def precision(pairs: list[tuple[bool, bool]]) -> float:
    """Returns the share of true ones among the answers "yes", or 0 without any.

    A pair says whether the answer is "yes", and whether that is true.
    """
    true_ones = [is_there for says_yes, is_there in pairs if says_yes]
    if not true_ones:
        return 0.0
    return sum(true_ones) / len(true_ones)


def f1(pairs: list[tuple[bool, bool]]) -> float:
    """Returns the harmonic mean of precision and recall, or 0 if both are 0."""
    true_positives = sum(says_yes and is_there for says_yes, is_there in pairs)
    if not true_positives:
        return 0.0
    # Answers "yes" and objects that are there.
    positives = sum(map(sum, pairs))
    return 2 * true_positives / positives


def ocrbench_results(document: dict, answers: list[str]) -> dict:
    """Returns 1 if the answer contains an accepted one, else 0: for all questions and the part."""
    accepted = document["answer"]
    if isinstance(accepted, str):
        accepted = [accepted]
    is_latex = document["dataset"] == "HME100k"
    answer = _normalized(answers[0], is_latex)
    right = float(any(_normalized(truth, is_latex) in answer for truth in accepted))
    part = PART_OF_TYPE[document["question_type"].strip().lower()]
    return {"total": right, part: right, "acc": right}


def _normalized(text: str, is_latex: bool) -> str:
    """Returns a text for comparison. In LaTeX spaces mean nothing, but case does."""
    stripped = text.strip()
    if is_latex:
        return stripped.replace("\n", "").replace(" ", "")
    return stripped.lower().replace("\n", " ")


points = sum  # OCRBench counts right answers: its total is out of 1000
