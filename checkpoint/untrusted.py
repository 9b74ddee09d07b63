# SPDX-License-Identifier: Apache-2.0
"""Checks of checkpoints from other people: no code runs, no file outside their folder is read.

Commands call [`check_files`] before transformers reads a checkpoint, [`fetch_checked_weights`]
before its model is built, and read inside [`refuse_unreadable`]. `docs/security.md` lists what each
command opens.
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
from ..devices import device_error, first_cause
from ..errors import is_panic
from .files import ADAPTER_CONFIG, INDEX, WEIGHTS


# The remedy for a checkpoint that is broken, or made to look so.
AGAIN = "Save or fetch the checkpoint again, or use another."

_SETTINGS = [
    "config.json",
    "generation_config.json",
    ADAPTER_CONFIG,
    INDEX,
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
]
_WEIGHT_FILE = re.compile(r"[^/\\]+\.safetensors")
_OTHER_FILES = {"configuration_files", "transformers_weights", "fast_tokenizer_files"}


def check_files(checkpoint: str | os.PathLike, revision: str | None = None) -> dict[str, Any]:
    """Checks all files but the weights, before transformers reads them. Fetches them from the Hub.

    Args:
        checkpoint: A folder or Hub id.
        revision: A branch, tag or commit of the Hub.

    Returns:
        The content of `config.json`. It is empty for an adapter.

    Raises:
        ValueError: A file is not valid JSON, is a link out of the folder, or names code or another
            file to read, or there is a model and an adapter.
        OSError: The Hub cannot be reached.
    """
    folder = Path(checkpoint)
    # No link may lead out of the folder, since records are copied and written there.
    for parent, folders, file_names in os.walk(str(folder)):
        for file_name in (*folders, *file_names):
            _check_inside(Path(parent, file_name), folder)
        # Hidden folders, such as .git and .venv, are not searched.
        folders[:] = [name for name in folders if not name.startswith(".")]
    setting_files = fetch_files(checkpoint, _SETTINGS, revision)
    settings = {file.name: json_object(file.read_bytes(), str(file)) for file in setting_files}
    if "config.json" in settings and ADAPTER_CONFIG in settings:
        raise ValueError(
            f"{checkpoint} has both config.json and {ADAPTER_CONFIG}. In a copy, remove the one "
            "that you do not want to use."
        )
    named_code = list(_named_code(folder, settings))
    if named_code:
        raise ValueError(
            f"{checkpoint} requests custom code: {', '.join(named_code)}. None of it was run. "
            "Remove these entries, or use another checkpoint."
        )
    for file in setting_files:
        other_files = settings[file.name].keys() & _OTHER_FILES
        if other_files:
            raise ValueError(
                f"{file}: {min(other_files)} names files to read in place of others. Remove it."
            )
    return settings.get("config.json", {})


def _named_code(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Yields the places that name code in the checkpoint or on the Hub."""
    adapter_config = settings.get(ADAPTER_CONFIG, {})
    if adapter_config.get("megatron_config"):
        yield f"megatron_core in {ADAPTER_CONFIG}"
    config = settings.get("config.json", {})
    # Other models may name their code, but it is not run.
    if config.get("model_type") == NormAlignLlavaConfig.model_type or adapter_config:
        if "model_file" in config:
            yield "model_file in config.json"  # MLX-VLM runs this file, without asking
        # config.json names the model's code. Processor and generation are transformers' own.
        for file_name in sorted(settings.keys() - {"config.json"}):
            if "auto_map" in dict(_nested_items(settings[file_name])):
                yield f"auto_map in {file_name}"
        if (folder / "custom_generate").exists():
            yield "custom_generate"
    # The package `kernels` would fetch and run code of the Hub.
    for file_name in ("config.json", "generation_config.json", ADAPTER_CONFIG):
        for setting, setting_value in _nested_items(settings.get(file_name)):
            if "_implementation" in setting and "/" in str(setting_value):
                yield f"{setting} {setting_value} in {file_name}"


