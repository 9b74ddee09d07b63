"""Chat templates: text as before, images and generation marks where they belong."""

import copy
import io
import re
from datetime import datetime
from itertools import product

import chat_families as families
import numpy as np
import pytest
import tiny_parts
import train_data
from chat_families import END_OF_TURN, SMOLLM2, TEMPLATES, chat, marked, parts, render
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, AutoProcessor, LlavaProcessor, PreTrainedTokenizerFast

from normalign_llava.assembly import chat_template
from normalign_llava.assembly.chat_template import multimodal_chat_template
from normalign_llava.assembly.encoder import TokenLayout
from normalign_llava.assembly.parts import set_chat_template
from normalign_llava.assembly.processing import make_processor, settle, text_tokenizer
from normalign_llava.checkpoint.opening import Checkpoint, check_processor
from normalign_llava.checkpoint.prompts import with_fixed_date
from normalign_llava.data.rows.checks import token_lengths
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.train.collator import ConversationCollator


def on_the_day(template):
    """A family's template on a day in July: with that day's text in place of each call."""
    call = re.compile(r"strftime_now\((['\"])(.*?)\1\)")
    return call.sub(lambda found: repr(datetime(2024, 7, 26).strftime(found[2])), template)


DATED = sorted(name for name in TEMPLATES if "strftime_now" in TEMPLATES[name])


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_only_conversations_render_as_under_the_models_own_template(name):
    template = multimodal_chat_template(TEMPLATES[name])[0]
    options = ({}, {"tools": [families.WEATHER]}, {"enable_thinking": False})
    for messages, prompt, how in product(families.CONVERSATIONS, (False, True), options):
        how = {**how, "add_generation_prompt": prompt}
        expected = families.outcome(on_the_day(TEMPLATES[name]), messages, **how)
        assert families.outcome(template, messages, **how) == expected, messages


@pytest.mark.parametrize(
    "head", ["\n\n  a\n", "  {% if true %}\n  b\n  {% endif %}\n", "{#- c -#}\n\n", "\t{{- 1 }}\n "]
)
def test_white_space_before_the_first_statement_is_kept(head):
    template = head + SMOLLM2
    new = multimodal_chat_template(template)[0]
    assert render(new, chat("Hi")) == render(template, chat("Hi"))
    for text in (new, template):
        printed = render(chat_template.printing_first(text, "<s> ", "<image>"), chat("Hi"))
        assert printed == "<s> " + render(template, chat("Hi"))


@pytest.mark.parametrize(
    "name", [*END_OF_TURN, "cohere", "lfm2", "glm4moe", "deepseekv3", "gptoss", "gemma4"]
)
def test_image_parts_become_the_image_token_in_every_family(name):
    template = multimodal_chat_template(TEMPLATES[name], image_token="<|image's|>")[0]
    images = {"type": "image"}, {"type": "image", "image": np.zeros((2, 2, 3))}
    with_images = render(template, parts(chat("What?", "This.", "Why?"), *images))
    assert with_images == render(template, chat("<|image's|><|image's|>What?", "This.", "Why?"))
    assert with_images.count("<|image's|>") == 2


@pytest.mark.parametrize("name", DATED)
def test_prompts_tell_a_fixed_date_whatever_the_day(name):
    assert "llama3_2" in DATED
    template = multimodal_chat_template(TEMPLATES[name])[0]
    messages = chat("What?", "A kite.")
    on_that_day = render(on_the_day(TEMPLATES[name]), messages)
    assert render(TEMPLATES[name], messages) != on_that_day  # the family's own tells today's
    assert render(template, messages) == on_that_day


def test_every_way_to_write_a_date_is_that_of_strftime():
    letters = (
        "a A w u d -d e j -j b h B m -m y Y C g G U W V H -H I -I p M -M S -S f z Z c x X D F T R"
    )
    for directive in [f"%{letter}" for letter in letters.split()] + ["%% of %d", "%A, %d. %B %Y"]:
        dated = f"{{{{ strftime_now({directive!r}) }}}}"
        text = render(with_fixed_date(dated), chat("Why?"))
        assert text == datetime(2024, 7, 26).strftime(directive), directive


