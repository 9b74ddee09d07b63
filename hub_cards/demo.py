# SPDX-License-Identifier: Apache-2.0
"""The demo of a model, `demo_app.py`: served here, or published as a Space."""

import json
from pathlib import Path

from ..checkpoint.files import require_checkpoint
from ..errors import check_installed


GRADIO_VERSION = "6.31.0"  # what a Space installs, and the tests run

SPACE_CARD = """\
---
title: {title}
emoji: 🔎
colorFrom: blue
colorTo: yellow
sdk: gradio
sdk_version: {gradio}
app_file: app.py
pinned: false
license: apache-2.0
models:
  - {repo_id}
short_description: Ask about an image, and see where the words look
---

Asks [{repo_id}](https://huggingface.co/{repo_id}/tree/{revision}) about an image, at the commit in
`space.json`. If the model is private, give the Space a secret `HF_TOKEN` that can read it.
"""


def run_demo(checkpoint: str | Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Serves a page that asks a checkpoint about images, until it is interrupted.

    Args:
        checkpoint: Folder or Hub id.
        host: Address to listen on.
        port: By default the first free one from 7860.

    Raises:
        ValueError: The checkpoint does not exist, is damaged, or is not of this package.
        OSError: The checkpoint cannot be fetched, or no port is free.
        ImportError: Gradio is not installed.
    """
    source, revision = require_checkpoint(checkpoint)
    check_installed("gradio", "demo", "The demo")
    import torch
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from ..checkpoint.opening import open_checkpoint
    from ..checkpoint.precision import dtype_to_load
    from .demo_app import ATTENTION, build_app, launch

    opened = open_checkpoint(source, revision)
    if opened.model_type != "normalign_llava":
        raise ValueError(
            f"{checkpoint} is a {opened.model_type!r} model. The demo is for NormAlign-LLaVA only."
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype_to_load("auto", opened.config, opened.fetched_weight_bytes)
    model = opened.load(dtype=dtype, attn_implementation=ATTENTION).to(device_type).eval()
    path = Path(checkpoint)
    model_name = path.resolve().name if path.exists() else checkpoint
    app = build_app(
        model,
        opened.processor,
        title="NormAlign-LLaVA",
        source=f"Ask `{model_name}` about an image.",
    )
    local_hosts = ["localhost", "127.0.0.1"]
    middleware = []
    if host in local_hosts:
        # Another site may give this computer a name of its own, to read the page (DNS rebinding).
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=local_hosts)]
    launch(app, server_name=host, server_port=port, app_kwargs={"middleware": middleware})


def space_files(repo_id: str, revision: str) -> dict[str, bytes]:
    """Returns all files of a Space by path. It loads the model from the commit `revision`."""
    space_card = SPACE_CARD.format(
        title=json.dumps(repo_id.rpartition("/")[2]),
        gradio=GRADIO_VERSION,
        repo_id=repo_id,
        revision=revision,
    )
    package = Path(__file__).parents[1]
    app_code = (package / "hub_cards/demo_app.py").read_text(encoding="utf-8")
    app_code = app_code.replace("from ..evaluation.answering import", "from answering import")
    return {
        "README.md": space_card.encode(),
        "app.py": app_code.encode(),
        "answering.py": (package / "evaluation/answering.py").read_bytes(),
        "requirements.txt": b"torch>=2.6\ntransformers>=5.20,<6\npillow>=11.3,<13\n",
        "space.json": json.dumps({"model": repo_id, "revision": revision}).encode(),
    }
