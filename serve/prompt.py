# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Turning a request's messages into inputs of the model; what is too large is refused first."""

import io
from typing import Any

from jinja2 import TemplateError
from PIL import Image
from starlette.exceptions import HTTPException
from transformers import BatchFeature, LlavaProcessor

from ..data.rows.images import decode_image
from .requests import ChatRequest, TextPart


MAX_PIXELS = 50_000_000
"""Limit of all images of a request together."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_CHARACTERS = 20
"""Limit per token of the context; text has about four. Longer prompts are not even tokenized, which takes memory."""


def make_prompt(request: ChatRequest, encoded: list[bytes], processor: LlavaProcessor, context: int) -> BatchFeature:
    """Inputs of `generate`: `input_ids` `(1, tokens)`, `attention_mask`, and `pixel_values` if there are images.

    Args:
        request: Its messages are rendered by the processor's chat template.
        encoded: The images' files, in the order of the messages.
        context: The model's context in tokens, answer included.

    Raises:
        HTTPException: An image cannot be read, the template refuses the messages, or there is no room for an answer
            (400).
    """
    too_long = f"too many for the model's context of {context:,}, answer included. Shorten it."
    texts = [part.text for message in request.messages for part in message.content if isinstance(part, TextPart)]
    characters, image_tokens = (
        sum(map(len, texts)),
        processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0],
    )
    if characters > MAX_CHARACTERS * context or len(encoded) * image_tokens > context:
        what = f"{characters:,} characters and {len(encoded)} images of {image_tokens} tokens each"
        raise HTTPException(400, f"The prompt has {what}, {too_long}")
    images, room = [], MAX_PIXELS
    for number, data in enumerate(encoded, 1):
        pixels, image = _open(data, number, room)
        images.append(image)
        room -= pixels
    messages = _messages(request, images)
    try:
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
    except TemplateError as error:
        raise HTTPException(400, f"The chat template refuses the messages: {str(error)[:200]}.") from error
    token = processor.image_token
    if (found := text.count(token)) != len(images):
        what = f"The prompt has {token} {found} times for {len(images)} images"
        raise HTTPException(400, f"{what}. Leave it out of texts: it stands for an image.")
    prompt = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    if (length := prompt["input_ids"].shape[1]) >= context:
        raise HTTPException(400, f"The prompt has {length:,} tokens, {too_long}")
    return prompt


def _messages(request: ChatRequest, images: list[Image.Image]) -> list[dict[str, Any]]:
    left = iter(images)

    def part_of(part: Any) -> dict[str, Any]:
        return part.model_dump() if isinstance(part, TextPart) else {"type": "image", "image": next(left)}

    return [{"role": each.role, "content": [part_of(part) for part in each.content]} for each in request.messages]


def _open(data: bytes, number: int, max_pixels: int) -> tuple[int, Image.Image]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            pixels = opened.width * opened.height
    except Image.DecompressionBombError:
        raise HTTPException(400, f"Image {number} has more than {MAX_PIXELS:,} pixels. Make it smaller.") from None
    # Decoders raise anything for broken files.
    except Exception:
        raise HTTPException(400, f"Image {number} cannot be read. Send one of {', '.join(FORMATS)}.") from None
    try:
        return pixels, decode_image({"path": f"Image {number}", "bytes": data}, max_pixels)
    except ValueError as error:
        raise HTTPException(400, f"{str(error)[:300]}.") from None
