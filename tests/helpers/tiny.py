"""Tiny real models, made in code, of a few thousand parameters."""

import torch
import transformers
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration


IMAGE = 97  # id of the image token
VOCABULARY = 99
WIDTH = 32
ENCODER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
ENCODER |= dict(image_size=16, patch_size=8)


def vision_config(kind: str = "clip"):
    if kind == "siglip":
        return transformers.SiglipVisionConfig(**ENCODER, vision_use_head=False)
    return transformers.CLIPVisionConfig(**ENCODER)


def text_config(tied: bool = True, cls=LlamaConfig, **kwargs):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    sizes |= dict(num_hidden_layers=2, max_position_embeddings=256, tie_word_embeddings=tied)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return cls(**{**sizes, **ids, **kwargs})


def config(cls=NormAlignLlavaConfig, vision="clip", tied=True, text=None, **kwargs):
    strategy = "full" if vision == "siglip" else "default"
    parts = dict(vision_config=vision_config(vision), text_config=text or text_config(tied))
    features = dict(vision_feature_select_strategy=strategy, vision_feature_layer=-2)
    return cls(**parts, **features, image_token_index=IMAGE, tie_word_embeddings=tied, **kwargs)


def model(seed=0, **kwargs) -> NormAlignLlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return _at_real_scale(NormAlignLlavaForConditionalGeneration(config(**kwargs)))


def llava(seed=0, **kwargs) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return _at_real_scale(LlavaForConditionalGeneration(config(cls=LlavaConfig, **kwargs)))


def _at_real_scale(model):
    # At these widths a projector's initial outputs are so small that the norm's epsilon would show.
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight *= 40.0
        model.model.multi_modal_projector.linear_2.weight *= 40.0
    return model.eval()


def heeding(model):
    """The model, changed so that what was said before matters to it though it is untrained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 30 if "language_model" in name and "v_proj" in name else 1
    return model


def reference_n_text(weight, excluded=(IMAGE,)) -> float:
    """N_text row by row in float64 with plain Python sums."""
    rows = enumerate(weight.detach().double().tolist())
    norms = [sum(value**2 for value in row) ** 0.5 for index, row in rows if index not in excluded]
    norms = [norm for norm in norms if norm > 0]
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
