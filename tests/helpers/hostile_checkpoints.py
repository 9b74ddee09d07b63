"""Checkpoints as a stranger may have made them: each function spoils a good folder in one way.

Code in them writes the file `marker` when it runs.
"""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"
TEXT, VISION = "text_config", "vision_config"
DEEP = "[" * 100_000 + "]" * 100_000
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
"""Sets the title of a terminal, then colours what follows."""

Spoil = Callable[[Path, Path], object]  # folder, marker


def edit(file: Path, **changes) -> None:
    """Sets keys of a JSON file; a mapping is laid over the one that is there."""
    content = json.loads(file.read_text()) if file.exists() else {}
    for name, value in changes.items():
        old = content.get(name)
        content[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    file.write_text(json.dumps(content))


def code(folder: Path, marker: Path) -> None:
    """`evil.py`, which writes the marker as soon as it is imported."""
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'a').write('run')\nclass Evil: pass\n")


def foreign(file: str, auto: str, **changes) -> Spoil:
    """Names the code in the `auto_map` of a file."""
    reference = [None, "evil.Evil"] if auto == "AutoTokenizer" else "evil.Evil"

    def spoil(folder: Path, marker: Path) -> None:
        code(folder, marker)
        edit(folder / file, auto_map={auto: reference}, **changes)

    return spoil


def image_processor(folder: Path, marker: Path) -> None:
    code(folder, marker)
    named = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    edit(folder / "processor_config.json", image_processor=named)


def image_processor_beside(folder: Path, marker: Path) -> None:
    code(folder, marker)
    edit(folder / "processor_config.json", image_processor={"auto_map": {"AutoImageProcessor": "evil.Evil"}})


def hidden_in_escapes(folder: Path, marker: Path) -> None:
    """The key as JSON may also spell it."""
    foreign("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil")(folder, marker)
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"auto_map"', '"auto\\u005fmap"'))


def other_configuration(folder: Path, marker: Path) -> None:
    """The configuration that is compared names another one, which transformers reads in its place."""
    code(folder, marker)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.5.0.0.json").write_text(json.dumps({**content, "auto_map": {"AutoConfig": "evil.Evil"}}))
    edit(folder / "config.json", configuration_files=["config.5.0.0.json"])


def custom_generate(folder: Path, marker: Path) -> None:
    code(folder, marker)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        (folder / "evil.py").read_text() + "def generate(model, *args, **kwargs): return model.generate(*args)\n"
    )


class _Payload:
    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def pickled(name: str) -> Spoil:
    """A pickle in place of the weights."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(_Payload(marker)))

    return spoil


def weights_elsewhere(how: str) -> Spoil:
    """The weights are another folder's: `how` they are named."""

    def spoil(folder: Path, marker: Path) -> None:
        other = folder.parent / f"{folder.name}-private"
        other.mkdir()
        (folder / WEIGHTS).rename(other / WEIGHTS)
        if how == "link":
            (folder / WEIGHTS).symlink_to(other / WEIGHTS)
            return
        if how == "transformers_weights":
            edit(folder / "config.json", transformers_weights=f"../{other.name}/{WEIGHTS}")
            return
        name = {"absolute": str(other / WEIGHTS), "relative": f"../{other.name}/{WEIGHTS}", "shard": SHARD}[how]
        if how == "shard":
            (folder / SHARD).symlink_to(other / WEIGHTS)
        names = dict.fromkeys(load_file(other / WEIGHTS), name)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))

    return spoil


def elsewhere(name: str) -> Spoil:
    """A file that is a link to one of another folder."""

    def spoil(folder: Path, marker: Path) -> None:
        other = folder.parent / f"{folder.name}-private"
        other.mkdir()
        (other / "kept").write_text('{"secret": "kept"}')
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(other / "kept")

    return spoil


def tokenizer_elsewhere(folder: Path, marker: Path) -> None:
    other = folder.parent / f"{folder.name}-private"
    other.mkdir()
    (folder / "tokenizer.json").rename(other / "tokenizer.1.0.0.json")
    edit(folder / "tokenizer_config.json", fast_tokenizer_files=[f"../{other.name}/tokenizer.1.0.0.json"])


def pipe(name: str) -> Spoil:
    """A named pipe, which nobody writes to."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def named_template(text: str) -> Spoil:
    """A chat template beside the others, which is used in their place."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "default.jinja").write_text(text)

    return spoil


def indexed(text: str) -> Spoil:
    """An index with this text beside the weights in one shard."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        (folder / INDEX).write_text(text)

    return spoil


def weights(change: Callable[[bytes], bytes]) -> Spoil:
    """Other bytes in the weights' file."""
    return lambda folder, marker: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def header(**fields) -> Spoil:
    """One tensor's entry in the header of the weights, changed."""

    def change(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + size])
        entries[next(name for name in entries if name != "__metadata__")].update(fields)
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return weights(change)