def test_a_template_without_a_date_and_one_with_a_fixed_date_stay():
    assert with_fixed_date(SMOLLM2) == SMOLLM2
    fixed = with_fixed_date(TEMPLATES["llama3_2"])
    assert fixed != TEMPLATES["llama3_2"] and with_fixed_date(fixed) == fixed


def test_checkpoints_from_before_tell_the_same_date_too(tmp_path):
    """Their templates ask for today's date: opening and training put in the fixed one."""
    processor = built(tmp_path / "built", families.byte_tokenizer(), TEMPLATES["llama3_2"])
    fixed = processor.chat_template
    assert (before := fixed.replace(with_fixed_date(" strftime_now")[: -len(" strftime_now")], ""))
    assert before != fixed and "strftime_now" in before
    processor.chat_template = processor.tokenizer.chat_template = before
    processor.save_pretrained(tmp_path / "older")
    opened = Checkpoint(str(tmp_path / "older"), None, {}).processor
    given = AutoProcessor.from_pretrained(tmp_path / "older")
    collator = ConversationCollator(given)
    messages = parts(chat("Why?"), {"type": "image"})
    for settled in (opened, opened.tokenizer, collator.processor, collator.processor.tokenizer):
        text = settled.apply_chat_template(messages, tokenize=False)
        assert "Today Date: 26 Jul 2024" in text


def test_a_template_whose_generation_prompt_alone_would_change_is_refused():
    prompt = "{{ 'one' if multimodal is defined else 'other' }}"  # which the preamble defines
    odd = SMOLLM2.replace("{{ '<|im_start|>assistant\n' }}", prompt)
    assert odd != SMOLLM2
    with pytest.raises(ValueError, match="renders the conversation .* differently"):
        multimodal_chat_template(odd)


LAYOUT = TokenLayout(prefix=1, patches=4, patch_size=8, encoder="clip_vision_model")


def built(folder, tokenizer, template):
    """The processor that `build` writes, loaded again."""
    tokenizer.chat_template = template
    set_chat_template(tokenizer, None)
    image_processor = tiny_parts.image_processor("clip")
    make_processor(image_processor, tokenizer, LAYOUT, "default", 1).save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


FOUR = ("smollm2", "llama2", "gemma3", "llava_1_5")
WAYS = dict.fromkeys([*product(TEMPLATES, ["first and last"]), *product(FOUR, families.ADDING)])


