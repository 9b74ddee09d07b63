"""Chat templates: text as before, images and generation marks where they belong."""

import copy
import io
import re
from datetime import datetime
from itertools import product

import chat_families
import numpy as np
import pytest
import tiny_parts
import train_data
from chat_families import END_OF_TURN, SMOLLM2, TEMPLATES, chat, marked, parts, render
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, AutoProcessor, LlavaProcessor, PreTrainedTokenizerFast

from normalign_llava.assembly import chat_template
from normalign_llava.assembly.build import make_processor
from normalign_llava.assembly.chat_template import multimodal_chat_template
from normalign_llava.assembly.encoder import TokenLayout
from normalign_llava.assembly.parts import set_chat_template
from normalign_llava.assembly.processing import (
    normalize_tokenization,
    text_tokenizer,
)
from normalign_llava.checkpoint.opening import Checkpoint, check_processor
from normalign_llava.checkpoint.prompts import with_fixed_date
from normalign_llava.data.rows.checks import token_lengths
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.train.collator import ConversationCollator


IMAGE_PART = {"type": "image"}


def multimodal(template, **options) -> str:
    """The template with images and marks."""
    new_template, _ = multimodal_chat_template(template, **options)
    return new_template


def has_marks(template, **options) -> bool:
    _, is_marked = multimodal_chat_template(template, **options)
    return is_marked


def on_the_day(template):
    """A family's template on a day in July: with that day's text in place of each call."""
    call = re.compile(r"strftime_now\((['\"])(.*?)\1\)")
    fixed_day = datetime(2024, 7, 26)
    return call.sub(lambda match: repr(fixed_day.strftime(match[2])), template)


DATED = sorted(family for family in TEMPLATES if "strftime_now" in TEMPLATES[family])


RENDER_OPTIONS = [
    {"add_generation_prompt": False},
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "tools": [chat_families.WEATHER]},
    {"add_generation_prompt": True, "tools": [chat_families.WEATHER]},
    {"add_generation_prompt": False, "enable_thinking": False},
    {"add_generation_prompt": True, "enable_thinking": False},
]


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_only_conversations_render_as_under_the_models_own_template(family):
    own_template = on_the_day(TEMPLATES[family])
    new_template = multimodal(TEMPLATES[family])
    for messages in chat_families.CONVERSATIONS:
        for options in RENDER_OPTIONS:
            expected = chat_families.outcome(own_template, messages, **options)
            actual = chat_families.outcome(new_template, messages, **options)
            assert actual == expected, messages


@pytest.mark.parametrize(
    "head",
    [
        "\n\n  a\n",
        "  {% if true %}\n  b\n  {% endif %}\n",
        "{#- c -#}\n\n",
        "\t{{- 1 }}\n ",
    ],
)
def test_white_space_before_the_first_statement_is_kept(head):
    template = head + SMOLLM2
    new_template = multimodal(template)
    expected = render(template, chat("Hi"))
    assert render(new_template, chat("Hi")) == expected
    for printed_template in (new_template, template):
        with_first = chat_template.printing_first(printed_template, "<s> ", "<image>")
        assert render(with_first, chat("Hi")) == "<s> " + expected


@pytest.mark.parametrize(
    "family",
    [
        *END_OF_TURN,
        "cohere",
        "lfm2",
        "glm4moe",
        "deepseekv3",
        "gptoss",
        "gemma4",
    ],
)
def test_image_parts_become_the_image_token_in_every_family(family):
    template = multimodal(TEMPLATES[family], image_token="<|image's|>")
    pixels_part = {"type": "image", "image": np.zeros((2, 2, 3))}
    conversation = parts(chat("What?", "This.", "Why?"), IMAGE_PART, pixels_part)
    expected = render(template, chat("<|image's|><|image's|>What?", "This.", "Why?"))
    assert render(template, conversation) == expected
    assert expected.count("<|image's|>") == 2


def test_some_families_print_a_date():
    assert "llama3_2" in DATED


@pytest.mark.parametrize("family", DATED)
def test_prompts_tell_a_fixed_date_whatever_the_day(family):
    messages = chat("What?", "A kite.")
    expected = render(on_the_day(TEMPLATES[family]), messages)
    # The family's own template prints today's date.
    assert render(TEMPLATES[family], messages) != expected
    assert render(multimodal(TEMPLATES[family]), messages) == expected


