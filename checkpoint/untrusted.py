# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Opening checkpoints that others made: no code of theirs, no file but theirs, nothing that never ends.

Commands call [`check_files`] before transformers sees a checkpoint and [`check_weights`] before a model is made of it,
and let transformers read it inside [`normalign_llava.loading.loading`]. `docs/security.md` has a row for each command.
"""

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.hub import CHAT_TEMPLATE_DIR, cached_file, cached_files, list_repo_templates

from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import escaped
from .loading import AGAIN, TEMPLATE_SECONDS, limited, loading
from .names import ADAPTER_CONFIG, INDEX, PICKLES, WEIGHTS


"""Suffixes of files that run code when they are read."""

_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_SETTINGS = (
    *("config.json", "generation_config.json", ADAPTER_CONFIG, INDEX, *_TOKENIZER, "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
_OTHERS = (
    *("chat_template.jinja", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
_NAMES_FILES = {"configuration_files", "transformers_weights", "fast_tokenizer_files"}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
_WIDTHS = ("hidden_size", "intermediate_size")
_MOST_LAYERS = 1_000
_LARGE = (
    INDEX,
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
)
_LARGEST = 2**27  # bytes

_QUESTION = {"role": "user", "content": "What is this?"}
_CONVERSATION = [_QUESTION, {"role": "assistant", "content": "A red kite."}, _QUESTION]


def check_files(checkpoint: str | os.PathLike, revision: str | None = None) -> dict[str, Any]:
    """Reads the files beside the weights, before transformers does, and returns `config.json`.

    Args:
        checkpoint: Folder of a model or an adapter, or Hub id.
        revision: Branch, tag or commit on the Hub.

    Returns:
        What `config.json` holds; nothing where there is none, as in the folder of an adapter.

    Raises:
        ValueError: One of them cannot be read, lies elsewhere, names code that would be run or another file that would
            be read in its place, has characters that a terminal obeys, or is a chat template that does not end.
        OSError: There is no such checkpoint.
    """
    cached_file(str(checkpoint), "config.json", revision=revision)  # whose error says whether there is a checkpoint
    files = {file.name: file for file in _files(checkpoint, [*_SETTINGS, *_OTHERS], revision)}
    extra_templates = _extra_templates(checkpoint, revision)
    for file in extra_templates:
        check_inside(file, file.parents[1])
    for file in Path(checkpoint).iterdir() if Path(checkpoint).is_dir() else files.values():  # records are copied
        check_inside(file)
    for file in [*files.values(), *extra_templates]:
        if (size := file.stat().st_size) > (_LARGEST if file.name in _LARGE else _LARGEST // 32):
            raise ValueError(f"{file} has {size:,} bytes, far more than such a file has. {AGAIN}")
    settings = {name: json_object(file.read_bytes(), str(file)) for name, file in files.items() if name in _SETTINGS}
    config, adapter = settings.get("config.json", {}), settings.get(ADAPTER_CONFIG, {})
    for name, key in (("config.json", "model_type"), (ADAPTER_CONFIG, "base_model_name_or_path")):
        if not isinstance(value := settings.get(name, {}).get(key), str | None):
            raise ValueError(f"{files[name]} has no text for {key}, but {value!r}. {AGAIN}")
    _check_code(checkpoint, settings, adapter)
    _check_sizes(checkpoint, config, dict.fromkeys(_LAYERS, _MOST_LAYERS), f"no model has more than {_MOST_LAYERS:,}")
    for name, content in settings.items():
        if named := content.keys() & _NAMES_FILES:
            raise ValueError(f"{files[name]}: {min(named)} names files to read in place of others. Remove it.")
    for name, content in settings.items():
        if name not in (*_TOKENIZER, "chat_template.json"):
            _check_shown(files[name], content)
    for name, content in settings.items():
        for template in _templates(content.get("chat_template")):
            check_template(template, f"The chat template in {files[name]}")
    for file in [file for file in files.values() if file.suffix == ".jinja"] + extra_templates:
        check_template(file.read_text("utf-8", "replace"), f"The chat template {file}")
    return config


def check_weights(checkpoint: str | os.PathLike, revision: str | None = None) -> int:
    """Compares the sizes in `config.json` with the headers of the weights, which of a Hub id are fetched.

    Args:
        checkpoint: Folder of a model, or Hub id.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The bytes of the weights.

    Raises:
        ValueError: There are no weights in safetensors, they lie elsewhere or cannot be read, or hold less than the
            configuration asks for.
    """
    config = {}
    for file in _files(checkpoint, ["config.json"], revision):
        config = json_object(file.read_bytes(), str(file))
    weights = _files(checkpoint, [WEIGHTS], revision)
    for index in _files(checkpoint, [INDEX], revision) if not weights else ():
        names = shards(json_object(index.read_bytes(), str(index)), str(index))
        weights = _files(checkpoint, names, revision)
        if absent := sorted({*names} - {file.name for file in weights}):
            raise ValueError(f"{index} names {', '.join(absent)}, which {checkpoint} lacks. {AGAIN}")
    if not weights:
        raise ValueError(
            f"{checkpoint} has no weights in safetensors: neither {WEIGHTS} nor {INDEX} with its shards. Pickled ones "
            f"(*{', *'.join(PICKLES[:4])}) are not opened: they can run code. Load the model where you trust it, save "
            "it again, and use that."
        )
    tensors, widest = 0, 0
    for file in weights:
        check_inside(file)
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    _check_shown(file, name)
                    tensors, widest = tensors + 1, max(widest, *opened.get_slice(name).get_shape(), 0)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}. Was it cut short? {AGAIN}") from error
    held = f"its weights are {tensors:,} tensors, none wider than {widest:,}"
    _check_sizes(checkpoint, config, dict.fromkeys(_LAYERS, tensors) | dict.fromkeys(_WIDTHS, widest), held)
    text = config.get("text_config")
    _check_sizes(checkpoint, text if isinstance(text, dict) else {}, {"vocab_size": widest}, held)
    if (quantization := config.get("quantization_config")) is not None:
        with loading(f"The quantization_config of {checkpoint}"):
            AutoQuantizationConfig.from_dict(quantization)
    return sum(file.stat().st_size for file in weights)


def check_inside(file: Path, folder: Path | None = None) -> None:
    """Raises ValueError if `file` is none, or is out of `folder` (its own); links of the Hub's cache may be."""
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"{file} is no file, but a pipe or a device, which may never end. Remove it.")
    if file.is_file() and not is_inside(file, (folder or file.parent).resolve()):
        raise ValueError(
            f"{file} is a link out of its folder, to {file.resolve()}. Put a copy in its place if that is meant: `cp "
            "-rL` copies a folder so."
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, links resolved, or where the Hub's cache keeps what its links lead to."""
    real = path.resolve()
    # In the Hub's cache, the files of `snapshots/COMMIT` are links to the repository's `blobs`.
    cached = folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs"
    return cached or real.is_relative_to(folder)


def shards(index: dict[str, Any], where: str) -> list[str]:
    """The files that an index names: safetensors beside it.

    Raises:
        ValueError: It names none, or anything else; the message names `where` it is.
    """
    try:
        names = sorted(set(index["weight_map"].values()))
        known = all(PurePosixPath(name).name == name and name.endswith(".safetensors") for name in names)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is no index of weights ({type(error).__name__}: {error}). {AGAIN}") from error
    if not names or not known:
        raise ValueError(f"{where} names {', '.join(map(repr, names)) or 'nothing'}, no file beside it. {AGAIN}")
    return names


def names_code(content: Any) -> bool:
    """Whether there is an `auto_map` anywhere in what a JSON file holds."""
    return any(isinstance(each, dict) and "auto_map" in each for each in _inside(content))


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names `where` it is, if it holds anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {error}"
        raise ValueError(f"{where} is {why}. {AGAIN}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no JSON object. {AGAIN}")
    return found


def check_template(template: str, where: str) -> None:
    """Renders conversations with a chat template: text, parts, an image; with and without the prompt for an answer.

    Raises:
        ValueError: It takes seconds or a GiB of memory, reaches for what the sandbox keeps, or is no Jinja. Whether it
            refuses a conversation is another matter.
    """
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in _CONVERSATION]
    shown = [{**parts[0], "content": [{"type": "image"}, *parts[0]["content"]]}, *parts[1:]]
    for messages, prompt in product((_CONVERSATION, parts, shown), (True, False)):
        with limited(where, TEMPLATE_SECONDS, memory=2**30):
            try:
                render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt)
            except (MemoryError, RecursionError):
                raise
            except (SecurityError, TemplateSyntaxError) as error:
                raise ValueError(f"{where} cannot be run: {error} {AGAIN}") from error
            except Exception:  # templates refuse a conversation with whatever Jinja or their authors raise
                pass


