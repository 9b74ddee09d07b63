# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The page of a Space, served on this computer for a checkpoint folder."""

from pathlib import Path

from ...checkpoint.find import find_checkpoint
from ...errors import check_installed


def run_demo(checkpoint: str | Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Loads a checkpoint, a folder or Hub id, and serves the page until it is interrupted.

    `port` is by default the first free one from 7860. Raises ImportError without Gradio, ValueError if there is no
    NormAlign-LLaVA, and OSError if the port is taken.
    """
    source, revision = find_checkpoint(checkpoint)
    check_installed("gradio", "demo", "The demo")
    import torch

    from ...checkpoint.opening import open_checkpoint
    from ...checkpoint.precision import dtype_to_load
    from ...checkpoint.untrusted import bytes_of_weights
    from .demo import ATTENTION, build_app, launch

    opened = open_checkpoint(source, revision)
    if opened.model_type != "normalign_llava":
        raise ValueError(f"{checkpoint} is a {opened.model_type!r} model. The demo shows NormAlign-LLaVA models.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype_to_load("auto", opened.config, bytes_of_weights(source, revision))
    model = opened.load(dtype=dtype, attn_implementation=ATTENTION).to(device).eval()
    known = Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint
    app = build_app(model, opened.processor, title="NormAlign-LLaVA", source=f"Model: `{known}`.")
    launch(app, server_name=host, server_port=port)
