# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing the demo of a published model, as a Space."""

from collections.abc import Callable

from huggingface_hub import HfApi

from ..push.repository import Pushed, Repository, find_repository, push
from . import space_files


OF_THE_HUB = {".gitattributes", "README.md"}
"""The files that the Hub creates a Space with."""

SETTINGS = "space.json"
"""A file that every Space of this package has, and hardly another."""


def space_of(repo_id: str) -> str:
    """The name of a model's Space."""
    return f"{repo_id}-demo"


def check_space(api: HfApi, repo_id: str) -> Repository:
    """The Space of a model as it is now.

    Raises:
        ValueError: It was not published by this package: it has files, and not `space.json`.
    """
    existing = find_repository(api, space_of(repo_id), kind="space")
    if SETTINGS not in existing.files and existing.files - OF_THE_HUB:
        raise ValueError(
            f"The Space {space_of(repo_id)} exists and was not published by this package. Rename it, or publish "
            "without --space."
        )
    return existing


def push_space(pushed: Pushed, notify: Callable[[str], object]) -> str:
    """Publishes the Space of a model, for the pushed commit; returns its page.

    A new Space is private if the model is.

    Raises:
        OSError: It failed. The model is published.
    """
    model = pushed.repository
    name = space_of(model.repo_id)
    files = space_files(model.repo_id, pushed.commit, model.repo_id.split("/")[1])
    try:
        existing = check_space(model.api, model.repo_id)
        stale = [path for path in existing.files if path.startswith("demo/") and path not in files]
        page = push(existing, files, stale, private=model.private, notify=notify).repository.url
    except (ValueError, OSError) as error:
        raise OSError(
            f"The model is published, at {pushed.commit} of {model.repo_id}; its Space {name} is not. {error}"
        ) from None
    if model.reading_token:
        notify(f"To read the model, the Space needs a token as its secret HF_TOKEN: {page}/settings.")
    return page
