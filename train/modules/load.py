# SPDX-License-Identifier: Apache-2.0
"""Loading the model to train, as an arm and in a precision, quantized or not."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer

from ...assembly.arms import ARMS, arm_of, restarts_norm
from ...assembly.processing import check_feature_layer
from ...checkpoint import weights
from ...checkpoint.files import TRAINING_RECORD
from ...checkpoint.opening import Checkpoint
from ...checkpoint.prompts import stop_as_trained
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, decoder_quantization
from ..memory import largest_batch
from ..settings import Precision, RunConfig, autocast_dtype
from .forward import watching_outputs
from .model import PLACES, projector_norm, trained_parameters


if TYPE_CHECKING:  # it imports this file
    from ..prepare import Plan


@dataclass(frozen=True)
class LoadedModel:
    """The model of a run, before TRL's trainer adds adapters.

    Attributes:
        model: The model to train.
        settings: The options that TRL's trainer gets, a copy of the plan's.
        precision: The precision of steps, and why.
        commit: The commit of the Hub that the model was loaded from.
        weights_in: Folders with files of its frozen modules, the newest first.
    """

    model: Any
    settings: RunConfig
    precision: Precision
    commit: str | None
    weights_in: list[Path]


def load(plan: "Plan") -> LoadedModel:
    """Loads the model of a plan, and settles the precision of steps if the model decides it.

    Raises:
        ValueError: The checkpoint cannot be loaded.
        OSError: A file of it cannot be read or fetched.
    """
    settings = plan.trainer_config()
    opened = plan.model
    model = opened.model
    commit = None
    weights_in = []
    if opened.checkpoint is not None:
        model = load_model(
            opened.checkpoint,
            settings,
            plan.learning_rates,
            opened.quantization,
            use_peft=opened.adapters is not None,
        )
        commit = opened.checkpoint.revision
        weights_in = weights.fetch_index_folder(model.name_or_path, commit)
    stop_as_trained(model, opened.processor)  # the processor may not be the checkpoint's
    precision = plan.precision
    if precision.fp16_needs_check and not settings.dry_run:
        batch = largest_batch(settings, plan.data.train, plan.data.collator)
        precision = settle_float16(model, settings.device, batch)
        if not precision.fp16:
            init_kwargs = {**(settings.model_init_kwargs or {}), "dtype": "float32"}
            settings.set_derived(fp16=False, model_init_kwargs=init_kwargs)
            settings.mixed_precision = "no"
    return LoadedModel(model, settings, precision, commit, weights_in)


def check_architecture(model_type: str | None, name: str) -> None:
    """Raises ValueError if a model is not a NormAlign-LLaVA."""
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{name} is a {model_type!r} model. Make a NormAlign-LLaVA of it: `normalign build`."
        )


def config_of_arm(checkpoint: Checkpoint, arm: str | None) -> NormAlignLlavaConfig:
    """Returns the checkpoint's configuration as one of the paper's arms, by default its own.

    Raises:
        ValueError: The checkpoint was trained, and the arm would discard its gain, or the vision
            tower has no layer that the configuration reads.
    """
    config = copy.deepcopy(checkpoint.config)
    check_feature_layer(config.vision_feature_layer, config.vision_config)
    stored_arm = arm_of(config)
    if arm in (None, stored_arm):
        return config
    if config.projector_norm == "none":
        config.projector_norm = "layer_norm"
    defaults = {"projector_gain_init": "text_norm", "gradient_compensation": "global"}
    config.update(defaults | ARMS[arm])
    discards_gain = arm == "none" or restarts_norm(checkpoint.config, config)
    if discards_gain and (Path(checkpoint.name) / TRAINING_RECORD).exists():
        raise ValueError(
            f"{checkpoint.name} was trained as arm {stored_arm!r}; arm {arm!r} would discard its "
            "gain. Build another checkpoint."
        )
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
        learning_rates: The peak learning rate of each module, 0 if it is frozen.
        quantization_config: How to quantize the decoder.
        use_peft: Whether the language model will be trained by adapters only.

    Raises:
        ValueError: The checkpoint cannot be loaded, or a dry run cannot count its quantization.
        OSError: A file of the checkpoint cannot be read or fetched.
    """
    config = config_of_arm(checkpoint, settings.arm)
    init_kwargs = dict(settings.model_init_kwargs or {})
    init_kwargs.pop("revision", None)
    if quantization_config is not None:
        # 4-bit layers compute in the precision of steps.
        quantization_config = copy.copy(quantization_config)
        compute_dtype = getattr(torch, autocast_dtype(settings) or "float32")
        quantization_config.bnb_4bit_compute_dtype = compute_dtype
        init_kwargs.setdefault("device_map", {"": settings.device})
        init_kwargs["quantization_config"] = quantization_config
    # A class says which modules `from_pretrained` reads in float32: here, those that are trained in
    # full. It reads the others in the dtype of [`frozen_dtype`]. The model then gets its own class.
    own_class = NormAlignLlavaForConditionalGeneration
    in_float32 = [*own_class._keep_in_fp32_modules_strict]
    for module, names in PLACES.items():
        has_only_adapters = use_peft and module == "language"
        if learning_rates[module] and not has_only_adapters:
            in_float32 += names
    attributes = {"_keep_in_fp32_modules_strict": in_float32, "__module__": own_class.__module__}
    cls = type(own_class.__name__, (own_class,), attributes)
    if settings.dry_run:
        model = model_without_weights(cls, config, init_kwargs)
    else:
        model = checkpoint.load(cls, config=config, **init_kwargs)
        if restarts_norm(checkpoint.config, config):
            model.align_projector_norm()
        norm = projector_norm(model)
        if any(parameter.is_meta for parameter in norm.parameters()):
            # The checkpoint lacks the norm, and FSDP gives it the first process's values later. But
            # accelerate takes two parameters on meta for one, and would never step the gain.
            norm.to_empty(device="cpu")
    model.__class__ = own_class
    # Loading with a configuration that is not the folder's leaves the name empty.
    model.name_or_path = checkpoint.name
    model.config.name_or_path = checkpoint.name
    if quantization_config is not None and not use_peft:
        _train_quantized(model)
    return model


