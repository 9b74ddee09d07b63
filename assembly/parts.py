# SPDX-License-Identifier: Apache-2.0
"""The language model that a model is built of, and assembling it with a vision encoder.

A checkpoint gets some flags of the language model's `generation_config.json`.
"""

import inspect
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AddedToken,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checkpoint.opening import Checkpoint
from ..checkpoint.prompts import answer_ends, default_template, without_idle_flags
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..devices import device_error, first_cause
from ..modeling_normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    NormAlignLlavaMultiModalProjector,
)
from .chat_template import multimodal_chat_template


logger = logging.getLogger(__name__)

IMAGE_TOKEN = "<image>"

COPIED = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "suppress_tokens",
    "max_length",
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "use_cache",
    "cache_implementation",
    "cache_config",
}
"""Flags that are copied: tokens, lengths, how answers are drawn, and the cache.

Others, such as `repetition_penalty` and `num_beams`, change answers that are not drawn. A greedy
answer would no longer be what training made the likeliest.
"""


def check_language_model(language: Checkpoint) -> None:
    """Raises ValueError unless this is a causal language model that takes LLaVA's inputs.

    Warns if the gain would have no effect.
    """
    config = language.config
    part_config = config.get_text_config(decoder=True)
    has_cache = False
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_MAPPING
    if is_known and part_config is config:
        parameters = inspect.signature(MODEL_MAPPING[type(config)].forward).parameters
        # The second name is of transformers before 5.24.
        has_cache = "cache" in parameters or "past_key_values" in parameters
    if not has_cache:
        remedy = ""
        if type(part_config) in MODEL_FOR_CAUSAL_LM_MAPPING and part_config is not config:
            remedy = f" Save its {part_config.model_type!r} model by itself, and use that."
        raise ValueError(
            f"{language.name} is a {config.model_type!r} model, not a causal language model with a "
            f"cache.{remedy}"
        )
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_default_dynamic_cache():
        raise ValueError(
            f"{language.name} is a {config.model_type!r} model. Its cache is of a kind of its own, "
            "and LLaVA generates with transformers' DynamicCache. Use another."
        )
    # The first is of Gemma 3n and 4, the second of Qwen4-Exp.
    if getattr(config, "hidden_size_per_layer_input", 0) or getattr(config, "ple_layer_ids", None):
        raise ValueError(
            f"{language.name} is a {config.model_type!r} model. Its layers read a second embedding "
            "of each token, and a visual token has none. Use another."
        )
    if config.model_type in ("bloom", "nanochat"):
        logger.warning(f"{language.name} normalises its input embeddings: the gain has no effect.")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike | None) -> bool:
    """Adds the image token and a chat template that reads images, from the file `path` if set.

    Returns whether the template marks what the model has to generate. Raises ValueError as
    [`multimodal_chat_template`] does.
    """
    original = default_template(tokenizer.chat_template)
    if path:
        original = Path(path).read_text("utf-8")
    template, has_marks = multimodal_chat_template(
        original, image_token=IMAGE_TOKEN, special_tokens=tokenizer.special_tokens_map
    )
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        image_token = AddedToken(IMAGE_TOKEN, special=True, normalized=False)
        tokenizer.add_tokens(image_token, special_tokens=True)
    tokenizer.chat_template = template
    make_ends_special(tokenizer)
    return has_marks


