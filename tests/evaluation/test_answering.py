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
    require_answer_limit,
    user_turn,
)


QUESTION = "what is 7 plus 0?"
OTHER_QUESTION = "a or b, or c?"
IMAGE = Image.radial_gradient("L").convert("RGB")
IMAGE_TOKENS = "<image>" * 4


@pytest.fixture(scope="module")
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture
def conversation():
    """A question about an image."""
    return [user_turn(QUESTION, [IMAGE])]


def test_ends_and_padding_are_the_model_s():
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    own_config = GenerationConfig(
        eos_token_id=[3, end],
        pad_token_id=4,
        num_beams=3,
        max_new_tokens=5,
    )
    greedy = greedy_config(own_config, tokenizer)
    assert greedy.eos_token_id == [3, end]
    assert greedy.pad_token_id == 4
    assert greedy.num_beams != 3
    assert greedy.max_new_tokens is None
    assert greedy.do_sample is False


def test_ends_and_padding_that_a_model_lacks_are_the_tokenizer_s():
    tokenizer = byte_tokenizer()
    greedy = greedy_config(GenerationConfig(), tokenizer)
    assert greedy.eos_token_id == [tokenizer.eos_token_id]
    assert greedy.pad_token_id == tokenizer.pad_token_id


def test_without_ends_and_padding_there_are_none():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.pad_token = None
    greedy = greedy_config(GenerationConfig(), tokenizer)
    assert greedy.eos_token_id is None
    assert greedy.pad_token_id is None


def test_token_0_may_be_an_end_and_padding():
    tokenizer = byte_tokenizer()
    own_config = GenerationConfig(eos_token_id=(0, 5), pad_token_id=0)
    greedy = greedy_config(own_config, tokenizer)
    assert greedy.eos_token_id == [0, 5, tokenizer.eos_token_id]
    assert greedy.pad_token_id == 0
    assert greedy_config(GenerationConfig(eos_token_id=0)).eos_token_id == [0]


def test_what_else_decoding_needs_is_kept():
    needed = {
        "bos_token_id": 6,
        "decoder_start_token_id": 7,
        "cache_implementation": "static",
    }
    greedy = greedy_config(GenerationConfig(**needed))
    assert greedy.to_dict().items() >= needed.items()


def test_the_model_s_own_settings_come_back_also_after_an_error(model, processor):
    own_config = model.generation_config
    tokenizer = processor.tokenizer
    with pytest.raises(ZeroDivisionError), decoding_greedily(model, tokenizer):
        assert model.generation_config is not own_config
        assert model.generation_config.eos_token_id[-1] == tokenizer.eos_token_id
        raise ZeroDivisionError
    assert model.generation_config is own_config


def decode_without_padding(processor, inputs):
    texts = []
    masks = inputs["attention_mask"].bool()
    for token_ids, mask in zip(inputs["input_ids"], masks, strict=True):
        texts.append(processor.decode(token_ids[mask]))
    return texts


@pytest.fixture
def padding_processor(processor):
    """As in training, it pads on the right, and has no token to pad with."""
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.pad_token = None
    return processor


@pytest.fixture
def two_conversations():
    """A long question about two images, and a short one about one."""
    return [
        [user_turn("Long question?", [IMAGE, IMAGE])],
        [user_turn("Short?", [IMAGE])],
    ]


def check_padded_on_the_left(processor, inputs):
    """The second of two questions is shorter; the end of the sequence pads."""
    masks = inputs["attention_mask"].bool()
    assert masks[:, -1].all()
    assert not masks[1, 0]
    assert inputs["input_ids"][1, 0] == processor.tokenizer.eos_token_id
    assert inputs["pixel_values"].shape[0] == 3


def test_inputs_are_padded_on_the_left(padding_processor, two_conversations):
    inputs = model_inputs(padding_processor, two_conversations)
    expected = []
    for question in (f"{IMAGE_TOKENS}{IMAGE_TOKENS}Long question?", f"{IMAGE_TOKENS}Short?"):
        expected.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert decode_without_padding(padding_processor, inputs) == expected
    check_padded_on_the_left(padding_processor, inputs)


