# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The fields of a request. Others are refused by name, if they would change the answer."""

import reprlib
from typing import Annotated, Literal

import anyio
import httpx
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from ..data.rows.images import ImageRules, short


MAX_IMAGE_BYTES = 20 * 2**20
MAX_MARKS = 100_000
"""Commas and opening brackets in a request: 40 MB of them would take half a minute to parse."""
FETCHING = 10
"""Seconds in which all image URLs of a request must have answered."""
AS_DATA = "Send the image as data:image/png;base64,... ."
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields of OpenAI's API that do not change the answer."""


class _Part(BaseModel):
    # Types are not converted. Other fields of messages (`name`, `refusal`) are ignored.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class TextPart(_Part):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImageURL(_Part):
    """The URL of an image, `data:` or http."""

    url: str


class ImagePart(_Part):
    """A part of a message that is an image."""

    type: Literal["image_url"]
    image_url: ImageURL


class Message(_Part):
    """A turn; a string as content is one text part."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
        Field(max_length=1000),
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ]


class StreamOptions(_Part):
    """Options of a streamed answer."""

    include_usage: bool = False


# JSON's 1e9 is a whole number, but not an int.
Count = Annotated[float, Field(ge=1, multiple_of=1)]


class ChatRequest(_Part):
    """The supported fields of OpenAI's chat completions, with the meaning that its documentation gives them."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value or []),
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None


def parse_request(body: bytes) -> ChatRequest:
    """Reads the body of a request.

    Raises:
        HTTPException: It is not JSON, has another form, or asks for something unsupported (400).
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_MARKS:
        raise HTTPException(400, f"The request has more than {MAX_MARKS:,} commas and brackets. Shorten it.")
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}, got {reprlib.repr(first['input'])}" if where else first["msg"]
        raise HTTPException(400, f"{what[:300]}.") from None
    for name, value in (request.model_extra or {}).items():
        if value and name not in WITHOUT_EFFECT:
            raise HTTPException(400, f"{name[:100]} is not supported by this server. Leave it out.")
    return request


async def read_images(request: ChatRequest, *, allow_urls: bool) -> list[bytes]:
    """The images of a request, encoded, in the order of its messages.

    Raises:
        HTTPException: One is not a `data:` URL that can be decoded, or its http URL cannot be fetched (400).
    """
    urls = [part.image_url.url for message in request.messages for part in message.content if part.type != "text"]
    try:
        with anyio.fail_after(FETCHING):
            return [await _read_image(url, allow_urls) for url in urls]
    except TimeoutError:
        raise HTTPException(400, f"The image URLs did not answer within {FETCHING} seconds.") from None


async def _read_image(url: str, allow_urls: bool) -> bytes:
    if url.startswith("data:"):
        try:
            return ImageRules().image(url)["bytes"]
        except ValueError as error:
            raise HTTPException(400, f"{error}. {AS_DATA}") from None
    if not url.lower().startswith(("http://", "https://")):
        raise HTTPException(400, f"The server opens no files: {short(url)}. {AS_DATA}")
    if not allow_urls:
        raise HTTPException(400, f"The server fetches no URLs (see --allow-urls). {AS_DATA}")
    return await _fetch(url)


async def _fetch(url: str) -> bytes:
    # Redirections are not followed, and nothing is decompressed: it may be large.
    try:
        image = bytearray()
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            if response.status_code != 200:
                raise HTTPException(400, f"{url[:200]} answered with status {response.status_code}.")
            async for chunk in response.aiter_raw():
                image += chunk
                if len(image) > MAX_IMAGE_BYTES:
                    raise HTTPException(400, f"The image at {url[:200]} has more than {MAX_IMAGE_BYTES:,} bytes.")
        return bytes(image)
    except HTTPException:
        raise
    # Malformed URLs raise anything: port 99999 an OverflowError in an ExceptionGroup.
    except Exception as error:
        raise HTTPException(400, f"{url[:200]} cannot be fetched: {str(error)[:200]}.") from None
