"""Tiny vision encoders of every kind that `build` takes, and of kinds that it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tiny
import torch
import transformers
from transformers import AutoModel


SIZES = tiny.ENCODER
BY_RATIO = dict(SIZES)  # for encoders whose inner size is a multiple of the hidden size
del BY_RATIO["intermediate_size"]
IN_PAIRS = {
    **SIZES,
    "image_size": [16, 16],
    "patch_size": [8, 8],
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
SQUARE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Kind:
    """A kind of encoder: its model, tokens before patches, `model_type`, and image processor."""

    model: Callable
    prefix: int
    model_type: str
    processor: str = "ViT"


def _encoder(config_class, *, prefix, processor="ViT", sizes=SIZES, **settings) -> Kind:
    encoder_config = config_class(**sizes, **settings)
    make_model = partial(AutoModel.from_config, encoder_config)
    return Kind(make_model, prefix, encoder_config.model_type, processor)


def _with_text(config_class, *, prefix, processor="CLIP", sizes=SIZES) -> Kind:
    """A kind of encoder that is the vision part of a model with text."""
    model_config = config_class(vision_config=sizes, text_config=TEXT)
    make_model = partial(AutoModel.from_config, model_config)
    model_type = model_config.vision_config.model_type
    return Kind(make_model, prefix, model_type, processor)


def _internvl():
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**IN_PAIRS),
        text_config=tiny.text_config(),
        image_token_id=5,
    )
    return transformers.InternVLForConditionalGeneration(config)


ENCODERS = {
    "CLIP": _with_text(transformers.CLIPConfig, prefix=1),
    "MetaCLIP 2": _with_text(transformers.MetaClip2Config, prefix=1),
    "Chinese-CLIP": _with_text(
        transformers.ChineseCLIPConfig,
        prefix=1,
        processor="ChineseCLIP",
    ),
    "SigLIP": _with_text(
        transformers.SiglipConfig,
        prefix=0,
        processor="Siglip",
    ),
    "SigLIP 2": _encoder(
        transformers.SiglipVisionConfig,
        prefix=0,
        processor="Siglip",
    ),
    "DINOv2": _encoder(
        transformers.Dinov2Config,
        prefix=1,
        processor="Bit",
    ),
    "DINOv2 with registers": _encoder(
        transformers.Dinov2WithRegistersConfig,
        prefix=5,
        processor="Bit",
        num_register_tokens=4,
    ),
    "DINOv3": _encoder(
        transformers.DINOv3ViTConfig,
        prefix=5,
        num_register_tokens=4,
    ),
    "AIMv2": _encoder(
        transformers.Aimv2VisionConfig,
        prefix=0,
        processor="CLIP",
    ),
    "AIMv2 with text": _with_text(transformers.Aimv2Config, prefix=0),
    "MLCD": _encoder(
        transformers.MLCDVisionConfig,
        prefix=1,
        processor="CLIP",
    ),
    "I-JEPA": _encoder(transformers.IJepaConfig, prefix=0),
    "ViT": _encoder(transformers.ViTConfig, prefix=1),
    "ViT-MSN": _encoder(transformers.ViTMSNConfig, prefix=1),
    "DeiT": _encoder(
        transformers.DeiTConfig,
        prefix=2,
        processor="DeiT",
    ),
    "BEiT": _encoder(
        transformers.BeitConfig,
        prefix=1,
        processor="Beit",
    ),
    "data2vec": _encoder(
        transformers.Data2VecVisionConfig,
        prefix=1,
        processor="Beit",
    ),
    "InternViT": Kind(
        model=_internvl,
        prefix=1,
        model_type="internvl_vision",
        processor="GotOcr2",
    ),
    "TIPSv2": _with_text(
        transformers.Tipsv2Config,
        prefix=2,
        sizes=BY_RATIO,
    ),
    "RADIO": _encoder(
        transformers.RadioConfig,
        prefix=10,
        sizes=BY_RATIO,
    ),
    "Pixio": _encoder(
        transformers.PixioConfig,
        prefix=8,
        processor="Bit",
    ),
    "Sapiens2": _encoder(transformers.Sapiens2Config, prefix=9),
}
"""Kinds of encoder that fit, by name. Some are the vision part of a model with text."""


def image_processor(family: str):
    """The image processor of a family. DINOv3 and TIPSv2 use ViT's and CLIP's.

    Their own image processors need torchvision.
    """
    settings = {"size": SQUARE}
    if family in ("CLIP", "Bit"):
        settings["size"] = {"shortest_edge": 16}
        settings["crop_size"] = SQUARE
    elif family in ("ChineseCLIP", "DeiT"):
        settings["size"] = {"height": 20, "width": 18}
        settings["crop_size"] = SQUARE
    elif family == "Beit":  # its crop_size stays 224, though it does not crop
        settings["do_center_crop"] = False
    processor_class = getattr(transformers, f"{family}ImageProcessor")
    return processor_class(**settings)


def save(folder, name: str) -> str:
    """Writes an encoder with its image processor into a folder."""
    kind = ENCODERS[name]
    torch.manual_seed(1)
    model = kind.model()
    model.save_pretrained(folder)
    image_processor(kind.processor).save_pretrained(folder)
    return str(folder)
