# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A stock LlavaProcessor that writes as many image tokens as the vision encoder gives features."""

from typing import Any

import torch
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import is_torchvision_available
from transformers.utils.chat_template_utils import render_jinja_template

from ..checkpoint.limits import TEMPLATE_BYTES
from ..checkpoint.loading import AGAIN, TEMPLATE_SECONDS, limited, loading
from ..errors import install


VISION_ENCODERS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "vit": 1,
}
"""Vision encoders by `model_type`, with the number of class tokens before the patches."""

PADS_RIGHT = (
    "its tokenizer pads on the right, where answers to a batch of questions are empty or wrong. "
    'Write "padding_side": "left" into its tokenizer_config.json.'
)
"""The fault and remedy of a checkpoint that was built before [`pad_left`] existed."""

_KINDS = {AutoTokenizer: "tokenizer", AutoImageProcessor: "image processor"}
_SAVE = "Save that of the model it was made from beside"
_LARGEST_SIDE = 16_384  # pixels of an image that an image processor makes; also the most tokens of an image


def pad_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the padding side to left, also in what is saved: generating from a batch needs it."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the attribute alone is not saved


def load_preprocessor(cls: Any, name: str, **kwargs: Any) -> Any:
    """`cls.from_pretrained(name)`, with errors that name the folder and what it lacks; runs no remote code.

    Args:
        cls: `AutoTokenizer`, `AutoImageProcessor`, `AutoProcessor` or a class of processors.
        name: Folder or Hub id, whose files were checked.

    Raises:
        ValueError: It does not exist or cannot be loaded, makes too large images, or its chat template is not valid
            Jinja or does not end.
        ImportError: It needs torchvision.
    """
    kind = _KINDS.get(cls, "processor")
    remedy = f"{_SAVE} it: `{cls.__name__}.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
    try:
        with loading(f"The {kind} of {name}", remedy=remedy):
            found = cls.from_pretrained(name, **{"trust_remote_code": False, **kwargs})
            image_processor = getattr(found, "image_processor", found)
            sizes = (getattr(image_processor, each, None) for each in ("size", "crop_size"))
            sides = [side for size in sizes for side in dict(size or {}).values() if side is not None]
            # Qwen's processors, which merge patches, count the pixels of the image there.
            if max(sides, default=0) > _LARGEST_SIDE ** (2 if hasattr(image_processor, "merge_size") else 1):
                raise ValueError(f"The {kind} of {name} makes images of up to {max(sides):,} pixels a side. {remedy}")
    except (OSError, ImportError, ValueError) as error:
        if "torchvision" in str(error).lower() and not is_torchvision_available():  # said in several ways
            raise ImportError(
                f"The {kind} of {name} needs torchvision, which is not installed. {install('vision')}"
            ) from error
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{name} has no {kind} that can be loaded. {remedy} transformers says: {error}") from error
    stored = getattr(found, "chat_template", None)
    for template in filter(None, stored.values() if isinstance(stored, dict) else [stored]):
        _check_template(template, f"The chat template of {name}")
    return found


def _check_template(template: str, where: str) -> None:
    """Raises ValueError if a template takes too long or too much memory for a short conversation, or is not Jinja.

    Whether it accepts that conversation does not matter here. One that misbehaves with others alone is found when it
    renders them.
    """
    messages = [{"role": role, "content": "What is this?"} for role in ("user", "assistant", "user")]
    with limited(where, TEMPLATE_SECONDS, TEMPLATE_BYTES):
        try:
            render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
        except (MemoryError, RecursionError):
            raise
        except (SecurityError, TemplateSyntaxError) as error:
            raise ValueError(f"{where} cannot be run: {error} {AGAIN}") from error
        except Exception:  # a template may refuse a conversation with any error
            pass


