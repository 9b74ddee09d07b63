# SPDX-License-Identifier: Apache-2.0
"""Finds models: a local folder or file, or a repository on the Hub. Does not import torch, so errors come quickly."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .names import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def find_model(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """The path or Hub id for `from_pretrained`, once it is known to exist, and the commit to read all its files at.

    transformers takes a folder that does not exist for a repository, and asks the Hub for each of its files several
    times. Here the Hub is asked once, and only about a valid Hub id. A branch may move while a model is checked and
    loaded: whoever reads it must give this commit as the revision, everywhere. It is None for a path, and comes from
    the cache if the Hub cannot be reached.

    Raises ValueError, with the `remedy`, if it does not exist or neither the Hub nor the cache has it.
    """
    path = Path(os.path.expanduser(model))  # which leaves an unknown user as it is
    if path.exists():
        return str(path), None
    absent = f"{model} is no file or folder here"
    if not is_hub_id(name := os.fspath(model)):
        raise ValueError(f"{absent}. {remedy} A model of the Hub is named owner/name.")
    try:
        return name, HfApi().resolve_revision(name, revision=revision).resolved
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(
            f"{absent}, and the Hub has no model of that name and revision, or none that you may see. {remedy} A "
            "private one needs `hf auth login`."
        ) from error
    except (HTTPError, OSError, RevisionResolutionError) as error:
        raise ValueError(
            f"{absent}, and the Hub ({constants.ENDPOINT}) cannot be asked: {str(error).rstrip('. ')}. "
            "Check the name and your connection."
        ) from error


def find_checkpoint(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """[`find_model`] for a whole model: also raises ValueError for a folder without `config.json`, as an adapter's."""
    source, commit = find_model(model, revision, remedy=remedy)
    folder = Path(source)
    if folder.exists() and not (folder / "config.json").is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{model} is an adapter. Merge it first (`normalign merge {model} --output DIR`), and name DIR."
            )
        raise ValueError(
            f"{model} has no config.json, so it is no model of transformers.{_inside(folder, 'config.json')} {remedy}"
        )
    return source, commit


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ValueError unless `folder` is that of a checkpoint or an adapter."""
    path, names = Path(folder), ("config.json", ADAPTER_CONFIG)
    if not any((path / name).is_file() for name in names):
        raise ValueError(
            f"{folder} is no folder of a checkpoint: it has no config.json and no {ADAPTER_CONFIG}."
            f"{_inside(path, *names)}"
        )


def check_adapter(adapter: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds an adapter: its configuration and its weights."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(adapter) / name).is_file():
            raise ValueError(
                f"{adapter} holds no {name}, so it is no folder of an adapter. Give the one that training with "
                f"use_peft wrote, or a checkpoint-N in it.{_inside(Path(adapter), ADAPTER_CONFIG)}"
            )


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


def _inside(folder: Path, *names: str) -> str:
    inside = sorted({file.parent.name for name in names for file in folder.glob(f"checkpoint-*/{name}")})
    return f" It has {', '.join(inside)}: name one of them." if inside else ""
