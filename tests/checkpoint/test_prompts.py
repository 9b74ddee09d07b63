"""What a chat template writes behind an answer, and which tokens end it."""

import chat_families as families
import pytest
import tiny_parts as parts
import train_data
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from normalign_llava.checkpoint import prompts


END = "<|im_end|>"
OTHER = "<|im_start|>"  # 2 and 1
LOOP = "{% for m in messages %}{{ m['content'] }}{{ '<|im_end|>' }}{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part is mapping %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
)
REFUSES_STRINGS = "{% if messages[0]['content'] is string %}{{ raise_exception('no') }}{% endif %}"
MARKED = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
MARKED += "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '<|im_start|>' }}{% else %}"
MARKED += "{{ m['content'] }}{% endif %}{% endfor %}"
ENDS = {
    "reads strings": (LOOP, [END]),
    "reads parts alone": (OF_PARTS, [END]),
    "refuses strings": (REFUSES_STRINGS + OF_PARTS, [END]),
    "refuses everything": ("{{ raise_exception('no') }}" + LOOP, []),
    "prints no answer": ("{{ '<|im_end|>' }}", []),
    "prints nothing behind it": (LOOP.replace("{{ '<|im_end|>' }}", ""), []),
    "marks what is to be generated": (MARKED, [END]),
    "marks the line break behind it": (MARKED.replace("im_end|>'", "im_end|>\n'"), [END]),
    "marks more than answers": (
        "{% generation %}{{ '<|im_start|>' }}{% endgeneration %}" + MARKED,
        [END],
    ),
    "prints more behind it": (LOOP.replace("im_end|>", "im_end|>\n<|im_start|>"), [END]),
    "marks no end": (MARKED.replace(" + '<|im_end|>'", ""), []),
    "is one of several": ({"tool_use": LOOP.replace(END, OTHER), "default": LOOP}, [END]),
    "is none of several": ({"tool_use": LOOP}, []),
    "is none": (None, []),
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_is_printed_behind_an_answer(kind):
    template, expected = ENDS[kind]
    tokenizer = parts.tokenizer(template)
    assert prompts.end_texts(tokenizer) == expected
    assert prompts.unrecognized_ends(tokenizer) == []
    tokenizer = parts.tokenizer(LOOP.replace(END, OTHER))
    if template is not None:  # in place of the tokenizer's own
        assert prompts.end_texts(tokenizer, template) == expected
        numbers = [2, 1] if template == LOOP.replace(END, OTHER) else [2]  # its own end is 2
        assert prompts.answer_ends(tokenizer, template) == numbers
    assert prompts.answer_ends(tokenizer) == [2, 1]


def test_a_tokenizer_without_an_end_has_its_template_s():
    tokenizer = parts.tokenizer(LOOP)
    tokenizer.eos_token = None
    assert prompts.answer_ends(tokenizer) == [2]


@pytest.mark.parametrize(
    "known, added, expected",
    [(None, [7], 7), (None, [7, 8], [7, 8]), (3, [7], [3, 7]), ([3, 2], [2, 7], [3, 2, 7])],
)
def test_ends_are_added_behind_those_that_are_known(known, added, expected):
    config = GenerationConfig(eos_token_id=known)
    assert prompts.stopping_at(config, added).eos_token_id == expected
    assert config.eos_token_id == known
    assert prompts.stopping_at(config, []) is config


def test_idle_flags_are_taken_out_of_a_copy():
    config = GenerationConfig(temperature=0.3, num_beams=1, length_penalty=2.0, max_length=50)
    kept, removed = prompts.without_idle_flags(config)
    assert removed == {"temperature": 0.3, "length_penalty": 2.0}
    assert kept.max_length == 50 and kept.temperature == GenerationConfig().temperature
    assert config.temperature == 0.3
    config.max_new_tokens = -5
    with pytest.raises(ValueError, match="-5"):
        prompts.without_idle_flags(config)


@pytest.mark.parametrize(
    "template, has_marks",
    [
        ("{% generation %}a{% endgeneration %}", True),
        ("{%- generation -%}a{%- endgeneration -%}", True),
        ("{%generation%}a{%endgeneration%}", True),
        ("{% if add_generation_prompt %}a{% endif %}", False),
        ("{% set generation = 1 %}", False),
        ("{{ generation }} {% generations %}", False),
    ],
)
def test_marks_are_told_from_other_words(template, has_marks):
    assert prompts.has_generation_marks(template) == has_marks


@pytest.mark.parametrize(
    "template, asks, fixes",
    [
        (families.SMOLLM2, False, False),
        ("{{ strftime_now('%d') }}", True, False),
        ("{% macro strftime_now(f) %}x{% endmacro %}{{ strftime_now('%d') }}", False, True),
    ],
)
def test_templates_with_a_date(template, asks, fixes):
    assert prompts.asks_for_the_date(template) == asks
    assert prompts.fixes_the_date(template) == fixes
    assert not prompts.fixes_the_date(None)


def test_what_a_tokenizer_adds_to_every_text_ends_no_answer():
    tokenizer = parts.tokenizer(LOOP)
    adding = TemplateProcessing(single=f"$A {OTHER}", special_tokens=[(OTHER, 1)])
    tokenizer.backend_tokenizer.post_processor = adding
    assert tokenizer.encode("a")[-1] == 1
    assert prompts.answer_ends(tokenizer) == [2]


@pytest.mark.parametrize("template", [None, {"default": LOOP}])
def test_a_processor_without_a_template_or_with_several_stays_as_it_is(template):
    processor = train_data.processor()
    processor.chat_template = template
    prompts.fix_date(processor)
    assert processor.chat_template == template
