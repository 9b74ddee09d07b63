"""Greedy answers: a model's own settings, inputs without a chat template, room, and streams."""

from contextlib import contextmanager

import pytest
import torch
import train_data
from asking import generate
from chat_families import byte_tokenizer
from PIL import Image
from transformers import AutoProcessor, BloomConfig, GenerationConfig, LlamaConfig, LlavaConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.evaluation import answering
from normalign_llava.evaluation.answering import (
    AnswerStream,
    answers,
    decoding_greedily,
    greedy_config,
    make_turn,
    model_inputs,
    require_free_positions,
    user_turn,
)


QUESTION = "what is 7 plus 0?"
IMAGE = Image.radial_gradient("L").convert("RGB")


@pytest.fixture(scope="module")
def asked(checkpoint):
    """A model and its processor."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    return model, AutoProcessor.from_pretrained(checkpoint)


def test_ends_and_padding_are_the_model_s_and_then_the_tokenizer_s():
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    padding = tokenizer.pad_token_id
    own = GenerationConfig(eos_token_id=[3, end], pad_token_id=4, num_beams=3, max_new_tokens=5)
    greedy = greedy_config(own, tokenizer)
    assert (greedy.eos_token_id, greedy.pad_token_id) == ([3, end], 4)
    assert greedy.num_beams != 3 and greedy.max_new_tokens is None and greedy.do_sample is False
    bare = greedy_config(GenerationConfig(), tokenizer)
    assert (bare.eos_token_id, bare.pad_token_id) == ([end], padding)
    tokenizer.eos_token = tokenizer.pad_token = None
    none = greedy_config(GenerationConfig(), tokenizer)
    assert none.eos_token_id is none.pad_token_id is None


def test_token_0_and_what_else_decoding_needs_are_kept():
    tokenizer = byte_tokenizer()
    own = GenerationConfig(eos_token_id=(0, 5), pad_token_id=0)
    greedy = greedy_config(own, tokenizer)
    assert greedy.eos_token_id == [0, 5, tokenizer.eos_token_id] and greedy.pad_token_id == 0
    assert greedy_config(GenerationConfig(eos_token_id=0)).eos_token_id == [0]
    needed = {"bos_token_id": 6, "decoder_start_token_id": 7, "cache_implementation": "static"}
    assert greedy_config(GenerationConfig(**needed)).to_dict().items() >= needed.items()


def test_the_model_s_own_settings_come_back_also_after_an_error(asked):
    model, processor = asked
    own = model.generation_config
    with pytest.raises(ZeroDivisionError), decoding_greedily(model, processor.tokenizer):
        assert model.generation_config is not own
        assert model.generation_config.eos_token_id[-1] == processor.tokenizer.eos_token_id
        raise ZeroDivisionError
    assert model.generation_config is own


@pytest.mark.parametrize("template", [True, False])
def test_inputs_are_padded_on_the_left(checkpoint, template):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.pad_token = None
    turns = [[user_turn("Long question?", [IMAGE, IMAGE])], [user_turn("Short?", [IMAGE])]]
    expected = [f"{'<image>' * 8}Long question?", f"{'<image>' * 4}Short?"]
    if template:
        parts = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        expected = [parts.format(text) for text in expected]
    else:
        processor.chat_template = None
        image = f"{'<image>' * 4}\n"  # a line break after each
        expected = [f"{image}{image}Long question?", f"{image}Short?"]
    inputs = model_inputs(processor, turns)
    masks = inputs["attention_mask"].bool()
    pairs = zip(inputs["input_ids"], masks, strict=True)
    assert [processor.decode(ids[mask]) for ids, mask in pairs] == expected
    assert masks[:, -1].all() and not masks[1, 0]
    assert inputs["input_ids"][1, 0] == processor.tokenizer.eos_token_id
    assert inputs["pixel_values"].shape[0] == 3


def test_a_padding_token_of_the_tokenizer_s_own_pads(checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.pad_token = "z"
    inputs = model_inputs(processor, [[user_turn("Long question?")], [user_turn("Short?")]])
    assert processor.decode(inputs["input_ids"][1, :2]) == "zz"


def test_without_a_chat_template_some_questions_of_a_batch_may_have_no_image(checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = None
    inputs = model_inputs(processor, [[user_turn("a?", [IMAGE])], [user_turn("b?")]])
    pairs = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    texts = [processor.decode(ids[mask]) for ids, mask in pairs]
    assert texts == [f"{'<image>' * 4}\na?", "b?"] and len(inputs["pixel_values"]) == 1


def test_without_a_chat_template_one_question_is_asked_also_without_an_image(checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = None
    inputs = model_inputs(processor, [[user_turn("a or b?")]])
    assert processor.decode(inputs["input_ids"][0]) == "a or b?" and "pixel_values" not in inputs
    with pytest.raises(ValueError, match="takes only one question"):
        model_inputs(processor, [[make_turn("system", "Be brief."), user_turn("a or b?")]])


def test_a_text_with_the_image_token_is_refused_in_any_turn(asked):
    _, processor = asked
    for turns in ([user_turn("<image>?")], [make_turn("system", "<image>"), user_turn("a?")]):
        with pytest.raises(ValueError, match="<image>. It stands for an image"):
            model_inputs(processor, [[user_turn("b?")], turns])


def test_a_processor_may_have_no_token_of_its_own_for_an_image(asked):
    _, processor = asked
    known = processor.image_token
    texts = [[user_turn("<image>?")]]
    try:
        for token in (None, ""):
            processor.image_token = token
            answering.check_texts(processor, texts)
    finally:
        processor.image_token = known
    answering.check_texts(processor.tokenizer, texts)


def test_a_prompt_leaves_the_positions_after_it():
    text = LlamaConfig(max_position_embeddings=20)
    config = LlavaConfig(text_config=text)
    assert require_free_positions(config, 19) == 1
    for tokens in (20, 21):
        with pytest.raises(ValueError, match=f"{tokens} tokens, and the model reads 20"):
            require_free_positions(config, tokens)
    assert require_free_positions(BloomConfig(), 21) is None  # of relative positions


@contextmanager
def saying(model, processor, token):
    """Within the block the model says nothing but this token."""
    others = {*range(model.config.text_config.vocab_size)}
    others -= {processor.tokenizer.convert_tokens_to_ids(token)}
    model.generation_config.suppress_tokens = sorted(others)
    try:
        yield
    finally:
        model.generation_config.suppress_tokens = None


def test_answers_end_with_the_model_s_positions(asked):
    model, processor = asked
    turns = [user_turn(QUESTION, [IMAGE])]
    inputs = model_inputs(processor, [turns])
    length = inputs["input_ids"].shape[1]
    positions = model.config.text_config
    positions.max_position_embeddings = length + 2
    try:
        with saying(model, processor, "A"):
            assert answers(model, processor, [turns], 6) == ["AA"]
            assert answers(model, processor, [turns], 1) == ["A"]
            stream = AnswerStream(model, processor, inputs, 6)
            assert "".join(stream) == "AA" and stream.token_ids.shape[1] == length + 2
    finally:
        positions.max_position_embeddings = 256


def test_a_model_without_a_limit_answers_as_long_as_it_may(asked, monkeypatch):
    model, processor = asked
    turns = [user_turn(QUESTION, [IMAGE])]
    monkeypatch.setattr(answering, "require_free_positions", lambda config, tokens: None)
    with saying(model, processor, "A"):
        assert answers(model, processor, [turns], 3) == ["AAA"]
        stream = AnswerStream(model, processor, model_inputs(processor, [turns]), 3)
        assert "".join(stream) == "AAA"


def test_special_tokens_and_spaces_at_its_ends_are_no_part_of_an_answer(asked):
    model, processor = asked
    turns = [user_turn(QUESTION, [IMAGE])]
    for token in (" ", "<|im_start|>"):
        with saying(model, processor, token):
            assert answers(model, processor, [turns], 3) == [""]
    with saying(model, processor, "<|im_start|>"):
        stream = AnswerStream(model, processor, model_inputs(processor, [turns]), 3)
        assert list(stream) == [] and stream.token_ids[0, -3:].unique().numel() == 1


def test_an_answer_in_a_batch_is_greedy_whatever_the_model_s_own_settings_are(asked):
    model, processor = asked
    with saying(model, processor, "A"):
        model.generation_config.num_beams = model.generation_config.num_return_sequences = 2
        try:
            assert answers(model, processor, [[user_turn(QUESTION, [IMAGE])]], 2) == ["AA"]
        finally:
            model.generation_config.num_beams = model.generation_config.num_return_sequences = None


def test_a_model_in_bfloat16_answers(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="bfloat16")
    processor = AutoProcessor.from_pretrained(checkpoint)
    with saying(model, processor, "A"):
        assert answers(model, processor, [[user_turn(QUESTION, [IMAGE])]], 2) == ["AA"]


def test_answers_in_a_batch_and_as_a_stream_are_those_of_generate(asked, checkpoint):
    model, processor = asked
    expected = [generate(checkpoint, text, IMAGE)[0] for text in (QUESTION, "a or b, or c?")]
    turns = [[user_turn(text, [IMAGE])] for text in (QUESTION, "a or b, or c?")]
    assert answers(model, processor, turns, 8) == [text.strip() for text in expected]
    stream = AnswerStream(model, processor, model_inputs(processor, turns[:1]), 8)
    assert stream.token_ids is None
    assert "".join(stream) == expected[0] and stream.token_ids.shape[0] == 1


def test_a_stream_that_is_closed_stops_and_one_that_fails_says_why(asked):
    model, processor = asked
    inputs = model_inputs(processor, [[user_turn(QUESTION, [IMAGE])]])
    model.generation_config.suppress_tokens = [processor.tokenizer.eos_token_id]
    steps = []
    count = model.lm_head.register_forward_hook(lambda *call: steps.append(1))
    try:
        pieces = iter(AnswerStream(model, processor, inputs, 150))
        next(pieces)
        pieces.close()
    finally:
        count.remove()
        model.generation_config.suppress_tokens = None
    assert len(steps) < 150
    broken = {**inputs, "pixel_values": torch.zeros(3, 3, 16, 16)}
    with pytest.raises((ValueError, RuntimeError), match="features"):
        "".join(AnswerStream(model, processor, broken, 4))


def test_labels_that_a_processor_makes_are_left_out(asked, monkeypatch):
    processor = train_data.processor()
    made = processor.apply_chat_template

    def with_labels(*args, **kwargs):
        inputs = made(*args, **kwargs)
        inputs["labels"] = inputs["input_ids"]
        return inputs

    monkeypatch.setattr(processor, "apply_chat_template", with_labels)
    assert "labels" not in model_inputs(processor, [[user_turn("a?", [IMAGE])]])