LETTERS = "a A w u d -d e j -j b h B m -m y Y C g G U W V H -H I -I p M -M S -S f z Z c x X D F T R"
DIRECTIVES = [f"%{letter}" for letter in LETTERS.split()]


@pytest.mark.parametrize("directive", [*DIRECTIVES, "%% of %d", "%A, %d. %B %Y"])
def test_every_way_to_write_a_date_is_that_of_strftime(directive):
    dated = f"{{{{ strftime_now({directive!r}) }}}}"
    expected = datetime(2024, 7, 26).strftime(directive)
    assert render(with_fixed_date(dated), chat("Why?")) == expected


def test_a_template_without_a_date_stays():
    assert with_fixed_date(SMOLLM2) == SMOLLM2


def test_a_template_with_a_fixed_date_stays():
    fixed = with_fixed_date(TEMPLATES["llama3_2"])
    assert fixed != TEMPLATES["llama3_2"]
    assert with_fixed_date(fixed) == fixed


LAYOUT = TokenLayout(prefix=1, patches=4, patch_size=8, encoder="clip_vision_model")


def built(folder, tokenizer, template):
    """The processor that `build` writes, loaded again."""
    tokenizer.chat_template = template
    set_chat_template(tokenizer, None)
    image_processor = tiny_parts.image_processor("clip")
    make_processor(image_processor, tokenizer, LAYOUT, "default", 1).save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture
def older_checkpoint(tmp_path):
    """A processor's folder from before: its template asks for today's date."""
    llama_template = TEMPLATES["llama3_2"]
    processor = built(tmp_path / "built", chat_families.byte_tokenizer(), llama_template)
    fixed_template = processor.chat_template
    macro = with_fixed_date(" strftime_now").removesuffix(" strftime_now")
    older_template = fixed_template.replace(macro, "")
    assert older_template
    assert older_template != fixed_template
    assert "strftime_now" in older_template
    processor.chat_template = older_template
    processor.tokenizer.chat_template = older_template
    processor.save_pretrained(tmp_path / "older")
    return tmp_path / "older"


def assert_prints_the_fixed_date(processor) -> None:
    messages = parts(chat("Why?"), IMAGE_PART)
    for renderer in (processor, processor.tokenizer):
        text = renderer.apply_chat_template(messages, tokenize=False)
        assert "Today Date: 26 Jul 2024" in text


def test_an_older_checkpoint_is_opened_with_the_fixed_date(older_checkpoint):
    opened = Checkpoint(str(older_checkpoint), None, {})
    assert_prints_the_fixed_date(opened.processor)


def test_an_older_checkpoint_is_trained_with_the_fixed_date(older_checkpoint):
    collator = ConversationCollator(AutoProcessor.from_pretrained(older_checkpoint))
    assert_prints_the_fixed_date(collator.processor)


def test_a_template_is_refused_if_only_its_generation_prompt_would_change():
    # The preamble defines `multimodal`.
    changing_prompt = "{{ 'one' if multimodal is defined else 'other' }}"
    template = SMOLLM2.replace("{{ '<|im_start|>assistant\n' }}", changing_prompt)
    assert template != SMOLLM2
    with pytest.raises(ValueError, match="renders the conversation .* differently"):
        multimodal_chat_template(template)


REPEATED_IMAGE = "<image>" * 4
FEW_FAMILIES = ("smollm2", "llama2", "gemma3", "llava_1_5")
# Each pair once: some few families are with "first and last" in both.
FAMILIES_AND_TOKENIZERS = dict.fromkeys(
    [
        *product(TEMPLATES, ["first and last"]),
        *product(FEW_FAMILIES, chat_families.ADDING),
    ]
)


def language_model_ids(tokenizer, text, start, end):
    """As the language model's own tokenizer encodes a text, without what it adds at the end."""
    if text.startswith("".join(start)):
        return tokenizer.encode(text, add_special_tokens=False)
    token_ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(token_ids)[: len(start)] == start
    return token_ids[: len(token_ids) - len(end)]


