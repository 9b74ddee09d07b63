# Copyright 2026 The NormAlign-LLaVA authors. SPDX-License-Identifier: Apache-2.0
# From the package normalign-llava 0.1.0. A checkpoint has no code but this and the modeling file;
# `normalign publish` sends the package's, byte for byte. If you review it: both import torch,
# transformers (DeepSpeed if ZeRO-3 already runs), and of the standard library what only holds or
# copies things. They open no file or connection, start no process, read no environment variable
# and evaluate no text. On import they register names with transformers. The rest is the model.
"""Configuration of NormAlign-LLaVA: LLaVA's, plus the norm that follows the projector."""

from typing import ClassVar, Literal, get_args

from transformers import LlavaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


class NormAlignLlavaConfig(LlavaConfig):
    """[`LlavaConfig`] with a norm after the projector (https://huggingface.co/papers/2512.08374).

    Args:
        projector_norm: kind of norm after the projector. `"none"` is the plain LLaVA projector.
        projector_gain_init: start of the gain. `"text_norm"` gives visual tokens the mean norm of
            text embeddings: N_text / sqrt(d) (eq. 11). `"one"` is the paper's ablation.
        gradient_compensation: `"global"` divides the gradient at the normalised tokens by the mean
            |gain| (Global Weight Compensation, eq. 12). `"none"` is a plain norm.
        gain_floor: smallest mean |gain| that the compensation divides by.
        projector_norm_eps: epsilon of the norm.
        text_embedding_norm: N_text, mean norm of text entering the decoder. `None` until measured.
        vision_prefix_tokens: tokens before the encoder's patches (class token, registers) that
            `vision_feature_select_strategy="default"` leaves out. LLaVA leaves out 1.

    The other arguments are [`LlavaConfig`]'s.

    Raises:
        ValueError: If a value is not allowed.
    """

    model_type = "normalign_llava"
    # Saving a class writes only that class into auto_map, but all must be there after every save.
    auto_map_entries: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_normalign_llava.NormAlignLlavaConfig",
        "AutoModel": "modeling_normalign_llava.NormAlignLlavaModel",
        "AutoModelForImageTextToText": (
            "modeling_normalign_llava.NormAlignLlavaForConditionalGeneration"
        ),
        "AutoModelForMultimodalLM": (
            "modeling_normalign_llava.NormAlignLlavaForConditionalGeneration"
        ),
        # LLaMA-Factory loads models that transformers does not know by this class.
        "AutoModelForCausalLM": "modeling_normalign_llava.NormAlignLlavaForConditionalGeneration",
    }
    _auto_class = "AutoConfig"  # save_pretrained copies the code beside the weights

    projector_norm: Literal["layer_norm", "rms_norm", "none"] = "layer_norm"
    projector_gain_init: Literal["text_norm", "one"] = "text_norm"
    gradient_compensation: Literal["global", "none"] = "global"
    gain_floor: float = 1e-3
    projector_norm_eps: float = 1e-5
    text_embedding_norm: float | None = None
    vision_prefix_tokens: int = 1

    def __post_init__(self, **kwargs):
        # A LLaVA folder's model_type, "llava", would make the next loading drop the norm.
        kwargs.pop("model_type", None)
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)
        self.auto_map = dict(self.auto_map_entries)
        for name in ("projector_norm", "projector_gain_init", "gradient_compensation"):
            allowed = get_args(NormAlignLlavaConfig.__annotations__[name])
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
        for name in ("gain_floor", "projector_norm_eps", "text_embedding_norm"):
            value = getattr(self, name)
            if value is None and name == "text_embedding_norm":  # not measured yet
                continue
            if not isinstance(value, int | float) or not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        if type(self.vision_prefix_tokens) is not int or self.vision_prefix_tokens < 1:
            count = f"got {self.vision_prefix_tokens!r}"
            raise ValueError(f"vision_prefix_tokens must be a positive whole number, {count}.")

    def save_pretrained(self, save_directory, *args, **kwargs):
        """[`~transformers.PreTrainedConfig.save_pretrained`] with all entries of `auto_map`.

        LLaMA-Factory calls `register_for_auto_class` on the class of the model before it saves one.
        That makes `auto_map` name the whole model as the base class.
        """
        self.auto_map = dict(self.auto_map_entries)
        return super().save_pretrained(save_directory, *args, **kwargs)


def embedding_scales(config: PreTrainedConfig) -> tuple[float, float]:
    """Returns the factors that a language model applies to embeddings before its decoder.

    A row of the embeddings enters the decoder with its norm times both.

    Returns:
        The factor where tokens are looked up, so only on text (MiniCPM3), and the factor on every
        input embedding, visual tokens too (HRM).
    """
    root = config.hidden_size**0.5
    kind = config.model_type
    if kind.startswith(("gemma", "vaultgemma")):
        return root, 1.0
    if getattr(config, "scale_embedding", False):  # BioGPT, XGLM
        return root, 1.0
    if kind == "falcon_h1":
        return float(config.embedding_multiplier), 1.0
    if kind.startswith("granite") or kind == "hyperclovax":
        return 1.0, float(config.embedding_multiplier)
    if kind == "recurrent_gemma" or (kind == "afmoe" and config.mup_enabled):
        return 1.0, root
    scale_text = getattr(config, "scale_emb", 1.0)
    scale_all = getattr(config, "embedding_scale", 1.0)
    return float(scale_text), float(scale_all)


# `transformers serve` and pipelines look up a configuration's model in both, TRL in one.
for _names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
    _names[NormAlignLlavaConfig.model_type] = "NormAlignLlavaForConditionalGeneration"
