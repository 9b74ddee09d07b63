# SPDX-License-Identifier: Apache-2.0
"""Checks before publishing, of what loading cannot see: code, norm, secrets, an adapter's base."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_files

from ...checkpoint.files import ADAPTER_CONFIG, TRAINING_RECORD, find_checkpoint
from ...checkpoint.untrusted import check_files
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..card.facts import Part
from .source import CODE, PublishSource, read_config, read_json, read_norm


PACKAGE = Path(__file__).resolve().parents[2]
_SAVE_AGAIN = "Load the checkpoint with this package and save it to another folder."
_HUB_TOKEN = r"\b(?:hf|api_org)_(?!(.)\1+\b)[A-Za-z0-9]{30,}\b"  # but not a placeholder: hf_xxx...
_PICKLED = (b"\x80", b"PK")  # how pickles begin, and the zip archives that torch.save puts them in
_MERGED = "the merged model, without --adapter."
_PUBLISH_BASE = f"Publish the base first, and name it: --base user/name. Or publish {_MERGED}"


def check_checkpoint(folder: Path) -> None:
    """Refuses foreign code, padding on the right, and a norm that is not finite or not float32."""
    (stored, config), faults = read_config(folder), list[str]()
    if config:
        files = [folder / name for name in CODE if (folder / name).is_file()]
        for name in _foreign(stored, files):
            faults.append(f"{name} is not this version's of the package. {_SAVE_AGAIN}")
        if read_json(folder / "tokenizer_config.json").get("padding_side") != "left":
            faults.append('tokenizer_config.json pads on the right. Write "padding_side": "left".')
        tied = getattr(config.text_config, "tie_word_embeddings", False)  # as servers read it
        if stored.get("tie_word_embeddings", False) != tied:
            faults.append(f"config.json: its text_config ties embeddings otherwise. {_SAVE_AGAIN}")
    for name, tensor in read_norm(folder).items():
        if tensor.dtype != torch.float32:
            faults.append(f"{name} is {tensor.dtype}, not float32: it loses updates. {_SAVE_AGAIN}")
        if bad := int((~tensor.isfinite()).sum()):
            faults.append(f"{name} has {bad} NaN or infinite values. Use an earlier checkpoint.")
    if faults:
        raise ValueError("\n- ".join([f"{folder} cannot be published:", *faults]))


def check_private(source: PublishSource, token: str) -> None:
    """Refuses tokens, that of the publisher among them, paths of this machine, and pickles.

    Of weights, only metadata are read. The error lists every place, and 4 characters of a token.
    """
    # The home folder, the checkpoint's and its parent, unless they are as common as "/root".
    folders = {Path.home(), Path.home().resolve(), source.folder, source.folder.parent}
    local = {str(path) for path in folders if len(path.parts) > 2}
    local |= {json.dumps(path)[1:-1] for path in local}  # as JSON escapes letters beyond ASCII
    longest_first = map(re.escape, sorted(local, key=len, reverse=True))
    needles = "|".join([*([re.escape(token)] if token else []), _HUB_TOKEN, *longest_first])
    faults = []
    for path, content in source.files.items():
        if isinstance(content, Path):
            with safe_open(content, "pt") as file:
                text = json.dumps(file.metadata())
        elif content.startswith(_PICKLED):
            faults.append(f"{path}: a pickle, which runs code when read. Save it as safetensors.")
            continue
        else:
            text = content.decode("utf-8", "replace")
        for match in re.finditer(needles, text):
            secret, line = match[0], text.count("\n", 0, match.start()) + 1
            what = f"a local path, {secret}. Write the name that others know it by, or remove it."
            if secret not in local:
                whose = "your token" if secret == token else "a Hugging Face token"
                what = f"{whose}, {secret[:4]}... Remove and revoke it: others may have read it."
            faults.append(f"{path}, line {line}: {what}")
    if faults:
        raise ValueError("\n- ".join(["This must not be published:", *faults]))


def recorded_base(adapter: Path) -> Part | None:
    """The base that an adapter names; None if it names none, or a folder of this machine."""
    config = read_json(adapter / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path")
    if not name or Path(name).exists():
        return None
    return Part("base model", name, name, config.get("revision") or "main")


def pinned_base(adapter: Path, base: str | None, *, ask_hub: bool) -> Part:
    """The base of an adapter: `base`, or the one that it names, with `ask_hub` at its commit."""
    part = recorded_base(adapter)
    if base is not None and (part is None or base != part.hub_id):
        part = None if Path(base).exists() else Part("base model", base, base, "main")
    if part is None:
        raise ValueError(f"The adapter's base is a folder, so nobody can load it. {_PUBLISH_BASE}")
    if not ask_hub:
        return part
    base, commit = find_checkpoint(part.name, part.revision, remedy=_PUBLISH_BASE)
    config = check_files(base, commit)
    files = cached_files(base, CODE, revision=commit, _raise_exceptions_for_missing_entries=False)
    if foreign := _foreign(config, [Path(file) for file in files or ()]):
        raise ValueError(
            f"The adapter's base, {base} at {commit}, would run code that is not this version's of "
            f"this package: {', '.join(foreign)}. Publish the base anew, or {_MERGED}"
        )
    changed = [
        f"{name} {value!r}, not {base_value!r}"
        for name, value in read_json(adapter / TRAINING_RECORD).get("config_changes", {}).items()
        if value != (base_value := config.get(name, getattr(NormAlignLlavaConfig, name)))
    ]
    if changed:  # PEFT would load it on the base as that is
        trained = f"The adapter was trained with {'; '.join(changed)} as in its base {base}"
        raise ValueError(f"{trained}. Publish {_MERGED}")
    return Part("base model", base, base, commit)


def _foreign(config: dict[str, Any], files: list[Path]) -> list[str]:
    """Code that is not this package's: names of code files, if missing or other, and `auto_map`."""
    code = {file.name: file.read_bytes() for file in files}
    foreign = [name for name in CODE if code.get(name) != (PACKAGE / name).read_bytes()]
    if config.get("auto_map") != NormAlignLlavaConfig.auto_map_entries:
        foreign.append("auto_map in config.json")
    return foreign