@pytest.mark.parametrize("name, adds", WAYS)
def test_all_ways_to_tokenize_a_conversation_agree(tmp_path, name, adds):
    """Of users, `transformers serve`, TRL, training, `ask`, `evaluate`, and the language model."""
    make, start, end = families.ADDING[adds]
    own = make()
    processor = built(tmp_path, make(), TEMPLATES[name])
    own.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    image = {"path": None, "bytes": train_data.image_bytes()}
    shown = {"type": "image", "image": Image.open(io.BytesIO(image["bytes"]))}
    template = multimodal_chat_template(TEMPLATES[name], special_tokens=own.special_tokens_map)[0]
    for turns, images in ((["Hello"], []), (["Why?"], [shown]), (["Why?", "So."], [shown])):
        messages = parts(chat(*turns), *images)
        prompt = {"add_generation_prompt": len(turns) == 1}
        text = render(template, messages, **prompt, **own.special_tokens_map)
        text = text.replace("<image>", "<image>" * 4)
        expected = own.encode(text, add_special_tokens=False)
        if not text.startswith("".join(start)):
            expected = own.encode(text)
            assert own.convert_ids_to_tokens(expected)[: len(start)] == start
            expected = expected[: len(expected) - len(end)]
        rendered = processor.apply_chat_template(messages, **prompt)
        tokenizer = processor.tokenizer
        pictures = [part["image"] for part in images] or None
        as_tokens = dict(tokenize=True, return_dict=True)
        repeated = "<image>" * 4
        ways = {
            "processor(text)": processor(text=rendered, images=pictures),
            "its template": processor.apply_chat_template(messages, **as_tokens, **prompt),
            "TRL": tokenizer([rendered.replace("<image>", repeated)], add_special_tokens=False),
        }
        if not images:
            ways["the tokenizer's template"] = tokenizer.apply_chat_template([messages], **prompt)
        elif len(messages) == 1:
            ways["ask"] = next(batches(processor, [Sample("", "Why?", image)], 1))
        elif chat_template.has_generation_marks(processor.chat_template):
            row = parse_row(train_data.llava("<image>Why?", "So.", image))
            ways["training"] = ConversationCollator(processor)([row])
            assert token_lengths(processor, [row]) == [len(expected)]
        for way, encoded in ways.items():
            assert [*map(int, encoded["input_ids"][0])] == expected, way
    plain = own.encode("Plain text.")
    assert text_tokenizer(tokenizer).encode("Plain text.") == plain[: len(plain) - len(end)]
    assert tokenizer.encode("Plain text.") == own.encode("Plain text.", add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm2", "llava_1_5", "qwen3"])
def test_parts_that_are_joined_beforehand_print_the_same(name):
    image = "<image>" if name == "llava_1_5" else "<|i|>"
    template = multimodal_chat_template(TEMPLATES[name], image_token=image)[0]
    messages = parts(chat("What?", "This.", "Why?"), {"type": "image"}, {"type": "image"})
    messages[2]["content"].append({"type": "image"})
    before = copy.deepcopy(messages)
    shorter, joined = chat_template.without_preamble(template, messages, image)
    assert messages == before
    assert render(shorter, joined) == render(template, messages)
    if name == "llava_1_5":  # which reads parts itself
        assert shorter is template and joined is messages
    else:
        assert len(shorter) < len(template)
        texts = [message["content"] for message in joined]
        assert texts == ["<|i|><|i|>What?", "This.", "Why?<|i|>"]
        assert [message["role"] for message in joined] == ["user", "assistant", "user"]
    assert chat_template.without_preamble(template, messages, "<other>") == (template, messages)


def test_the_check_s_texts_are_those_that_a_template_prints():
    texts = chat_template.check_texts(multimodal_chat_template(SMOLLM2)[0], {})
    assert all("<image>" in text for text in texts)
    prompts = [text.endswith("<|im_start|>assistant\n") for text in texts]
    assert any(prompts) and not all(prompts)
    assert chat_template.check_texts("{{ raise_exception('no') }}", {}) == []
    shown = chat_template.check_texts("{{ tools }}", {})
    assert any("weather" in text for text in shown) and shown.count("None") < len(shown)


def test_of_several_templates_the_default_is_used_and_a_file_in_place_of_any(tmp_path):
    several = {"tool_use": "{{ raise_exception('another') }}", "default": SMOLLM2}
    tokenizer = tiny_parts.tokenizer(several)
    assert set_chat_template(tokenizer, None)
    assert "raise_exception('another')" not in tokenizer.chat_template
    assert render(tokenizer.chat_template, chat("Hi")) == render(SMOLLM2, chat("Hi"))
    size = len(tokenizer)
    number = tokenizer.convert_tokens_to_ids("<image>")
    assert number == size - 1 and tokenizer.decode([number], skip_special_tokens=True) == ""
    (tmp_path / "other.jinja").write_text("{{ 'Ü' }}" + SMOLLM2, encoding="utf-8")
    assert set_chat_template(tokenizer, tmp_path / "other.jinja")
    assert render(tokenizer.chat_template, chat("Hi")) == "Ü" + render(SMOLLM2, chat("Hi"))
    assert len(tokenizer) == size  # the image token is added once
    tokenizer = tiny_parts.tokenizer({"tool_use": SMOLLM2})  # of which none is the default
    assert set_chat_template(tokenizer, None)
    assert render(tokenizer.chat_template, chat("Hi")) == render(
        multimodal_chat_template(None)[0], chat("Hi")
    )


def test_a_processor_has_a_pad_token_and_the_encoder_s_patches():
    for pad, expected in ((None, "<|im_end|>"), ("<unk>", "<unk>")):
        tokenizer = tiny_parts.tokenizer()
        set_chat_template(tokenizer, None)
        tokenizer.pad_token = pad
        image_processor = tiny_parts.image_processor("clip")
        made = make_processor(image_processor, tokenizer, LAYOUT, "default", 1)
        assert made.tokenizer.pad_token == expected and made.tokenizer.padding_side == "left"
        assert made.vision_feature_select_strategy == "default" and made.patch_size == 8


@pytest.mark.parametrize(
    "prefix, strategy, left_out, additional",
    [(1, "default", 1, 1), (5, "default", 5, 1), (5, "default", 1, 5), (5, "full", 5, 5)]
    + [(0, "full", 1, 0)],
)
def test_a_processor_counts_the_tokens_that_stay(prefix, strategy, left_out, additional):
    tokenizer = tiny_parts.tokenizer()
    set_chat_template(tokenizer, None)
    layout = TokenLayout(prefix, 4, 8, "dinov3_vit")
    image_processor = tiny_parts.image_processor("clip")
    made = make_processor(image_processor, tokenizer, layout, strategy, left_out)
    assert made.num_additional_image_tokens == additional
    kept = 4 + prefix
    if strategy == "default":
        kept -= left_out
    assert check_processor(made) == kept


def processor_of(tokenizer, template):
    """One that is not settled yet."""
    token = AddedToken("<image>", special=True, normalized=False)
    tokenizer.add_tokens(token, special_tokens=True)
    how = dict(patch_size=8, vision_feature_select_strategy="default")
    how |= dict(num_additional_image_tokens=1, chat_template=template)
    return LlavaProcessor(tiny_parts.image_processor("clip"), tokenizer, **how)


def test_without_a_template_a_tokenizer_adds_what_it_added():
    processor = processor_of(families.adding_tokenizer(["<s>"]), None)
    before = processor.tokenizer.encode("a")
    settle(processor)
    assert processor.tokenizer.encode("a") == before
    assert processor.tokenizer.convert_ids_to_tokens(before[0]) == "<s>"
    assert processor.tokenizer.padding_side == "left" and processor.chat_template is None


class Stubborn(PreTrainedTokenizerFast):
    """A tokenizer that always adds its tokens, as Splinter's does."""

    def update_post_processor(self):
        pass


def test_a_tokenizer_that_adds_tokens_whatever_is_set_is_refused():
    backend = families.adding_tokenizer(["<s>"], ["</s>"]).backend_tokenizer
    tokens = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer = Stubborn(tokenizer_object=backend, **tokens)
    template = multimodal_chat_template("{{ bos_token }}" + SMOLLM2)[0]
    with pytest.raises(ValueError, match=r"\['<s>', '</s>'\] to texts whatever is set"):
        settle(processor_of(tokenizer, template))


def test_a_first_token_that_is_printed_behind_white_space_is_not_printed_again(tmp_path):
    template = "  {{ bos_token }}" + SMOLLM2
    processor = built(tmp_path, families.adding_tokenizer(["<s>"]), template)
    text = processor.apply_chat_template(chat("Hi"))
    assert text == render(template, chat("Hi")) and text.count("<s>") == 1


def test_a_tokenizer_that_drops_unknown_letters_is_refused():
    tokenizer = tiny_parts.tokenizer()
    set_chat_template(tokenizer, None)
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(
        vocab=tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False), merges=[]
    )
    with pytest.raises(ValueError, match="drops letters.*unk_token"):
        make_processor(tiny_parts.image_processor("clip"), tokenizer, LAYOUT, "default", 1)


