# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model to train: its checks, how it is loaded, and which of its modules are frozen."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer

from ...assembly.adapter import IN_PRECISION
from ...assembly.build import ARMS
from ...assembly.parts import check_feature_layer
from ...checkpoint.names import PICKLES, TRAINING_RECORD
from ...checkpoint.opening import Checkpoint, open_checkpoint
from ...checkpoint.untrusted import check_weights
from ...checkpoint.weights import module_of_file
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..command import NO_MODEL
from ..options.arguments import NormAlignConfig, autocast_dtype


MODULES = ("language", "projector", "norm", "vision")
"""The parts with a learning rate of their own. The Trainer logs that of the first one that is trained."""


PLACES = {
    "language": ["language_model", "lm_head"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
    "vision": ["vision_tower"],
}
"""What is in the names of their parameters, and of no others'."""


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter belongs to, by its name. Adapters and the head belong to `"language"`."""
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." in parameter:
        return "norm" if ".norm." in parameter else "projector"
    return "language"


def check_checkpoint(
    checkpoint: str | os.PathLike, training: NormAlignConfig, revision: str | None = None
) -> tuple[Checkpoint, NormAlignLlavaConfig]:
    """The checkpoint to train, and its configuration with the arm of `training`; no weights are loaded."""
    opened = open_checkpoint(str(checkpoint), revision, remedy=NO_MODEL)
    folder = opened.name
    if Path(folder).exists() and Path(folder).resolve() == Path(str(training.output_dir)).resolve():
        raise ValueError(f"--output_dir is the checkpoint to train, {folder}. Choose another.")
    check_architecture(opened.model_type, folder)
    stored = any(file.suffix in (".safetensors", *PICKLES) for file in Path(folder).glob("*model*"))
    if stored or not training.dry_run:
        check_weights(folder, opened.revision)  # as loading does, but before rows are read
    config = copy.deepcopy(opened.config)
    check_feature_layer(config.vision_feature_layer, config.vision_config)
    current = arm_of(config)
    arm = training.arm or current
    if arm != current:
        if {arm, current} != {"aligned", "gwc"} and (Path(folder) / TRAINING_RECORD).exists():
            raise ValueError(
                f"{folder} was trained as arm {current!r}; arm {arm!r} would discard its gain. Start from an "
                f"untrained checkpoint: `normalign build --arm {arm}`."
            )
        norm = "layer_norm" if config.projector_norm == "none" else config.projector_norm
        neutral = {"projector_norm": norm, "projector_gain_init": "text_norm", "gradient_compensation": "global"}
        for name, value in {**neutral, **ARMS[arm]}.items():
            setattr(config, name, value)
    return opened, config


def check_architecture(model_type: str | None, name: str) -> None:
    """Raises ValueError if a model is not a NormAlign-LLaVA."""
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{name} is a {model_type!r} model. Build a NormAlign-LLaVA checkpoint from it with `normalign build` "
            "(--vision and --language, or --from-llava), and train that."
        )


def load_model(
    checkpoint: str | os.PathLike,
    training: NormAlignConfig,
    quantization_config: BitsAndBytesConfig | None = None,
    use_peft: bool = False,
) -> NormAlignLlavaForConditionalGeneration:
    """Loads a checkpoint as the arm of `training`, and aligns a norm that this adds or resets.

    What is trained in full is read in float32, the rest in [`frozen_dtype`], which `model_init_kwargs` then names.
    """
    kwargs = dict(training.model_init_kwargs or {})
    opened, config = check_checkpoint(checkpoint, training, kwargs.pop("revision", None))
    kwargs["dtype"] = frozen_dtype(kwargs.get("dtype"), config, training)
    training.model_init_kwargs = {**(training.model_init_kwargs or {}), "dtype": kwargs["dtype"]}
    if quantization_config is not None:
        quantization_config = copy.copy(quantization_config)
        quantization_config.bnb_4bit_compute_dtype = getattr(torch, autocast_dtype(training) or "float32")
        kwargs = {"device_map": {"": training.device}, **kwargs, "quantization_config": quantization_config}
    rates = training.learning_rates(use_peft) | ({"language": 0.0} if use_peft else {})
    in_float32 = [name for module in MODULES if rates[module] for name in PLACES[module]]
    cls = NormAlignLlavaForConditionalGeneration
    with patch.object(cls, "_keep_in_fp32_modules_strict", [*cls._keep_in_fp32_modules_strict, *in_float32]):
        if training.dry_run:
            return without_weights(checkpoint, config, kwargs)
        model = opened.load(config=config, **kwargs)
    # The name is empty if the configuration differs from the folder's; training.json records the difference.
    model.name_or_path = model.config.name_or_path = str(checkpoint)
    stored, arm = arm_of(opened.config), arm_of(config)
    if {stored, arm} & {"none", "unit"} and arm not in (stored, "none"):
        model.align_projector_norm()
    return model


def check_quantized(
    config: NormAlignLlavaConfig,
    quantization: BitsAndBytesConfig,
    training: NormAlignConfig,
    peft_config: LoraConfig | None,
) -> None:
    """Raises ValueError if a layer that would be quantized would also be trained, other than by adapters."""
    use_peft = peft_config is not None
    saved = [*(peft_config.modules_to_save or ())] if peft_config else []
    if peft_config and peft_config.use_dora and quantization.load_in_8bit and training.device.type == "cpu":
        raise ValueError("use_dora with load_in_8bit fails in PEFT on a CPU. Leave one of them out, or use 4 bits.")
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    _quantizer(quantization).preprocess_model(model=model, device_map=None)
    for name, layer in model.named_modules():
        module, parts = module_of(f"{name}."), name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        own = next((each for each in saved if any(path.endswith(each) for path in paths)), None)  # as PEFT finds them
        if own and module == "language" and type(layer).__name__ in ("Linear4bit", "Linear8bitLt"):
            raise ValueError(
                f"modules_to_save names {own}, of which {name} would be quantized, and quantized weights cannot be "
                "trained. Leave out one of them, or name it in target_modules: adapters can be put on it."
            )
        rate, origin = training.explained_learning_rates(use_peft)[module]
        if type(layer).__name__ in ("Linear4bit", "Linear8bitLt") and rate and not (use_peft and module == "language"):
            option = f"{module}_learning_rate"
            adapters = " add --use_peft, or" if module == "language" else ""
            raise ValueError(
                f"{name} would be quantized, and quantized weights cannot be trained, as {option} {rate:g} ({origin}) "
                f"asks for. Leave out the quantization,{adapters} freeze the module with --{option} 0."
            )


def frozen_dtype(asked: str | torch.dtype | None, config: NormAlignLlavaConfig, training: NormAlignConfig) -> str:
    """The dtype of what is not trained: by default the checkpoint's own if steps are autocast to it, or else float32.

    Raises:
        ValueError: Another half precision was asked for than steps are autocast to, which torch does not mix.
    """
    if is_deepspeed_zero3_enabled():
        return "float32"  # which DeepSpeed makes of all that it divides while it is loaded
    autocast, halves = autocast_dtype(training), {"bfloat16", "float16"}
    own = config.dtype or config.get_text_config().dtype
    name = str(own if asked in (None, "auto") else asked).removeprefix("torch.")
    if asked in (None, "auto"):
        return name if name == autocast else "float32"
    if autocast and name in halves - {autocast}:
        raise ValueError(f"dtype {name} and steps in {autocast} cannot be mixed. Use --dtype {autocast}, or float32.")
    return name


def without_weights(
    name: str | os.PathLike, config: NormAlignLlavaConfig, kwargs: dict[str, Any]
) -> NormAlignLlavaForConditionalGeneration:
    """The model that `from_pretrained` would load with `kwargs`, on meta: shapes and dtypes alone, also in 4 bits."""
    kwargs, dtype = dict(kwargs), getattr(torch, kwargs["dtype"])
    quantization, device_map = kwargs.pop("quantization_config", None), kwargs.pop("device_map", None)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration._from_config(config, **{**kwargs, "dtype": dtype})
    for key, parameter in model.named_parameters():
        if any(place in key for place in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    model.name_or_path = model.config.name_or_path = str(name)
    if quantization is None:
        return model
    if quantization.load_in_8bit:
        raise ValueError("dry_run cannot count load_in_8bit. Leave it out, or count with load_in_4bit.")
    quantizer = _quantizer(quantization)
    quantizer.preprocess_model(model=model, device_map=device_map)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    with patch.dict("bitsandbytes.functional.name2qmap"):  # which keeps a table for later models; here it is on meta
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.to(dtype)  # as they are loaded
                module.weight._quantize("meta")
                if module.weight.quant_state.nested:
                    module.weight.quant_state.offset = torch.zeros(())  # which is read where bytes are counted
    return model


def _quantizer(quantization: BitsAndBytesConfig) -> HfQuantizer:
    """What quantizes as `from_pretrained` of the model does."""
    quantization = copy.copy(quantization)
    if quantization.llm_int8_skip_modules is None:
        quantization.llm_int8_skip_modules = IN_PRECISION
    return AutoHfQuantizer.from_config(quantization, pre_quantized=False)


def arm_of(config: NormAlignLlavaConfig) -> str:
    """The paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"


def train_beside_quantized(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Has TRL and the Trainer take a model whose quantized layers are frozen, without adapters.

    transformers refuses any quantized model without adapters, TRL rounds all that may be trained to bfloat16 before
    [`freeze`] says what is, and states that are loaded have the quantized layers as they were read.
    """
    model.is_quantized = False
    model.requires_grad_(False)

    def load_trained(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name in state.keys() - trained:
            del state[name]

    model.register_load_state_dict_pre_hook(load_trained)


def freeze(model: PreTrainedModel, learning_rates: dict[str, float]) -> None:
    """Makes exactly the modules with a learning rate trainable; layers under adapters stay frozen."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue  # packed 4-bit weights
        trained = learning_rates[module_of(name)] > 0
        parameter.requires_grad_(trained and (parameter.requires_grad or not isinstance(model, PeftModel)))


def frozen_modules(model: nn.Module) -> set[str]:
    """The modules without a trained parameter, as their files of weights are called."""
    named = list(model.named_parameters())
    trained = {module_of_file(name) for name, parameter in named if parameter.requires_grad}
    return {module_of_file(name) for name, _ in named} - trained


def train_in_float32(model: nn.Module) -> None:
    """Makes what is trained float32, in which small updates do not vanish, beside frozen modules of half precision.

    Where nothing autocasts, a projector takes features in its own precision, and so do further modules that are saved
    with an adapter; what these give has the precision of the layers around them.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and not is_deepspeed_zero3_enabled():  # where all is float32
            parameter.data = parameter.data.float()
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module_of(f"{name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(lambda module, inputs, output: _cast(output, module.original_module))


def _cast(values: Any, like: nn.Module) -> Any:
    """Floating point tensors in the precision of a module, unless autocast casts them where they are used."""
    dtype = next(like.parameters()).dtype

    def cast(value: Tensor) -> Tensor:
        kept = torch.is_autocast_enabled(value.device.type) or not value.is_floating_point()
        return value if kept else value.to(dtype)

    return tree_map_only(Tensor, cast, values)


def eval_frozen(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Puts modules without a trained parameter into evaluation mode, so that they have no dropout.

    A frozen language model still has to carry gradients to the projector. transformers checkpoints decoder layers in
    training mode only, so checkpointed layers stay in that mode, and are computed in evaluation mode.
    """
    for module in (model.model.vision_tower, model.model.language_model, model.model.multi_modal_projector):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            module.eval()
    for layer in model.model.language_model.modules():
        if layer.training or not isinstance(layer, GradientCheckpointingLayer) or not layer.gradient_checkpointing:
            continue
        layer.training, checkpoint = True, layer._gradient_checkpointing_func
        if not isinstance(checkpoint, _FrozenCheckpoint):
            layer._gradient_checkpointing_func = _FrozenCheckpoint(layer, checkpoint)


@dataclass
class _FrozenCheckpoint:
    """Checkpoints a layer in training mode, but computes it, both times, in evaluation mode while it is frozen."""

    layer: GradientCheckpointingLayer
    checkpoint: Callable

    def __call__(self, forward: Callable, *args):
        def frozen_forward(*args):
            training = self.layer.training
            self.layer.training = any(parameter.requires_grad for parameter in self.layer.parameters())
            try:
                return forward(*args)
            finally:
                self.layer.training = training

        return self.checkpoint(frozen_forward, *args)


def projector_norm(model: nn.Module) -> nn.Module:
    """The norm after the projector; with adapters, the trained copy."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """The model itself, without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