def encode_text(processor, turns):
    """A question without an image, tokenized in every way."""
    messages = parts(chat(*turns))
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    tokenizer = processor.tokenizer
    return {
        "processor(text)": processor(text=text, images=None),
        "its template": processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
        ),
        "TRL": tokenizer([text], add_special_tokens=False),
        "the tokenizer's template": tokenizer.apply_chat_template(
            [messages],
            add_generation_prompt=True,
        ),
    }


def encode_with_image(processor, turns, image):
    """A question with an image, and its answer if it has one, tokenized in every way."""
    picture = Image.open(io.BytesIO(image["bytes"]))
    messages = parts(chat(*turns), {"type": "image", "image": picture})
    is_question = len(turns) == 1
    text = processor.apply_chat_template(messages, add_generation_prompt=is_question)
    repeated = text.replace("<image>", REPEATED_IMAGE)
    encoded_by_way = {
        "processor(text)": processor(text=text, images=[picture]),
        "its template": processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=is_question,
        ),
        "TRL": processor.tokenizer([repeated], add_special_tokens=False),
    }
    if is_question:
        (question,) = turns
        sample = Sample("", question, image)
        encoded_by_way["ask"] = next(batches(processor, [sample], 1))
    elif chat_template.has_generation_marks(processor.chat_template):
        training_row = training_row_of(turns, image)
        encoded_by_way["training"] = ConversationCollator(processor)([training_row])
    return encoded_by_way


def training_row_of(turns, image):
    question, answer = turns
    return parse_row(train_data.llava(f"<image>{question}", answer, image))


def assert_all_ways_give(encoded_by_way, expected) -> None:
    for way, encoded in encoded_by_way.items():
        token_ids = [int(token_id) for token_id in encoded["input_ids"][0]]
        assert token_ids == expected, way


@pytest.mark.parametrize(("family", "adds"), FAMILIES_AND_TOKENIZERS)
def test_all_ways_to_tokenize_a_conversation_agree(tmp_path, family, adds):
    """Of users, `transformers serve`, TRL, training, `ask`, `evaluate`, and the language model."""
    make_tokenizer, start, end = chat_families.ADDING[adds]
    processor = built(tmp_path, make_tokenizer(), TEMPLATES[family])
    own_tokenizer = make_tokenizer()
    image_token = AddedToken("<image>", special=True, normalized=False)
    own_tokenizer.add_tokens(image_token, special_tokens=True)
    special_tokens = own_tokenizer.special_tokens_map
    template = multimodal(TEMPLATES[family], special_tokens=special_tokens)

    def expected_ids(turns, *images):
        text = render(
            template,
            parts(chat(*turns), *images),
            add_generation_prompt=len(turns) == 1,
            **special_tokens,
        )
        repeated = text.replace("<image>", REPEATED_IMAGE)
        return language_model_ids(own_tokenizer, repeated, start, end)

    assert_all_ways_give(encode_text(processor, ["Hello"]), expected_ids(["Hello"]))

    image = {"path": None, "bytes": train_data.image_bytes()}
    for turns in (["Why?"], ["Why?", "So."]):
        expected = expected_ids(turns, IMAGE_PART)
        encoded_by_way = encode_with_image(processor, turns, image)
        assert_all_ways_give(encoded_by_way, expected)
        if "training" in encoded_by_way:
            training_row = training_row_of(turns, image)
            assert token_lengths(processor, [training_row]) == [len(expected)]

    plain_ids = own_tokenizer.encode("Plain text.")
    without_end = plain_ids[: len(plain_ids) - len(end)]
    assert text_tokenizer(processor.tokenizer).encode("Plain text.") == without_end
    without_added = own_tokenizer.encode("Plain text.", add_special_tokens=False)
    assert processor.tokenizer.encode("Plain text.") == without_added


def conversation_with_images():
    """A conversation of three turns with two images first and one last."""
    messages = parts(chat("What?", "This.", "Why?"), IMAGE_PART, IMAGE_PART)
    messages[2]["content"].append(IMAGE_PART)
    return messages


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_parts_that_are_joined_beforehand_print_the_same(family):
    template = multimodal(TEMPLATES[family], image_token="<|i|>")
    messages = conversation_with_images()
    before = copy.deepcopy(messages)
    shorter, joined = chat_template.without_preamble(template, messages, "<|i|>")
    assert messages == before
    assert render(shorter, joined) == render(template, messages)
    assert len(shorter) < len(template)

    texts = [message["content"] for message in joined]
    assert texts == ["<|i|><|i|>What?", "This.", "Why?<|i|>"]
    roles = [message["role"] for message in joined]
    assert roles == ["user", "assistant", "user"]

    with_other_token = chat_template.without_preamble(template, messages, "<other>")
    assert with_other_token == (template, messages)


