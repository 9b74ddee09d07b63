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
    """A function that checks a split's columns, and opens its images as those of training data."""

    def documents(split: Dataset) -> Dataset:
        changes = {"image", *columns, *values} - set(split.column_names)
        for column in values.keys() - changes:
            for value in map(str, split.unique(column)):
                if value.strip().lower() not in values[column]:
                    changes.add(f"{column}={value}")
        if changes:
            named = ", ".join(sorted(changes))
            raise ValueError(f"The data set changed: missing columns or new values: {named}.")
        # `datasets` would let Pillow open any format.
        undecoded = split.cast_column("image", datasets.Image(decode=False))
        return undecoded.with_transform(decoded, columns=["image"], output_all_columns=True)

    def decoded(batch: dict[str, list]) -> dict[str, list]:
        return {"image": [image and decode_image(image) for image in batch["image"]]}

    return documents


mmbench = checked("index", "question", "hint", "answer", *"ABCD")
mmstar = checked("question", "answer", "l2_category")
CHOICES = [f"choice_{letter}" for letter in "ABCD"]
seedbench = checked("question", "answer", *CHOICES, question_image_type=("chart", "map", "web"))
scienceqa = checked("question", "choices", "answer", "hint")
ai2d = checked("question", "options", "answer")
pope = checked("question", category=("random", "popular", "adversarial"), answer=("yes", "no"))
ocrbench = checked("question", "answer", "dataset", question_type=PART_OF_TYPE)


def image(document: dict) -> list[Image.Image]:
    """The image of a question in RGB, or none: ScienceQA has questions without one."""
    return [document["image"].convert("RGB")] if document["image"] else []


def text(document: dict) -> str:
    """The prompt of SEED-Bench-2-Plus, AI2D and ScienceQA, where image and hint may be absent."""
    image = "<image>" if document["image"] else ""
    hint = f"Context: {document['hint']}\n" if document.get("hint") else ""
    return f"{image}{hint}{document['question']}\n{_listed(document)}\n{ASK_FOR_LETTER}"


def mmbench_text(document: dict) -> str:
    """The prompt of MMBench, which writes "nan" for no hint."""
    hint = "" if document["hint"] in (None, "", "nan") else f"{document['hint']} "
    question = f"{hint}{document['question']} There are several options:"
    return f"<image>{question}\n{_listed(document)}\n\n{ASK_FOR_LETTER}"


def target(document: dict) -> str:
    """The letter of the right option, which ScienceQA and AI2D have as a number from 0."""
    answer = str(document["answer"]).strip().upper()
    return ascii_uppercase[int(answer)] if answer.isdigit() else answer


def results(document: dict, answers: list[str]) -> dict:
    """`acc`, 1 if the answer names the right option, else 0; and what the other metrics take."""
    right = float(chosen_option(answers[0], _options(document)) == target(document))
    if "l2_category" in document:  # MMStar
        return {"acc_by_category": (document["l2_category"], right), "acc": right}
    if "A" in document:  # MMBench
        return {"acc_circular": (int(document["index"]), right), "acc": right}
    if "question_image_type" in document:  # SEED-Bench-2-Plus
        return {"acc": right, f"acc_{document['question_image_type'].strip().lower()}": right}
    return {"acc": right}


def whole_questions(rows: Sequence[tuple[int, float]]) -> dict[int, float]:
    """By index, 1 if right in all rotations, else 0. Rotations without their first do not count."""
    rotations = defaultdict(list)
    for index, right in rows:
        rotations[index % ROTATION].append(right)
    return {index: float(all(rotations[index])) for index, _ in rows if index < ROTATION}


def circular(rows: list[tuple[int, float]]) -> float:
    """Share of the questions of MMBench that are answered rightly in every rotation."""
    return fmean(whole_questions(rows).values())


def by_category(rows: Sequence[tuple[str, float]]) -> list[float]:
    """The scores of rows (category, score), weighted so that categories count alike in the mean."""
    sizes = Counter(category for category, _ in rows)
    return [right * len(rows) / (len(sizes) * sizes[category]) for category, right in rows]


def mean_of_categories(rows: list[tuple[str, float]]) -> float:
    """Mean over the 18 fine categories of MMStar of the share of right answers."""
    return fmean(by_category(rows))


def _listed(document: dict) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in _options(document).items())


def _options(document: dict) -> dict[str, str]:
    """Options by letter: of a list, of columns A to D or choice_A to choice_D, or of the text."""
    if texts := document.get("options") or document.get("choices"):
        return dict(zip(ascii_uppercase, texts, strict=False))
    lettered = {letter: document.get(f"choice_{letter}", document.get(letter)) for letter in "ABCD"}
    # Questions of MMBench with fewer options have "nan" or nothing there.
    if options := {key: text for key, text in lettered.items() if text not in (None, "", "nan")}:
        return options
    listed = OPTION.findall(re.split(r"\b(?:Options|Choices):", document["question"])[-1].strip())
    return dict.fromkeys("ABCD", "") | {letter: text.strip() for letter, text in listed}


def pope_results(document: dict, answers: list[str]) -> dict:
    """Scores for all questions, and for the setting's. Neither yes nor no counts as no object."""
    word, truth = yes_or_no(answers[0]), document["answer"].strip().lower()
    says_yes, is_there = word == "yes", truth == "yes"
    scores = {"acc": float(word == truth), "precision": (says_yes, is_there)}
    scores |= {"recall": float(says_yes)} if is_there else {}
    scores |= {"f1": (says_yes, is_there), "yes_ratio": float(says_yes)}
    setting = document["category"].strip().lower()
    return scores | {f"{name}_{setting}": score for name, score in scores.items()}


def precision(pairs: list[tuple[bool, bool]]) -> float:
    """Share of true ones among the answers "yes", from pairs of said and true; 0 without any."""
    of_yes = [is_there for says_yes, is_there in pairs if says_yes]
    return sum(of_yes) / len(of_yes) if of_yes else 0.0


def f1(pairs: list[tuple[bool, bool]]) -> float:
    """Harmonic mean of precision and recall; 0 if both are 0."""
    right = sum(says_yes and is_there for says_yes, is_there in pairs)
    return 2 * right / sum(map(sum, pairs)) if right else 0.0


def ocrbench_results(document: dict, answers: list[str]) -> dict:
    """1 if the answer contains an accepted one, else 0: for all, the row's part, and the mean."""
    accepted = document["answer"]
    texts = [answers[0], *([accepted] if isinstance(accepted, str) else accepted)]
    if document["dataset"] == "HME100k":  # LaTeX: spaces mean nothing, case does
        answer, *accepted = [text.strip().replace("\n", "").replace(" ", "") for text in texts]
    else:
        answer, *accepted = [text.lower().strip().replace("\n", " ") for text in texts]
    right = float(any(text in answer for text in accepted))
    part = PART_OF_TYPE[document["question_type"].strip().lower()]
    return {"total": right, part: right, "acc": right}


points = sum  # OCRBench counts right answers: its total is out of 1000