def test_inputs_without_a_chat_template_are_padded_on_the_left(
    padding_processor, two_conversations
):
    padding_processor.chat_template = None
    inputs = model_inputs(padding_processor, two_conversations)
    # A line break comes after each image.
    assert decode_without_padding(padding_processor, inputs) == [
        f"{IMAGE_TOKENS}\n{IMAGE_TOKENS}\nLong question?",
        f"{IMAGE_TOKENS}\nShort?",
    ]
    check_padded_on_the_left(padding_processor, inputs)


def test_a_padding_token_of_the_tokenizer_s_own_pads(processor):
    processor.tokenizer.pad_token = "z"
    inputs = model_inputs(processor, [[user_turn("Long question?")], [user_turn("Short?")]])
    assert processor.decode(inputs["input_ids"][1, :2]) == "zz"


def test_without_a_chat_template_some_questions_of_a_batch_may_have_no_image(processor):
    processor.chat_template = None
    inputs = model_inputs(processor, [[user_turn("a?", [IMAGE])], [user_turn("b?")]])
    assert decode_without_padding(processor, inputs) == [f"{IMAGE_TOKENS}\na?", "b?"]
    assert len(inputs["pixel_values"]) == 1


def test_without_a_chat_template_one_question_is_asked_also_without_an_image(processor):
    processor.chat_template = None
    inputs = model_inputs(processor, [[user_turn("a or b?")]])
    assert processor.decode(inputs["input_ids"][0]) == "a or b?"
    assert "pixel_values" not in inputs


def test_without_a_chat_template_a_system_turn_is_refused(processor):
    processor.chat_template = None
    conversation = [make_turn("system", "Be brief."), user_turn("a or b?")]
    with pytest.raises(ValueError, match="takes only one question"):
        model_inputs(processor, [conversation])


@pytest.mark.parametrize(
    "conversation",
    [
        pytest.param([user_turn("<image>?")], id="user"),
        pytest.param([make_turn("system", "<image>"), user_turn("a?")], id="system"),
    ],
)
def test_a_text_with_the_image_token_is_refused_in_any_turn(processor, conversation):
    with pytest.raises(ValueError, match="<image>. It stands for an image"):
        model_inputs(processor, [[user_turn("b?")], conversation])


@pytest.mark.parametrize("image_token", [None, ""])
def test_a_processor_may_have_no_token_of_its_own_for_an_image(processor, image_token):
    processor.image_token = image_token
    answering.check_texts(processor, [[user_turn("<image>?")]])


def test_a_tokenizer_has_no_token_for_an_image(processor):
    answering.check_texts(processor.tokenizer, [[user_turn("<image>?")]])


def test_a_prompt_leaves_the_positions_after_it():
    config = LlavaConfig(text_config=LlamaConfig(max_position_embeddings=20))
    assert require_answer_limit(config, 19, 3) == 1
    assert require_answer_limit(config, 16, 3) == 3


@pytest.mark.parametrize("prompt_length", [20, 21])
def test_a_prompt_that_leaves_no_position_is_refused(prompt_length):
    config = LlavaConfig(text_config=LlamaConfig(max_position_embeddings=20))
    with pytest.raises(ValueError, match=f"{prompt_length} tokens, and the model reads 20"):
        require_answer_limit(config, prompt_length, 3)


def test_a_model_of_relative_positions_has_no_limit():
    assert require_answer_limit(BloomConfig(), 21, 3) == 3


@contextmanager
def allowing_only(model, processor, token):
    """Within the block the model says nothing but this token."""
    suppressed = set(range(model.config.text_config.vocab_size))
    suppressed.remove(processor.tokenizer.convert_tokens_to_ids(token))
    model.generation_config.suppress_tokens = sorted(suppressed)
    try:
        yield
    finally:
        model.generation_config.suppress_tokens = None


@pytest.fixture
def says_only_a(model, processor):
    with allowing_only(model, processor, "A"):
        yield