def fetch_checked_weights(
    checkpoint: str | os.PathLike,
    revision: str | None = None,
    choose_tensor: Callable[[Iterable[str]], str] | None = None,
) -> list[Path]:
    """Returns the files of weights. Fetches them from the Hub, and checks that they are whole.

    Args:
        checkpoint: A folder or Hub id.
        revision: A branch, tag or commit of the Hub.
        choose_tensor: Chooses a tensor among the names in an index. Only its file is fetched and
            checked. By default, all files are.

    Raises:
        ValueError: Weights in safetensors are missing, damaged, or outside the folder.
        OSError: The Hub cannot be reached.
    """
    weights = fetch_files(checkpoint, [WEIGHTS], revision)
    if not weights:
        for index in fetch_files(checkpoint, [INDEX], revision):
            file_names = _names_in_index(index, choose_tensor)
            weights = fetch_files(checkpoint, file_names, revision)
            missing_names = sorted(set(file_names) - {file.name for file in weights})
            if missing_names:
                raise ValueError(
                    f"{index} names missing files: {', '.join(missing_names)}. {AGAIN}"
                )
    if not weights:
        raise ValueError(
            f"{checkpoint} has no weights in safetensors: neither {WEIGHTS} nor {INDEX}. Pickles "
            "can run code: load the model where you trust it, and save it again."
        )
    for file in weights:
        _check_inside(file, file.parent)
        with refuse_unreadable(str(file)), safe_open(file, "pt"):
            pass
    return weights


def _names_in_index(index: Path, choose_tensor: Callable[[Iterable[str]], str] | None) -> list[str]:
    """Reads the names of all files in an index, or of the file with the chosen tensor.

    Raises ValueError if the index is damaged, or names files elsewhere.
    """
    weight_map: Any = json_object(index.read_bytes(), str(index)).get("weight_map")
    file_names = []
    if isinstance(weight_map, dict):
        file_names = [str(name) for name in weight_map.values()]
    if not file_names or not all(map(_WEIGHT_FILE.fullmatch, file_names)):
        raise ValueError(f"{index} is not an index of safetensors files in its folder. {AGAIN}")
    if choose_tensor:
        return [weight_map[choose_tensor(weight_map)]]
    return sorted(set(file_names))


def _check_inside(file: Path, folder: Path) -> None:
    """Raises ValueError for a pipe, a device, or a link out of `folder`."""
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"{file} is a pipe or a device, not a file. Remove it.")
    if not is_inside(file, folder.resolve()):
        raise ValueError(
            f"{file} is a link out of its folder, to {os.path.realpath(file)}. Remove it, or copy "
            "the folder without links: `cp -rL`."
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`, or in the blobs of the Hub's cache beside it."""
    real_path = Path(os.path.realpath(path))  # unlike resolve(), without error for a link to itself
    if folder.parent.name == "snapshots" and real_path.parent == folder.parents[1] / "blobs":
        return True
    return real_path.is_relative_to(folder)


@contextmanager
def refuse_unreadable(what: str, *, remedy: str = AGAIN) -> Iterator[None]:
    """Turns errors in the block, of reading other people's files, into ValueErrors about `what`.

    OSErrors and ImportErrors stay as they are, and so do errors of GPUs, kernels and memory.

    Args:
        what: The subject of the message, such as "The model X".
        remedy: A sentence that says what to do.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except BaseException as error:
        if device_error(error):  # no fault of the file
            error.add_note(f"loading {what[0].lower()}{what[1:]}")
            raise
        if not (isinstance(error, Exception) or is_panic(error)) or _is_ours(error):
            raise
        cause, _ = first_cause(error)
        reason = " ".join(cause.split())
        if "trust_remote_code" in reason:
            raise ValueError(f"{what} needs code that comes with it. It is not run.") from error
        reason = reason[:600].rstrip(".")
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{what} cannot be loaded: {reason}. {remedy}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether an error was raised by this package, so that its text is a sentence."""
    # bytes.decode has no frame of its own, so its error looks like one of ours.
    if not isinstance(error, ValueError) or isinstance(error, UnicodeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # where it was raised
    package = __name__.partition(".")[0]
    return str(frame.f_globals.get("__name__")).startswith(f"{package}.")


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """Parses the object in a JSON file's content. Raises ValueError if it holds anything else."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}. {AGAIN}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object. {AGAIN}")
    return value


def fetch_files(
    checkpoint: str | os.PathLike, names: list[str], revision: str | None
) -> list[Path]:
    """Returns the files of these names that exist. Files on the Hub are fetched."""
    cached_paths = cached_files(
        str(checkpoint), names, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return [Path(cached_path) for cached_path in cached_paths or []]


def _nested_items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields all keys in a JSON value with their values, the outer ones first."""
    if isinstance(content, dict):
        yield from content.items()
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from _nested_items(part)
