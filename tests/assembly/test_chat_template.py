"""Chat templates: text-only conversations as before, images where they belong."""

import io
from itertools import product

import numpy as np
import pytest
import tiny
import tiny_parts
import train_data
from chat_families import (
    ADDING,
    CONVERSATIONS,
    END_OF_TURN,
    SMOLLM2,
    TEMPLATES,
    WEATHER,
    adding_tokenizer,
    chat,
    outcome,
    parts,
    render,
)
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, AutoProcessor

from normalign_llava.assembly.chat_template import has_generation_marks, multimodal_chat_template, printing_first
from normalign_llava.assembly.parts import set_chat_template
from normalign_llava.assembly.processing import make_processor, text_tokenizer
from normalign_llava.data.rows.checks import token_lengths
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.data.rows.questions import Sample
from normalign_llava.diagnose.data import batches
from normalign_llava.train.collator import ConversationCollator


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
    new = multimodal_chat_template(template)[0]
    assert render(new, chat("Hi")) == render(template, chat("Hi"))
    for each in (new, template):
        assert render(printing_first(each, "<s> ", "<image>"), chat("Hi")) == "<s> " + render(template, chat("Hi"))


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


def built(folder, tokenizer, template):
    """The processor that `build` writes, loaded again."""
    tokenizer.chat_template = template
    set_chat_template(tokenizer, None)
    make_processor(tiny_parts.image_processor("clip"), tokenizer, tiny.vision_config("clip")).save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


OTHERS = [adds for adds in ADDING if adds != "first and last"]


@pytest.mark.parametrize(
    "name, adds",
    [
        *((name, "first and last") for name in TEMPLATES),
        *product(["smollm2", "llama2", "gemma3", "llava_1_5"], OTHERS),
    ],
)
def test_all_ways_to_tokenize_a_conversation_agree(tmp_path, name, adds):
    """Those of users, `transformers serve`, TRL, training, `ask` and `evaluate`, and the language model's own."""
    make, start, end = ADDING[adds]
    own, processor = make(), built(tmp_path, make(), TEMPLATES[name])
    own.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    image = {"path": None, "bytes": train_data.image_bytes()}
    shown = {"type": "image", "image": Image.open(io.BytesIO(image["bytes"]))}
    template = multimodal_chat_template(TEMPLATES[name], special_tokens=own.special_tokens_map)[0]
    for messages, images in ((chat("Hello"), []), (chat("Why?"), [shown]), (chat("Why?", "So."), [shown])):
        messages, prompt = parts(messages, *images), {"add_generation_prompt": len(messages) == 1}
        text = render(template, messages, **prompt, **own.special_tokens_map).replace("<image>", "<image>" * 4)
        expected = own.encode(text, add_special_tokens=False)
        if not text.startswith("".join(start)):
            expected = own.encode(text)
            assert own.convert_ids_to_tokens(expected)[: len(start)] == start
            expected = expected[: len(expected) - len(end)]
        rendered = processor.apply_chat_template(messages, **prompt)
        ways = {
            "processor(text)": processor(text=rendered, images=[each["image"] for each in images] or None),
            "the processor's template": processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, **prompt
            ),
            "TRL": processor.tokenizer(text=[rendered.replace("<image>", "<image>" * 4)], add_special_tokens=False),
        }
        if not images:
            ways["the tokenizer's template"] = processor.tokenizer.apply_chat_template([messages], **prompt)
        elif len(messages) == 1:
            ways["ask"] = next(batches(processor, [Sample("", "Why?", image)], 1))
        elif has_generation_marks(processor.chat_template):
            row = parse_row(train_data.llava("<image>Why?", "So.", image))
            ways["training"] = ConversationCollator(processor)([row])
            assert token_lengths(processor, [row]) == [len(expected)]
        for way, found in ways.items():
            assert [*map(int, found["input_ids"][0])] == expected, way
    plain = own.encode("Plain text.")
    assert text_tokenizer(processor.tokenizer).encode("Plain text.") == plain[: len(plain) - len(end)]
    assert processor.tokenizer.encode("Plain text.") == own.encode("Plain text.", add_special_tokens=False)


def test_templates_and_tokenizers_that_cannot_agree_are_refused(tmp_path):
    some = "{% if messages[0]['role'] == 'system' %}{{ bos_token }}{% endif %}" + SMOLLM2
    with pytest.raises(ValueError, match="prints '<s>'.* before some conversations only.*--chat-template"):
        built(tmp_path, adding_tokenizer(["<s>"]), some)
    tokenizer = tiny_parts.tokenizer(extra=("<bos>",))  # which is no token of its own in a text
    adds = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 3)])
    tokenizer.backend_tokenizer.post_processor = adds
    with pytest.raises(ValueError, match="puts '<bos>' before a text.* other tokens.*--chat-template"):
        built(tmp_path, tokenizer, SMOLLM2)
