# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The page of a Space, served on this computer for a checkpoint folder."""

from pathlib import Path

from ...checkpoint.find import find_checkpoint
from ...errors import check_installed


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
    source, revision = find_checkpoint(checkpoint)
    check_installed("gradio", "demo", "The demo")
    import torch

    from ...assembly.parts import load_part
    from ...assembly.processing import load_processor
    from ...checkpoint.untrusted import check_files
    from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
    from .demo import ATTENTION, build_app, launch

    if (kind := check_files(source, revision).get("model_type")) != "normalign_llava":
        raise ValueError(f"{source} is a {kind!r} model. The demo shows NormAlign-LLaVA models.")
    processor = load_processor(source, revision)
    device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", torch.float32)
    kwargs = {"revision": revision, "attn_implementation": ATTENTION}
    model = load_part(NormAlignLlavaForConditionalGeneration, source, dtype, **kwargs)
    model = model.to(device).eval()
    known = Path(source).resolve().name if Path(source).exists() else source
    app = build_app(model, processor, title="NormAlign-LLaVA", source=f"Model: `{known}`.")
    launch(app, server_name=host, server_port=port)
