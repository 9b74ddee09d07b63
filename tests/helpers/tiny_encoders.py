"""Tiny vision encoders of every kind that `build` takes, and of kinds that it refuses."""

from collections.abc import Callable
from dataclasses import dataclass

import tiny
import torch
import transformers
from transformers import AutoModel


SIZES = tiny.ENCODER
BY_RATIO = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
IN_PAIRS = SIZES | {"image_size": [16, 16], "patch_size": [8, 8]}
TEXT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
TEXT |= {"vocab_size": 50}
SQUARE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Kind:
    """A kind of encoder: its model, tokens before patches, `model_type`, and image processor."""

    model: Callable
    prefix: int
    model_type: str
    processor: str = "ViT"


def _encoder(config_class, prefix, processor="ViT", **settings):
    config = config_class(**settings)
    return Kind(lambda: AutoModel.from_config(config), prefix, config.model_type, processor)


def _composite(config_class, vision, prefix, processor="CLIP"):
    config = config_class(vision_config=vision, text_config=TEXT)
    encoder = config.vision_config.model_type
    return Kind(lambda: AutoModel.from_config(config), prefix, encoder, processor)


def _internvl():
    vision = transformers.InternVLVisionConfig(**IN_PAIRS)
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=tiny.text_config(), image_token_id=5
    )
    return transformers.InternVLForConditionalGeneration(config)


ENCODERS = {
    "CLIP": _composite(transformers.CLIPConfig, SIZES, 1),
    "MetaCLIP 2": _composite(transformers.MetaClip2Config, SIZES, 1),
    "Chinese-CLIP": _composite(transformers.ChineseCLIPConfig, SIZES, 1, "ChineseCLIP"),
    "SigLIP": _composite(transformers.SiglipConfig, SIZES, 0, "Siglip"),
    "SigLIP 2": _encoder(transformers.SiglipVisionConfig, 0, "Siglip", **SIZES),
    "DINOv2": _encoder(transformers.Dinov2Config, 1, "Bit", **SIZES),
    "DINOv2 with registers": _encoder(
        transformers.Dinov2WithRegistersConfig, 5, "Bit", **SIZES, num_register_tokens=4
    ),
    "DINOv3": _encoder(transformers.DINOv3ViTConfig, 5, **SIZES, num_register_tokens=4),
    "AIMv2": _encoder(transformers.Aimv2VisionConfig, 0, "CLIP", **SIZES),
    "AIMv2 with text": _composite(transformers.Aimv2Config, SIZES, 0),
    "MLCD": _encoder(transformers.MLCDVisionConfig, 1, "CLIP", **SIZES),
    "I-JEPA": _encoder(transformers.IJepaConfig, 0, **SIZES),
    "ViT": _encoder(transformers.ViTConfig, 1, **SIZES),
    "ViT-MSN": _encoder(transformers.ViTMSNConfig, 1, **SIZES),
    "DeiT": _encoder(transformers.DeiTConfig, 2, "DeiT", **SIZES),
    "BEiT": _encoder(transformers.BeitConfig, 1, "Beit", **SIZES),
    "data2vec": _encoder(transformers.Data2VecVisionConfig, 1, "Beit", **SIZES),
    "InternViT": Kind(_internvl, 1, "internvl_vision", "GotOcr2"),
    "TIPSv2": _composite(transformers.Tipsv2Config, BY_RATIO, 2),
    "RADIO": _encoder(transformers.RadioConfig, 10, **BY_RATIO),
    "Pixio": _encoder(transformers.PixioConfig, 8, "Bit", **SIZES),
    "Sapiens2": _encoder(transformers.Sapiens2Config, 9, **SIZES),
}
"""Kinds of encoder that fit, by name. Some are the vision part of a model with text."""


def image_processor(kind: str):
    """The image processor of a kind. Those of DINOv3 and TIPSv2 need torchvision: ViT's, CLIP's."""
    if kind in ("CLIP", "Bit"):
        settings = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
    elif kind in ("ChineseCLIP", "DeiT"):
        settings = {"size": {"height": 20, "width": 18}, "crop_size": SQUARE}
    elif kind == "Beit":  # whose crop_size stays 224, though it does not crop
        settings = {"size": SQUARE, "do_center_crop": False}
    else:
        settings = {"size": SQUARE}
    return getattr(transformers, f"{kind}ImageProcessor")(**settings)


def save(folder, name: str) -> str:
    """Writes an encoder with its image processor into a folder."""
    kind = ENCODERS[name]
    torch.manual_seed(1)
    model = kind.model()
    model.save_pretrained(folder)
    image_processor(kind.processor).save_pretrained(folder)
    return str(folder)
