# SPDX-License-Identifier: Apache-2.0
"""How the model to train is loaded: as which arm, in which precision, quantized or not."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer

from ...assembly.processing import ARMS, arm_of, check_feature_layer
from ...checkpoint.files import TRAINING_RECORD
from ...checkpoint.opening import Checkpoint
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..settings import Precision, RunConfig, autocast_dtype
from .forward import watching_outputs
from .model import PLACES, projector_norm, trained_parameters


def check_architecture(model_type: str | None, name: str) -> None:
    """Raises ValueError if a model is not a NormAlign-LLaVA."""
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{name} is a {model_type!r} model. Make a NormAlign-LLaVA of it: `normalign build`."
        )


def config_of_arm(checkpoint: Checkpoint, arm: str | None) -> NormAlignLlavaConfig:
    """The checkpoint's configuration as one of the paper's arms, by default its own."""
    config = copy.deepcopy(checkpoint.config)
    check_feature_layer(config.vision_feature_layer, config.vision_config)
    stored = arm_of(config)
    if arm in (None, stored):
        return config
    if {arm, stored} != {"aligned", "gwc"} and (Path(checkpoint.name) / TRAINING_RECORD).exists():
        raise ValueError(
            f"{checkpoint.name} was trained as arm {stored!r}; arm {arm!r} would discard its gain. "
            "Build another checkpoint."
        )
    norm = "layer_norm" if config.projector_norm == "none" else config.projector_norm
    neutral = {"projector_gain_init": "text_norm", "gradient_compensation": "global"}
    config.update({"projector_norm": norm, **neutral, **ARMS[arm]})
    return config


def load_model(
    checkpoint: Checkpoint,
    settings: RunConfig,
    learning_rates: dict[str, float],
    quantization_config: BitsAndBytesConfig | None = None,
    use_peft: bool = False,
) -> NormAlignLlavaForConditionalGeneration:
    """Loads a checkpoint as the arm of `settings`, and aligns a norm that this adds or resets."""
    config = config_of_arm(checkpoint, settings.arm)
    kwargs = dict(settings.model_init_kwargs or {})
    kwargs.pop("revision", None)
    if quantization_config is not None:
        dtype, quantization_config = autocast_dtype(settings), copy.copy(quantization_config)
        quantization_config.bnb_4bit_compute_dtype = getattr(torch, dtype or "float32")
        kwargs.setdefault("device_map", {"": settings.device})
        kwargs["quantization_config"] = quantization_config
    # What is trained in full is read in float32, the rest in the dtype of [`frozen_dtype`].
    in_full = learning_rates | ({"language": 0.0} if use_peft else {})
    in_float32 = [name for module, names in PLACES.items() if in_full[module] for name in names]
    cls = NormAlignLlavaForConditionalGeneration
    # `from_pretrained` asks the class which modules stay in float32.
    kept = {"_keep_in_fp32_modules_strict": [*cls._keep_in_fp32_modules_strict, *in_float32]}
    loaded_as = type(cls.__name__, (cls,), {**kept, "__module__": cls.__module__})
    if settings.dry_run:
        model = _without_weights(loaded_as, config, **kwargs)
    else:
        model = checkpoint.load(loaded_as, config=config, **kwargs)
    model.__class__ = cls
    # The name is empty if the configuration is not the folder's; training.json records changes.
    model.name_or_path = model.config.name_or_path = checkpoint.name
    stored, arm = arm_of(checkpoint.config), arm_of(config)
    if {stored, arm} & {"none", "unit"} and arm not in (stored, "none") and not settings.dry_run:
        model.align_projector_norm()
    norm = projector_norm(model)
    if any(parameter.is_meta for parameter in norm.parameters()) and not settings.dry_run:
        # A norm that the checkpoint lacks, under FSDP, which gives it the first process's values
        # later: accelerate takes two parameters on meta for one, and would never step the gain.
        norm.to_empty(device="cpu")
    if quantization_config is not None and not use_peft:
        # transformers refuses a quantized model without adapters, TRL rounds what may be trained
        # before [`freeze`] says what is, and loaded states have quantized layers as they were read.
        model.is_quantized = False
        model.requires_grad_(False)

        def load_trained(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
            for name in state.keys() - trained_parameters(module).keys():
                del state[name]

        model.register_load_state_dict_pre_hook(load_trained)
    return model


def frozen_dtype(config: NormAlignLlavaConfig, settings: RunConfig) -> str:
    """The dtype of what is frozen: by default the checkpoint's own if steps use it, or float32."""
    if is_deepspeed_zero3_enabled():
        return "float32"  # which DeepSpeed makes of all that it divides while it is loaded
    autocast = autocast_dtype(settings)
    dtype = (settings.model_init_kwargs or {}).get("dtype")
    if dtype in (None, "auto"):
        stored = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
        return stored if stored == autocast else "float32"
    name = str(dtype).removeprefix("torch.")
    if autocast and name in {"bfloat16", "float16"} - {autocast}:
        raise ValueError(
            f"dtype {name} and steps in {autocast} do not mix. Use --dtype {autocast}, or float32."
        )
    return name


