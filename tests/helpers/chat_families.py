"""Chat templates of many families, conversations to render with them, and tokenizers."""

from importlib.resources import files
from itertools import cycle

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template


# SmolLM2-135M-Instruct's, as its GGUF file has it (Apache-2.0).
SMOLLM2 = """{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
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
# The patterns of Llama 2, Mistral 7B and Granite 3, without tools and default system turns.
LLAMA_2 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('neither user nor assistant') }}{% endif %}{% endfor %}"
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
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] \
+ '<|end_of_text|>
' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
            {%- if controls %}
                {{- ' ' + controls | tojson()}}
            {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
# The pattern of llava-hf checkpoints: reads nothing but lists of parts, and prints the image token.
LLAVA_15 = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def shipped_templates() -> dict[str, str]:
    """The templates that TRL ships, by family; not its own versions for training."""
    templates = {}
    for template_path in (files("trl") / "chat_templates").iterdir():
        file_name = template_path.name
        if file_name.endswith(".jinja") and not file_name.endswith("_training.jinja"):
            family = file_name.removesuffix(".jinja")
            templates[family] = template_path.read_text(encoding="utf-8")
    return templates


SHIPPED = shipped_templates()
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
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string"}},
        },
    },
}


def chat(*turns):
    """user, assistant, user, ... in turn; a leading ("system", text) pair stands for itself."""
    system_texts = [turn[1] for turn in turns if isinstance(turn, tuple)]
    other_texts = turns[len(system_texts) :]
    messages = [{"role": "system", "content": text} for text in system_texts]
    roles = cycle(("user", "assistant"))
    for text, role in zip(other_texts, roles, strict=False):
        messages.append({"role": role, "content": text})
    return messages


CALL_OF_TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "arguments": {"port": "Brest"},
    },
}
TOOL_CALL = [
    {"role": "user", "content": "Tide in Brest?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL_OF_TIDE]},
    {"role": "tool", "content": "low"},
    {"role": "assistant", "content": "Low tide."},
]
CONVERSATIONS = [
    chat("Hello"),
    chat(("system", "  Be kind.  "), "Hello"),
    chat("Hello", "Hi", "How are you?"),
    chat(("system", ""), "Hello", "\nHi\n\n", " {{ x }} {% raw %} ", "<b>&amp;", "Ü ☃ 🪁", "\tok "),
    chat("", "", "again", ""),
    chat("Why?", "<think>\nhm\n</think>\n\nBecause.", "And?", "<think>\nwell\n</think>\n\nSo."),
    [*chat("one"), *chat("two"), {"role": "assistant", "content": "three"}],
    [*chat("one", "two"), {"role": "system", "content": "late"}, *chat("three")],
    [{"role": "user"}, {"role": "assistant", "content": "no content before"}],
    TOOL_CALL,
    [*TOOL_CALL, *chat("And in Calais?", "Unknown.")],
    [*chat(("system", "Use tools.")), *TOOL_CALL],
]


SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template, messages, **template_options):
    template_options = {**SPECIAL_TOKENS, **template_options}
    rendered_texts, _ = render_jinja_template(
        [messages],
        chat_template=template,
        **template_options,
    )
    return rendered_texts[0]


def outcome(*args, **kwargs):
    """What `render` returns, or the type and text of what it raises."""
    try:
        return render(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def marked(template, messages, **template_options):
    """The marked stretches of text."""
    template_options = {**SPECIAL_TOKENS, **template_options}
    rendered_texts, marked_spans = render_jinja_template(
        [messages],
        **template_options,
        chat_template=template,
        return_assistant_tokens_mask=True,
    )
    (text,) = rendered_texts
    (spans,) = marked_spans
    return [text[start:stop] for start, stop in spans]


def parts(messages, *images):
    """Content as lists of parts, with images at the start of the first turn."""
    messages_of_parts = []
    for message in messages:
        text_part = {"type": "text", "text": message["content"]}
        messages_of_parts.append({**message, "content": [text_part]})
    first_turn = messages_of_parts[0]
    first_turn["content"] = [*images, *first_turn["content"]]
    return messages_of_parts


def byte_tokenizer(*special: str, bos="<s>", eos="</s>") -> PreTrainedTokenizerFast:
    """A real fast tokenizer with one token a byte, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: token_id for token_id, byte in enumerate(alphabet)}
    backend_tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend_tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token="<pad>",
        extra_special_tokens=[*special],
    )


def adding_tokenizer(start, end=()) -> PreTrainedTokenizerFast:
    """One token a byte, and tokens that it puts before and after a text."""
    added_tokens = {*start, *end}
    tokenizer = byte_tokenizer(*added_tokens - {"<s>", "</s>"})
    tokens_with_ids = []
    for token in added_tokens:
        tokens_with_ids.append((token, tokenizer.convert_tokens_to_ids(token)))
    template = processors.TemplateProcessing(
        [*start, "$A", *end],
        special_tokens=tokens_with_ids,
    )
    # A sequence, as Llama 3's.
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), template]
    )
    return tokenizer


def llama_tokenizer(legacy: bool) -> LlamaTokenizer:
    """One token a letter: `<s>` first, and a space before the text or, if `legacy`, every piece."""
    printable = map(chr, range(33, 127))
    letters = ["<unk>", "<s>", "</s>", "<pad>", "\u2581", "\n", *printable]
    vocabulary = {letter: token_id for token_id, letter in enumerate(letters)}
    return LlamaTokenizer(
        vocabulary,
        [],
        legacy=legacy,
        add_bos_token=True,
        pad_token="<pad>",
    )


ADDING = {
    "nothing": (byte_tokenizer, [], []),
    "first and last": (lambda: adding_tokenizer(["<s>"], ["</s>"]), ["<s>"], ["</s>"]),
    "two first": (lambda: adding_tokenizer(["[gMASK]", "<sop>"]), ["[gMASK]", "<sop>"], []),
    "a space": (lambda: llama_tokenizer(legacy=False), ["<s>"], []),
    "spaces": (lambda: llama_tokenizer(legacy=True), ["<s>"], []),
}
"""Tokenizers by what they add to a text, with the tokens that come before and after it."""
