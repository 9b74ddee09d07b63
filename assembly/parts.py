# SPDX-License-Identifier: Apache-2.0
"""The two parts of a model: which vision encoders and language models fit, and how they are loaded and prepared."""

import inspect
import logging
import os
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AddedToken,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checkpoint.opening import Checkpoint
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignLlavaMultiModalProjector
from .chat_template import multimodal_chat_template
from .processing import VISION_ENCODERS


logger = logging.getLogger(__name__)


IMAGE_TOKEN = "<image>"
VOCABULARY_MULTIPLE = 64


def vision_config(vision: Checkpoint) -> PreTrainedConfig:
    """Configuration of the vision encoder alone. Raises ValueError if the encoder is not supported."""
    config = getattr(vision.config, "vision_config", vision.config)
    check_vision_encoder(vision.name, config)
    if config.model_type == "siglip_vision_model":
        config.vision_use_head = False  # the pooling head is not read
    return config


def check_vision_encoder(name: str, config: PreTrainedConfig) -> None:
    """Raises ValueError if the vision encoder with this configuration is not supported."""
    if config.model_type not in VISION_ENCODERS:
        raise ValueError(
            f"The vision encoder of {name} is a {config.model_type!r} model. Those that can be built in give every "
            f"image as many patches: {', '.join(VISION_ENCODERS)}."
        )


def check_language_model(language: Checkpoint) -> None:
    """Raises ValueError if `language` is not a causal language model of transformers that takes LLaVA's inputs."""
    config = language.config
    fits = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.get_text_config() is config
    taken = inspect.signature(MODEL_MAPPING[type(config)].forward).parameters if fits else {}
    if not taken.keys() & {"cache", "past_key_values"}:  # its name from transformers 5.24 on, and before
        raise ValueError(
            f"{language.name} is a {config.model_type!r} model, not a causal language model of transformers for text "
            "with a cache."
        )
    if config.model_type in ("bloom", "nanochat"):
        logger.warning(f"{language.name} normalises its embeddings, visual tokens too: the gain has no effect on it.")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike | None) -> bool:
    """Adds the image token, and gives the tokenizer a chat template that reads images: its own, or that of a file.

    Returns whether the template has generation marks.
    """
    original = tokenizer.chat_template
    if isinstance(original, dict):  # of several named templates, apply_chat_template uses this one
        original = original.get("default")
    if path:
        original = Path(path).read_text(encoding="utf-8")
    special = tokenizer.special_tokens_map
    template, marks = multimodal_chat_template(original, image_token=IMAGE_TOKEN, special_tokens=special)
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_tokens(AddedToken(IMAGE_TOKEN, special=True, normalized=False), special_tokens=True)
    tokenizer.chat_template = template
    return marks


def load_language_model(language: Checkpoint, dtype: str | torch.dtype) -> PreTrainedModel:
    """Loads a causal language model. Raises ValueError if LLaVA cannot contain it."""
    model = language.load(AutoModelForCausalLM, dtype)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    fits = head is not None and getattr(head, "bias", None) is None
    fits &= embeddings.embedding_dim == model.config.hidden_size
    if not fits or type(model.base_model) is not MODEL_MAPPING[type(model.config)]:
        raise ValueError(
            f"LLaVA cannot hold {language.name}: its head has a bias, its embeddings are not as wide as its hidden "
            "states, or transformers' AutoModel does not know its base model. Use another language model."
        )
    model.config.tie_word_embeddings = head.weight is embeddings.weight  # or resizing would tie what a file has apart
    return model


@torch.no_grad()
def add_image_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grows the vocabulary if the image token does not fit. New rows are the mean row: its logit is never largest."""
    old = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= old:
        return
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=VOCABULARY_MULTIPLE, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = table.weight
        weight[old:] = weight[:old].mean(dim=0, dtype=torch.float32).to(weight.dtype)


def assemble(
    config: NormAlignLlavaConfig, tower: PreTrainedModel, language_model: PreTrainedModel
) -> NormAlignLlavaForConditionalGeneration:
    """The model of two loaded parts, and a projector with random weights."""
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    model.model.vision_tower = tower
    model.model.language_model = language_model.base_model
    model.lm_head = language_model.get_output_embeddings()
    projector = NormAlignLlavaMultiModalProjector(config)
    projector.apply(model.model._init_weights)
    for linear in (projector.linear_1, projector.linear_2):
        linear.to(language_model.dtype)
    model.model.multi_modal_projector = projector
    model.generation_config = language_model.generation_config
    return model.eval()


@torch.no_grad()
def text_outputs(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `(1, 8, d)` and logits `(1, 8, V)`, float32, of a fixed text."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(3, 3 + 8).remainder(vocabulary)[None]
    hidden = model.eval().base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden.float(), model(input_ids=ids, use_cache=False).logits.float()


def check_text_outputs(model: PreTrainedModel, expected: tuple[torch.Tensor, torch.Tensor], language: str) -> None:
    """Raises ValueError if the assembled model's [`text_outputs`] differ from those of its language model alone."""
    if not all(tensor.isfinite().all() for tensor in expected):
        raise ValueError(f"{language} computes NaN or infinite values on text. Its weights are damaged.")
    hidden, logits = text_outputs(model)
    for name, got, wanted in (("hidden states", hidden, expected[0]), ("logits", logits, expected[1])):
        if not torch.allclose(got[..., : wanted.shape[-1]], wanted, rtol=1e-2, atol=1e-2 * wanted.abs().max().item()):
            raise ValueError(
                f"Inside LLaVA, {language} computes other {name} than by itself. This family cannot be built in."
            )
