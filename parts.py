# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The two parts of a model: which vision encoders and language models fit, how they are loaded and made ready."""

import logging
import os
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .chat_template import check_chat_template, multimodal_chat_template
from .processing import VISION_ENCODERS


logger = logging.getLogger(__name__)

IMAGE_TOKEN = "<image>"
VOCABULARY_MULTIPLE = 64


def vision_config(vision: str) -> PreTrainedConfig:
    """Configuration of the vision encoder alone. Raises ValueError if it is none that can be built in."""
    config = AutoConfig.from_pretrained(vision)
    if config.model_type.startswith("siglip2"):
        raise ValueError(
            f"{vision} is a SigLIP 2 NaFlex encoder, whose images have any number of patches. LLaVA needs a fixed "
            "number: use a SigLIP 2 checkpoint of fixed resolution."
        )
    config = getattr(config, "vision_config", config)
    if config.model_type not in VISION_ENCODERS:
        raise ValueError(
            f"{vision} is a {config.model_type!r} model. Vision encoders that can be built in: "
            f"{', '.join(VISION_ENCODERS)}."
        )
    if config.model_type == "siglip_vision_model":
        config.vision_use_head = False  # the pooling head is not read
    return config


def check_language_model(language: str) -> None:
    """Raises ValueError if `language` is not a causal language model of transformers."""
    config = AutoConfig.from_pretrained(language)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{language} is a {config.model_type!r} model, not a causal language model of transformers.")


def check_feature_layer(feature_layer: int | list[int], config: PreTrainedConfig) -> None:
    """Raises ValueError if the encoder has no such hidden state; 0 is the embeddings, -1 the last layer's output."""
    states = config.num_hidden_layers + 1
    for layer in [feature_layer] if isinstance(feature_layer, int) else feature_layer:
        if not -states <= layer < states:
            raise ValueError(
                f"feature_layer {layer} does not exist: the encoder has {states} hidden states, the first 0."
            )


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike | None) -> tuple[str, bool]:
    """Adds the image token, and gives the tokenizer a chat template that reads images.

    Args:
        tokenizer: the language model's; changed in place.
        path: file with a template to use in place of its own.

    Returns:
        What was done, in words, and whether the template has generation marks.

    Raises:
        ValueError: the template renders text-only conversations otherwise than the original, or its marks are wrong.
    """
    original = tokenizer.chat_template
    if isinstance(original, dict):  # several named templates; the one that apply_chat_template takes
        original = original["default"]
    if path:
        original = Path(path).read_text(encoding="utf-8")
    made = multimodal_chat_template(original, image_token=IMAGE_TOKEN)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_tokens(AddedToken(IMAGE_TOKEN, special=True, normalized=False), special_tokens=True)
    check_chat_template(tokenizer, made, original)
    tokenizer.chat_template = made.template
    if not made.generation_marks:
        logger.warning(
            "The chat template has no {% generation %} marks, so this checkpoint is for inference only. Training on "
            "assistant turns needs them: pass a template that has them with --chat-template."
        )
    return made.source, made.generation_marks


def load_part(cls: type[PreTrainedModel], name: str, dtype: torch.dtype | str, **kwargs) -> PreTrainedModel:
    """`cls.from_pretrained`. Raises ValueError if the checkpoint lacks tensors."""
    model, info = cls.from_pretrained(name, dtype=dtype, output_loading_info=True, **kwargs)
    # A ViT without its pooling layer is whole: LLaVA reads hidden states.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise ValueError(f"{name} lacks {len(missing)} tensors of {cls.__name__}: {', '.join(missing[:10])}.")
    return model


def load_language_model(language: str, dtype: str) -> PreTrainedModel:
    """Loads a causal language model. Raises ValueError if LLaVA's frame cannot hold it."""
    model = load_part(AutoModelForCausalLM, language, dtype)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"The head of {language} has a bias, which LLaVA's head cannot hold. Use another language model."
        )
    if type(model.base_model) is not MODEL_MAPPING[type(model.config)]:
        raise ValueError(f"{language} has no base model that transformers' AutoModel can make; LLaVA cannot hold it.")
    return model


@torch.no_grad()
def add_image_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grows the vocabulary where the image token does not fit. New rows are the mean row: its logit is no maximum."""
    old = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= old:
        return
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=VOCABULARY_MULTIPLE, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = table.weight
        weight[old:] = weight[:old].mean(dim=0, dtype=torch.float32).to(weight.dtype)


@torch.no_grad()
def text_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits `(1, 8, V)`, float32, of a fixed text."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(3, 3 + 8).remainder(vocabulary)[None]
    return model.eval()(input_ids=ids, use_cache=False).logits.float()


def check_text_logits(model: PreTrainedModel, expected: torch.Tensor, language: str) -> None:
    """Compares an assembled model with its language model on text; see [`text_logits`].

    Raises ValueError where the most likely tokens differ. Families that transform logits after the head get a warning.
    """
    got = text_logits(model)[..., : expected.shape[-1]]
    if torch.allclose(got, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
        return
    if not torch.equal(got.argmax(-1), expected.argmax(-1)):
        raise ValueError(
            f"Inside LLaVA, {language} computes other logits than by itself. This family cannot be built in."
        )
    logger.warning(
        f"{language} transforms its logits after the head (scaling or soft-capping), which LLaVA does not: the most "
        "likely token is the same, sampling temperatures and losses differ."
    )