def test_parts_are_not_joined_for_a_template_that_reads_them_itself():
    template = multimodal(TEMPLATES["llava_1_5"], image_token="<image>")
    messages = conversation_with_images()
    before = copy.deepcopy(messages)
    shorter, joined = chat_template.without_preamble(template, messages, "<image>")
    assert messages == before
    assert render(shorter, joined) == render(template, messages)
    assert shorter is template
    assert joined is messages

    with_other_token = chat_template.without_preamble(template, messages, "<other>")
    assert with_other_token == (template, messages)


def test_the_check_s_texts_are_those_that_a_template_prints():
    texts = chat_template.check_texts(multimodal(SMOLLM2), {})
    are_prompts = []
    for text in texts:
        assert "<image>" in text
        are_prompts.append(text.endswith("<|im_start|>assistant\n"))
    assert any(are_prompts)
    assert not all(are_prompts)


def test_a_template_that_prints_nothing_has_no_text_to_check():
    assert chat_template.check_texts("{{ raise_exception('no') }}", {}) == []


def test_the_check_s_texts_are_with_tools_and_without():
    texts = chat_template.check_texts("{{ tools }}", {})
    assert any("weather" in text for text in texts)
    assert texts.count("None") < len(texts)


def assert_renders_hi_like(tokenizer, expected) -> None:
    assert render(tokenizer.chat_template, chat("Hi")) == expected


def test_of_several_templates_the_default_is_used():
    several_templates = {
        "tool_use": "{{ raise_exception('another') }}",
        "default": SMOLLM2,
    }
    tokenizer = tiny_parts.tokenizer(several_templates)
    assert set_chat_template(tokenizer, None)
    assert "raise_exception('another')" not in tokenizer.chat_template
    assert_renders_hi_like(tokenizer, render(SMOLLM2, chat("Hi")))


def test_of_several_templates_without_a_default_none_is_used():
    tokenizer = tiny_parts.tokenizer({"tool_use": SMOLLM2})
    assert set_chat_template(tokenizer, None)
    assert_renders_hi_like(tokenizer, render(multimodal(None), chat("Hi")))


def test_the_image_token_is_added_last_and_once(tmp_path):
    tokenizer = tiny_parts.tokenizer()
    set_chat_template(tokenizer, None)
    token_count = len(tokenizer)
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    assert image_token_id == token_count - 1
    assert tokenizer.decode([image_token_id], skip_special_tokens=True) == ""

    # A template from a file takes the place of any other.
    template_path = tmp_path / "other.jinja"
    template_path.write_text("{{ 'Ü' }}" + SMOLLM2, encoding="utf-8")
    assert set_chat_template(tokenizer, template_path)
    assert_renders_hi_like(tokenizer, "Ü" + render(SMOLLM2, chat("Hi")))
    assert len(tokenizer) == token_count


def tokenizer_with_image_token():
    tokenizer = tiny_parts.tokenizer()
    set_chat_template(tokenizer, None)
    return tokenizer


def llava_processor(tokenizer, layout=LAYOUT, strategy="default", left_out=1):
    """The processor that `build` makes for an encoder of 2 x 2 patches."""
    image_processor = tiny_parts.image_processor("clip")
    return make_processor(image_processor, tokenizer, layout, strategy, left_out)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end():
    tokenizer = tokenizer_with_image_token()
    tokenizer.pad_token = None
    assert llava_processor(tokenizer).tokenizer.pad_token == "<|im_end|>"


def test_a_pad_token_stays_and_pads_at_the_left():
    tokenizer = tokenizer_with_image_token()
    tokenizer.pad_token = "<unk>"
    processor = llava_processor(tokenizer)
    assert processor.tokenizer.pad_token == "<unk>"
    assert processor.tokenizer.padding_side == "left"


def test_a_processor_has_the_encoder_s_patches():
    processor = llava_processor(tokenizer_with_image_token())
    assert processor.vision_feature_select_strategy == "default"
    assert processor.patch_size == 8