def _files(checkpoint: str | os.PathLike, names: list[str], revision: str | None) -> list[Path]:
    """Those of the files that there are; of a Hub id they are fetched."""
    found = cached_files(str(checkpoint), names, revision=revision, _raise_exceptions_for_missing_entries=False)
    return [Path(file) for file in found or []]


def _extra_templates(checkpoint: str | os.PathLike, revision: str | None) -> list[Path]:
    """Chat templates with names; one called default is used in place of the others."""
    if (folder := Path(checkpoint)).is_dir():
        names = [file.stem for file in (folder / CHAT_TEMPLATE_DIR).glob("*.jinja")]
    else:
        found = list_repo_templates(str(checkpoint), local_files_only=False, revision=revision)
        names = [name.removesuffix(".jinja") for name in found]
    return _files(checkpoint, [f"{CHAT_TEMPLATE_DIR}/{name}.jinja" for name in names], revision)


def _inside(content: Any) -> Iterator[Any]:
    """All that a JSON value is made of, itself included; keys too."""
    rest = [content]
    while rest:
        yield (each := rest.pop())
        rest += [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []


def _check_code(checkpoint: str | os.PathLike, settings: dict[str, dict[str, Any]], adapter: dict[str, Any]) -> None:
    config, foreign = settings.get("config.json", {}), []
    if config.get("model_type") == NormAlignLlavaConfig.model_type or adapter:
        # Everything but the model is transformers' own, so nothing needs code. Of other models, none is run.
        foreign = [f"auto_map in {name}" for name in settings if name != "config.json" and names_code(settings[name])]
        foreign += ["custom_generate"] if Path(checkpoint, "custom_generate").exists() else []
    foreign += [f"megatron_core in {ADAPTER_CONFIG}"] if adapter.get("megatron_config") else []
    settings_of_parts = [item for part in _inside(config) if isinstance(part, dict) for item in part.items()]
    # Where the package `kernels` is, transformers would fetch this one from the Hub.
    kernels = [f"{key} {value}" for key, value in settings_of_parts if "_implementation" in key and "/" in str(value)]
    foreign += [f"{kernel} in config.json" for kernel in kernels]
    if foreign:
        raise ValueError(
            f"{checkpoint} names code that this package has no use for: {', '.join(foreign)}. None of it was run. "
            "Remove that, if you trust the rest, or use another checkpoint."
        )


def _check_sizes(checkpoint: str | os.PathLike, config: dict[str, Any], most: dict[str, int], why: str) -> None:
    for part in _inside(config):
        for key in most.keys() & part.keys() if isinstance(part, dict) else ():
            if isinstance(part[key], int) and not 0 <= part[key] <= most[key]:
                raise ValueError(f"config.json of {checkpoint} says {key} {part[key]:,}, but {why}. {AGAIN}")


def _check_shown(file: Path, content: Any) -> None:
    if odd := next((each for each in _inside(content) if isinstance(each, str) and escaped(each) != each), None):
        raise ValueError(f"{file} has characters that a terminal would obey, in {odd[:200]!r}. {AGAIN}")


def _templates(stored: Any) -> list[str]:
    """The texts of a `chat_template`: one, a list of several with names, or those by their names."""
    several = (
        [each.get("template") for each in stored if isinstance(each, dict)] if isinstance(stored, list) else stored
    )
    several = list(several.values()) if isinstance(several, dict) else several
    return [each for each in (several if isinstance(several, list) else [several]) if isinstance(each, str)]
