# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A stock LlavaProcessor that writes exactly as many placeholders as the vision encoder gives features."""

import torch
from PIL import Image
from transformers import BaseImageProcessor, LlavaProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


VISION_ENCODERS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "vit": 1,
}
"""Vision encoders by `model_type`, with the number of class tokens that stand before the patches."""


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
    """A [`LlavaProcessor`] for this encoder and tokenizer.

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
            "patch of the picture would be lost. Use 'full'."
        )
    if not image_processor.crop_size:
        size = image_processor.size
        if not size.get("height") or not size.get("width"):
            raise ValueError(f"The image processor's size {dict(size)} gives no fixed height and width.")
        image_processor.crop_size = {"height": size["height"], "width": size["width"]}
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=vision_config.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=additional_tokens(vision_config),
        chat_template=chat_template or tokenizer.chat_template,
        image_token=image_token,
    )


def check_processor(processor: LlavaProcessor, model: PreTrainedModel | None = None) -> int:
    """Placeholders per image, checked against the features that `model` computes for a picture.

    Raises:
        ValueError: the prompt, `_get_num_multimodal_tokens` and the model do not agree on the number.
    """
    picture = Image.new("RGB", (97, 61), "white")
    inputs = processor(images=picture, text=processor.image_token, return_tensors="pt")
    counts = {
        "the prompt": int((inputs["input_ids"] == processor.image_token_id).sum()),
        "_get_num_multimodal_tokens": processor._get_num_multimodal_tokens([(61, 97)])["num_image_tokens"][0],
    }
    if model is not None:
        with torch.no_grad():
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            counts["the model"] = sum(len(image) for image in model.get_image_features(pixels).pooler_output)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} in {where}" for where, count in counts.items())
        raise ValueError(
            f"The number of image tokens does not agree: {found}. Pictures must leave the image processor in one "
            "size, a multiple of the patch."
        )
    return counts["the prompt"]
