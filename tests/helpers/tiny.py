"""Tiny real models, made in code: every family that the tests need, in a few thousand parameters."""

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration


IMAGE = 97  # id of the image token
VOCABULARY = 99
WIDTH = 32


def vision_config(kind: str = "clip"):
    sizes = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    if kind == "siglip":
        return SiglipVisionConfig(**sizes, vision_use_head=False)
    return CLIPVisionConfig(**sizes)


def text_config(tied: bool = True, cls=LlamaConfig, **kwargs):
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return cls(**{**sizes, **kwargs})


def config(cls=NormAlignLlavaConfig, vision="clip", tied=True, text=None, **kwargs):
    full = "full" if vision == "siglip" else "default"
    return cls(
        vision_config=vision_config(vision),
        text_config=text or text_config(tied),
        image_token_index=IMAGE,
        vision_feature_select_strategy=full,
        vision_feature_layer=-2,
        tie_word_embeddings=tied,
        **kwargs,
    )


def model(seed=0, **kwargs) -> NormAlignLlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return _with_a_projector_of_real_scale(NormAlignLlavaForConditionalGeneration(config(**kwargs)).eval())


def llava(seed=0, **kwargs) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return _with_a_projector_of_real_scale(LlavaForConditionalGeneration(config(cls=LlavaConfig, **kwargs)).eval())


def _with_a_projector_of_real_scale(model):
    # At these widths a projector's initial outputs are so small that the norm's epsilon would show.
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight *= 40.0
        model.model.multi_modal_projector.linear_2.weight *= 40.0
    return model


def heeding(model):
    """The model, changed so that what was said before matters to it though it is untrained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 30 if "language_model" in name and "v_proj" in name else 1
    return model


def reference_n_text(weight, excluded=(IMAGE,)) -> float:
    """N_text row by row in float64 with plain Python sums."""
    norms = [
        sum(float(v) ** 2 for v in row) ** 0.5
        for index, row in enumerate(weight.detach().double().tolist())
        if index not in excluded
    ]
    norms = [n for n in norms if n > 0]
    return sum(norms) / len(norms)


def inputs(images=1, text=5, batch=1, seed=0):
    """Prompts with `images` images of 4 tokens each: ids, mask and pixel values."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        words = torch.randint(3, 90, (text,), generator=generator).tolist()
        rows.append([1, *([IMAGE] * (4 * images)), *words])
    ids = torch.tensor(rows)
    result = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        result["pixel_values"] = torch.randn(batch * images, 3, 16, 16, generator=generator)
    return result