@pytest.mark.parametrize(
    ("prefix", "strategy", "left_out", "additional", "kept"),
    [
        (1, "default", 1, 1, 4),
        (5, "default", 5, 1, 4),
        (5, "default", 1, 5, 8),
        (5, "full", 5, 5, 9),
        (0, "full", 1, 0, 4),
    ],
)
def test_a_processor_counts_the_tokens_that_stay(prefix, strategy, left_out, additional, kept):
    layout = TokenLayout(prefix, 4, 8, "dinov3_vit")
    processor = llava_processor(tokenizer_with_image_token(), layout, strategy, left_out)
    assert processor.num_additional_image_tokens == additional
    assert check_processor(processor) == kept


def unsettled_processor(tokenizer, template):
    """A processor that is not settled yet."""
    image_token = AddedToken("<image>", special=True, normalized=False)
    tokenizer.add_tokens(image_token, special_tokens=True)
    return LlavaProcessor(
        tiny_parts.image_processor("clip"),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def test_without_a_template_a_tokenizer_adds_what_it_added():
    processor = unsettled_processor(chat_families.adding_tokenizer(["<s>"]), None)
    before = processor.tokenizer.encode("a")
    normalize_tokenization(processor)
    assert processor.tokenizer.encode("a") == before
    assert processor.tokenizer.convert_ids_to_tokens(before[0]) == "<s>"
    assert processor.tokenizer.padding_side == "left"
    assert processor.chat_template is None


class Stubborn(PreTrainedTokenizerFast):
    """A tokenizer that always adds its tokens, as Splinter's does."""

    def update_post_processor(self):
        pass


def test_a_tokenizer_that_adds_tokens_whatever_is_set_is_refused():
    adding = chat_families.adding_tokenizer(["<s>"], ["</s>"])
    tokenizer = Stubborn(
        tokenizer_object=adding.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    template = multimodal("{{ bos_token }}" + SMOLLM2)
    processor = unsettled_processor(tokenizer, template)
    with pytest.raises(ValueError, match=r"\['<s>', '</s>'\] to texts whatever is set"):
        normalize_tokenization(processor)


def test_a_first_token_that_is_printed_behind_white_space_is_not_printed_again(tmp_path):
    template = "  {{ bos_token }}" + SMOLLM2
    processor = built(tmp_path, chat_families.adding_tokenizer(["<s>"]), template)
    text = processor.apply_chat_template(chat("Hi"))
    assert text == render(template, chat("Hi"))
    assert text.count("<s>") == 1


def test_a_tokenizer_that_drops_unknown_letters_is_refused():
    tokenizer = tokenizer_with_image_token()
    backend = tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=False)
    model_class = type(backend.model)
    backend.model = model_class(vocab=vocabulary, merges=[])
    with pytest.raises(ValueError, match="drops letters.*unk_token"):
        llava_processor(tokenizer)


def test_a_template_that_prints_the_first_token_before_some_texts_only_is_refused(tmp_path):
    sometimes = "{% if messages[0]['role'] == 'system' %}{{ bos_token }}{% endif %}"
    tokenizer = chat_families.adding_tokenizer(["<s>"])
    message = "'<s>' before a text.* before some only.*--chat-template"
    with pytest.raises(ValueError, match=message):
        built(tmp_path, tokenizer, sometimes + SMOLLM2)


def test_a_first_token_that_is_no_token_of_its_own_in_a_text_is_refused(tmp_path):
    tokenizer = tiny_parts.tokenizer(extra=("<bos>",))
    adds_bos = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 3)])
    tokenizer.backend_tokenizer.post_processor = adds_bos
    with pytest.raises(ValueError, match="puts '<bos>' before a text.* other tokens"):
        built(tmp_path, tokenizer, SMOLLM2)


SECOND_ANSWER = "  Two\nlines "


def marked_answers(family):
    """What marks hold of the answers "A kite." and `SECOND_ANSWER`."""
    if family == "llama2":
        # Sets answers apart with spaces; its generation prompt ends before one.
        return [" A kite. </s>", " Two\nlines </s>"]
    end_of_turn = END_OF_TURN[family]
    second_answer = SECOND_ANSWER
    if family in chat_families.TRIMS:
        second_answer = second_answer.strip()
    if family == "qwen3":
        # Opens the last answer with an empty thought, which is to be generated.
        second_answer = "<think>\n\n</think>\n\n" + second_answer
    return ["A kite." + end_of_turn, second_answer + end_of_turn]


