# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""An OpenAI-compatible server for one checkpoint: transformers' own, told of our classes."""

import os
import socket
import time
from contextlib import suppress

from huggingface_hub.errors import HTTPError  # of the HTTP library that pictures are fetched with
from transformers import AutoModelForMultimodalLM, AutoProcessor, PreTrainedConfig
from transformers.cli.serve import Serve
from transformers.models.auto import modeling_auto
from transformers.utils.import_utils import is_serve_available

from .configuration_normalign_llava import NormAlignLlavaConfig
from .modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


def serve(
    checkpoint: str | os.PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
) -> None:
    """Serves a checkpoint as `/v1/chat/completions` and its like until it is interrupted.

    The server is `transformers serve`, pinned to this checkpoint. The classes are the installed package's: no code
    that came with the checkpoint is run. Prints the address and the name that requests give as `model`.

    Args:
        checkpoint: Folder or Hub id.
        host: Address to listen on. The server asks for no key, and opens any picture that a request names, from the
            network or from its own disk: let no stranger reach it.
        port: Port to listen on; 0 takes a free one.
        revision: Branch, tag or commit on the Hub.
        dtype: `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`, the checkpoint's. The norm stays float32.
        device: `"cpu"`, `"cuda:0"`, or `"auto"`, as `device_map` of `from_pretrained`.
        quantization: `"bnb-4bit"` or `"bnb-8bit"`, by bitsandbytes.

    Raises:
        ImportError: The extra `serve` is not installed.
        ValueError: The checkpoint is no NormAlign-LLaVA or has no chat template, or an option is not allowed.
        OSError: The checkpoint is not found, or the address cannot be listened on.
    """
    if not is_serve_available():
        raise ImportError("Serving needs more packages: pip install 'normalign-llava[serve]'")
    checkpoint = os.fspath(checkpoint)
    _check(checkpoint, revision)
    _register()
    with _listening(host, port) as listener, suppress(KeyboardInterrupt):
        name = f"{checkpoint}@{revision}" if revision else checkpoint
        _Server(name, listener, dtype=dtype, device=device, quantization=quantization)


class _Server(Serve):
    def __init__(self, model: str, listener: socket.socket, **options):
        self._model, self._listener = model, listener
        super().__init__(model, non_blocking=True, **options)  # loads the model, then calls start_server

    def start_server(self):
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        app = self.server.config.app
        # The server lists what the Hub's cache holds, which a folder is not in. The first route that fits answers.
        card = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": ""}
        models = JSONResponse({"object": "list", "data": [card]})
        app.router.routes.insert(0, Route("/v1/models", lambda request: models))
        # Left alone, each of these is a 500 without a word. A picture that cannot be read is the request's fault.
        for kind in (ValueError, OSError, HTTPError):
            app.add_exception_handler(kind, lambda request, error: _refusal(400, str(error)))
        app.add_exception_handler(Exception, lambda request, error: _refusal(500, f"{type(error).__name__}: {error}"))

        host, port = self._listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"Serving {self._model} at http://{address}:{port}/v1", flush=True)
        self.server.run(sockets=[self._listener])


def _refusal(status: int, message: str):
    from starlette.responses import JSONResponse

    if len(message) > 400:  # it quotes the picture, and ends with the cause
        message = f"{message[:150]} ... {message[-250:]}"
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _check(checkpoint: str, revision: str | None) -> None:
    if "@" in checkpoint:
        raise ValueError(
            f"The server takes what follows the '@' of {checkpoint} for a revision. Give that with --revision, and a "
            "folder under another name."
        )
    try:
        config, _ = PreTrainedConfig.get_config_dict(checkpoint, revision=revision)
    except OSError as error:
        raise OSError(f"{checkpoint} is no folder here, and was not found on the Hub: {error}") from error
    kind = config.get("model_type")
    if kind != NormAlignLlavaConfig.model_type:
        remedies = {
            None: "An adapter is merged first: normalign merge",
            "llava": "normalign build --from-llava adds the norm",
        }
        raise ValueError(
            f"The model_type of {checkpoint} is {kind!r}, not {NormAlignLlavaConfig.model_type!r}. "
            f"{remedies.get(kind, 'transformers serve may serve it')}."
        )
    if AutoProcessor.from_pretrained(checkpoint, revision=revision).chat_template is None:
        raise ValueError(
            f"{checkpoint} has no chat template to turn messages into prompts. Build it with one: normalign build "
            "--chat-template FILE."
        )


def _register() -> None:
    # The server loads AutoModelForMultimodalLM where this table has the model type, and where it has the class's name
    # it passes pictures on. `register` does not fill the table.
    name = NormAlignLlavaForConditionalGeneration.__name__
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[NormAlignLlavaConfig.model_type] = name
    AutoModelForMultimodalLM.register(NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration)


def _listening(host: str, port: int) -> socket.socket:
    # Bound before the model is loaded, so that a port in use costs no minutes.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}. Choose another --port.") from error
    return listener