def model_without_weights(
    cls: Any, config: NormAlignLlavaConfig, init_kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Returns the model that `cls.from_pretrained` would load, on meta, also in 4 bits.

    Args:
        cls: The model's class.
        config: The model's configuration.
        init_kwargs: The arguments of `from_pretrained`, with `dtype`.

    Raises:
        ValueError: The quantization is to 8 bits.
    """
    arguments = dict(init_kwargs)
    precision = getattr(torch, arguments.pop("dtype"))
    device_map = arguments.pop("device_map", None)
    quantization = arguments.pop("quantization_config", None)
    if quantization is not None and quantization.load_in_8bit:
        raise ValueError("dry_run cannot count load_in_8bit. Leave it out, or use load_in_4bit.")
    with torch.device("meta"):
        model = cls._from_config(config, dtype=precision, **arguments)
    for parameter_name, parameter in model.named_parameters():
        if any(place in parameter_name for place in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    if quantization is None:
        return model
    from bitsandbytes.functional import create_dynamic_map, name2qmap

    name2qmap.setdefault("dynamic", create_dynamic_map())  # or one on meta would be kept for all
    quantizer = AutoHfQuantizer.from_config(decoder_quantization(quantization), pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=device_map)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    # Layers in 4 bits get the shapes and dtypes that loading would give them.
    for module in model.modules():
        if type(module).__name__ != "Linear4bit":
            continue
        module.to(precision)
        module.weight._quantize("meta")
        if module.weight.quant_state.nested:
            module.weight.quant_state.offset = torch.zeros(())  # read where bytes are counted
    return model


def _train_quantized(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Lets a quantized model be trained without adapters. All of it is frozen until [`freeze`].

    transformers refuses to train such a model, and TRL rounds the parameters that are trainable
    before [`freeze`]. Only trained parameters are taken from states that are loaded later, because
    their quantized layers are as they were read.
    """
    model.is_quantized = False
    model.requires_grad_(False)

    def keep_trained(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in state.keys() - trained_parameters(module).keys():
            del state[name]

    model.register_load_state_dict_pre_hook(keep_trained)


def frozen_dtype(config: NormAlignLlavaConfig, settings: RunConfig) -> str:
    """Returns the dtype of frozen modules: by default the checkpoint's if steps use it, or float32.

    Raises:
        ValueError: The dtype that was given does not go with the precision of steps.
    """
    if is_deepspeed_zero3_enabled():
        return "float32"  # DeepSpeed makes all that it divides float32 while it is loaded
    autocast = autocast_dtype(settings)
    init_kwargs = settings.model_init_kwargs or {}
    given_dtype = init_kwargs.get("dtype")
    if given_dtype in (None, "auto"):
        stored_dtype = str(config.dtype or config.get_text_config().dtype)
        if stored_dtype.removeprefix("torch.") == autocast:
            return autocast
        return "float32"
    name = str(given_dtype).removeprefix("torch.")
    if autocast and name in {"bfloat16", "float16"} - {autocast}:
        raise ValueError(
            f"dtype {name} and steps in {autocast} do not mix. Use --dtype {autocast}, or float32."
        )
    return name


def settle_float16(
    model: PreTrainedModel, device: torch.device, batch: dict[str, Any]
) -> Precision:
    """Returns float16, or float32 if hidden states come near 65,504.

    All processes must call this together. The model is moved to the device. If the answer is
    float32, its weights and products become float32 too.
    """
    if getattr(model, "hf_device_map", None) is None:
        model.to(device)
    [largest] = broadcast_object_list([largest_hidden_state(model, batch)])
    extent = "overflow"
    if math.isfinite(largest):
        extent = f"reach {largest:,.0f}"
    float16_end = torch.finfo(torch.float16).max
    because = f"hidden states of long rows {extent}, and float16 ends at {float16_end:,.0f}"
    is_safe = largest < float16_end / 4  # they may grow while it is trained
    if not is_safe:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        quantization = getattr(model.config, "quantization_config", None)
        if quantization is not None:
            quantization.bnb_4bit_compute_dtype = torch.float32
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.compute_dtype = torch.float32
    return Precision(bf16=False, fp16=is_safe, because=because)


@torch.no_grad()
def largest_hidden_state(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Returns the largest absolute value of a module's output in float16.

    It is infinity if an output is not finite.
    """
    names = {"input_ids", "attention_mask", "position_ids", "pixel_values"} & batch.keys()
    inputs = {name: batch[name].to(model.device) for name in names}
    largest: list[Tensor] = []

    def add_largest(name: str, outputs: list[Tensor]) -> None:
        largest.extend(output.float().abs().max() for output in outputs)

    with watching_outputs(model, add_largest), torch.autocast(model.device.type, torch.float16):
        model.model(**inputs, use_cache=False)
    return torch.stack(largest).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