def make_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    vision_config: PreTrainedConfig,
    select_strategy: str | None = None,
    *,
    chat_template: str | None = None,
    image_token: str = "<image>",
) -> LlavaProcessor:
    """A [`LlavaProcessor`] for this encoder and tokenizer; the tokenizer gets a pad token, on the left.

    Args:
        image_processor: The encoder's. If it has no `crop_size`, it gets one: LlavaProcessor computes the number of
            image tokens from it for serving engines.
        tokenizer: The language model's.
        vision_config: The encoder's configuration.
        select_strategy: `"default"`, `"full"`, or None for the one that fits the encoder.
        chat_template: In place of the tokenizer's.
        image_token: The tokenizer's image token.

    Raises:
        ValueError: The strategy is unknown or would drop a patch, or the size of images is not fixed.
    """
    class_tokens = VISION_ENCODERS[vision_config.model_type]
    strategy = select_strategy or ("default" if class_tokens else "full")
    if strategy not in ("default", "full"):
        raise ValueError(f"select_strategy must be 'default' or 'full', got {select_strategy!r}.")
    if strategy == "default" and not class_tokens:
        raise ValueError(
            f"select_strategy 'default' drops the first token, and {vision_config.model_type} has no class token: a "
            "patch of the image would be lost. Use 'full'."
        )
    if not image_processor.crop_size:
        size = image_processor.size
        if not size.get("height") or not size.get("width"):
            raise ValueError(f"The image processor's size {dict(size)} gives no fixed height and width.")
        image_processor.crop_size = {"height": size["height"], "width": size["width"]}
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    pad_left(tokenizer)
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=vision_config.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=class_tokens + getattr(vision_config, "num_register_tokens", 0),
        chat_template=chat_template or tokenizer.chat_template,
        image_token=image_token,
    )


def load_processor(
    checkpoint: str, revision: str | None = None, *, config: PreTrainedConfig | None = None
) -> LlavaProcessor:
    """The processor of a NormAlign-LLaVA checkpoint whose files were checked; runs no remote code.

    Args:
        checkpoint: Folder or Hub id.
        revision: Branch, tag or commit on the Hub.
        config: The model's; its image token must be the processor's.

    Raises:
        ValueError: The checkpoint has no processor, one that cannot be read or makes too many tokens of an image, or
            another model's.
    """
    processor = load_preprocessor(AutoProcessor, checkpoint, revision=revision)
    with loading(f"The processor of {checkpoint}"):
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"{checkpoint} has a tokenizer but no processor. {_SAVE} it.")
        tokens = processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]
        if not 0 < tokens <= _LARGEST_SIDE:
            raise ValueError(f"The processor of {checkpoint} makes {tokens:,} tokens of an image. {_SAVE} it.")
        if config is not None and processor.image_token_id != config.image_token_id:
            raise ValueError(
                f"The image token of {checkpoint} is {config.image_token_id} in config.json and "
                f"{processor.image_token_id} in its tokenizer. {_SAVE} it."
            )
        check_processor(processor)
    return processor


def check_processor(processor: LlavaProcessor, model: PreTrainedModel | None = None) -> int:
    """The number of image tokens per image, compared with the features that `model` computes for an image.

    Raises:
        ValueError: The prompt, `_get_num_multimodal_tokens` and the model disagree on the number.
    """
    image = Image.new("RGB", (97, 61), "white")
    inputs = processor(images=image, text=processor.image_token, return_tensors="pt")
    counts = {
        "the prompt": int((inputs["input_ids"] == processor.image_token_id).sum()),
        "_get_num_multimodal_tokens": processor._get_num_multimodal_tokens([(61, 97)])["num_image_tokens"][0],
    }
    if model is not None:
        with torch.no_grad():
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            counts["the model"] = sum(len(each) for each in model.get_image_features(pixels).pooler_output)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} in {where}" for where, count in counts.items())
        raise ValueError(
            f"The number of image tokens differs: {found}. The image processor must give all images one size, a "
            "multiple of the patch."
        )
    return counts["the prompt"]
