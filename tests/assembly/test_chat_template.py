"""Chat templates: text-only conversations as before, images where they belong."""

import numpy as np
import pytest
from chat_families import (
    CONVERSATIONS,
    END_OF_TURN,
    SHIPPED,
    SMOLLM2,
    TEMPLATES,
    TOOL_CALL,
    WEATHER,
    chat,
    outcome,
    parts,
    render,
)
from PIL import Image

from normalign_llava.assembly.chat_template import (
    multimodal_chat_template,
)


# -------------------------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_only_conversations_render_as_under_the_models_own_template(name):
    template = multimodal_chat_template(TEMPLATES[name]).template
    for messages in CONVERSATIONS:
        for add_generation_prompt in (False, True):
            for kwargs in ({}, {"tools": [WEATHER]}, {"enable_thinking": False}):
                kwargs["add_generation_prompt"] = add_generation_prompt
                assert outcome(template, messages, **kwargs) == outcome(TEMPLATES[name], messages, **kwargs), messages


@pytest.mark.parametrize("name", [*END_OF_TURN, "glm4moe", "llava_1_5"])
def test_roles_that_a_template_does_not_know_fare_as_before(name):
    messages = [*chat("Hello"), {"role": "critic", "content": "Boring."}]
    assert outcome(multimodal_chat_template(TEMPLATES[name]).template, messages) == outcome(TEMPLATES[name], messages)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "smolvlm", "idefics3", "llava_next", "llava_1_5"])
def test_templates_that_read_lists_of_text_go_on_reading_them_their_way(name):
    messages = parts(chat(" Hello ", "Hi ", "How are you?"))
    messages[2]["content"] *= 2
    template = multimodal_chat_template(TEMPLATES[name]).template
    assert outcome(template, messages) == outcome(TEMPLATES[name], messages)
    assert "Hello" in render(template, messages)


@pytest.mark.parametrize(
    "head", ["\n\n  a\n", "  {% if true %}\n  b\n  {% endif %}\n", "{#- c -#}\n\n", "\t{{- 1 }}\n "]
)
def test_white_space_before_the_first_statement_is_kept(head):
    template = head + SMOLLM2
    assert render(multimodal_chat_template(template).template, chat("Hi")) == render(template, chat("Hi"))


# ------------------------------------------------------------------------------------------------------------ images
def test_smollm2_with_images_written_out():
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare "},
                {"type": "image"},
                {"type": "text", "text": " with "},
                {"type": "image", "image": Image.new("RGB", (2, 2))},
                {"type": "text", "text": "."},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "They are equal."}]},
        {"role": "user", "content": "Sure?"},
    ]
    assert render(multimodal_chat_template(SMOLLM2).template, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nCompare <image> with <image>.<|im_end|>\n"
        "<|im_start|>assistant\nThey are equal.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", [*END_OF_TURN, "cohere", "lfm2", "glm4moe", "deepseekv3", "gptoss", "gemma4"])
def test_image_parts_become_the_image_token_in_every_family(name):
    template = multimodal_chat_template(TEMPLATES[name], image_token="<|image's|>").template
    images = {"type": "image"}, {"type": "image", "image": np.zeros((2, 2, 3))}
    with_images = render(template, parts(chat("What?", "This.", "Why?"), *images))
    as_text = render(template, chat("<|image's|><|image's|>What?", "This.", "Why?"))
    assert with_images == as_text
    assert with_images.count("<|image's|>") == 2


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "llava_next", "llava_1_5"])
def test_templates_that_print_the_image_token_keep_their_own_layout(name):
    messages = parts(chat("What?"), {"type": "image"})
    new = multimodal_chat_template(TEMPLATES[name])
    assert render(new.template, messages, add_generation_prompt=True) == render(
        TEMPLATES[name], messages, add_generation_prompt=True
    )
    assert "preamble" not in new.source


def test_template_made_twice_is_the_same():
    once = multimodal_chat_template(SMOLLM2)
    assert multimodal_chat_template(once.template).template == once.template
    assert multimodal_chat_template(once.template).generation_marks
    vicuna = multimodal_chat_template(None).template
    assert multimodal_chat_template(vicuna).template == vicuna


def test_parts_that_are_neither_image_nor_text_are_refused():
    template = multimodal_chat_template(SMOLLM2).template
    with pytest.raises(Exception, match="image and text parts, not parts of type video"):
        render(template, [{"role": "user", "content": [{"type": "video"}]}])


def test_lists_that_are_not_parts_are_left_to_the_template():
    messages = [*TOOL_CALL[:2], {"role": "tool", "content": [1, {"height": "low"}]}]
    template = multimodal_chat_template(SHIPPED["llama3_1"]).template
    assert '[1, {"height": "low"}]' in render(template, messages)


def test_a_final_message_in_parts_can_be_continued():
    template = multimodal_chat_template(SMOLLM2).template
    text = render(template, parts(chat("What?", "It is a"), {"type": "image"}), continue_final_message=True)
    assert text.endswith("<image>What?<|im_end|>\n<|im_start|>assistant\nIt is a")