def tensors(change: Callable[[dict], dict]) -> Spoil:
    return lambda folder, marker: save_file(
        change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"}
    )


def written(name: str, content: str | bytes) -> Spoil:
    """A file with this content."""
    return lambda folder, marker: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def config(part: str | None = None, **changes) -> Spoil:
    """Settings of `config.json`, or of a part in it."""
    return lambda folder, marker: edit(folder / "config.json", **({part: changes} if part else changes))


def processor(**changes) -> Spoil:
    return lambda folder, marker: edit(folder / "processor_config.json", **changes)


CODE: dict[str, Spoil] = {
    "tokenizer's code": foreign("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
    "processor's code": foreign("processor_config.json", "AutoProcessor", processor_class="Evil"),
    "image processor's code": image_processor,
    "tokenizer's code beside a class": foreign("tokenizer_config.json", "AutoTokenizer"),
    "processor's code beside a class": foreign("processor_config.json", "AutoProcessor"),
    "image processor's code beside a class": image_processor_beside,
    "preprocessor's code": foreign("preprocessor_config.json", "AutoImageProcessor", image_processor_type="Evil"),
    "configuration's code": foreign("config.json", "AutoConfig", model_type="evil"),
    "code behind an escaped key": hidden_in_escapes,
    "code of another configuration": other_configuration,
    "code for generation": custom_generate,
    "pickle": pickled("pytorch_model.bin"),
    "pickle called safetensors": pickled(WEIGHTS),
    "code of a kernel": config(attn_implementation="stranger/kernel"),
    "code of a kernel, private key": config(TEXT, _attn_implementation="stranger/kernel"),
}
FILES: dict[str, Spoil] = {
    f"weights elsewhere, {how}": weights_elsewhere(how)
    for how in ("link", "absolute", "relative", "shard", "transformers_weights")
}
ELSEWHERE: dict[str, Spoil] = {
    **{
        f"{name} elsewhere": elsewhere(name) for name in ("training.json", "build.json", "README.md", "dynamics.jsonl")
    },
    "tokenizer elsewhere": tokenizer_elsewhere,
    "a pipe": pipe("trainer_state.json"),
}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS: dict[str, Spoil] = {
    "10^7 layers": config(TEXT, num_hidden_layers=10**7),
    "10^7 layers of the encoder": config(VISION, num_hidden_layers=10**7),
    "hidden size 10^9": config(TEXT, hidden_size=10**9),
    "vocabulary 10^12": config(TEXT, vocab_size=10**12),
    "head size 10^11": config(TEXT, head_dim=10**11),
    "images of 10^8 pixels a side": config(VISION, image_size=10**8),
    "patches of 0 pixels": config(VISION, patch_size=0),
    "10^6 experts": config(TEXT, model_type="mixtral", num_local_experts=10**6),
    "10^9 registers": config(VISION, model_type="dinov2_with_registers", num_register_tokens=10**9, mlp_ratio=4),
    "settings of 5 MB": config(id2label=["x" * 5_000_000]),
    "10^5 feature layers": config(vision_feature_layer=[-2] * 10**5),
    "template, loops": written("chat_template.jinja", LOOPS),
    "template, text that doubles": written("chat_template.jinja", DOUBLED),
    "template, text of 10^12": written("chat_template.jinja", "{{ 'a' * 10**12 }}"),
    "template, loops, called default": named_template(LOOPS),
    "template, loops without the prompt": written(
        "chat_template.jinja", "{% if not add_generation_prompt %}" + LOOPS + "{% endif %}" + GOOD
    ),
    "template, loops at an image": written(
        "chat_template.jinja",
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}" + LOOPS + "{% endif %}"
        "{% endfor %}{% endfor %}",
    ),
    "template, loops after a refusal of text": written(
        "chat_template.jinja",
        "{% if messages[0].content is string %}{{ raise_exception('no') }}{% endif %}" + LOOPS,
    ),
    "template, macro": written(
        "chat_template.jinja", "{% macro m(n) %}{{ m(n-1) }}{{ m(n-1) }}{% endmacro %}{{ m(90) }}"
    ),
    "template, loops in the third turn": written(
        "chat_template.jinja", "{% if messages|length > 2 %}" + LOOPS + "{% endif %}" + GOOD
    ),
    "processor, images of 10^6 pixels a side": processor(
        image_processor={"size": {"shortest_edge": 10**6}, "crop_size": {"height": 10**6, "width": 10**6}}
    ),
    "processor, 10^9 image tokens": processor(num_additional_image_tokens=10**9),
}
BROKEN: dict[str, Spoil] = {
    "weights cut short": weights(lambda content: content[: len(content) // 2]),
    "weights of no bytes": weights(lambda content: b""),
    "header of 2^62 bytes": weights(lambda content: struct.pack("<Q", 2**62) + content[8:]),
    "header of 10^9 bytes": weights(lambda content: struct.pack("<Q", 10**9) + content[8:]),
    "header that is no JSON": weights(lambda content: content[:8] + b"x" * 40 + content[48:]),
    "header, nested deeply": weights(lambda content: struct.pack("<Q", len(DEEP)) + DEEP.encode()),
    "header with a shape too large": header(shape=[2**40, 2**40]),
    "header with offsets beyond the end": header(data_offsets=[0, 2**50]),
    "tensor missing": tensors(lambda found: dict(list(found.items())[3:])),
    "tensor of another shape": tensors(lambda found: {name: each[..., :1].clone() for name, each in found.items()}),
    "tensor too many": tensors(lambda found: found | {"stranger": next(iter(found.values())).clone()}),
    "no weights": lambda folder, marker: (folder / WEIGHTS).unlink(),
    "index, nested deeply": indexed(DEEP),
    "index that is a list": indexed("[]"),
    "index of names that are numbers": indexed('{"metadata": {}, "weight_map": {"a": 1}}'),
    "index without metadata": indexed(json.dumps({"weight_map": {"lm_head.weight": SHARD}})),
    "index of a shard that is not there": indexed('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'),
    "configuration, nested deeply": written("config.json", '{"model_type": "normalign_llava", "a": ' + DEEP + "}"),
    "tokenizer's settings, nested deeply": written("tokenizer_config.json", DEEP),
    "processor's settings, nested deeply": written("processor_config.json", DEEP),
    "generation's settings, nested deeply": written("generation_config.json", DEEP),
    "tokenizer, nested deeply": written("tokenizer.json", DEEP),
    "configuration that is a list": written("config.json", "[]"),
    "configuration that is no text": written("config.json", bytes(range(256))),
    "configuration of no bytes": written("config.json", ""),
    "list for text_config": config(text_config=[1, 2]),
    "text for text_config": config(text_config="llama"),
    "nothing for vision_config": config(vision_config=None),
    "list for model_type": config(model_type=["normalign_llava"]),
    "unknown part": config(TEXT, model_type="stranger"),
    "unknown quant_method": config(quantization_config={"quant_method": "stranger"}),
    "no quant_method": config(quantization_config={"bits": 4}),
    "list for quantization_config": config(quantization_config=[1]),
    "unknown dtype": config(dtype="stranger"),
    "unknown activation": config(TEXT, hidden_act="stranger"),
    "text for a size": config(TEXT, hidden_size="32"),
    "heads that do not divide": config(VISION, num_attention_heads=3),
    "no heads": config(TEXT, num_attention_heads=0),
    "fewer layers than none": config(TEXT, num_hidden_layers=-2),
    "unknown rotary": config(TEXT, rope_parameters={"rope_type": "stranger", "rope_theta": 1.0}),
    "feature layer that is not there": config(vision_feature_layer=99),
    "text for a feature layer": config(vision_feature_layer="last"),
    "image token that is not there": config(image_token_index=10**9),
    "other size of images": config(VISION, image_size=32),
    "text for auto_map": config(auto_map="evil"),
    "tokenizer cut short": lambda folder, marker: (folder / "tokenizer.json").write_bytes(
        (folder / "tokenizer.json").read_bytes()[:200]
    ),
    "no tokenizer": lambda folder, marker: (folder / "tokenizer.json").unlink(),
    "no processor": lambda folder, marker: (folder / "processor_config.json").unlink(),
    "list for tokenizer_class": lambda folder, marker: edit(folder / "tokenizer_config.json", tokenizer_class=[1]),
    "template that raises": written("chat_template.jinja", "{{ raise_exception('no') }}"),
    "template that is no Jinja": written("chat_template.jinja", "{% for %}"),
    "template, nested deeply": written("chat_template.jinja", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    "template that is no text": written("chat_template.jinja", bytes(range(256))),
    "template that prints no images": written("chat_template.jinja", "{{ messages[0].role }}"),
    "template that reaches for Python": written("chat_template.jinja", "{{ ''.__class__.__mro__ }}"),
    "list for the size of images": processor(image_processor={"size": [16], "crop_size": [16]}),
    "unknown image processor": processor(image_processor={"image_processor_type": "Stranger"}),
    "patches of 0 pixels, processor": processor(patch_size=0),
    "text for a mean": processor(image_processor={"image_mean": "red"}),
}
WORDS: dict[str, Spoil] = {
    "escapes in model_type": config(model_type=f"evil{ESCAPE}[bold red]"),
    "escapes in a part": config(TEXT, model_type=f"evil{ESCAPE}[/]"),
    "escapes in a key": config(**{f"evil{ESCAPE}[/]": 1}),
    "escapes in a setting": config(projector_norm=f"evil{ESCAPE}[/]"),
    "escapes in a tensor's name": tensors(
        lambda found: {f"evil{ESCAPE}[/]": each for each in [next(iter(found.values())).clone()]}
    ),
}
KINDS = {**CODE, **FILES, **ELSEWHERE, **ENDLESS, **BROKEN, **WORDS}