@pytest.mark.parametrize("family", END_OF_TURN)
def test_marks_hold_each_answer_and_its_end_of_turn_and_nothing_else(family):
    new_template, is_marked = multimodal_chat_template(TEMPLATES[family])
    assert is_marked

    messages = chat("What?", "A kite.", "And?", SECOND_ANSWER)
    expected = marked_answers(family)
    assert marked(new_template, messages) == expected
    assert marked(new_template, parts(messages, IMAGE_PART)) == expected
    assert marked(new_template, messages[:1], add_generation_prompt=True) == []


QWEN_CALL = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "tide", "parameters": {"port": "Brest"}}<|eot_id|>'
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "expected_call", "expected_answer"),
    [
        ("qwen2_5", QWEN_CALL, "Low tide."),
        ("qwen3", QWEN_CALL, EMPTY_THOUGHT + "Low tide."),
        ("qwen3_instruct_2507", QWEN_CALL, "Low tide."),
        ("llama3_1", LLAMA_CALL, "Low tide."),
        ("llama3_2", LLAMA_CALL, "Low tide."),
    ],
    ids=["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"],
)
def test_marks_hold_tool_calls_but_not_what_tools_say(family, expected_call, expected_answer):
    new_template = multimodal(TEMPLATES[family])
    expected = [expected_call, expected_answer + END_OF_TURN[family]]
    actual = marked(new_template, chat_families.TOOL_CALL, tools=[chat_families.WEATHER])
    assert actual == expected


@pytest.mark.parametrize(
    "family",
    ["cohere", "cohere2", "lfm2", "lfm2_v2", "qwen2_5_vl", "qwen3_vl"],
)
def test_marks_from_trl_are_used_where_we_have_no_edit(family):
    new_template, is_marked = multimodal_chat_template(chat_families.SHIPPED[family])
    assert is_marked

    messages = parts(chat("What?", "A kite.", "And?", "Two."), IMAGE_PART)
    first_answer, second_answer = marked(new_template, messages)
    assert "A kite." in first_answer
    assert first_answer.rstrip().endswith(">")
    assert "What?" not in first_answer
    assert "Two." in second_answer
    assert "And?" not in second_answer


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "gptoss"],
)
def test_marks_that_would_change_the_text_are_not_used(family):
    new_template, is_marked = multimodal_chat_template(chat_families.SHIPPED[family])
    assert not is_marked
    assert "generation %}" not in new_template


ANSWER = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("right_part", "wrong_part"),
    [
        pytest.param(
            ANSWER,
            "{{ message['content'] }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
            id="answer left out",
        ),
        pytest.param(
            ANSWER,
            "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
            id="end of turn left out",
        ),
        pytest.param(
            "{%- else %}{{ message['content'] + '<|im_end|>' }}",
            "{%- else %}" + ANSWER,
            id="questions marked",
        ),
    ],
)
def test_wrong_marks_of_a_template_itself_are_not_claimed(right_part, wrong_part):
    right_template = multimodal(SMOLLM2)
    assert right_template.count(right_part) == 1
    assert has_marks(right_template)
    assert not has_marks(right_template.replace(right_part, wrong_part))


MARKED_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}" + ANSWER + "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT = "{{ '<|im_start|>assistant\n' }}"
REFUSES_TOOLS = "{% if message['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}"
MARKS_TOOLS = "{% if tools %}{% generation %}{{ 'tools' }}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        pytest.param(
            {},
            True,
            id="nothing",
        ),
        pytest.param(
            {PROMPT + "{% endif %}": PROMPT + "{% else %}{{ 'So long.' }}{% endif %}"},
            True,
            id="text behind the last turn",
        ),
        pytest.param(
            {PROMPT: PROMPT.replace("assistant", "ASSISTANT")},
            False,
            id="another generation prompt",
        ),
        pytest.param(
            {"in messages": "in messages[-1:]"},
            False,
            id="only the last turn is printed",
        ),
        pytest.param(
            {"{% for message": MARKS_TOOLS + "{% for message"},
            False,
            id="tools are marked too",
        ),
        pytest.param(
            {
                "{{ '<|im_start|>'": REFUSES_TOOLS + "{{ '<|im_start|>'",
                "== 'assistant'": "== 'assistant' and loop.index0 < 3",
                "['content']": "['content'].strip()",
            },
            False,
            id="only first answers are marked, and trimmed",
        ),
    ],
)
def test_marks_are_those_of_every_answer_and_end_where_a_generation_prompt_begins(edits, expected):
    template = MARKED_CHATML
    for old_part, new_part in edits.items():
        assert old_part in template
        template = template.replace(old_part, new_part)
    assert has_marks(template) == expected


