# SPDX-License-Identifier: Apache-2.0
"""Checks before publishing that loading does not make.

Of code and norm, secrets, an adapter's base, and GGUF files.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...checkpoint.files import ADAPTER_CONFIG, TRAINING_RECORD, require_checkpoint
from ...checkpoint.untrusted import check_files, fetch_files
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...export.record import exported_weights, weights_hash
from ..card.facts import (
    MODELFILE,
    Part,
    gguf_files,
    models_of,
    read_config,
    read_json,
    read_norm,
    weight_files,
)
from .source import CODE, PublishSource


PACKAGE = Path(__file__).resolve().parents[2]
_SAVE_AGAIN = "Load the checkpoint with this package and save it to another folder."
_HUB_TOKEN = r"\b(?:hf|api_org)_(?!(.)\1+\b)[A-Za-z0-9]{30,}\b"  # but not a placeholder: hf_xxx...
_PICKLED = (b"\x80", b"PK")  # how pickles begin, and the zip archives that torch.save puts them in
_GGUF_METADATA = 2**24  # bytes that hold them, with all tokens of a large vocabulary
_MERGED = "the merged model, without --adapter."
_PUBLISH_BASE = f"Publish the base first, and name it: --base user/name. Or publish {_MERGED}"


def check_checkpoint(folder: Path) -> None:
    """Raises ValueError if the model would not be served as it was trained.

    It refuses foreign code, padding on the right, embeddings that are tied in only one of the two
    configurations, and a norm that is not finite or not float32. It also raises ValueError if
    a file of the checkpoint is broken or not safe to read.
    """
    faults = []
    config_json, config = read_config(folder)
    if config is not None:
        for foreign_code in _fetch_foreign(config_json, folder):
            faults.append(f"{foreign_code} is not this version's of the package. {_SAVE_AGAIN}")
        if read_json(folder / "tokenizer_config.json").get("padding_side") != "left":
            faults.append('tokenizer_config.json pads on the right. Write "padding_side": "left".')
        text_tied = getattr(config.text_config, "tie_word_embeddings", False)  # as servers read it
        if config_json.get("tie_word_embeddings", False) != text_tied:
            faults.append(f"config.json: its text_config ties embeddings otherwise. {_SAVE_AGAIN}")
    for tensor_name, tensor in read_norm(folder).items():
        if tensor.dtype != torch.float32:
            faults.append(
                f"{tensor_name} is {tensor.dtype}, not float32: it loses updates. {_SAVE_AGAIN}"
            )
        not_finite = int((~tensor.isfinite()).sum())
        if not_finite:
            faults.append(
                f"{tensor_name} has {not_finite} NaN or infinite values. Use an earlier checkpoint."
            )
    if faults:
        raise ValueError("\n- ".join([f"{folder} cannot be published:", *faults]))


def check_private(source: PublishSource, token: str) -> None:
    """Raises ValueError if files have tokens or paths of this machine, or are pickles.

    Only the metadata of weights is read. The error lists every place, and shows 4 characters of a
    token.

    Args:
        source: The files that are to be published.
        token: The publisher's token, or "".
    """
    local_paths = set()
    for folder in (Path.home(), Path.home().resolve(), source.folder, source.folder.parent):
        if len(folder.parts) > 2:  # others are as common as "/root"
            in_json = json.dumps(str(folder))[1:-1]  # JSON escapes letters beyond ASCII
            local_paths |= {str(folder), in_json}
    longest_first = sorted(local_paths, key=len, reverse=True)
    texts = filter(None, [token, *longest_first])
    private_pattern = re.compile("|".join([*map(re.escape, texts), _HUB_TOKEN]))
    faults = []
    for repo_path, content in source.files.items():
        if isinstance(content, Path):
            text = _read_metadata(content)
        elif content.startswith(_PICKLED):
            faults.append(f"{repo_path}: a pickle. It runs code when read. Save it as safetensors.")
            continue
        else:
            text = content.decode("utf-8", "replace")
        for occurrence in private_pattern.finditer(text):
            secret = occurrence[0]
            line_number = text.count("\n", 0, occurrence.start()) + 1
            if secret in local_paths:
                remedy = "Write the name that others know it by, or remove it."
                description = f"a local path, {secret}. {remedy}"
            else:
                owner = "your token" if secret == token else "a Hugging Face token"
                remedy = "Remove and revoke it: others may have read it."
                description = f"{owner}, {secret[:4]}... {remedy}"
            faults.append(f"{repo_path}, line {line_number}: {description}")
    if faults:
        raise ValueError("\n- ".join(["This must not be published:", *faults]))


def _read_metadata(file: Path) -> str:
    """Reads the metadata of a file of weights. In a GGUF file, they are at the beginning."""
    if file.suffix == ".gguf":
        with file.open("rb") as stream:
            return stream.read(_GGUF_METADATA).decode("utf-8", "replace")
    with safe_open(file, "pt") as tensors:
        return json.dumps(tensors.metadata())


def recorded_base(adapter: Path) -> Part | None:
    """Reads the base that an adapter names. Returns None for none, or a folder of this machine."""
    adapter_config = read_json(adapter / ADAPTER_CONFIG)
    base_name = adapter_config.get("base_model_name_or_path")
    if not base_name or Path(base_name).exists():
        return None
    return Part("base model", base_name, base_name, adapter_config.get("revision") or "main")


def require_pinned_base(adapter: Path, base: str | None, *, ask_hub: bool) -> Part:
    """Returns the base that an adapter is published with, and refuses one that cannot be loaded.

    Args:
        adapter: Folder of the adapter.
        base: Hub id of its base. By default it is the one that the adapter names.
        ask_hub: Pin the base to its commit, and check that it is as it was in training.

    Raises:
        ValueError: The base is not on the Hub, would run foreign code, or has another architecture
            than in training.
        OSError: The base cannot be fetched.
    """
    base_part = recorded_base(adapter)
    if base is not None and (base_part is None or base != base_part.hub_id):
        base_part = None if Path(base).exists() else Part("base model", base, base, "main")
    if base_part is None:
        raise ValueError(f"The adapter's base is a folder, so nobody can load it. {_PUBLISH_BASE}")
    if not ask_hub:
        return base_part
    base, base_commit = require_checkpoint(base_part.name, base_part.revision, remedy=_PUBLISH_BASE)
    base_config = check_files(base, base_commit)
    foreign_code = _fetch_foreign(base_config, base, base_commit)
    if foreign_code:
        raise ValueError(
            f"The adapter's base, {base} at {base_commit}, would run code that is not this "
            f"version's of this package: {', '.join(foreign_code)}. Publish the base anew, or "
            f"{_MERGED}"
        )
    # PEFT would load the adapter on the base as that is.
    changed_settings = []
    training_record = read_json(adapter / TRAINING_RECORD)
    for setting, trained_value in training_record.get("config_changes", {}).items():
        base_value = base_config.get(setting, getattr(NormAlignLlavaConfig, setting))
        if trained_value != base_value:
            changed_settings.append(f"{setting} {trained_value!r}, not {base_value!r}")
    if changed_settings:
        raise ValueError(
            f"The adapter was trained with {'; '.join(changed_settings)} as in its base {base}. "
            f"Publish {_MERGED}"
        )
    return Part("base model", base, base, base_commit)


def _fetch_foreign(
    config: dict[str, Any], checkpoint: str | Path, revision: str | None = None
) -> list[str]:
    """Returns what of a checkpoint's code is not this package's.

    Args:
        config: `config.json`, whose `auto_map` names the code.
        checkpoint: The folder or Hub id.
        revision: The commit on the Hub.

    Returns:
        Names of code files that are missing or differ, and "auto_map in config.json".
    """
    files = fetch_files(checkpoint, list(CODE), revision)
    content_by_name = {file.name: file.read_bytes() for file in files}
    foreign = [name for name in CODE if content_by_name.get(name) != (PACKAGE / name).read_bytes()]
    if config.get("auto_map") != NormAlignLlavaConfig.auto_map_entries:
        foreign.append("auto_map in config.json")
    return foreign


def check_gguf(checkpoint: Path) -> None:
    """Checks the GGUF files of a checkpoint folder, and the Modelfile beside them.

    Files that `normalign export` did not write have no record of their weights. They may be of
    other weights.

    Raises:
        ValueError: A file is not GGUF or has no tensors, a Modelfile names a file that is missing,
            or the files were exported from other weights. The error lists every fault.
    """
    files = gguf_files(checkpoint)
    faults = []
    for file in files:
        with file.open("rb") as stream:
            header = stream.read(16)  # magic bytes, version, number of tensors
        if not (len(header) == 16 and header.startswith(b"GGUF") and any(header[8:])):
            faults.append(f"{file} is not a GGUF file with tensors. Write it again, or remove it.")
    folders = sorted({file.parent for file in files})
    for folder in folders:
        modelfile = folder / MODELFILE
        for name in models_of(modelfile):
            if name.endswith(".gguf") and not (folder / name).is_file():
                faults.append(
                    f"{modelfile} names {name}, but this file does not exist. Write it, or correct "
                    "or remove the Modelfile."
                )
    recorded_hashes = {}
    if not faults:
        recorded_hashes = {folder: exported_weights(folder) for folder in folders}
    if any(recorded_hashes.values()):
        current_hash = weights_hash(weight_files(checkpoint))  # it takes long
        faults = [
            f"{folder} was exported from other weights than {checkpoint} has now. Remove it and "
            f"run `normalign export {checkpoint}` again, or publish without --gguf."
            for folder, recorded_hash in recorded_hashes.items()
            if recorded_hash not in (None, current_hash)
        ]
    if faults:
        raise ValueError("\n- ".join(["These GGUF files cannot be published:", *faults]))
