# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A stock LlavaProcessor that writes as many image tokens as the vision encoder gives features."""

from transformers import BaseImageProcessor, LlavaProcessor, PreTrainedConfig, PreTrainedTokenizerBase


VISION_ENCODERS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "vit": 1,
}
"""Vision encoders by `model_type`, with the number of class tokens before the patches."""


def pad_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the padding side to left, also in what is saved: generating from a batch needs it."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the attribute alone is not saved


def make_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    vision_config: PreTrainedConfig,
    select_strategy: str | None = None,
) -> LlavaProcessor:
    """A [`LlavaProcessor`] for this encoder and tokenizer; the tokenizer gets a pad token, on the left.

    An image processor without `crop_size` gets one: LlavaProcessor computes the number of image tokens from it for
    serving engines. `select_strategy` is `"default"`, `"full"`, or None for the one that fits the encoder.
    """
    class_tokens = VISION_ENCODERS[vision_config.model_type]
    strategy = select_strategy or ("default" if class_tokens else "full")
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
        chat_template=tokenizer.chat_template,
    )
