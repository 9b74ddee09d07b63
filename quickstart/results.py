# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Writes the quickstart's evaluation into the checkpoint's `evaluation/`."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..data.easy_vqa import EMOJI_QUESTION, KINDS, OVERALL, SYSTEM
from ..evaluate.results import Evaluation, Metric
from .display import versions
from .evaluate import BATCH_SIZE, BLANK, MAX_NEW_TOKENS


EMOJI = "emoji"
PACKAGES = ("python", "torch", "transformers")


def write_evaluations(
    checkpoint: Path,
    after: dict[str, Any],
    before: dict[str, Any],
    baseline: dict[str, Any] | None,
    *,
    total: int,
    seed: int,
    bf16: bool,
    asked: float,
) -> None:
    """Writes `evaluation/easy-vqa.json` and `evaluation/emoji.json` into a checkpoint.

    Args:
        checkpoint: Folder of the trained model.
        after, before, baseline: Results of [`evaluate`] of the trained model, of the untrained one, and of the one
            trained without the norm, if there is one.
        total: Questions in easy-VQA's test split, from which those asked were drawn.
        seed: Seed of that draw.
        bf16: Whether the models multiplied in bfloat16.
        asked: When the trained model was evaluated, in seconds since the epoch.
    """
    references = {
        "blank image": after["blank"],
        "commonest answer": after["majority"],
        "before training": before["accuracy"],
        **({"trained without the norm": baseline["accuracy"]} if baseline else {}),
    }

    def metric(kind: str, subset: str | None = None) -> Metric:
        value, count = after["accuracy"][kind], after["count"][kind]
        given = {name: accuracy[kind] for name, accuracy in references.items()}
        error = (value * (1 - value) / count) ** 0.5 or None  # at 0 and 1 the formula does not apply
        return Metric("accuracy", value, error, references=given, subset=subset, samples=count)

    about: dict[str, Any] = {
        "date": datetime.fromtimestamp(asked, timezone.utc).date().isoformat(),
        "versions": {name: str(version) for name, version in versions().items() if name in PACKAGES},
    }
    decoding = f"Answers are decoded greedily, at most {MAX_NEW_TOKENS} tokens, in batches of {BATCH_SIZE}"
    precision = f"{decoding}, with float32 weights" + (" and products in bfloat16." if bf16 else ".")
    prompt = f'The system prompt is "{SYSTEM}"; the user\'s turn is the image, then the question.'
    blank = f"Blank image: the trained model is shown a white square of {BLANK.width} pixels in place of each image."
    commonest = "Commonest answer: the share of questions, of each kind, that have the commonest true answer."
    untrained = "Before training: the untrained model's answers to the first {} of these questions{}."
    per_kind = after["count"][KINDS[0]]
    Evaluation(
        task="easy-vqa",
        title="easy-VQA, held-out images",
        metrics=[metric(OVERALL), *(metric(kind, kind) for kind in KINDS)],
        samples=after["count"][OVERALL],
        total=total,
        protocol=[
            f"Of the {total:,} questions of easy-VQA's test split, {per_kind} of each kind (shape, colour, yes/no) "
            f"are asked, drawn by seed {seed}; none of its images is among those trained on.",
            "Yes/no questions come in pairs of the same wording, one whose answer is yes and one whose answer is no.",
            "Wordings and answers are those of the training questions.",
            prompt,
            precision,
            "Letter case aside, an answer is right if what follows its last comma is the true answer; yes/no answers "
            'are trained with what is seen and what is asked for before it, as in "red circle, not blue, no".',
            blank,
            commonest,
            untrained.format(before["count"][KINDS[0]], " of each kind"),
        ],
        **about,
    ).write(checkpoint)
    count = after["count"][EMOJI]
    Evaluation(
        task=EMOJI,
        title="Emoji drawn by another vendor",
        metrics=[metric(EMOJI)],
        samples=count,
        total=count,
        protocol=[
            f'Of {count} emoji the drawings of Google are trained on, and "{EMOJI_QUESTION}" is asked of the drawings '
            "of Microsoft (Fluent, 3D), which are not.",
            prompt,
            precision,
            "Letter case aside, an answer is right if it is the emoji's name, one word, or ends in it after a comma.",
            blank,
            commonest,
            untrained.format(before["count"][EMOJI], ""),
        ],
        **about,
    ).write(checkpoint)
