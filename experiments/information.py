# SPDX-License-Identifier: Apache-2.0
"""Visual information in nats an answer: I = H(answer | wording) - cross-entropy of the answers.

H is the entropy of the true answers to each wording of a question, from their counts among the
questions. It is the least cross-entropy that can be had without the image. The cross-entropy is
measured with the right image. I is at most 0 without the image, and H if every answer is certain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from datasets import Dataset
from torch import nn
from transformers import LlavaProcessor, TrainerCallback

from normalign_llava import (
    DATA_FEATURES,
    Checks,
    ConversationCollator,
    Question,
    conversation,
    easy_vqa,
    load_image,
    prepare_rows,
)


PER_KIND = 100
KINDS = ("shape", "colour")
SCORED = 100
"""The offline suite has the first `SCORED` questions of a kind, so they are left out here."""

EVERY = 40
BATCH_SIZE = 25


def held_out_questions() -> list[Question]:
    """Returns 100 questions each of shape and colour about easy-VQA's test images.

    None is in the offline suite. Yes/no questions are left out: their taught answers describe the
    image, and few have the same wording.
    """
    test_questions = easy_vqa("test", seed=0)
    questions = []
    for kind in KINDS:
        same_kind = [question for question in test_questions if question.kind == kind]
        questions += same_kind[SCORED : SCORED + PER_KIND]
    return questions


def entropies(questions: Sequence[Question]) -> list[float]:
    """Returns -log p of each question's answer, in nats. Their mean is H(answer | wording).

    p is the share of the answer among the answers to questions with the same wording.
    """
    answers_by_wording: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        answers_by_wording[question.text][question.answer] += 1
    surprisals = []
    for question in questions:
        answer_counts = answers_by_wording[question.text]
        share = answer_counts[question.answer] / answer_counts.total()
        surprisals.append(-math.log(share))
    return surprisals


def other_images(questions: Sequence[Question]) -> list[Question]:
    """Returns each question with the image of the next one with another answer.

    The next one with the same wording is taken. If there is none, it is one of the same kind.
    """
    changed_questions = []
    for number, question in enumerate(questions):
        with_other_answer = []
        with_same_wording = []
        for candidate in [*questions[number + 1 :], *questions[:number]]:
            if candidate.kind != question.kind or candidate.answer == question.answer:
                continue
            with_other_answer.append(candidate)
            if candidate.text == question.text:
                with_same_wording.append(candidate)
        candidates = with_same_wording or with_other_answer
        changed_questions.append(question._replace(image=candidates[0].image))
    return changed_questions


class InformationCallback(TrainerCallback):
    """Logs `information` every `EVERY` steps, also by kind, and `wrong_image` at the last step.

    `wrong_image` is the cross-entropy with another question's image minus that with the right one.

    Args:
        questions: Held-out questions.
        before: The number of steps of earlier stages. They count.
        last: The last step of all stages.
    """

    def __init__(self, questions: Sequence[Question], before: int, last: int):
        self.questions = questions
        self.before = before
        self.last = last

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Measures, if it is a step to measure at."""
        step = self.before + state.global_step
        if step % EVERY:
            return
        questions = self.questions
        losses = cross_entropies(model, processing_class, questions)
        nats_by_kind: dict[str, list[float]] = defaultdict(list)
        all_nats = []
        for question, entropy, loss in zip(questions, entropies(questions), losses, strict=True):
            all_nats.append(entropy - loss)
            nats_by_kind[question.kind].append(entropy - loss)
        log_entry = {"step": state.global_step, "all_steps": step, "information": fmean(all_nats)}
        for kind in KINDS:
            log_entry[f"information/{kind}"] = fmean(nats_by_kind[kind])
        if step == self.last:
            wrong_losses = cross_entropies(model, processing_class, other_images(questions))
            log_entry["wrong_image"] = fmean(wrong_losses) - fmean(losses)
        state.log_history.append(log_entry)


@torch.no_grad()
def cross_entropies(
    model: nn.Module, processor: LlavaProcessor, questions: Sequence[Question]
) -> list[float]:
    """Returns the cross-entropy of each answer with its end of turn, in nats over all tokens.

    The answer's earlier tokens are given (teacher forcing).
    """
    conversations = []
    for question in questions:
        conversations.append(conversation([question], [load_image(question.image)]))
    dataset = Dataset.from_list(conversations, features=DATA_FEATURES)
    rows, _ = prepare_rows(dataset, Checks(processor), name="questions", split="eval")
    collator = ConversationCollator(processor)
    losses = []
    was_training = model.training
    model.eval()
    for start in range(0, len(rows), BATCH_SIZE):
        end = min(start + BATCH_SIZE, len(rows))
        batch = collator([rows[number] for number in range(start, end)])
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()
        token_losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        losses += token_losses.view(labels.shape).sum(-1).tolist()
    model.train(was_training)
    return losses
