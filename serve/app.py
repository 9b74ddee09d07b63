# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The server's routes, as in OpenAI's API."""

import asyncio
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answering import Answer, Answering, Slot
from .requests import MAX_IMAGE_BYTES, ChatRequest, parse_request, read_images


MAX_BODY_BYTES = 2 * MAX_IMAGE_BYTES
READ_TIMEOUT = 30
"""Seconds in which a request must have begun, and in which its body must have arrived."""
STOP_TIMEOUT = 3
"""Seconds that a stopped server waits for slow clients."""
Result = TypeVar("Result")


def run_server(listener: socket.socket, answering: Answering, name: str, *, allow_urls: bool) -> None:
    """Serves `/v1/chat/completions`, `/v1/models` and `/health` until SIGINT or SIGTERM.

    Args:
        listener: Bound to the address to serve.
        answering: Answers the requests.
        name: Name of the model in requests.
        allow_urls: Whether to fetch images from URLs in requests.
    """

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            answering.close()
            await super().shutdown(sockets)

    with suppress(ValueError):  # outside the main thread
        # uvicorn re-raises the signal when it ends. Python's own handler would wait until the prompt has been read.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings: dict[str, Any] = {
        "log_level": "warning",
        "lifespan": "off",
        "ws": "none",
        "timeout_graceful_shutdown": STOP_TIMEOUT,
    }
    # A page in the user's browser may reach this machine under a name of its own (DNS rebinding).
    local = listener.getsockname()[0] == "127.0.0.1"
    app = _build_app(answering, name, allow_urls, hosts=["127.0.0.1", "localhost"] if local else ["*"])
    Server(uvicorn.Config(app, http=_Connection, **settings)).run(sockets=[listener])


class _Connection(H11Protocol):
    """A connection that is closed if it has no request in progress for one to two times `READ_TIMEOUT`.

    uvicorn has no timeout for the head of a request, nor for a body that was refused. h11, unlike httptools, limits
    the length of a head.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(READ_TIMEOUT, self._close_if_idle, None)

    def _close_if_idle(self, earlier: Any) -> None:
        if self.cycle is earlier and (earlier is None or earlier.response_complete):
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(READ_TIMEOUT, self._close_if_idle, self.cycle)


def _build_app(answering: Answering, name: str, allow_urls: bool, hosts: list[str]) -> Starlette:
    created = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "requests": answering.requests})

    async def models(request: Request) -> Response:
        card = {"id": name, "object": "model", "created": created, "owned_by": ""}
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(request: Request) -> Response:
        with answering.slot() as slot:
            asked = parse_request(await _body(request))
            if asked.model not in (None, name):
                raise HTTPException(404, f"There is no model {asked.model[:200]!r} here. Ask for {name!r}.")
            answer = await _while_connected(request, prepare(slot, asked))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if asked.stream:
            return _Stream(asked, answer, head)
        try:
            text = await _while_connected(request, _whole(answer))
        finally:
            answer.cancel()
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)})

    async def prepare(slot: Slot, asked: ChatRequest) -> Answer:
        return await answering.start(slot, asked, await read_images(asked, allow_urls=allow_urls))

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _disconnected, Exception: _fail},
    )


class _Stream(StreamingResponse):
    """An answer as server-sent events; it is cancelled when the client disconnects."""

    def __init__(self, asked: ChatRequest, answer: Answer, head: dict[str, Any]):
        self._answer = answer
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        super().__init__(_events(answer, head, with_usage), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def _events(answer: Answer, head: dict[str, Any], with_usage: bool) -> AsyncIterator[str]:
    head = {**head, "object": "chat.completion.chunk"}

    def event(delta: dict[str, str], finish_reason: str | None = None) -> str:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    yield event({"role": "assistant", "content": ""})
    try:
        async for piece in answer:
            yield event({"content": piece})
    except HTTPException as error:
        yield _event(_error(error.status_code, error.detail))
        return
    yield event({}, answer.finish_reason)
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


async def _whole(answer: Answer) -> str:
    return "".join([piece async for piece in answer])


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def _body(request: Request) -> bytes:
    # Other sites' pages in the user's browser cannot send this type without asking first (CORS).
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The body must be JSON, with the header Content-Type: application/json.")
    body = bytearray()
    try:
        with anyio.fail_after(READ_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"The request has more than {MAX_BODY_BYTES:,} bytes.")
    except TimeoutError:
        raise HTTPException(408, f"The request did not arrive within {READ_TIMEOUT} seconds.") from None
    return bytes(body)


async def _while_connected(request: Request, coroutine: Coroutine[Any, Any, Result]) -> Result:
    work, disconnect = asyncio.create_task(coroutine), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        disconnect.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def _refuse(request: Request, error: Any) -> Response:
    status, message = error.status_code, error.detail
    if message == HTTPStatus(status).phrase:  # from the router
        message = "This server has POST /v1/chat/completions, GET /v1/models and GET /health."
    return JSONResponse(_error(status, message), status_code=status, headers=error.headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _fail(request: Request, error: Exception) -> Response:
    return JSONResponse(_error(500, f"The server failed: {type(error).__name__}."), status_code=500)
