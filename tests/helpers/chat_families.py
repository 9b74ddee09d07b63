"""Chat templates of many families, conversations to render with them, and tokenizers."""

from importlib.resources import files

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
SHIPPED = {
    path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8")
    for path in (files("trl") / "chat_templates").iterdir()
    if path.name.endswith(".jinja") and not path.name.endswith("_training.jinja")
}
TEMPLATES = {**SHIPPED, "smollm2": SMOLLM2, "zephyr": ZEPHYR, "llama2": LLAMA_2, "mistral": MISTRAL}
TEMPLATES |= {"granite3_0": GRANITE_30, "granite3_1": GRANITE_31, "llava_1_5": LLAVA_15}
END_OF_TURN = {
    **dict.fromkeys(("smollm2", "qwen2_5", "qwen3", "qwen3_instruct_2507"), "<|im_end|>"),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(("gemma", "gemma3"), "<end_of_turn>"),
    **dict.fromkeys(("phi3", "phi3_5"), "<|end|>"),
    **dict.fromkeys(("zephyr", "llama2", "mistral"), "</s>"),
    **dict.fromkeys(("granite3_0", "granite3_1"), "<|end_of_text|>"),
}
TRIMS = ("llama3", "llama3_1", "llama3_2", "gemma", "gemma3")
PORT = {"type": "object", "properties": {"port": {"type": "string"}}}
TIDE = {"name": "tide", "description": "High or low?", "parameters": PORT}
WEATHER = {"type": "function", "function": TIDE}


def chat(*turns):
    """user, assistant, user, ... in turn; a leading ("system", text) pair stands for itself."""
    system = [{"role": "system", "content": turn[1]} for turn in turns if isinstance(turn, tuple)]
    texts = turns[len(system) :]
    roles = ("user", "assistant")
    return system + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TOOL_CALL = [
    {"role": "user", "content": "Tide in Brest?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
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
    kwargs |= {"chat_template": template, "return_assistant_tokens_mask": True}
    (text,), (spans,) = render_jinja_template([messages], **kwargs)
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
    added = dict(bos_token=bos, eos_token=eos, pad_token="<pad>", extra_special_tokens=[*special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **added)


def adding_tokenizer(start, end=()) -> PreTrainedTokenizerFast:
    """One token a byte, and tokens that it puts before and after a text."""
    tokenizer = byte_tokenizer(*{*start, *end} - {"<s>", "</s>"})
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {*start, *end}]
    added = processors.TemplateProcessing([*start, "$A", *end], special_tokens=tokens)
    sequence = processors.Sequence([processors.ByteLevel(), added])  # as Llama 3's
    tokenizer.backend_tokenizer.post_processor = sequence
    return tokenizer


def llama_tokenizer(legacy: bool) -> LlamaTokenizer:
    """One token a letter: `<s>` first, and a space before the text or, if `legacy`, every piece."""
    letters = ["<unk>", "<s>", "</s>", "<pad>", "\u2581", "\n", *map(chr, range(33, 127))]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    return LlamaTokenizer(vocabulary, [], legacy=legacy, add_bos_token=True, pad_token="<pad>")


ADDING = {
    "nothing": (byte_tokenizer, [], []),
    "first and last": (lambda: adding_tokenizer(["<s>"], ["</s>"]), ["<s>"], ["</s>"]),
    "two first": (lambda: adding_tokenizer(["[gMASK]", "<sop>"]), ["[gMASK]", "<sop>"], []),
    "a space": (lambda: llama_tokenizer(legacy=False), ["<s>"], []),
    "spaces": (lambda: llama_tokenizer(legacy=True), ["<s>"], []),
}
"""Tokenizers by what they add to a text, with the tokens that come before and after it."""
