# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checking and loading a checkpoint, and starting a server for it."""

import os
import socket
from contextlib import suppress

from transformers import BitsAndBytesConfig, LlavaProcessor

from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.untrusted import check_weights
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import escaped, install


QUANTIZATIONS = {
    None: None,
    "bnb-4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bnb-8bit": {"load_in_8bit": True},
}


def serve(
    checkpoint: str | os.PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    allow_urls: bool = False,
) -> None:
    """Serves `/v1/chat/completions` from a checkpoint until interrupted.

    Runs no code from the checkpoint. Prints the address, and the model's name for requests.

    Args:
        checkpoint: Folder or Hub id.
        host: Address to listen on. The server asks for no key: anyone who can reach it can use the model.
        port: Port to listen on; 0 takes a free one.
        revision: Branch, tag or commit on the Hub.
        dtype: `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`, the checkpoint's. The norm stays float32.
        device: `"cpu"`, `"cuda:0"`, or `"auto"`, as `device_map` of `from_pretrained`.
        quantization: `"bnb-4bit"` or `"bnb-8bit"`, by bitsandbytes.
        allow_urls: Whether to fetch images from http URLs in requests, also in this network. Otherwise images must be
            `data:` URLs. Files of this machine are never opened.

    Raises:
        ImportError: The extra `serve` is not installed.
        ValueError: The checkpoint does not exist, is of another architecture or has no chat template, or an option is
            unknown.
        OSError: The server cannot listen on the address.
    """
    try:
        from .answering import Answering
        from .app import run_server
    except ModuleNotFoundError as error:
        raise ImportError(f"Serving needs packages that are not installed. {install('serve')}") from error
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization must be 'bnb-4bit' or 'bnb-8bit', got {quantization!r}.")
    name, settings = f"{checkpoint}@{revision}" if revision else str(checkpoint), QUANTIZATIONS[quantization]
    opened = open_checkpoint(checkpoint, revision)
    processor = _load_processor(opened)
    with _listening(host, port) as listener, suppress(KeyboardInterrupt):
        model = opened.load(
            dtype=dtype,
            device_map=device,
            quantization_config=BitsAndBytesConfig(**settings) if settings else None,
        )
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(escaped(f"Serving {name} at http://{address}:{port}/v1"), flush=True)
        run_server(listener, Answering(model, processor), name, allow_urls=allow_urls)


def _load_processor(opened: Checkpoint) -> LlavaProcessor:
    checkpoint, kind = opened.name, opened.model_type
    if kind != NormAlignLlavaConfig.model_type:
        remedy = "normalign build --from-llava adds the norm" if kind == "llava" else "transformers serve may serve it"
        raise ValueError(
            f"The model_type of {checkpoint} is {kind!r}, not {NormAlignLlavaConfig.model_type!r}. {remedy}."
        )
    check_weights(checkpoint, opened.revision)
    processor = opened.processor
    if processor.chat_template is None:
        raise ValueError(
            f"{checkpoint} has no chat template to turn messages into prompts. Build it with one: normalign build "
            "--chat-template FILE."
        )
    return processor


def _listening(host: str, port: int) -> socket.socket:
    # Before the model is loaded, so that a port in use is found at once; two may bind to one until either listens.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port.") from error
    return listener
