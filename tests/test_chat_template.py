"""Chat templates: text as the language model's own, images as tokens, marks around what the model has to generate."""

from importlib.resources import files

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import is_chat_template_stop_token_trained

from normalign_llava.chat_template import (
    VICUNA_TEMPLATE,
    MultimodalTemplate,
    check_chat_template,
    multimodal_chat_template,
)
from normalign_llava.quickstart.convert import convert_language
from normalign_llava.quickstart.fetch import FetchError


# SmolLM2-135M-Instruct's, as its GGUF file has it (Apache-2.0).
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
# The pattern of Zephyr and TinyLlama, whose statements stand on lines of their own.
ZEPHYR = r"""{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
# The patterns of Llama 2, Mistral 7B and Granite 3: how they print turns, without tools and default system turns.
LLAMA_2 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GRANITE_30 = r"""{%- for message in messages %}
    {%- if message['role'] == 'user' %}
    {{- '<|start_of_role|>user<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- elif message['role'] == 'assistant' %}
    {{- '<|start_of_role|>assistant<|end_of_role|>'  + message['content'] + '<|end_of_text|>\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
GRANITE_31 = """{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>
' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
            {%- if controls %}
                {{- ' ' + controls | tojson()}}
            {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
# The pattern of llava-hf checkpoints: reads nothing but lists of parts, and prints the image token itself.
LLAVA_15 = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SHIPPED = {
    path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8")
    for path in (files("trl") / "chat_templates").iterdir()
    if path.name.endswith(".jinja") and not path.name.endswith("_training.jinja")
}
TEMPLATES = {
    **SHIPPED,
    "smollm2": SMOLLM2,
    "zephyr": ZEPHYR,
    "llama2": LLAMA_2,
    "mistral": MISTRAL,
    "granite3_0": GRANITE_30,
    "granite3_1": GRANITE_31,
    "llava_1_5": LLAVA_15,
}
END_OF_TURN = {
    "smollm2": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "zephyr": "</s>",
    "llama2": "</s>",
    "mistral": "</s>",
    "granite3_0": "<|end_of_text|>",
    "granite3_1": "<|end_of_text|>",
}
TRIMS = ("llama3", "llama3_1", "llama3_2", "gemma", "gemma3")
WEATHER = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "High or low?",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}


def chat(*turns):
    """user, assistant, user, ... in turn; a leading ("system", text) pair stands for itself."""
    messages = [{"role": "system", "content": turns[0][1]}] if turns and isinstance(turns[0], tuple) else []
    roles = ("user", "assistant")
    turns = turns[len(messages) :]
    return messages + [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


TOOL_CALL = [
    {"role": "user", "content": "Tide in Brest?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}],
    },
    {"role": "tool", "content": "low"},
    {"role": "assistant", "content": "Low tide."},
]
CONVERSATIONS = [
    chat("Hello"),
    chat(("system", "  Be kind.  "), "Hello"),
    chat("Hello", "Hi", "How are you?"),
    chat(("system", ""), "Hello", "\nHi\n\n", " {{ messages }} {% raw %} ", "<b>&amp;</b>", "Ünïcode ☃ 🪁", "\tok "),
    chat("", "", "again", ""),
    chat("Why?", "<think>\nhm\n</think>\n\nBecause.", "And?", "<think>\nwell\n</think>\n\nSo."),
    [*chat("one"), *chat("two"), {"role": "assistant", "content": "three"}],
    [*chat("one", "two"), {"role": "system", "content": "late"}, *chat("three")],
    [{"role": "user"}, {"role": "assistant", "content": "no content before"}],
    TOOL_CALL,
    [*TOOL_CALL, *chat("And in Calais?", "Unknown.")],
    [*chat(("system", "Use tools.")), *TOOL_CALL],
]


def render(template, messages, **kwargs):
    kwargs = {"bos_token": "<s>", "eos_token": "</s>", **kwargs}
    return render_jinja_template([messages], chat_template=template, **kwargs)[0][0]


def outcome(*args, **kwargs):
    try:
        return render(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def marked(template, messages, **kwargs):
    """The marked stretches of text."""
    kwargs = {"bos_token": "<s>", "eos_token": "</s>", **kwargs}
    (text,), (spans,) = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **kwargs
    )
    return [text[start:stop] for start, stop in spans]


def parts(messages, *images):
    """Content as lists of parts, with images at the start of the first turn."""
    lists = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    lists[0]["content"] = [*images, *lists[0]["content"]]
    return lists


def byte_tokenizer(*special: str, bos="<s>", eos="</s>") -> PreTrainedTokenizerFast:
    """A real fast tokenizer with one token a byte, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return fast


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    try:
        return AutoTokenizer.from_pretrained(convert_language())
    except FetchError as error:
        pytest.skip(str(error))


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
    template = multimodal_chat_template(TEMPLATES[name], image_token="<|picture's|>").template
    images = {"type": "image"}, {"type": "image", "image": np.zeros((2, 2, 3))}
    with_images = render(template, parts(chat("What?", "This.", "Why?"), *images))
    as_text = render(template, chat("<|picture's|><|picture's|>What?", "This.", "Why?"))
    assert with_images == as_text
    assert with_images.count("<|picture's|>") == 2


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
    assert multimodal_chat_template(VICUNA_TEMPLATE).template == VICUNA_TEMPLATE


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


# ------------------------------------------------------------------------------------------------------------- marks
@pytest.mark.parametrize("name", END_OF_TURN)
def test_marks_hold_each_answer_and_its_end_of_turn_and_nothing_else(name):
    new = multimodal_chat_template(TEMPLATES[name])
    assert new.generation_marks
    end = END_OF_TURN[name]
    answers = ["A kite.", "  Two\nlines "] if name not in TRIMS else ["A kite.", "Two\nlines"]
    expected = [answer + end for answer in answers]
    if name == "llama2":  # sets its answers apart with spaces, and ends its generation prompt before the first
        expected = [" A kite. </s>", " Two\nlines </s>"]
    if name == "qwen3":  # its template opens the last answer with an empty thought, which the model has to generate
        expected[1] = "<think>\n\n</think>\n\n" + expected[1]
    messages = chat("What?", "A kite.", "And?", "  Two\nlines ")
    for conversation in (messages, parts(messages, {"type": "image"})):
        assert marked(new.template, conversation) == expected
    assert marked(new.template, messages[:1], add_generation_prompt=True) == []


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"])
def test_marks_hold_tool_calls_but_not_what_tools_say(name):
    new = multimodal_chat_template(TEMPLATES[name])
    call = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call><|im_end|>'
    if name.startswith("llama"):
        call = '{"name": "tide", "parameters": {"port": "Brest"}}<|eot_id|>'
    answer = "<think>\n\n</think>\n\nLow tide." if name == "qwen3" else "Low tide."
    assert marked(new.template, TOOL_CALL, tools=[WEATHER]) == [call, answer + END_OF_TURN[name]]


def test_text_before_a_tool_call_is_marked_too():
    messages = [TOOL_CALL[0], {**TOOL_CALL[1], "content": "Let me look."}, *TOOL_CALL[2:]]
    (first, _) = marked(multimodal_chat_template(SHIPPED["qwen2_5"]).template, messages)
    assert first.startswith("Let me look.\n<tool_call>") and first.endswith("</tool_call><|im_end|>")
    two = [TOOL_CALL[0], {**TOOL_CALL[1], "tool_calls": TOOL_CALL[1]["tool_calls"] * 2}]
    (first,) = marked(multimodal_chat_template(SHIPPED["qwen2_5"]).template, two)
    assert first.count("<tool_call>") == 2 and first.startswith("<tool_call>")
    assert render(multimodal_chat_template(SHIPPED["qwen2_5"]).template, two) == render(SHIPPED["qwen2_5"], two)


def test_variants_of_a_family_are_known_by_their_statements():
    coder = SHIPPED["qwen2_5"].replace("You are Qwen, created by Alibaba Cloud. ", "")
    assert coder != SHIPPED["qwen2_5"]
    assert multimodal_chat_template(coder).generation_marks
    assert multimodal_chat_template(SMOLLM2.replace("named SmolLM, trained by Hugging Face", "")).generation_marks
    assert multimodal_chat_template(SMOLLM2.replace("\n", r"\n")).generation_marks


@pytest.mark.parametrize("name", ["cohere", "cohere2", "lfm2", "lfm2_v2", "qwen2_5_vl", "qwen3_vl"])
def test_marks_from_trl_are_used_where_we_have_no_edit(name):
    new = multimodal_chat_template(SHIPPED[name])
    assert new.generation_marks and f"{name}_training.jinja" in new.source
    first, second = marked(new.template, parts(chat("What?", "A kite.", "And?", "Two."), {"type": "image"}))
    assert "A kite." in first and first.rstrip().endswith(">") and "What?" not in first
    assert "Two." in second and "And?" not in second


@pytest.mark.parametrize("name", ["qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "gptoss"])
def test_marks_that_would_change_the_text_are_not_used(name):
    new = multimodal_chat_template(SHIPPED[name])
    assert not new.generation_marks and "generation %}" not in new.template
    assert "no generation marks" in new.source


def test_wrong_marks_of_a_template_itself_are_not_claimed():
    wrong = SMOLLM2.replace("{{'<|im_start|>' + message", "{% generation %}{{'<|im_start|>' + message").replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    )
    assert not multimodal_chat_template(wrong).generation_marks
    assert not multimodal_chat_template(LLAVA_15).generation_marks  # nothing ends its answers


# ------------------------------------------------------------------------------------------------------------ Vicuna
def test_vicuna_written_out():
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. "
    )
    messages = chat("What?", "A kite.", "And?")
    new = multimodal_chat_template(None)
    assert new.template == VICUNA_TEMPLATE and new.generation_marks
    assert render(new.template, parts(messages, {"type": "image"}), add_generation_prompt=True) == (
        f"<s>{system}USER: <image>What? ASSISTANT: A kite.</s>USER: And? ASSISTANT:"
    )
    assert render(new.template, chat(("system", "Be kind."), "What?")) == "<s>Be kind. USER: What? "
    assert render(new.template, chat(("system", ""), "What?")) == "<s>USER: What? "
    assert marked(new.template, chat("What?", "A kite.", "And?", "Two.")) == [" A kite.</s>", " Two.</s>"]
    with pytest.raises(Exception, match="'tool'"):
        render(new.template, TOOL_CALL)


# ---------------------------------------------------------------------------------------------------- real tokenizers
@pytest.mark.parametrize("name", [*END_OF_TURN, "cohere", "cohere2", "lfm2", "qwen2_5_vl", "qwen3_vl"])
def test_check_passes_and_trl_sees_the_stop_token_trained(name):
    new = multimodal_chat_template(TEMPLATES[name])
    tokens = ("<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
    tokenizer = byte_tokenizer(*{END_OF_TURN.get(name, "<|im_end|>"), *tokens} - {"</s>"})
    check_chat_template(tokenizer, new, TEMPLATES[name])
    assert is_chat_template_stop_token_trained(tokenizer, chat_template=new.template)


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "gemma4", "idefics3", "llava_1_5", "muse_glimmer"])
def test_check_passes_without_marks(name):
    check_chat_template(byte_tokenizer(), multimodal_chat_template(TEMPLATES[name]), TEMPLATES[name])


def test_check_names_the_conversation_that_renders_differently():
    changed = SMOLLM2.replace("'system' %}", "'system' and messages | length > 2 %}")
    with pytest.raises(ValueError, match="'one question' differently"):
        check_chat_template(byte_tokenizer(), multimodal_chat_template(changed), SMOLLM2)
    no_refusal = SHIPPED["gemma"].replace("raise_exception('System role not supported')", "''")
    with pytest.raises(ValueError, match="'system turn and one question' differently.*System role not supported"):
        check_chat_template(byte_tokenizer(), multimodal_chat_template(no_refusal), SHIPPED["gemma"])


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
def test_check_compares_the_marked_tokens(old, new):
    right = multimodal_chat_template(SMOLLM2)
    assert right.template.count(old) == 1
    wrong = right.template.replace(old, new)
    tokenizer = byte_tokenizer("<|im_end|>", "<|im_start|>")
    check_chat_template(tokenizer, right, SMOLLM2)
    check_chat_template(tokenizer, MultimodalTemplate(wrong, False, "no marks claimed"), SMOLLM2)
    with pytest.raises(ValueError, match="(?s)marks of the chat template cover .* 'two questions and answers'"):
        check_chat_template(tokenizer, MultimodalTemplate(wrong, True, "marks claimed"), SMOLLM2)


def test_check_refuses_marks_that_are_not_there():
    claimed = multimodal_chat_template(SHIPPED["glm4moe"]).template
    with pytest.raises(ValueError, match="cover '' in the conversation"):
        check_chat_template(byte_tokenizer(), MultimodalTemplate(claimed, True, "claimed"), None)
    with pytest.raises(ValueError, match="prints no conversation with answers"):
        check_chat_template(byte_tokenizer(), MultimodalTemplate(SMOLLM2, True, "without preamble"), None)


def test_vicuna_needs_an_end_of_turn_token():
    check_chat_template(byte_tokenizer(), multimodal_chat_template(None), None)
    with pytest.raises(ValueError, match="eos_token"):
        check_chat_template(byte_tokenizer(eos=None), multimodal_chat_template(None), None)


def test_a_template_that_is_not_jinja_is_refused():
    with pytest.raises(ValueError, match="not valid Jinja"):
        multimodal_chat_template("{% for message in messages %}{{ message['content'] }}")


def test_real_smollm2(smollm2_tokenizer):
    assert smollm2_tokenizer.chat_template == SMOLLM2
    new = multimodal_chat_template(SMOLLM2)
    smollm2_tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_chat_template(smollm2_tokenizer, new, SMOLLM2)
    assert is_chat_template_stop_token_trained(smollm2_tokenizer, chat_template=new.template)
    encoded = smollm2_tokenizer.apply_chat_template(
        parts(chat("What?", "A kite.", "And?", "Two."), {"type": "image"}),
        chat_template=new.template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    kept = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert smollm2_tokenizer.decode(kept) == "A kite.<|im_end|>Two.<|im_end|>"


@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "qwen3", "llama3", "llama3_2", "gemma", "gemma3"])
def test_the_processor_masks_the_same_answers_around_expanded_images(name):
    tokenizer = byte_tokenizer("<image>", END_OF_TURN[name])
    template = multimodal_chat_template(TEMPLATES[name]).template
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    image = Image.new("RGB", (20, 30))
    encoded = processor.apply_chat_template(
        parts(chat("What?", "A kite.", "And?", "Two."), {"type": "image", "image": image}),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, masks = np.array(encoded["input_ids"]).ravel(), np.array(encoded["assistant_masks"]).ravel()
    assert (ids == tokenizer.convert_tokens_to_ids("<image>")).sum() == 16
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    end = END_OF_TURN[name]
    assert tokenizer.decode(ids[masks.astype(bool)]) == f"A kite.{end}{thought}Two.{end}"
