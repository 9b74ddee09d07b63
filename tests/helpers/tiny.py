"""Tiny real models, made in code, of a few thousand parameters."""

import torch
import transformers
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration


IMAGE = 97
"""The id of the image token."""

VOCABULARY = 99
WIDTH = 32
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def vision_config(kind: str = "clip"):
    if kind == "siglip":
        return transformers.SiglipVisionConfig(**ENCODER, vision_use_head=False)
    return transformers.CLIPVisionConfig(**ENCODER)


def text_config(tied: bool = True, cls=LlamaConfig, **kwargs):
    options = {**TEXT, "tie_word_embeddings": tied, **kwargs}
    return cls(**options)


def config(cls=NormAlignLlavaConfig, vision="clip", tied=True, text=None, **kwargs):
    if text is None:
        text = text_config(tied)
    select_strategy = "default"
    if vision == "siglip":
        select_strategy = "full"
    return cls(
        vision_config=vision_config(vision),
        text_config=text,
        vision_feature_select_strategy=select_strategy,
        vision_feature_layer=-2,
        image_token_index=IMAGE,
        tie_word_embeddings=tied,
        **kwargs,
    )


def model(seed=0, **kwargs) -> NormAlignLlavaForConditionalGeneration:
    torch.manual_seed(seed)
    untrained = NormAlignLlavaForConditionalGeneration(config(**kwargs))
    return _at_real_scale(untrained)


def llava(seed=0, **kwargs) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    untrained = LlavaForConditionalGeneration(config(cls=LlavaConfig, **kwargs))
    return _at_real_scale(untrained)


def _at_real_scale(untrained):
    # At these widths a projector's initial outputs are so small that the norm's epsilon would show.
    projector = untrained.model.multi_modal_projector
    with torch.no_grad():
        projector.linear_1.weight *= 40.0
        projector.linear_2.weight *= 40.0
    return untrained.eval()


def heeding(untrained):
    """The model, changed so that earlier text matters to it though it is untrained."""
    with torch.no_grad():
        for parameter_name, parameter in untrained.named_parameters():
            if "language_model" in parameter_name and "v_proj" in parameter_name:
                parameter *= 30
    return untrained


def reference_n_text(weight, excluded=(IMAGE,)) -> float:
    """N_text row by row in float64 with plain Python sums."""
    norms = []
    for row_index, row in enumerate(weight.detach().double().tolist()):
        norm = sum(value**2 for value in row) ** 0.5
        if row_index not in excluded and norm > 0:
            norms.append(norm)
    return sum(norms) / len(norms)


def inputs(images=1, text=5, batch=1, seed=0):
    """Prompts with `images` images of 4 tokens each: ids, mask and pixel values."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(batch):
        text_ids = torch.randint(3, 90, (text,), generator=generator).tolist()
        image_ids = [IMAGE] * (4 * images)
        prompts.append([1, *image_ids, *text_ids])
    input_ids = torch.tensor(prompts)
    batch_inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
    }
    if images:
        image_count = batch * images
        pixel_values = torch.randn(image_count, 3, 16, 16, generator=generator)
        batch_inputs["pixel_values"] = pixel_values
    return batch_inputs
