# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A stock LlavaProcessor that writes exactly as many placeholders as the vision encoder gives features."""

from typing import Any

import torch
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

from ..checkpoint.loading import loading


VISION_ENCODERS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "vit": 1,
}
"""Vision encoders by `model_type`, with the number of class tokens that stand before the patches."""


PADS_RIGHT = (
    "its tokenizer pads on the right, where answers to a batch of questions are empty or wrong. "
    'Write "padding_side": "left" into its tokenizer_config.json.'
)
"""What to do about a checkpoint that was made before [`pad_left`]."""


def pad_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the tokenizer, and what is saved of it, pad on the left, as generating from a batch needs."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the attribute alone is not saved


_KINDS = {
    AutoTokenizer: "tokenizer",
    AutoImageProcessor: "image processor",
    AutoProcessor: "processor",
    LlavaProcessor: "processor",
}
_SAVE = "Save that of the model it was made from beside"
_LARGEST_SIDE = 16_384  # in pixels, of what an image processor makes; and the most tokens of an image


def load_preprocessor(cls: Any, name: str, **kwargs: Any) -> Any:
    """`cls.from_pretrained(name)`, whose own errors do not say which folder lacks what; runs no code of its own.

    Args:
        cls: `AutoTokenizer`, `AutoImageProcessor`, `AutoProcessor` or `LlavaProcessor`.
        name: Folder or Hub id, whose files were checked.

    Raises:
        ValueError: There is none, or it cannot be loaded.
    """
    remedy = f"{_SAVE} it: `{cls.__name__}.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
    try:
        with loading(f"The {_KINDS[cls]} of {name}", remedy=remedy):
            found = cls.from_pretrained(name, **{"trust_remote_code": False, **kwargs})
            image_processor = getattr(found, "image_processor", found)
            sizes = (getattr(image_processor, each, None) for each in ("size", "crop_size"))
            sides = [side for size in sizes for side in dict(size or {}).values() if side is not None]
            # Qwen's processors, which merge patches, count the pixels of the image there.
            if max(sides, default=0) > _LARGEST_SIDE ** (2 if hasattr(image_processor, "merge_size") else 1):
                raise ValueError(
                    f"The {_KINDS[cls]} of {name} makes images of up to {max(sides):,} pixels a side. {remedy}"
                )
            return found
    except (OSError, ImportError) as error:
        raise ValueError(
            f"{name} has no {_KINDS[cls]} that can be loaded. {remedy} transformers says: {error}"
        ) from error


def additional_tokens(config: PreTrainedConfig) -> int:
    """Tokens that the encoder puts before the patches: class token and registers."""
    return VISION_ENCODERS[config.model_type] + getattr(config, "num_register_tokens", 0)


def make_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    vision_config: PreTrainedConfig,
    select_strategy: str | None = None,
    *,
    chat_template: str | None = None,
    image_token: str = "<image>",
) -> LlavaProcessor:
    """A [`LlavaProcessor`] for this encoder and tokenizer, which pads, and does so on the left, from then on.

    Args:
        image_processor: the encoder's; it is given a `crop_size` where it has none, from which LlavaProcessor computes
            the number of tokens for serving engines.
        select_strategy: `"default"`, `"full"`, or None for what suits the encoder.

    Raises:
        ValueError: the strategy is unknown, or would drop a patch; the image processor's size is not fixed.
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
        num_additional_image_tokens=additional_tokens(vision_config),
        chat_template=chat_template or tokenizer.chat_template,
        image_token=image_token,
    )


def load_processor(
    checkpoint: str, revision: str | None = None, *, config: PreTrainedConfig | None = None
) -> LlavaProcessor:
    """The processor of a NormAlign-LLaVA checkpoint whose files were checked; no code that came with it is run.

    Args:
        checkpoint: folder or Hub id.
        revision: branch, tag or commit on the Hub.
        config: the model's, whose image token must be the processor's.

    Raises:
        ValueError: there is none, or it cannot be read, or makes too much of an image, or is another model's.
        OSError: a file of it is not there.
    """
    processor = load_preprocessor(AutoProcessor, checkpoint, revision=revision)
    with loading(f"The processor of {checkpoint}"):
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"{checkpoint} has a tokenizer and no processor. {_SAVE} it.")
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
    """Placeholders per image, checked against the features that `model` computes for an image.

    Raises:
        ValueError: the prompt, `_get_num_multimodal_tokens` and the model do not agree on the number.
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
            f"The number of image tokens does not agree: {found}. Images must leave the image processor in one "
            "size, a multiple of the patch."
        )
    return counts["the prompt"]
