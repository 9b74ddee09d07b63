# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The page of a Space, served on this computer for a checkpoint folder."""

from importlib.util import find_spec
from pathlib import Path

from ...checkpoint.find import find_checkpoint
from ...errors import install


def run_demo(checkpoint: str | Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Loads a checkpoint and serves the page until it is interrupted.

    Args:
        checkpoint: Folder or Hub id of a NormAlign-LLaVA.
        host: Address to listen on; "0.0.0.0" lets other computers in.
        port: Port to listen on; by default the first free one from 7860.

    Raises:
        ImportError: Gradio is not installed.
        ValueError: There is no NormAlign-LLaVA at `checkpoint`.
        OSError: The port is taken.
    """
    source = find_checkpoint(checkpoint)
    if find_spec("gradio") is None:
        raise ImportError(f"The demo needs gradio. {install('demo')}")
    from ... import modeling_normalign_llava  # noqa: F401  (registers our classes, so that ours need no remote code)
    from ...assembly.processing import load_processor
    from ...checkpoint.loading import loading
    from ...checkpoint.untrusted import check_files, check_weights

    if (kind := check_files(source).get("model_type")) != "normalign_llava":
        raise ValueError(f"{source} is a {kind!r} model. The demo shows NormAlign-LLaVA models.")
    check_weights(source)
    processor = load_processor(source)
    from .demo import build_app, launch, load

    with loading(f"The model {source}", seconds=None):
        model, _ = load(source, trust_remote_code=False)
    known = Path(source).resolve().name if Path(source).exists() else source
    app = build_app(model, processor, title="NormAlign-LLaVA", source=f"Model: `{known}`.")
    launch(app, server_name=host, server_port=port)