def _without_weights(cls: Any, config: NormAlignLlavaConfig, **kwargs: Any) -> PreTrainedModel:
    """The model that `from_pretrained` would load, on meta: shapes and dtypes, also in 4 bits."""
    precision, device_map = getattr(torch, kwargs.pop("dtype")), kwargs.pop("device_map", None)
    quantization: BitsAndBytesConfig | None = kwargs.pop("quantization_config", None)
    with torch.device("meta"):
        model = cls._from_config(config, dtype=precision, **kwargs)
    for name, parameter in model.named_parameters():
        if any(place in name for place in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    if quantization is None:
        return model
    if quantization.load_in_8bit:
        raise ValueError("dry_run cannot count load_in_8bit. Leave it out, or use load_in_4bit.")
    from bitsandbytes.functional import create_dynamic_map, name2qmap

    from ...assembly.adapter import IN_PRECISION  # late: few runs quantize

    name2qmap.setdefault("dynamic", create_dynamic_map())  # or one on meta would be kept for all
    quantization.llm_int8_skip_modules = IN_PRECISION  # as `from_pretrained` of the model has it
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=device_map)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.to(precision)  # as they are loaded
            module.weight._quantize("meta")
            if module.weight.quant_state.nested:
                module.weight.quant_state.offset = torch.zeros(())  # read where bytes are counted
    return model


def settle_float16(
    model: PreTrainedModel, device: torch.device, batch: dict[str, Any]
) -> Precision:
    """Returns float16, or float32 if hidden states come near 65,504. All processes call it.

    Then it makes the model's own weights and products float32.
    """
    if getattr(model, "hf_device_map", None) is None:
        model.to(device)
    largest = broadcast_object_list([largest_hidden_state(model, batch)])[0]
    reach = f"reach {largest:,.0f}" if math.isfinite(largest) else "overflow"
    end = torch.finfo(torch.float16).max
    because = f"hidden states of long rows {reach}, and float16 ends at {end:,.0f}"
    if largest < end / 4:  # they may grow while it is trained
        return Precision(bf16=False, fp16=True, because=because)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    if (quantization := getattr(model.config, "quantization_config", None)) is not None:
        quantization.bnb_4bit_compute_dtype = torch.float32
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = torch.float32
    return Precision(bf16=False, fp16=False, because=because)


@torch.no_grad()
def largest_hidden_state(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """The largest absolute value of a module's output in float16; infinity if one is not finite."""
    largest: list[Tensor] = []
    names = ("input_ids", "attention_mask", "position_ids", "pixel_values")
    inputs = {name: batch[name].to(model.device) for name in names if name in batch}

    def visit(name: str, outputs: list[Tensor]) -> None:
        largest.extend(output.float().abs().max() for output in outputs)

    with watching_outputs(model, visit), torch.autocast(model.device.type, torch.float16):
        model.model(**inputs, use_cache=False)
    return torch.stack(largest).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
