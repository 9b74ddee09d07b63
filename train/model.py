# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model that a run trains: loaded in its precision, in its arm, with adapters on the language model alone."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from trl import get_peft_config, get_quantization_config

from ..build import ARMS
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..provenance import hub_commit
from .arguments import ModelArguments, TrainArguments


MODULES = ("language", "projector", "norm", "vision")
"""The parts that have a learning rate of their own. The Trainer logs the first one's that is trained."""

RECORD = "training.json"
"""The file in a trained checkpoint that says how it was trained."""


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter belongs to, by its name; adapters and the head belong to `"language"`."""
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." in parameter:
        return "norm" if ".norm." in parameter else "projector"
    return "language"


def check_checkpoint(arguments: ModelArguments, training: TrainArguments) -> NormAlignLlavaConfig:
    """The configuration of the checkpoint to train, in the arm asked for; nothing is loaded.

    Raises:
        ValueError: it is no NormAlign-LLaVA checkpoint, or a trained one of another arm.
    """
    folder = str(arguments.model_name_or_path)
    if (Path(folder) / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} is an adapter. Merge it first (`normalign merge {folder} --output DIR`), then train DIR."
        )
    if not Path(folder).exists() and "/" not in folder:
        raise ValueError(
            f"There is no checkpoint folder {folder}. Make it with `normalign build --output {folder}` or the stage "
            "before, or name another with --model_name_or_path."
        )
    if Path(folder).exists() and Path(folder).resolve() == Path(str(training.output_dir)).resolve():
        raise ValueError(f"--output_dir is the checkpoint that is to be trained, {folder}. Choose another.")
    config = AutoConfig.from_pretrained(folder, revision=arguments.model_revision)
    if config.model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{folder} is a {config.model_type!r} model. Make a NormAlign-LLaVA checkpoint of it with `normalign "
            "build` (--vision and --language, or --from-llava), and train that."
        )
    current = arm_of(config)
    arm = training.arm or current
    if arm != current:
        if {arm, current} != {"aligned", "gwc"} and (Path(folder) / RECORD).exists():
            raise ValueError(
                f"{folder} was trained as arm {current!r}; arm {arm!r} would discard its gain. Start from an "
                f"untrained checkpoint, such as `normalign build --arm {arm}` makes."
            )
        norm = "layer_norm" if config.projector_norm == "none" else config.projector_norm
        neutral = {"projector_norm": norm, "projector_gain_init": "text_norm", "gradient_compensation": "global"}
        for name, value in {**neutral, **ARMS[arm]}.items():
            setattr(config, name, value)
    return config


def load_model(
    arguments: ModelArguments, training: TrainArguments, config: NormAlignLlavaConfig | None = None
) -> NormAlignLlavaForConditionalGeneration:
    """Loads a checkpoint in the precision and the arm asked for; a norm that the arm changes is aligned.

    Args:
        arguments: Which checkpoint, and its precision.
        training: The arm, and the device of a quantized model.
        config: What [`check_checkpoint`] gave.

    Raises:
        ValueError: What [`check_checkpoint`] raises.
    """
    config = config or check_checkpoint(arguments, training)
    quantization = get_quantization_config(arguments)
    stored = AutoConfig.from_pretrained(arguments.model_name_or_path, revision=arguments.model_revision)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        arguments.model_name_or_path,
        config=config,
        revision=arguments.model_revision,
        dtype=arguments.dtype,
        attn_implementation=arguments.attn_implementation,
        quantization_config=quantization,
        device_map={"": training.device} if quantization is not None else None,
        **(training.model_init_kwargs or {}),
    )
    if {arm_of(stored), arm := arm_of(config)} & {"none", "unit"} and arm not in (arm_of(stored), "none"):
        model.align_projector_norm()
    return model


def arm_of(config: NormAlignLlavaConfig) -> str:
    """The paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"