@pytest.mark.usefixtures("says_only_a")
def test_answers_end_with_the_model_s_positions(model, processor, conversation, monkeypatch):
    inputs = model_inputs(processor, [conversation])
    prompt_length = inputs["input_ids"].shape[1]
    text_config = model.config.text_config
    monkeypatch.setattr(text_config, "max_position_embeddings", prompt_length + 2)

    assert answers(model, processor, [conversation], 6) == ["AA"]
    assert answers(model, processor, [conversation], 1) == ["A"]
    stream = AnswerStream(model, processor, inputs, 6)
    assert "".join(stream) == "AA"
    assert stream.token_ids.shape[1] == prompt_length + 2


@pytest.mark.usefixtures("says_only_a")
def test_a_model_without_a_limit_answers_as_long_as_it_may(
    model, processor, conversation, monkeypatch
):
    limit = answering.require_answer_limit
    monkeypatch.setattr(
        answering, "require_answer_limit", lambda config, *numbers: limit(BloomConfig(), *numbers)
    )
    assert answers(model, processor, [conversation], 3) == ["AAA"]
    stream = AnswerStream(model, processor, model_inputs(processor, [conversation]), 3)
    assert "".join(stream) == "AAA"


@pytest.mark.parametrize("token", [" ", "<|im_start|>"])
def test_special_tokens_and_spaces_at_its_ends_are_no_part_of_an_answer(
    model, processor, conversation, token
):
    with allowing_only(model, processor, token):
        assert answers(model, processor, [conversation], 3) == [""]


def test_special_tokens_are_no_part_of_a_stream(model, processor, conversation):
    with allowing_only(model, processor, "<|im_start|>"):
        stream = AnswerStream(model, processor, model_inputs(processor, [conversation]), 3)
        assert list(stream) == []
        assert stream.token_ids[0, -3:].unique().numel() == 1


@pytest.mark.usefixtures("says_only_a")
def test_an_answer_in_a_batch_is_greedy_whatever_the_model_s_own_settings_are(
    model, processor, conversation, monkeypatch
):
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    monkeypatch.setattr(model.generation_config, "num_return_sequences", 2)
    assert answers(model, processor, [conversation], 2) == ["AA"]


def test_a_model_in_bfloat16_answers(checkpoint, processor, conversation):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="bfloat16")
    with allowing_only(model, processor, "A"):
        assert answers(model, processor, [conversation], 2) == ["AA"]


def test_answers_in_a_batch_are_the_ones_of_generate(model, processor, conversation, checkpoint):
    first_answer, *_ = generate(checkpoint, QUESTION, IMAGE)
    second_answer, *_ = generate(checkpoint, OTHER_QUESTION, IMAGE)
    conversations = [conversation, [user_turn(OTHER_QUESTION, [IMAGE])]]
    expected = [first_answer.strip(), second_answer.strip()]
    assert answers(model, processor, conversations, 8) == expected


def test_the_answer_of_a_stream_is_the_one_of_generate(model, processor, conversation, checkpoint):
    expected, *_ = generate(checkpoint, QUESTION, IMAGE)
    stream = AnswerStream(model, processor, model_inputs(processor, [conversation]), 8)
    assert stream.token_ids is None
    assert "".join(stream) == expected
    assert stream.token_ids.shape[0] == 1


def test_a_stream_that_is_closed_stops(model, processor, conversation, monkeypatch):
    without_end = [processor.tokenizer.eos_token_id]
    monkeypatch.setattr(model.generation_config, "suppress_tokens", without_end)
    steps = []
    counting = model.lm_head.register_forward_hook(lambda *call: steps.append(1))
    with counting:
        pieces = iter(AnswerStream(model, processor, model_inputs(processor, [conversation]), 150))
        next(pieces)
        pieces.close()
    assert len(steps) < 150


def test_a_stream_that_fails_says_why(model, processor, conversation):
    inputs = model_inputs(processor, [conversation])
    broken_inputs = {**inputs, "pixel_values": torch.zeros(3, 3, 16, 16)}
    with pytest.raises((ValueError, RuntimeError), match="features"):
        "".join(AnswerStream(model, processor, broken_inputs, 4))


def test_labels_that_a_processor_makes_are_left_out(monkeypatch):
    processor = train_data.processor()
    train_data.make_labels(processor, monkeypatch)
    assert "labels" not in model_inputs(processor, [[user_turn("a?", [IMAGE])]])
