# SPDX-License-Identifier: Apache-2.0
"""Loading the model to train, as an arm and in a precision, quantized or not."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ...assembly.processing import ARMS, arm_of, check_feature_layer
from ...checkpoint.files import TRAINING_RECORD
from ...checkpoint.opening import Checkpoint
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..settings import Precision, RunConfig, autocast_dtype
from .forward import watching_outputs
from .model import PLACES, projector_norm, trained_parameters
from .without_weights import model_without_weights


def check_architecture(model_type: str | None, name: str) -> None:
    """Raises ValueError if a model is not a NormAlign-LLaVA."""
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{name} is a {model_type!r} model. Make a NormAlign-LLaVA of it: `normalign build`."
        )


def config_of_arm(checkpoint: Checkpoint, arm: str | None) -> NormAlignLlavaConfig:
    """Returns the checkpoint's configuration as one of the paper's arms, by default its own.

    Raises ValueError if the checkpoint was trained, and the arm would discard its gain.
    """
    config = copy.deepcopy(checkpoint.config)
    check_feature_layer(config.vision_feature_layer, config.vision_config)
    stored_arm = arm_of(config)
    if arm in (None, stored_arm):
        return config
    keeps_gain = {arm, stored_arm} == {"aligned", "gwc"}
    if not keeps_gain and (Path(checkpoint.name) / TRAINING_RECORD).exists():
        raise ValueError(
            f"{checkpoint.name} was trained as arm {stored_arm!r}; arm {arm!r} would discard its "
            "gain. Build another checkpoint."
        )
    if config.projector_norm == "none":
        config.projector_norm = "layer_norm"
    config.projector_gain_init = "text_norm"
    config.gradient_compensation = "global"
    config.update(ARMS[arm])
    return config


def load_model(
    checkpoint: Checkpoint,
    settings: RunConfig,
    learning_rates: dict[str, float],
    quantization_config: BitsAndBytesConfig | None = None,
    use_peft: bool = False,
) -> NormAlignLlavaForConditionalGeneration:
    """Loads a checkpoint as the arm of `settings`, and aligns a norm that this adds or resets.

    Args:
        checkpoint: The checkpoint.
        settings: The options of the run.
        learning_rates: The peak learning rate of each module; 0 if it is frozen.
        quantization_config: How to quantize the decoder.
        use_peft: Whether the language model will be trained by adapters only.
    """
    config = config_of_arm(checkpoint, settings.arm)
    init_kwargs = dict(settings.model_init_kwargs or {})
    init_kwargs.pop("revision", None)
    if quantization_config is not None:
        init_kwargs.setdefault("device_map", {"": settings.device})
        init_kwargs["quantization_config"] = _computing_as_steps(quantization_config, settings)
    cls = _class_to_load(learning_rates, use_peft)
    if settings.dry_run:
        model = model_without_weights(cls, config, init_kwargs)
    else:
        model = checkpoint.load(cls, config=config, **init_kwargs)
    model.__class__ = NormAlignLlavaForConditionalGeneration
    # The name is empty if the configuration is not the folder's; training.json records changes.
    model.name_or_path = checkpoint.name
    model.config.name_or_path = checkpoint.name
    if not settings.dry_run:
        _start_norm(model, arm_of(checkpoint.config), arm_of(config))
    if quantization_config is not None and not use_peft:
        _train_quantized(model)
    return model


def _computing_as_steps(
    quantization_config: BitsAndBytesConfig, settings: RunConfig
) -> BitsAndBytesConfig:
    """Returns a copy in which 4-bit layers compute in the precision of steps."""
    config = copy.copy(quantization_config)
    config.bnb_4bit_compute_dtype = getattr(torch, autocast_dtype(settings) or "float32")
    return config


def _class_to_load(learning_rates: dict[str, float], use_peft: bool) -> type:
    """Returns the model's class, which reads in float32 what is trained in full.

    The rest is read in the dtype of [`frozen_dtype`]. `from_pretrained` asks the class which
    modules stay in float32.
    """
    cls = NormAlignLlavaForConditionalGeneration
    in_float32 = [*cls._keep_in_fp32_modules_strict]
    for module, names in PLACES.items():
        has_only_adapters = use_peft and module == "language"
        if learning_rates[module] and not has_only_adapters:
            in_float32 += names
    attributes = {"_keep_in_fp32_modules_strict": in_float32, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), attributes)


def _start_norm(model: NormAlignLlavaForConditionalGeneration, stored_arm: str, arm: str) -> None:
    """Aligns the norm, if the arm adds it to the stored one or starts it at another gain."""
    if arm not in (stored_arm, "none") and {stored_arm, arm} & {"none", "unit"}:
        model.align_projector_norm()
    norm = projector_norm(model)
    if any(parameter.is_meta for parameter in norm.parameters()):
        # A norm that the checkpoint lacks, under FSDP, which gives it the first process's values
        # later: accelerate takes two parameters on meta for one, and would never step the gain.
        norm.to_empty(device="cpu")


def _train_quantized(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Lets a quantized model be trained without adapters, by freezing all of it until [`freeze`].

    transformers refuses such a model, and TRL rounds what may be trained before [`freeze`]. States
    that are loaded later have quantized layers as they were read, so only trained parameters are
    taken from them.
    """
    model.is_quantized = False
    model.requires_grad_(False)

    def keep_trained(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in state.keys() - trained_parameters(module).keys():
            del state[name]

    model.register_load_state_dict_pre_hook(keep_trained)


def frozen_dtype(config: NormAlignLlavaConfig, settings: RunConfig) -> str:
    """Returns the dtype of frozen modules: by default the checkpoint's if steps use it, or float32.

    Raises ValueError if the dtype that was given does not go with the precision of steps.
    """
    if is_deepspeed_zero3_enabled():
        return "float32"  # DeepSpeed makes all that it divides float32 while it is loaded
    autocast = autocast_dtype(settings)
    init_kwargs = settings.model_init_kwargs or {}
    dtype = init_kwargs.get("dtype")
    if dtype in (None, "auto"):
        stored_dtype = str(config.dtype or config.get_text_config().dtype)
        if stored_dtype.removeprefix("torch.") == autocast:
            return autocast
        return "float32"
    name = str(dtype).removeprefix("torch.")
    if autocast and name in {"bfloat16", "float16"} - {autocast}:
        raise ValueError(
            f"dtype {name} and steps in {autocast} do not mix. Use --dtype {autocast}, or float32."
        )
    return name


def settle_float16(
    model: PreTrainedModel, device: torch.device, batch: dict[str, Any]
) -> Precision:
    """Returns float16, or float32 if hidden states come near 65,504. All processes call it.

    In float32, it makes the model's own weights and products float32 too.
    """
    if getattr(model, "hf_device_map", None) is None:
        model.to(device)
    [largest] = broadcast_object_list([largest_hidden_state(model, batch)])
    extent = "overflow"
    if math.isfinite(largest):
        extent = f"reach {largest:,.0f}"
    float16_end = torch.finfo(torch.float16).max
    because = f"hidden states of long rows {extent}, and float16 ends at {float16_end:,.0f}"
    if largest < float16_end / 4:  # they may grow while it is trained
        return Precision(bf16=False, fp16=True, because=because)
    _make_float32(model)
    return Precision(bf16=False, fp16=False, because=because)


def _make_float32(model: PreTrainedModel) -> None:
    """Makes weights float32, and the products of layers in 4 bits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        quantization.bnb_4bit_compute_dtype = torch.float32
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = torch.float32


@torch.no_grad()
def largest_hidden_state(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Returns the largest absolute value of a module's output in float16.

    It is infinity if an output is not finite.
    """
    inputs = {}
    for name in ("input_ids", "attention_mask", "position_ids", "pixel_values"):
        if name in batch:
            inputs[name] = batch[name].to(model.device)
    largest: list[Tensor] = []

    def add_largest(name: str, outputs: list[Tensor]) -> None:
        for output in outputs:
            largest.append(output.float().abs().max())

    with watching_outputs(model, add_largest), torch.autocast(model.device.type, torch.float16):
        model.model(**inputs, use_cache=False)
    return torch.stack(largest).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