def make_ends_special(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the tokens that end an answer special. Decoding then leaves them out of the answer."""
    for token_id in answer_ends(tokenizer):
        end_token = tokenizer.added_tokens_decoder[token_id]
        if not end_token.special:
            end_token.special = True
            tokenizer.add_tokens(end_token, special_tokens=True)


def load_language_model(language: Checkpoint, dtype: str | torch.dtype) -> PreTrainedModel:
    """Loads a causal language model. Raises ValueError if LLaVA cannot contain it."""
    model = language.load(AutoModelForCausalLM, dtype)
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    reasons = []
    if head is None:
        reasons.append("it has no head")
    elif getattr(head, "bias", None) is not None:
        reasons.append("its head has a bias")
    elif [name for name, _ in head.named_parameters()] != ["weight"]:
        reasons.append("its head is more than a matrix")
    hidden_size = getattr(model.config, "hidden_size", None)
    if hidden_size is None:
        reasons.append("its configuration has no hidden_size")
    elif embeddings.embedding_dim != hidden_size:
        reasons.append("its embeddings are not as wide as its hidden states")
    if [name for name, _ in embeddings.named_parameters()] != ["weight"]:
        reasons.append("its embeddings are more than a matrix")
    if type(model.base_model) is not MODEL_MAPPING[type(model.config)]:
        reasons.append("AutoModel does not know its base model")
    if reasons:
        raise ValueError(f"LLaVA cannot hold {language.name}: {', '.join(reasons)}. Use another.")
    # Otherwise resizing would tie two tensors that the file has apart.
    model.config.tie_word_embeddings = head.weight is embeddings.weight
    return model


@torch.no_grad()
def add_image_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grows the vocabulary if needed, with the mean row. Its logit is never the largest.

    The image token's embedding becomes different from every other token's, since transformers finds
    the places of image features by it.
    """
    old_size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > old_size:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[old_size:] = _mean_row(table.weight[:old_size])
    weight = model.get_input_embeddings().weight
    image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    weight[image_token_id] = _unlike_others(weight, image_token_id)


def _mean_row(weight: Tensor) -> Tensor:
    """Returns the mean `(d,)` of the rows `(V, d)`, summed in float32, in their dtype."""
    return weight.mean(dim=0, dtype=torch.float32).to(weight.dtype)


def _unlike_others(weight: Tensor, row: int) -> Tensor:
    """Returns a row `(d,)` of `weight` `(V, d)`, changed a little if another row is the same.

    The smallest element changes its sign. The norm stays the same to the bit, since N_text leaves
    out the image token and the padding of the vocabulary by their norm. A row of zeros becomes the
    mean row first.
    """
    row_values = weight[row].clone()
    if not row_values.any():
        row_values = _mean_row(weight)
    is_same = (weight == row_values).all(dim=1)
    is_same[row] = False
    if not is_same.any():
        return row_values
    smallest_index = row_values.abs().masked_fill(row_values == 0, torch.inf).argmin()
    row_values[smallest_index] = -row_values[smallest_index]
    return row_values


def assemble(
    config: NormAlignLlavaConfig, tower: PreTrainedModel, language: PreTrainedModel, logits: Tensor
) -> NormAlignLlavaForConditionalGeneration:
    """Makes the model of two loaded parts and a projector with random weights.

    Args:
        config: The model's configuration.
        tower: The vision encoder.
        language: The causal language model.
        logits: The [`logits_of_fixed_text`] of the language model by itself.

    Raises:
        ValueError: If the model fails or computes other logits, or they are not finite.
    """
    if not logits.isfinite().all():
        raise ValueError("The language model's logits are NaN or infinite: weights are damaged.")
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    model.model.vision_tower = tower
    model.model.language_model = language.base_model
    model.lm_head = language.get_output_embeddings()
    projector = NormAlignLlavaMultiModalProjector(config)
    projector.apply(model.model._init_weights)
    for linear in (projector.linear_1, projector.linear_2):
        linear.to(language.dtype)
    model.model.multi_modal_projector = projector
    model.generation_config = language.generation_config
    try:
        logits_inside = logits_of_fixed_text(model)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if device_error(error):  # such as full memory
            raise
        message, _ = first_cause(error)
        reason = message.strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            "Inside LLaVA, the language model gets embeddings in place of token ids, and fails: "
            f"{type(error).__name__}: {reason}. Use another."
        ) from error
    tolerance = 1e-2 * logits.abs().max().item()
    if not torch.allclose(logits_inside, logits, rtol=1e-2, atol=tolerance):
        raise ValueError(
            "Inside LLaVA, the language model computes other logits than by itself. Use another."
        )
    return model


def generation_for_checkpoint(
    generation: GenerationConfig,
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Divides a language model's generation configuration: what a checkpoint gets, and the rest.

    Flags that are not [`COPIED`] are left out. So are flags without effect, such as a temperature
    without `do_sample`, since transformers refuses to save them.

    Raises:
        ValueError: If transformers refuses the configuration for another reason.
    """
    copied, left_out = without_idle_flags(generation)
    defaults = vars(GenerationConfig())
    for flag_name, value in flags_of(copied).items():
        if flag_name in COPIED:
            continue
        if value is not False:  # a flag that is off says nothing
            left_out[flag_name] = value
        if flag_name in defaults:
            setattr(copied, flag_name, defaults[flag_name])
        else:  # transformers does not know this flag
            delattr(copied, flag_name)
    return copied, left_out


def flags_of(generation: GenerationConfig) -> dict[str, Any]:
    """Returns the flags of a generation configuration that are not transformers' defaults."""
    flags = generation.to_diff_dict()
    about_the_file = {"transformers_version", "_from_model_config", "_commit_hash"}
    return {name: flags[name] for name in sorted(flags.keys() - about_the_file)}


def in_words(flags: dict[str, Any]) -> str:
    """Returns flags and their values in one line."""
    return ", ".join(f"{name} {value}" for name, value in flags.items())


@torch.no_grad()
def logits_of_fixed_text(model: PreTrainedModel) -> Tensor:
    """Returns logits `(1, 8, V)`, float32, of a fixed text."""
    vocabulary_size = model.get_input_embeddings().num_embeddings
    input_ids = torch.arange(3, 11).remainder(vocabulary_size)[None]
    return model.eval()(input_ids=input_ids, use_cache=False).logits.float()
