"""What a chat template writes behind an answer, and which tokens end it."""

import chat_families
import pytest
import tiny_parts
import train_data
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from normalign_llava.checkpoint import prompts


END = "<|im_end|>"
END_ID = 2
OTHER = "<|im_start|>"
OTHER_ID = 1
LOOP = "{% for m in messages %}{{ m['content'] }}{{ '<|im_end|>' }}{% endfor %}"
LOOP_WITH_OTHER_END = LOOP.replace(END, OTHER)
OF_PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part is mapping %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
)
REFUSES_STRINGS = "{% if messages[0]['content'] is string %}{{ raise_exception('no') }}{% endif %}"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '<|im_start|>' }}{% else %}"
    "{{ m['content'] }}{% endif %}{% endfor %}"
)
MARKS_OTHER = "{% generation %}{{ '<|im_start|>' }}{% endgeneration %}"

TEMPLATES = [
    pytest.param(LOOP, [END], id="reads strings"),
    pytest.param(OF_PARTS, [END], id="reads only parts"),
    pytest.param(REFUSES_STRINGS + OF_PARTS, [END], id="refuses strings"),
    pytest.param("{{ raise_exception('no') }}" + LOOP, [], id="refuses everything"),
    pytest.param("{{ '<|im_end|>' }}", [], id="prints no answer"),
    pytest.param(
        LOOP.replace("{{ '<|im_end|>' }}", ""),
        [],
        id="prints nothing behind it",
    ),
    pytest.param(MARKED, [END], id="marks what is to be generated"),
    pytest.param(
        MARKED.replace("im_end|>'", "im_end|>\n'"),
        [END],
        id="marks the line break behind it",
    ),
    pytest.param(MARKS_OTHER + MARKED, [END], id="marks more than answers"),
    pytest.param(
        LOOP.replace("im_end|>", "im_end|>\n<|im_start|>"),
        [END],
        id="prints more behind it",
    ),
    pytest.param(
        MARKED.replace(" + '<|im_end|>'", ""),
        [],
        id="marks no end",
    ),
    pytest.param(
        {"tool_use": LOOP_WITH_OTHER_END, "default": LOOP},
        [END],
        id="is one of several",
    ),
    pytest.param({"tool_use": LOOP}, [], id="is none of several"),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [*TEMPLATES, pytest.param(None, [], id="is none")],
)
def test_what_a_tokenizer_s_template_prints_behind_an_answer(template, expected):
    tokenizer = tiny_parts.tokenizer(template)
    assert prompts.end_texts(tokenizer) == expected
    assert prompts.unrecognized_ends(tokenizer) == []


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_what_a_template_prints_in_place_of_the_tokenizer_s_own(template, expected):
    tokenizer = tiny_parts.tokenizer(LOOP_WITH_OTHER_END)
    assert prompts.end_texts(tokenizer, template) == expected
    assert prompts.answer_ends(tokenizer, template) == [END_ID]


def test_the_tokenizer_s_own_end_comes_before_the_end_of_its_template():
    tokenizer = tiny_parts.tokenizer(LOOP_WITH_OTHER_END)
    assert prompts.answer_ends(tokenizer) == [END_ID, OTHER_ID]


def test_a_tokenizer_without_an_end_has_its_template_s():
    tokenizer = tiny_parts.tokenizer(LOOP)
    tokenizer.eos_token = None
    assert prompts.answer_ends(tokenizer) == [END_ID]


@pytest.mark.parametrize(
    ("known", "added", "expected"),
    [
        (None, [7], 7),
        (None, [7, 8], [7, 8]),
        (3, [7], [3, 7]),
        ([3, 2], [2, 7], [3, 2, 7]),
    ],
)
def test_ends_are_added_behind_those_that_are_known(known, added, expected):
    generation_config = GenerationConfig(eos_token_id=known)
    assert prompts.stopping_at(generation_config, added).eos_token_id == expected
    assert generation_config.eos_token_id == known
    assert prompts.stopping_at(generation_config, []) is generation_config


@pytest.fixture
def config_with_idle_flags():
    return GenerationConfig(
        temperature=0.3,
        num_beams=1,
        length_penalty=2.0,
        max_length=50,
    )


def test_idle_flags_are_taken_out_of_a_copy(config_with_idle_flags):
    copied, removed = prompts.without_idle_flags(config_with_idle_flags)
    assert removed == {"temperature": 0.3, "length_penalty": 2.0}
    assert copied.max_length == 50
    assert copied.temperature == GenerationConfig().temperature
    assert config_with_idle_flags.temperature == 0.3


def test_a_flag_that_cannot_be_is_refused(config_with_idle_flags):
    config_with_idle_flags.max_new_tokens = -5
    with pytest.raises(ValueError, match="-5"):
        prompts.without_idle_flags(config_with_idle_flags)


@pytest.mark.parametrize(
    ("template", "has_marks"),
    [
        ("{% generation %}a{% endgeneration %}", True),
        ("{%- generation -%}a{%- endgeneration -%}", True),
        ("{%generation%}a{%endgeneration%}", True),
        ("{% if add_generation_prompt %}a{% endif %}", False),
        ("{% set generation = 1 %}", False),
        ("{{ generation }} {% generations %}", False),
    ],
)
def test_marks_differ_from_other_words(template, has_marks):
    assert prompts.has_generation_marks(template) == has_marks


@pytest.mark.parametrize(
    ("template", "asks", "fixes"),
    [
        pytest.param(
            chat_families.SMOLLM2,
            False,
            False,
            id="no-date",
        ),
        pytest.param(
            "{{ strftime_now('%d') }}",
            True,
            False,
            id="today",
        ),
        pytest.param(
            "{% macro strftime_now(f) %}x{% endmacro %}{{ strftime_now('%d') }}",
            False,
            True,
            id="fixed",
        ),
    ],
)
def test_templates_with_a_date(template, asks, fixes):
    assert prompts.asks_for_the_date(template) == asks
    assert prompts.fixes_the_date(template) == fixes


def test_without_a_template_no_date_is_fixed():
    assert not prompts.fixes_the_date(None)


def test_what_a_tokenizer_adds_to_every_text_ends_no_answer():
    tokenizer = tiny_parts.tokenizer(LOOP)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {OTHER}",
        special_tokens=[(OTHER, OTHER_ID)],
    )
    assert tokenizer.encode("a")[-1] == OTHER_ID
    assert prompts.answer_ends(tokenizer) == [END_ID]


@pytest.mark.parametrize("template", [None, {"default": LOOP}])
def test_a_processor_without_a_template_or_with_several_stays_as_it_is(template):
    processor = train_data.processor()
    processor.chat_template = template
    prompts.fix_date(processor)
    assert processor.chat_template == template
