"""Visual information, against a computation by hand on a tiny model."""

import math
from collections import Counter
from pathlib import Path

import information
import numpy as np
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


def question_of(kind, text, answer, image=None):
    return Question(kind, text, answer, image, answer)


def test_entropy_is_that_of_the_answers_to_each_wording():
    questions = [
        question_of("shape", "shape?", "circle"),
        question_of("shape", "shape?", "circle"),
        question_of("shape", "shape?", "square"),
        question_of("shape", "hue?", "red"),
    ]
    expected = [math.log(3 / 2), math.log(3 / 2), math.log(3), 0]
    assert entropies(questions) == pytest.approx(expected)


QUESTIONS = [
    question_of("shape", "shape?", "circle", Path("a")),
    question_of("shape", "what shape?", "square", Path("b")),
    question_of("colour", "hue?", "red", Path("c")),
    question_of("shape", "shape?", "circle", Path("d")),
    question_of("shape", "shape?", "square", Path("e")),
    question_of("colour", "colour?", "blue", Path("f")),
]


def images_of(questions):
    return [question.image for question in questions]


def without_images(questions):
    return [question._replace(image=None) for question in questions]


def test_another_image_is_one_of_another_answer_to_the_same_wording():
    """It is the next one, from the beginning after the last; if there is none, of other words."""
    changed = other_images(QUESTIONS)
    assert [str(image) for image in images_of(changed)] == ["e", "d", "f", "e", "a", "c"]
    assert without_images(changed) == without_images(QUESTIONS)


def test_questions_of_the_suite_are_left_out(archives):
    questions = held_out_questions()
    counts = Counter(question.kind for question in questions)
    assert counts == {"shape": 100, "colour": 100}
    assert set(questions).isdisjoint(held_out(100))


LOSSES = [0.5, 0.25, 0.125, 1.0, 2.0, 4.0]


@pytest.fixture
def known_losses(monkeypatch):
    """Sets the cross-entropies, which are 3 higher with other images."""

    def losses_of(model, processor, questions):
        assert model == "model"
        assert processor == "processor"
        if images_of(questions) == images_of(QUESTIONS):
            return LOSSES
        return [loss + 3.0 for loss in LOSSES]

    monkeypatch.setattr(information, "cross_entropies", losses_of)


@pytest.fixture
def logged_entries(known_losses):
    """What is logged in 69 steps of the second stage, after 20 of the first."""
    callback = InformationCallback(QUESTIONS, before=20, last=2 * EVERY)
    trainer_state = TrainerState()
    for step in range(1, 70):
        trainer_state.global_step = step
        callback.on_step_end(
            None,
            trainer_state,
            TrainerControl(),
            model="model",
            processing_class="processor",
        )
    return trainer_state.log_history


def test_information_is_logged_at_every_fortieth_step_of_both_stages(logged_entries):
    first_entry, last_entry = logged_entries
    assert first_entry["step"] == 20
    assert first_entry["all_steps"] == 40
    assert last_entry["step"] == 60
    assert last_entry["all_steps"] == 80


def test_logged_information_is_the_mean_of_entropy_minus_cross_entropy(logged_entries):
    by_question = np.subtract(entropies(QUESTIONS), LOSSES)
    first_entry, last_entry = logged_entries
    assert first_entry["information"] == pytest.approx(by_question.mean())
    assert last_entry["information"] == first_entry["information"]
    assert last_entry["information/shape"] == pytest.approx(by_question[[0, 1, 3, 4]].mean())
    assert last_entry["information/colour"] == pytest.approx(by_question[[2, 5]].mean())


def test_the_loss_of_a_wrong_image_is_logged_at_the_last_step(logged_entries):
    first_entry, last_entry = logged_entries
    assert "wrong_image" not in first_entry
    assert last_entry["wrong_image"] == pytest.approx(3.0)


@pytest.fixture(scope="module")
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def llava_processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def four_questions(archives):
    """Two questions of shape and two of colour, with different answers."""
    held_out_of_kinds = held_out_questions()
    questions = []
    for first_question in (held_out_of_kinds[0], held_out_of_kinds[100]):
        kind = first_question.kind
        for other_question in held_out_of_kinds:
            if other_question.kind == kind and other_question.answer != first_question.answer:
                questions += [first_question, other_question]
                break
    assert [question.kind for question in questions] == ["shape", "shape", "colour", "colour"]
    return questions


def cross_entropy_by_token(model, processor, question):
    """Returns the cross-entropy of the answer, of which a token at a time is appended."""
    inputs = processor.apply_chat_template(
        prompt(question.text, load_image(question.image)),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    cross_entropy = 0.0
    for answer_token in processor.tokenizer(f"{question.answer}<|im_end|>")["input_ids"]:
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1].double()
        cross_entropy -= (logits[answer_token] - logits.logsumexp(0)).item()
        next_token = torch.tensor([[answer_token]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], next_token], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return cross_entropy


@pytest.fixture(scope="module")
def expected_losses(model, llava_processor, four_questions):
    losses = []
    for question in four_questions:
        losses.append(cross_entropy_by_token(model, llava_processor, question))
    return losses


@pytest.mark.slow
def test_cross_entropy_is_that_of_the_answer_token_by_token(
    model, llava_processor, four_questions, expected_losses
):
    losses = cross_entropies(model, llava_processor, four_questions)
    assert losses == pytest.approx(expected_losses, rel=1e-5)


@pytest.mark.slow
def test_information_of_a_model_is_logged(model, llava_processor, four_questions, expected_losses):
    trainer_state = TrainerState(global_step=EVERY - 20, max_steps=140)
    callback = InformationCallback(four_questions, before=20, last=EVERY)
    callback.on_step_end(
        None,
        trainer_state,
        TrainerControl(),
        model=model,
        processing_class=llava_processor,
    )
    (logged,) = trainer_state.log_history
    by_question = np.subtract(entropies(four_questions), expected_losses)
    assert logged["information"] == pytest.approx(by_question.mean(), rel=1e-5)
    assert logged["information/shape"] == pytest.approx(by_question[:2].mean(), rel=1e-5)
    assert logged["all_steps"] == EVERY
    assert math.isfinite(logged["wrong_image"])