def test_templates_and_tokenizers_that_cannot_agree_are_refused(tmp_path):
    some = "{% if messages[0]['role'] == 'system' %}{{ bos_token }}{% endif %}" + SMOLLM2
    with pytest.raises(ValueError, match="'<s>' before a text.* before some only.*--chat-template"):
        built(tmp_path, families.adding_tokenizer(["<s>"]), some)
    tokenizer = tiny_parts.tokenizer(extra=("<bos>",))  # which is no token of its own in a text
    adds = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 3)])
    tokenizer.backend_tokenizer.post_processor = adds
    with pytest.raises(ValueError, match="puts '<bos>' before a text.* other tokens"):
        built(tmp_path, tokenizer, SMOLLM2)


@pytest.mark.parametrize("name", END_OF_TURN)
def test_marks_hold_each_answer_and_its_end_of_turn_and_nothing_else(name):
    new, has_marks = multimodal_chat_template(TEMPLATES[name])
    assert has_marks
    second = "Two\nlines" if name in families.TRIMS else "  Two\nlines "
    expected = [answer + END_OF_TURN[name] for answer in ("A kite.", second)]
    if name == "llama2":  # sets answers apart with spaces; its generation prompt ends before one
        expected = [" A kite. </s>", " Two\nlines </s>"]
    if name == "qwen3":  # opens the last answer with an empty thought, which is to be generated
        expected[1] = "<think>\n\n</think>\n\n" + expected[1]
    messages = chat("What?", "A kite.", "And?", "  Two\nlines ")
    for conversation in (messages, parts(messages, {"type": "image"})):
        assert marked(new, conversation) == expected
    assert marked(new, messages[:1], add_generation_prompt=True) == []


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"]
)
def test_marks_hold_tool_calls_but_not_what_tools_say(name):
    new, _ = multimodal_chat_template(TEMPLATES[name])
    call = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call><|im_end|>'
    if name.startswith("llama"):
        call = '{"name": "tide", "parameters": {"port": "Brest"}}<|eot_id|>'
    answer = "<think>\n\n</think>\n\nLow tide." if name == "qwen3" else "Low tide."
    expected = [call, answer + END_OF_TURN[name]]
    assert marked(new, families.TOOL_CALL, tools=[families.WEATHER]) == expected


