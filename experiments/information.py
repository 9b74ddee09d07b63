# SPDX-License-Identifier: Apache-2.0
"""Visual information in nats an answer: I = H(answer | wording) - cross-entropy of the answers.

H is the entropy of the true answers to each wording of a question, from their counts among the
questions: the least cross-entropy that can be had without the image. The cross-entropy is that with
the right image. So I is at most 0 without the image, and H if every answer is certain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from datasets import Dataset
from torch import nn
from transformers import LlavaProcessor, TrainerCallback

from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.fetched.easy_vqa import (
    DATA_FEATURES,
    Question,
    conversation,
    easy_vqa,
    load_image,
)
from normalign_llava.train.collator import ConversationCollator


PER_KIND = 100
KINDS = ("shape", "colour")
SCORED = 100
"""Questions of a kind; the first `SCORED` of a kind are the offline suite's, and left out."""

EVERY = 40
BATCH_SIZE = 25


def held_out_questions() -> list[Question]:
    """100 questions each of shape and colour about easy-VQA's test images; none is of the suite.

    Yes/no questions are left out: their taught answers describe the image, and few have the same
    wording.
    """
    questions = easy_vqa("test", seed=0)
    of_kind = [[each for each in questions if each.kind == kind] for kind in KINDS]
    return [each for asked in of_kind for each in asked[SCORED : SCORED + PER_KIND]]


def entropies(questions: Sequence[Question]) -> list[float]:
    """For each question -log p of its answer, in nats, by the answers to questions so worded.

    Their mean is H(answer | wording).
    """
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for each in questions:
        answers[each.text][each.answer] += 1
    shares = [answers[each.text][each.answer] / answers[each.text].total() for each in questions]
    return [-math.log(share) for share in shares]


def other_images(questions: Sequence[Question]) -> list[Question]:
    """The questions, each with the image of the next question so worded that has another answer."""
    changed = []
    for number, each in enumerate(questions):
        following = [*questions[number + 1 :], *questions[:number]]
        other = [q for q in following if q.kind == each.kind and q.answer != each.answer]
        same = [q for q in other if q.text == each.text]
        changed.append(each._replace(image=(same or other)[0].image))
    return changed


class InformationCallback(TrainerCallback):
    """Logs `information` every `EVERY` steps, also by kind, and `wrong_image` at the last step.

    `wrong_image` is the cross-entropy with another question's image minus that with the right one.

    Args:
        questions: Held-out questions.
        before: Steps of earlier stages, which count.
        last: The last step of all stages.
    """

    def __init__(self, questions: Sequence[Question], before: int, last: int):
        self.questions = questions
        self.before = before
        self.last = last

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Measures, at a step of its own."""
        step = self.before + state.global_step
        if step % EVERY:
            return
        questions = self.questions
        right = cross_entropies(model, processing_class, questions)
        known = [entropy - loss for entropy, loss in zip(entropies(questions), right, strict=True)]
        entry = {"step": state.global_step, "all_steps": step, "information": fmean(known)}
        for kind in KINDS:
            pairs = zip(known, questions, strict=True)
            entry[f"information/{kind}"] = fmean(nats for nats, each in pairs if each.kind == kind)
        if step == self.last:
            wrong = cross_entropies(model, processing_class, other_images(questions))
            entry["wrong_image"] = fmean(wrong) - fmean(right)
        state.log_history.append(entry)


@torch.no_grad()
def cross_entropies(
    model: nn.Module, processor: LlavaProcessor, questions: Sequence[Question]
) -> list[float]:
    """Cross-entropy of each answer and its end of turn, in nats over all tokens, teacher-forced."""
    conversations = [conversation([each], [load_image(each.image)]) for each in questions]
    rows = Dataset.from_list(conversations, features=DATA_FEATURES)
    rows, _ = prepare_rows(rows, Checks(processor), name="questions", split="eval")
    collator = ConversationCollator(processor)
    losses = []
    training = model.training
    model.eval()
    for start in range(0, len(rows), BATCH_SIZE):
        end = min(start + BATCH_SIZE, len(rows))
        batch = collator([rows[number] for number in range(start, end)])
        batch = {name: value.to(model.device) for name, value in batch.items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses += loss.view(labels.shape).sum(-1).tolist()
    model.train(training)
    return losses
