# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing the demo of a published model, as a Space."""

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..push.repository import Pushed, Repository, find_repository, push


GRADIO_VERSION = "6.31.0"
"""What a Space installs; the one that the tests run."""

_FOLDER = Path(__file__).parent


def space_files(repo_id: str, revision: str, title: str) -> dict[str, bytes]:
    """Path -> content of all files in the repository of a Space, which loads the model from the commit `revision`."""
    environment = Environment(loader=FileSystemLoader(_FOLDER), undefined=StrictUndefined, keep_trailing_newline=True)
    card = environment.get_template("README.md.jinja").render(
        repo_id=repo_id, revision=revision, title=title, gradio=GRADIO_VERSION
    )
    demo = {f"demo/{path.name}": path.read_bytes() for path in sorted((_FOLDER / "demo").glob("*.py"))}
    settings = {"model": repo_id, "revision": revision, "title": title}
    return {
        "README.md": card.encode(),
        "app.py": (_FOLDER / "app.py").read_bytes(),
        **demo,
        "requirements.txt": (_FOLDER / "requirements.txt").read_bytes(),
        "space.json": (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode(),
    }


def check_space(api: HfApi, repo_id: str) -> Repository:
    """The Space of a model as it is now.

    Raises:
        ValueError: It was not published by this package: it has files, and not `space.json`.
    """
    existing = find_repository(api, f"{repo_id}-demo", kind="space")
    empty = existing.files <= {".gitattributes", "README.md"}  # as the Hub creates one
    if "space.json" not in existing.files and not empty:
        raise ValueError(
            f"The Space {existing.repo_id} exists and was not published by this package. Rename it, or publish "
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
    files = space_files(model.repo_id, pushed.commit, model.repo_id.split("/")[1])
    try:
        existing = check_space(model.api, model.repo_id)
        stale = [path for path in existing.files if path.startswith("demo/") and path not in files]
        push(existing, files, stale, private=model.private, notify=notify)
    except (ValueError, OSError) as error:
        raise OSError(
            f"The model is published, at {pushed.commit} of {model.repo_id}; its Space is not. {error}"
        ) from None
    page = f"{model.api.endpoint}/spaces/{existing.repo_id}"
    if model.private:
        notify(f"To read the model, the Space needs a token as its secret HF_TOKEN: {page}/settings.")
    return page