@pytest.mark.parametrize("name", ["cohere", "cohere2", "lfm2", "lfm2_v2", "qwen2_5_vl", "qwen3_vl"])
def test_marks_from_trl_are_used_where_we_have_no_edit(name):
    new, has_marks = multimodal_chat_template(families.SHIPPED[name])
    assert has_marks
    first, second = marked(new, parts(chat("What?", "A kite.", "And?", "Two."), {"type": "image"}))
    assert "A kite." in first and first.rstrip().endswith(">") and "What?" not in first
    assert "Two." in second and "And?" not in second


@pytest.mark.parametrize("name", ["qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "gptoss"])
def test_marks_that_would_change_the_text_are_not_used(name):
    new, has_marks = multimodal_chat_template(families.SHIPPED[name])
    assert not has_marks and "generation %}" not in new


ANSWER = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"


@pytest.mark.parametrize(
    "old, new",
    [
        (ANSWER, "{{ message['content'] }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"),
        (ANSWER, "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"),
        ("{%- else %}{{ message['content'] + '<|im_end|>' }}", "{%- else %}" + ANSWER),
    ],
    ids=["answer left out", "end of turn left out", "questions marked"],
)
def test_wrong_marks_of_a_template_itself_are_not_claimed(old, new):
    right = multimodal_chat_template(SMOLLM2)[0]
    assert right.count(old) == 1 and multimodal_chat_template(right)[1]
    assert not multimodal_chat_template(right.replace(old, new))[1]


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}" + ANSWER + "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT = "{{ '<|im_start|>assistant\n' }}{% endif %}"
NO_TOOLS = (
    "{% if message['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ '<|im_start|>'"
)
OF_TOOLS = "{% if tools %}{% generation %}{{ 'tools' }}{% endgeneration %}{% endif %}{% for message"
EDITS = {
    "nothing": ({}, True),
    "text behind the last turn": (
        {PROMPT: PROMPT[:-11] + "{% else %}{{ 'So long.' }}{% endif %}"},
        True,
    ),
    "another generation prompt": ({PROMPT: PROMPT.replace("assistant", "ASSISTANT")}, False),
    "the last turn alone is printed": ({"in messages": "in messages[-1:]"}, False),
    "tools are marked too": ({"{% for message": OF_TOOLS}, False),
    "first answers alone are marked, and trimmed": (
        {
            "{{ '<|im_start|>'": NO_TOOLS,
            "== 'assistant'": "== 'assistant' and loop.index0 < 3",
            "['content']": "['content'].strip()",
        },
        False,
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_marks_are_those_of_every_answer_and_end_where_a_generation_prompt_begins(kind):
    edits, holds = EDITS[kind]
    template = CHATML
    for old, new in edits.items():
        assert old in template
        template = template.replace(old, new)
    assert multimodal_chat_template(template)[1] == holds


@pytest.mark.parametrize("printed", ["<image>", "<image><image>What is this?", "What is this?"])
def test_a_template_that_prints_parts_otherwise_is_no_reader_of_images(printed):
    lists = (
        f"{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{printed}{{% endif %}}"
    )
    template = f"{{% for m in messages %}}{lists}{{{{ '<|im_end|>' }}}}{{% endfor %}}"
    new = multimodal_chat_template(template)[0]
    assert render(new, parts(chat("Why?"), {"type": "image"})) == "<image>Why?<|im_end|>"


def test_a_template_that_cannot_be_read_is_refused_and_one_that_refuses_a_conversation_is_not():
    with pytest.raises(ValueError, match="not valid Jinja: TemplateSyntaxError"):
        multimodal_chat_template("{% if %}" + SMOLLM2)
    refusing = "{{ raise_exception('no') }}"
    template, has_marks = multimodal_chat_template(refusing)
    assert template.endswith(refusing) and not has_marks


def test_conversations_are_compared_with_tools_and_prompts_and_in_parts():
    def difference(first, second, lists=False):
        return chat_template._difference(first, second, lists)

    def constant(messages, tools, prompt):
        return "same"

    def of_parts(messages, tools, prompt):
        return "same" if isinstance(messages[0]["content"], str) else "parts"

    def of_tools(messages, tools, prompt):
        return "tools" if tools else "same"

    def of_prompts(messages, tools, prompt):
        return "prompt" if prompt else "same"

    assert difference(constant, constant, lists=True) is difference(of_parts, constant) is None
    assert difference(of_parts, constant, lists=True) is not None
    assert "tool" in difference(of_tools, constant)
    assert difference(of_prompts, constant) is not None


def test_marks_need_an_end_of_turn():
    assert not multimodal_chat_template(families.LLAVA_15)[1]
    assert not multimodal_chat_template(None, special_tokens={"bos_token": "<s>"})[1]


def test_vicuna_written_out():
    system = "A chat between a curious user and an artificial intelligence assistant. "
    system += "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    new, has_marks = multimodal_chat_template(None)
    assert has_marks
    messages = parts(chat("What?", "A kite.", "And?"), {"type": "image"})
    assert render(new, messages, add_generation_prompt=True) == (
        f"<s>{system}USER: <image>What? ASSISTANT: A kite.</s>USER: And? ASSISTANT:"
    )
    assert render(new, chat(("system", "Be kind."), "What?")) == "<s>Be kind. USER: What? "
    assert render(new, chat(("system", ""), "What?")) == "<s>USER: What? "
    assert marked(new, chat("What?", "A kite.", "And?", "Two.")) == [" A kite.</s>", " Two.</s>"]
    with pytest.raises(Exception, match="'tool'"):
        render(new, families.TOOL_CALL)


@pytest.mark.parametrize("rank, told", [(None, 1), ("0", 1), ("1", 0)])
def test_of_several_processes_the_first_tells_what_the_template_now_prints(
    tmp_path, monkeypatch, caplog, rank, told
):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    processor = built(tmp_path, families.adding_tokenizer(["<s>"]), SMOLLM2)
    assert processor.apply_chat_template(chat("Hi")).startswith("<s>")
    assert caplog.text.count("The tokenizer put '<s>' before a text") == told
