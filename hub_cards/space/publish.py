# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing the demo of a published model, as a Space."""

from collections.abc import Callable

from ..push.client import Client
from ..push.contents import Content, Contents
from ..push.push import MADE_WITH, Pushed, push_snapshot, take_snapshot
from ..push.repository import MANIFEST, Repository, read_repository
from . import space_files


def space_of(repo_id: str) -> str:
    """The name of a model's Space."""
    return f"{repo_id}-demo"


def check_space(client: Client, repo_id: str) -> Repository | None:
    """The Space of a model as it is now, None if it does not exist.

    Raises:
        ValueError: It was not published by this package: it has files of its own and no manifest of ours.
    """
    existing = read_repository(client, space_of(repo_id), "space")
    if existing is not None and MANIFEST not in existing.files and existing.files.keys() - MADE_WITH["space"]:
        raise ValueError(
            f"The Space {space_of(repo_id)} exists and was not published by this package. Rename it, or publish "
            "without --space."
        )
    return existing


def push_space(client: Client, pushed: Pushed, notify: Callable[[str], object]) -> str:
    """Publishes the Space of a model, for the pushed commit; returns its page.

    A new Space is private if the model is.

    Raises:
        OSError: It failed. The model is published.
    """
    name = space_of(pushed.repo_id)
    files = space_files(pushed.repo_id, pushed.commit, pushed.repo_id.split("/")[1])
    sent = Contents([Content(path, content, len(content), "code") for path, content in files.items()], {})
    try:
        with client.step(f"looking at {name}"):
            existing = check_space(client, pushed.repo_id)
        private = pushed.private if existing is None else None
        snapshot = take_snapshot(sent)
        page = push_snapshot(client, snapshot, name, before=existing, kind="space", private=private, notify=notify).url
    except (ValueError, OSError) as error:
        raise OSError(
            f"The model is published, at {pushed.commit} of {pushed.repo_id}; its Space {name} is not. {error}"
        ) from None
    if pushed.private or pushed.gated:
        notify(f"To read the model, the Space needs a token as its secret HF_TOKEN: {page}/settings.")
    return page