def lora_config(
    arguments: ModelArguments, model: NormAlignLlavaForConditionalGeneration, rates: dict[str, float]
) -> LoraConfig | None:
    """TRL's PEFT configuration, kept to the language model, with what is trained in full in `modules_to_save`.

    PEFT's "all-linear" and bare names such as "q_proj" would reach into the vision tower; the target is therefore a
    pattern that begins with the language model. The projector, with its norm, is saved with the adapter.

    Args:
        arguments: `lora_target_modules` are names of linear layers; by default all of the decoder's.
        model: The model, without adapters.
        rates: Learning rate of each module.

    Raises:
        ValueError: a target names no linear layer of the language model, or the language model is frozen.
    """
    config = get_peft_config(arguments)
    if config is None:
        return None
    if rates["language"] == 0:
        raise ValueError("use_peft puts adapters on the language model, but its learning rate is 0. Drop one of them.")
    linears = {
        name.rpartition(".")[2]
        for name, module in model.model.language_model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if not linears:
        raise ValueError("The language model has no linear layer that an adapter could be put on. Leave out use_peft.")
    targets = config.target_modules or linears
    targets = linears if targets == "all-linear" else {targets} if isinstance(targets, str) else set(targets)
    if unknown := targets - linears:
        raise ValueError(
            f"lora_target_modules names {', '.join(sorted(unknown))}, but the language model's linear layers are "
            f"{', '.join(sorted(linears))}."
        )
    config.target_modules = rf".*\.language_model\..*\.({'|'.join(sorted(targets))})"
    whole = [
        ("vision_tower", rates["vision"]),
        ("multi_modal_projector", max(rates["projector"], rates["norm"])),
    ]
    asked = set(config.modules_to_save or ()) - {name for name, _ in whole}
    for name in asked:
        places = [path for path, _ in model.named_modules() if path.split(".")[-1] == name]
        if not places or any(part in path for path in places for part in ("vision_tower.", "multi_modal_projector.")):
            where = "in the vision tower or the projector, which have rates of their own" if places else "no module"
            raise ValueError(f"lora_modules_to_save names {name}: {where}. Name modules of the language model.")
    config.modules_to_save = [*sorted(asked), *(name for name, rate in whole if rate > 0)] or None
    # Or an adapter would say what its base is called, and not which it was.
    config.revision = hub_commit(str(arguments.model_name_or_path), arguments.model_revision)
    return config


def freeze(model: PreTrainedModel, rates: dict[str, float]) -> None:
    """Lets gradients flow into the modules with a rate, and into nothing else.

    Args:
        model: The model, with or without adapters; where it has adapters, the layers under them stay frozen.
        rates: Learning rate of each module.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue  # packed 4-bit weights
        trained = rates[module_of(name)] > 0
        parameter.requires_grad_(trained and (parameter.requires_grad or not isinstance(model, PeftModel)))


def restore_projector(model: PeftModel, values: dict[str, torch.Tensor], wide: bool) -> None:
    """Gives the adapter's copy of the projector the values that it was made from, which casting has rounded.

    Args:
        model: The model with its adapter; one whose projector is frozen has no copy.
        values: The projector's state before.
        wide: Whether linear layers become float32 as well, which takes autocast to multiply: at small rates bfloat16
            weights hardly move. The norm is float32 in any case.
    """
    for name, parameter in model.named_parameters():
        _, copied, name = name.partition("multi_modal_projector.modules_to_save.default.")
        if copied:
            dtype = torch.float32 if wide or name.startswith("norm.") else values[name].dtype
            parameter.data = values[name].to(dtype)


def eval_frozen(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Puts modules without a trained parameter into evaluation mode: their dropout is off.

    Decoder layers keep their own flag: in evaluation mode they would not be checkpointed, and a frozen language model
    still has to carry gradients to the projector.
    """
    for module in (model.model.vision_tower, model.model.language_model, model.model.multi_modal_projector):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            module.eval()
            if module is model.model.language_model:
                for layer in module.modules():
                    if isinstance(layer, GradientCheckpointingLayer):
                        layer.training = True


def projector_norm(model: nn.Module) -> nn.Module:
    """The norm after the projector that is in use: of a model with adapters, the trained copy."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """The model itself, without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