@pytest.mark.parametrize("printed", ["<image>", "<image><image>What is this?", "What is this?"])
def test_a_template_that_prints_parts_otherwise_is_no_reader_of_images(printed):
    template = (
        "{% for m in messages %}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        + printed
        + "{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    )
    text = render(multimodal(template), parts(chat("Why?"), IMAGE_PART))
    assert text == "<image>Why?<|im_end|>"


def test_a_template_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="not valid Jinja: TemplateSyntaxError"):
        multimodal_chat_template("{% if %}" + SMOLLM2)


def test_a_template_that_refuses_every_conversation_is_kept_without_marks():
    refusing_template = "{{ raise_exception('no') }}"
    new_template, is_marked = multimodal_chat_template(refusing_template)
    assert new_template.endswith(refusing_template)
    assert not is_marked


def print_constant(messages, tools, prompt):
    return "same"


def print_parts_otherwise(messages, tools, prompt):
    return "same" if isinstance(messages[0]["content"], str) else "parts"


def print_tools_otherwise(messages, tools, prompt):
    return "tools" if tools else "same"


def print_prompts_otherwise(messages, tools, prompt):
    return "prompt" if prompt else "same"


def difference(first, second, lists=False):
    return chat_template._changed_conversation(first, second, lists)


def test_conversations_are_compared_in_parts_if_that_is_asked():
    assert difference(print_parts_otherwise, print_constant) is None
    assert difference(print_parts_otherwise, print_constant, lists=True) is not None
    assert difference(print_constant, print_constant, lists=True) is None


def test_conversations_are_compared_with_tools_and_prompts():
    assert "tool" in difference(print_tools_otherwise, print_constant)
    assert difference(print_prompts_otherwise, print_constant) is not None


def test_marks_need_an_end_of_turn():
    assert not has_marks(chat_families.LLAVA_15)
    assert not has_marks(None, special_tokens={"bos_token": "<s>"})


VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)


def test_vicuna_written_out():
    template = multimodal(None)
    messages = parts(chat("What?", "A kite.", "And?"), IMAGE_PART)
    text = render(template, messages, add_generation_prompt=True)
    turns = "USER: <image>What? ASSISTANT: A kite.</s>USER: And? ASSISTANT:"
    assert text == f"<s>{VICUNA_SYSTEM}{turns}"


def test_vicuna_with_a_system_turn():
    template = multimodal(None)
    with_system = chat(("system", "Be kind."), "What?")
    assert render(template, with_system) == "<s>Be kind. USER: What? "
    with_empty_system = chat(("system", ""), "What?")
    assert render(template, with_empty_system) == "<s>USER: What? "


def test_vicuna_marks_answers():
    template, is_marked = multimodal_chat_template(None)
    assert is_marked
    messages = chat("What?", "A kite.", "And?", "Two.")
    assert marked(template, messages) == [" A kite.</s>", " Two.</s>"]


def test_vicuna_has_no_tools():
    with pytest.raises(Exception, match="'tool'"):
        render(multimodal(None), chat_families.TOOL_CALL)


@pytest.mark.parametrize(
    ("rank", "warning_count"),
    [
        (None, 1),
        ("0", 1),
        ("1", 0),
    ],
)
def test_of_several_processes_the_first_says_what_the_template_now_prints(
    tmp_path, monkeypatch, caplog, rank, warning_count
):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    processor = built(tmp_path, chat_families.adding_tokenizer(["<s>"]), SMOLLM2)
    assert processor.apply_chat_template(chat("Hi")).startswith("<s>")
    warning = "The tokenizer put '<s>' before a text"
    assert caplog.text.count(warning) == warning_count
