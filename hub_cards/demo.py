# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The page of a Space, served on this computer for a checkpoint folder."""

from pathlib import Path

from .. import modeling_normalign_llava  # noqa: F401  (registers our classes, so that ours need no remote code)


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
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError("The demo needs gradio. Install it with: pip install 'normalign-llava[demo]'") from error
    from transformers import AutoConfig

    from .space.demo import build_app, launch, load

    name = Path(checkpoint).expanduser()
    source = str(name) if name.exists() else str(checkpoint)
    if name.is_dir() and not (name / "config.json").is_file():
        adapter = (name / "adapter_config.json").is_file()
        remedy = "Merge the adapter first: normalign merge." if adapter else "Name a checkpoint folder."
        raise ValueError(f"{name} has no config.json. {remedy}")
    config = AutoConfig.from_pretrained(source)
    if config.model_type != "normalign_llava":
        raise ValueError(f"{source} is a {config.model_type!r} model. The demo shows NormAlign-LLaVA models.")
    model, processor = load(source, trust_remote_code=False)
    known = name.resolve().name if name.exists() else source
    app = build_app(model, processor, title="NormAlign-LLaVA", source=f"Model: `{known}`.")
    launch(app, server_name=host, server_port=port)
