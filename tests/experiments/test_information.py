"""Visual information, against a computation by hand on a tiny model."""

import math

import pytest
import torch
from information import EVERY, InformationCallback, cross_entropies, entropies, held_out_questions
from transformers import AutoProcessor, TrainerControl, TrainerState

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.fetched.easy_vqa import Question, load_image, prompt


def test_entropy_is_that_of_the_answers_to_each_wording():
    asked = [("shape?", "circle"), ("shape?", "circle"), ("shape?", "square"), ("hue?", "red")]
    questions = [Question("shape", text, answer, None, answer) for text, answer in asked]
    by_hand = [math.log(3 / 2), math.log(3 / 2), math.log(3), 0]
    assert entropies(questions) == pytest.approx(by_hand)


@pytest.mark.slow
def test_cross_entropy_is_that_of_the_answer_token_by_token(archives, checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    both, questions, by_hand = held_out_questions(), [], []
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
