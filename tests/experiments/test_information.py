# SPDX-License-Identifier: Apache-2.0
"""Visual information, against a computation by hand on a tiny model."""

import math

import pytest
import torch
from information import EVERY, InformationCallback, cross_entropies, entropies, held_out_questions
from transformers import AutoProcessor, TrainerControl, TrainerState

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.fetched.easy_vqa import Question, load_image, prompt


WORDED = [("what shape?", "circle"), ("what shape?", "circle"), ("what shape?", "square"), ("what hue?", "red")]


def test_entropy_is_that_of_the_answers_to_each_wording():
    found = entropies([Question("shape", text, answer, None, answer) for text, answer in WORDED])
    assert found == pytest.approx([math.log(3 / 2), math.log(3 / 2), math.log(3), 0])


@pytest.mark.slow
def test_cross_entropy_is_that_of_the_answer_token_by_token(archives, checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    both = held_out_questions()
    firsts = (both[0], both[100])  # of shape, of colour
    others = [next(q for q in both if q.kind == first.kind and q.answer != first.answer) for first in firsts]
    questions = [firsts[0], others[0], firsts[1], others[1]]
    by_hand = []
    for question in questions:
        chat = prompt(question.text, load_image(question.image))
        options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        inputs = processor.apply_chat_template(chat, **options)
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
    (found,) = state.log_history
    known = [entropy - nats for entropy, nats in zip(entropies(questions), by_hand, strict=True)]
    assert found["information"] == pytest.approx(sum(known) / 4, rel=1e-5)
    assert found["information/shape"] == pytest.approx(sum(known[:2]) / 2, rel=1e-5)
    assert found["all_steps"] == EVERY and math.isfinite(found["wrong_image"])
