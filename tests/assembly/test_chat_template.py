"""Chat templates: text-only conversations as before, images where they belong."""

import numpy as np
import pytest
from chat_families import CONVERSATIONS, END_OF_TURN, SMOLLM2, TEMPLATES, WEATHER, chat, outcome, parts, render

from normalign_llava.assembly.chat_template import multimodal_chat_template


# -------------------------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_only_conversations_render_as_under_the_models_own_template(name):
    template = multimodal_chat_template(TEMPLATES[name])[0]
    for messages in CONVERSATIONS:
        for add_generation_prompt in (False, True):
            for kwargs in ({}, {"tools": [WEATHER]}, {"enable_thinking": False}):
                kwargs["add_generation_prompt"] = add_generation_prompt
                assert outcome(template, messages, **kwargs) == outcome(TEMPLATES[name], messages, **kwargs), messages


@pytest.mark.parametrize(
    "head", ["\n\n  a\n", "  {% if true %}\n  b\n  {% endif %}\n", "{#- c -#}\n\n", "\t{{- 1 }}\n "]
)
def test_white_space_before_the_first_statement_is_kept(head):
    template = head + SMOLLM2
    assert render(multimodal_chat_template(template)[0], chat("Hi")) == render(template, chat("Hi"))


# ------------------------------------------------------------------------------------------------------------ images
@pytest.mark.parametrize("name", [*END_OF_TURN, "cohere", "lfm2", "glm4moe", "deepseekv3", "gptoss", "gemma4"])
def test_image_parts_become_the_image_token_in_every_family(name):
    template = multimodal_chat_template(TEMPLATES[name], image_token="<|image's|>")[0]
    images = {"type": "image"}, {"type": "image", "image": np.zeros((2, 2, 3))}
    with_images = render(template, parts(chat("What?", "This.", "Why?"), *images))
    as_text = render(template, chat("<|image's|><|image's|>What?", "This.", "Why?"))
    assert with_images == as_text
    assert with_images.count("<|image's|>") == 2


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "llava_next", "llava_1_5"])
def test_templates_that_print_the_image_token_keep_their_own_layout(name):
    messages = parts(chat("What?"), {"type": "image"})
    new = multimodal_chat_template(TEMPLATES[name])[0]
    assert render(new, messages, add_generation_prompt=True) == render(
        TEMPLATES[name], messages, add_generation_prompt=True
    )
    assert "multimodal" not in new  # as the preamble has it
