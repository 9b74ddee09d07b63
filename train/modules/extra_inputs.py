# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Two inputs that a model takes while it is trained, besides its own: the answers alone, and a blank image."""

import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaProcessor

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


ANSWERS = "answers"
"""Input `(B, T - 1)`: which positions predict a label. The hidden states are cut to those, `(1, labels, d)`."""

BLANK_IMAGE = "blank_image"
"""Input `(1, channels, height, width)` of a batch without images: the vision tower sees it, the decoder does not.

Other processes may have images, and under FSDP2 and ZeRO-3 all must gather the tower's weights in the same order:
after the embeddings', before the decoder's.
"""


def blank_image(processor: LlavaProcessor) -> Tensor:
    """An image of zeros, in the shape that the vision tower reads."""
    image = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
    return torch.zeros_like(image["pixel_values"])


def take_extra_inputs(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Has the model take [`ANSWERS`] and [`BLANK_IMAGE`], both of which may be missing."""
    inner = model.model

    def before_decoder(module, args, kwargs):
        kwargs.pop(ANSWERS, None)
        if (blank := kwargs.pop(BLANK_IMAGE, None)) is not None:
            embeddings = kwargs["inputs_embeds"]
            features = inner.get_image_features(pixel_values=blank.to(embeddings)).pooler_output[0]
            nowhere = torch.zeros_like(embeddings, dtype=torch.bool)  # so its gradients are zero
            kwargs["inputs_embeds"] = embeddings.masked_scatter(nowhere, features.to(embeddings))
        return args, kwargs

    def after_model(module, args, kwargs, output):
        if (answers := kwargs.get(ANSWERS)) is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][answers][None]
        return output

    inner.language_model.register_forward_pre_hook(before_decoder, with_kwargs=True)
    inner.register_forward_hook(after_model, with_kwargs=True)
