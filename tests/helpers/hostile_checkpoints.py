"""Malicious and broken checkpoints: each function spoils a good folder in one way.

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
TEXT = "text_config"

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
        name = f"../{other.name}/{WEIGHTS}"
        if how == "transformers_weights":
            edit(folder / "config.json", transformers_weights=name)
            return
        if how == "shard":
            name = SHARD
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


def linked(name: str) -> Spoil:
    """A link to a name elsewhere under which a file would be written."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder.parent / "private" / "new")

    return spoil


def pipe(name: str) -> Spoil:
    """A named pipe, which nobody writes to."""

    def spoil(folder: Path, marker: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

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


def config(part: str | None = None, **changes) -> Spoil:
    """Settings of `config.json`, or of a part in it."""
    return lambda folder, marker: edit(folder / "config.json", **({part: changes} if part else changes))


CODE: dict[str, Spoil] = {
    "tokenizer's code": foreign("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
    "processor's code beside a class": foreign("processor_config.json", "AutoProcessor"),
    "preprocessor's code": foreign("preprocessor_config.json", "AutoImageProcessor", image_processor_type="Evil"),
    "image processor's code": image_processor,
    "configuration's code": foreign("config.json", "AutoConfig", model_type="evil"),
    "code for generation": custom_generate,
    "code of a kernel": config(attn_implementation="stranger/kernel"),
    "code of a kernel, private key": config(TEXT, _attn_implementation="stranger/kernel"),
    "pickle": pickled("pytorch_model.bin"),
}
ELSEWHERE: dict[str, Spoil] = {
    **{
        f"weights elsewhere, {how}": weights_elsewhere(how)
        for how in ("link", "relative", "shard", "transformers_weights")
    },
    "training.json elsewhere": elsewhere("training.json"),
    "trainer_state.json is a pipe": pipe("trainer_state.json"),
    "evaluation/ai2d elsewhere": linked("evaluation/ai2d"),
    ".README.md-1 elsewhere": linked(".README.md-1"),
}
BROKEN: dict[str, Spoil] = {
    "hidden size 10^9": config(TEXT, hidden_size=10**9),
    "weights cut short": weights(lambda content: content[: len(content) // 2]),
    "header with a shape too large": header(shape=[2**40, 2**40]),
    "tensor missing": tensors(lambda found: dict(list(found.items())[3:])),
    "tensor of another shape": tensors(lambda found: {name: each[..., :1].clone() for name, each in found.items()}),
    "no weights": lambda folder, marker: (folder / WEIGHTS).unlink(),
    "index that is a list": indexed("[]"),
    "configuration that is a list": lambda folder, marker: (folder / "config.json").write_text("[]"),
    "list for text_config": config(text_config=[1, 2]),
    "feature layer that does not exist": config(vision_feature_layer=99),
    "no tokenizer": lambda folder, marker: (folder / "tokenizer.json").unlink(),
    "no processor": lambda folder, marker: (folder / "processor_config.json").unlink(),
}
KINDS = {**CODE, **ELSEWHERE, **BROKEN}
