# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The files of a Space that answers questions with a published model."""

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


GRADIO_VERSION = "6.31.0"
"""What a Space installs; the one that the tests run."""

_FOLDER = Path(__file__).parent


def space_files(repo_id: str, revision: str, title: str) -> dict[str, bytes]:
    """Everything that a Space's repository holds.

    Args:
        repo_id: The model's repository.
        revision: Its commit, from which weights, processor and code are loaded.
        title: The page's heading and the Space's title, in one line.

    Returns:
        Path in the repository -> content.
    """
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
