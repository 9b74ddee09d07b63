"""Visual information, against a computation by hand on a tiny model."""

import math
from collections import Counter
from pathlib import Path

import information
import pytest
import torch
from information import (
    EVERY,
    InformationCallback,
    cross_entropies,
    entropies,
    held_out_questions,
    other_images,
)
from transformers import AutoProcessor, TrainerControl, TrainerState

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.fetched.easy_vqa import Question, held_out, load_image, prompt


def test_entropy_is_that_of_the_answers_to_each_wording():
    asked = [("shape?", "circle"), ("shape?", "circle"), ("shape?", "square"), ("hue?", "red")]
    questions = [Question("shape", text, answer, None, answer) for text, answer in asked]
    by_hand = [math.log(3 / 2), math.log(3 / 2), math.log(3), 0]
    assert entropies(questions) == pytest.approx(by_hand)


ASKED = [
    ("shape", "shape?", "circle", "a"),
    ("shape", "what shape?", "square", "b"),
    ("colour", "hue?", "red", "c"),
    ("shape", "shape?", "circle", "d"),
    ("shape", "shape?", "square", "e"),
    ("colour", "colour?", "blue", "f"),
]
QUESTIONS = [
    Question(kind, text, answer, Path(image), answer) for kind, text, answer, image in ASKED
]


def test_another_image_is_one_of_another_answer_to_the_same_wording():
    """The next one, from the beginning after the last; of other words where there is no such."""
    changed = other_images(QUESTIONS)
    assert [str(each.image) for each in changed] == ["e", "d", "f", "e", "a", "c"]
    assert [each._replace(image=None) for each in changed] == [
        each._replace(image=None) for each in QUESTIONS
    ]


def test_questions_of_the_suite_are_left_out(archives):
    questions = held_out_questions()
    assert Counter(each.kind for each in questions) == {"shape": 100, "colour": 100}
    assert not {*questions} & {*held_out(100)}


def test_information_is_logged_at_every_fortieth_step_of_both_stages(monkeypatch):
    losses = [0.5, 0.25, 0.125, 1.0, 2.0, 4.0]

    def known_losses(model, processor, questions):
        assert (model, processor) == ("model", "processor")
        wrong = [each.image for each in questions] != [each.image for each in QUESTIONS]
        return [loss + 3.0 for loss in losses] if wrong else losses

    monkeypatch.setattr(information, "cross_entropies", known_losses)
    callback = InformationCallback(QUESTIONS, before=20, last=2 * EVERY)
    state = TrainerState()
    known = {"model": "model", "processing_class": "processor"}
    for step in range(1, 70):
        state.global_step = step
        callback.on_step_end(None, state, TrainerControl(), **known)
    first, last = state.log_history
    by_hand = [entropy - loss for entropy, loss in zip(entropies(QUESTIONS), losses, strict=True)]
    of_shape = [by_hand[place] for place in (0, 1, 3, 4)]
    assert (first["step"], first["all_steps"]) == (20, 40) and "wrong_image" not in first
    assert (last["step"], last["all_steps"]) == (60, 80)
    assert last["information"] == first["information"] == pytest.approx(sum(by_hand) / 6)
    assert last["information/shape"] == pytest.approx(sum(of_shape) / 4)
    assert last["information/colour"] == pytest.approx((by_hand[2] + by_hand[5]) / 2)
    assert last["wrong_image"] == pytest.approx(3.0)


@pytest.mark.slow
def test_cross_entropy_is_that_of_the_answer_token_by_token(archives, checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    both = held_out_questions()
    questions = []
    by_hand = []
    for first in (both[0], both[100]):  # of shape, of colour
        other = next(q for q in both if q.kind == first.kind and q.answer != first.answer)
        questions += [first, other]
    for question in questions:
        chat = prompt(question.text, load_image(question.image))
        as_tensors = dict(tokenize=True, return_dict=True, return_tensors="pt")
        inputs = processor.apply_chat_template(chat, add_generation_prompt=True, **as_tensors)
        nats = 0.0
        for token in processor.tokenizer(f"{question.answer}<|im_end|>")["input_ids"]:
            with torch.no_grad():
                logits = model(**inputs).logits[0, -1].double()
            nats -= (logits[token] - logits.logsumexp(0)).item()
            inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[token]])], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        by_hand.append(nats)
    assert cross_entropies(model, processor, questions) == pytest.approx(by_hand, rel=1e-5)

    state = TrainerState(global_step=EVERY - 20, max_steps=140)
    callback = InformationCallback(questions, before=20, last=EVERY)
    callback.on_step_end(None, state, TrainerControl(), model=model, processing_class=processor)
    (logged,) = state.log_history
    known = [entropy - nats for entropy, nats in zip(entropies(questions), by_hand, strict=True)]
    assert logged["information"] == pytest.approx(sum(known) / 4, rel=1e-5)
    assert logged["information/shape"] == pytest.approx(sum(known[:2]) / 2, rel=1e-5)
    assert logged["all_steps"] == EVERY and math.isfinite(logged["wrong_image"])
