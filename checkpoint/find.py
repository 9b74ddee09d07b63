# SPDX-License-Identifier: Apache-2.0
"""Finds models: a local folder or file, or a repository on the Hub. Does not import torch, so errors come quickly."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError, RevisionResolutionError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .names import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def find_model(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """The path or Hub id for `from_pretrained`, once it is known to exist, and the commit to read all its files at.

    The Hub is asked once, and only about a valid Hub id. A branch may move while a model is checked and loaded: all
    that is read must be read at this commit. It is None for a path, and comes from the cache if the Hub cannot be
    reached. Raises ValueError, with the `remedy`, if neither a folder, the Hub nor the cache has it.
    """
    path = Path(os.path.expanduser(model))  # which leaves an unknown user as it is
    if path.exists():
        return str(path), None
    absent = f"{model} is no file or folder here"
    if not is_hub_id(name := os.fspath(model)):
        raise ValueError(f"{absent}. {remedy} A model of the Hub is named owner/name.")
    try:
        return name, HfApi().resolve_revision(name, revision=revision).resolved
    except (HTTPError, OSError, RevisionResolutionError) as error:
        raise ValueError(
            f"{absent}, and the Hub ({constants.ENDPOINT}) has none that you may see, or cannot be asked "
            f"({str(error).partition(chr(10))[0]}). {remedy} A private model needs `hf auth login`."
        ) from error


def find_checkpoint(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """[`find_model`] for a whole model: also raises ValueError for a folder without `config.json`, as an adapter's."""
    source, commit = find_model(model, revision, remedy=remedy)
    if (Path(source) / ADAPTER_CONFIG).is_file() and not (Path(source) / "config.json").exists():
        raise ValueError(f"{model} is an adapter. Merge it first: `normalign merge {model} --output DIR`.")
    if Path(source).exists():
        _check_holds(source, "config.json", remedy=f"It is no model of transformers. {remedy}")
    return source, commit


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ValueError unless `folder` is that of a checkpoint or an adapter."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        _check_holds(folder, "config.json", remedy=f"It is no checkpoint, and without {ADAPTER_CONFIG} no adapter.")


def check_adapter(adapter: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds an adapter: its configuration and its weights."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_holds(adapter, name, remedy="Give the folder of an adapter, which training with use_peft wrote.")


def _check_holds(folder: str | os.PathLike, name: str, remedy: str) -> None:
    if not (Path(folder) / name).is_file():
        inside = sorted(file.parent.name for file in Path(folder).glob(f"checkpoint-*/{name}"))
        instead = f" It has {', '.join(inside)}: name one of them." if inside else ""
        raise ValueError(f"{folder} has no {name}. {remedy}{instead}")


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError unless `repo_id` is `"namespace/name"` as the Hub allows it."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"The repository {repo_id!r} lacks its owner. Give user/name or organisation/name.")


def is_hub_id(name: str) -> bool:
    """Whether `name` is a valid Hub id, owner/name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
