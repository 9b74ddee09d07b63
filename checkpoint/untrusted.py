# SPDX-License-Identifier: Apache-2.0
"""Checks of checkpoints from other people: no code runs, no file outside their folder is read.

Commands call [`check_files`] before transformers reads a checkpoint, [`check_weights`] before its
model is built, and read inside [`loading`]. `docs/security.md` lists what each command opens.
"""

import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils.hub import cached_files

from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import device_error, first_cause, is_panic
from .files import ADAPTER_CONFIG, INDEX, WEIGHTS


# The remedy for a checkpoint that is broken, or made to look so.
AGAIN = "Save or fetch the checkpoint again, or use another."

_SETTINGS = [
    *("config.json", "generation_config.json", ADAPTER_CONFIG, INDEX, "tokenizer_config.json"),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
]
_OTHER_FILES = {"configuration_files", "transformers_weights", "fast_tokenizer_files"}


def check_files(checkpoint: str | os.PathLike, revision: str | None = None) -> dict[str, Any]:
    """Checks all files but the weights, before transformers reads them; returns `config.json`.

    Of an adapter it returns `{}`. Raises ValueError if a file is not valid JSON, is a link out of
    the folder, or names code or another file to read, or if there is a model and an adapter.
    """
    # Records are copied and results written, so all files count.
    for parent, folders, names in os.walk(str(checkpoint)):
        for name in (*folders, *names):
            check_inside(Path(parent, name), Path(checkpoint))
        folders[:] = [name for name in folders if not name.startswith(".")]  # .git, .venv
    files = {file.name: file for file in files_of(checkpoint, _SETTINGS, revision)}
    settings = {name: json_object(file.read_bytes(), str(file)) for name, file in files.items()}
    config, adapter = settings.get("config.json", {}), settings.get(ADAPTER_CONFIG, {})
    if {"config.json", ADAPTER_CONFIG} <= settings.keys():
        both = f"{checkpoint} has both config.json and {ADAPTER_CONFIG}"
        raise ValueError(f"{both}. In a copy, remove the one that you do not want to use.")
    code = [f"megatron_core in {ADAPTER_CONFIG}"] if adapter.get("megatron_config") else []
    if config.get("model_type") == NormAlignLlavaConfig.model_type or adapter:
        # All but the model is transformers' own and needs no code. Of other models, none is run.
        for name in sorted(settings.keys() - {"config.json"}):
            code += [f"auto_map in {name}"] if "auto_map" in dict(_items(settings[name])) else []
        code += ["custom_generate"] if Path(checkpoint, "custom_generate").exists() else []
    for name in ("config.json", "generation_config.json", ADAPTER_CONFIG):
        for key, value in _items(settings.get(name)):
            # The package `kernels` would fetch this from the Hub.
            if "_implementation" in key and "/" in str(value):
                code.append(f"{key} {value} in {name}")
    if code:
        named = f"{checkpoint} names code that this package has no use for: {', '.join(code)}"
        raise ValueError(f"{named}. None of it was run. Remove that, or use another checkpoint.")
    for name, content in settings.items():
        if others := content.keys() & _OTHER_FILES:
            named = f"{min(others)} names files to read in place of others"
            raise ValueError(f"{files[name]}: {named}. Remove it.")
    return config


def check_weights(
    checkpoint: str | os.PathLike,
    revision: str | None = None,
    holding: Callable[[Iterable[str]], str] | None = None,
) -> list[Path]:
    """The files of weights, once they are known to be whole and in the folder.

    Those of a Hub id are fetched; if there is an index and `holding`, only the file with the tensor
    that `holding` chooses of the names in the index.
    Raises ValueError if there are no weights in safetensors, or they lie elsewhere or are damaged.
    """
    weights = files_of(checkpoint, [WEIGHTS], revision)
    for index in files_of(checkpoint, [INDEX], revision) if not weights else ():
        weight_map: Any = json_object(index.read_bytes(), str(index)).get("weight_map")
        names = [*weight_map.values()] if isinstance(weight_map, dict) else []
        if not names or not all(re.fullmatch(r"[^/\\]+\.safetensors", str(name)) for name in names):
            raise ValueError(f"{index} is not an index of safetensors files in its folder. {AGAIN}")
        names = sorted({*names}) if holding is None else [weight_map[holding(weight_map)]]
        weights = files_of(checkpoint, names, revision)
        if absent := sorted({*names} - {file.name for file in weights}):
            raise ValueError(f"{index} names {', '.join(absent)}, which is missing. {AGAIN}")
    if not weights:
        raise ValueError(
            f"{checkpoint} has no weights in safetensors: neither {WEIGHTS} nor {INDEX}. Pickles "
            "can run code: load the model where you trust it, and save it again."
        )
    for file in weights:
        check_inside(file)
        with loading(str(file)), safe_open(file, "pt"):
            pass
    return weights


def check_inside(file: Path, folder: Path | None = None) -> None:
    """Raises ValueError for a pipe, a device, or a link out of `folder`, by default the file's."""
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"{file} is a pipe or a device, not a file. Remove it.")
    if not is_inside(file, (folder or file.parent).resolve()):
        linked = f"{file} is a link out of its folder, to {os.path.realpath(file)}"
        raise ValueError(f"{linked}. Remove it, or copy the folder without links: `cp -rL`.")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, or in the blobs that it links to in the Hub's cache."""
    real = Path(os.path.realpath(path))  # which has no error for a link to itself
    cached = folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs"
    return cached or real.is_relative_to(folder)


@contextmanager
def loading(what: str, *, remedy: str = AGAIN) -> Iterator[None]:
    """Turns errors of reading other people's files into ValueErrors whose subject is `what`.

    OSError and ImportError stay, as do errors of a device, of a library of kernels, and of memory.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except BaseException as error:
        if device_error(error):  # which is no fault of the file
            error.add_note(f"loading {what[0].lower()}{what[1:]}")
            raise
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # where it was raised
        ours = str(frame.f_globals.get("__name__")).startswith(f"{__package__.split('.')[0]}.")
        # bytes.decode has no frame of its own, so its error looks like one of ours.
        is_sentence = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        if is_sentence and ours:
            raise
        reason = " ".join(first_cause(error)[0].split())
        if "trust_remote_code" in reason:
            raise ValueError(f"{what} needs code that comes with it, which is not run.") from error
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = reason[:600].rstrip(".")
        raise ValueError(f"{what} cannot be loaded: {kind}{reason}. {remedy}") from error


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """The object in a JSON file called `where`. Raises ValueError if it holds anything else."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}. {AGAIN}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object. {AGAIN}")
    return value


def files_of(checkpoint: str | os.PathLike, names: list[str], revision: str | None) -> list[Path]:
    """The files of these names that exist; those of a Hub id are fetched."""
    files = cached_files(
        str(checkpoint), names, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return [Path(file) for file in files or []]


def _items(content: Any) -> list[tuple[str, Any]]:
    """All keys in a JSON value, with their values."""
    items = [*content.items()] if isinstance(content, dict) else []
    parts = content if isinstance(content, list) else [value for _, value in items]
    return items + [item for part in parts for item in _items(part)]
