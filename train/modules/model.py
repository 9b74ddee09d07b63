# SPDX-License-Identifier: Apache-2.0
"""The model to train, as it is trained: which parameters, in which dtypes, on how many processes.

First its modules by name, then precision, forward passes, and the division by FSDP2 or DeepSpeed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checkpoint.files import INDEX
from ...checkpoint.weights import module_of_tensor
from ...diagnose.measure.families import in_evaluation_mode
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


MODULES = ("language", "projector", "norm", "vision")
"""Modules with their own learning rates. The Trainer logs the first one's that is trained."""

PLACES = {
    "language": ["language_model", "lm_head"],
    "vision": ["vision_tower"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
}
"""Parts of the names of their parameters. The norm is within the projector."""


def module_of(parameter: str) -> str:
    """Returns which of `MODULES` a parameter is in, by its name.

    Adapters and the head belong to the language model.
    """
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." not in parameter:
        return "language"
    if ".norm." in parameter:
        return "norm"
    return "projector"


def projector_norm(model: nn.Module) -> nn.Module:
    """Returns the norm after the projector, or its trained copy if there are adapters."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """Returns the model itself, without PEFT's wrapper."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def freeze(model: PreTrainedModel, learning_rates: dict[str, float]) -> None:
    """Makes only the modules with a learning rate trainable. Layers under adapters stay frozen."""
    has_adapters = isinstance(model, PeftModel)
    for parameter_name, parameter in model.named_parameters():
        if not parameter.is_floating_point():  # packed 4-bit weights
            continue
        may_train = parameter.requires_grad or not has_adapters
        parameter.requires_grad_(may_train and learning_rates[module_of(parameter_name)] > 0)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def frozen_modules(model: nn.Module) -> set[str]:
    """Returns the modules without a trained parameter, as their files of weights are called."""
    modules = {module_of_tensor(parameter_name) for parameter_name, _ in model.named_parameters()}
    return modules - {module_of_tensor(name) for name in trained_parameters(model)}


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values for a time."""
    # unittest.mock.patch.multiple would call __setattr__, and modules register what they are given.
    previous_values = {name: vars(owner)[name] for name in values.keys() & vars(owner).keys()}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(previous_values)


def train_in_float32(model: nn.Module) -> None:
    """Makes trained parameters float32, so that small updates do not vanish."""
    is_float32 = is_deepspeed_zero3_enabled()  # ZeRO-3 loads all in float32
    if not is_float32:
        for parameter in trained_parameters(model).values():
            parameter.data = parameter.data.float()
    # Without autocast, hooks cast what goes into the projector, and into and out of saved modules.
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for module_name, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        if not is_float32:  # TRL rounds PEFT's copy on a quantized base
            copied_parameters = module.modules_to_save["default"].parameters()
            original_parameters = module.original_module.parameters()
            for copied, original in zip(copied_parameters, original_parameters, strict=True):
                copied.data = original.to(copied.device, torch.float32, copy=True)
        if module_of(f"{module_name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(
                lambda module, inputs, output: _cast(output, module.original_module)
            )


def _cast(values: Any, like: nn.Module) -> Any:
    """Returns tensors in a module's precision, unless autocast casts them where they are used."""
    parameter = next(like.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return values

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, values)


@contextmanager
def evaluating(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluates without gradients, in training's precision. Restores modes and random state."""
    devices = []
    if args.device.type == "cuda":
        devices.append(torch.cuda.current_device())
    half_precision = torch.bfloat16 if args.bf16 else torch.float16
    autocast = torch.autocast(args.device.type, half_precision, enabled=args.bf16 or args.fp16)
    with in_evaluation_mode(model), torch.random.fork_rng(devices), autocast:
        yield


def wrap_forward(model: NormAlignLlavaForConditionalGeneration, blank_image: Tensor) -> None:
    """Wraps the forward pass for training, over TRL's fused head.

    While `model.only_answers` is true, the fused head gets the hidden states that predict a label,
    `(1, labels, d)`, and not all. In a pass without images and cache, the vision tower sees a blank
    image, the decoder none: other processes may have images, and under FSDP2 and ZeRO-3 all must
    gather the tower's weights in the same order, after the embeddings' and before the decoder's.
    """
    inner = model.model
    forward_with_head = _unbound(model.forward)
    forward_of_inner = _unbound(inner.forward)

    @wraps(forward_with_head)
    def forward(self, *args, labels=None, **kwargs):
        if labels is not None and kwargs.get("fused_lm_head") and self.only_answers:
            kwargs |= _answers(labels)
        else:
            kwargs["labels"] = labels
        return forward_with_head(self, *args, **kwargs)

    @wraps(forward_of_inner)
    def inner_forward(self, *args, answers=None, **kwargs):
        input_ids = kwargs.get("input_ids")
        has_no_image = kwargs.get("pixel_values") is None
        if input_ids is not None and has_no_image and kwargs.get("use_cache") is False:
            text = self.get_input_embeddings()(input_ids)
            features = self.get_image_features(pixel_values=blank_image.to(text)).pooler_output[0]
            nowhere = torch.zeros_like(text, dtype=torch.bool)  # so the gradients are zero
            kwargs["input_ids"] = None
            kwargs["inputs_embeds"] = text.masked_scatter(nowhere, features.to(text))
        output = forward_of_inner(self, *args, **kwargs)
        if answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][answers][None]
        return output

    model.forward = MethodType(forward, model)
    inner.forward = MethodType(inner_forward, inner)


@torch.compiler.disable  # or graphs would be compiled again for every number of labels
def _answers(labels: Tensor) -> dict[str, Tensor]:
    """Returns the learned labels and where they are predicted, or all labels if none is learned."""
    next_labels = labels[:, 1:]
    is_learned = next_labels != -100
    if not is_learned.any():
        return {"labels": labels}
    return {"answers": is_learned, "shift_labels": next_labels[is_learned][None]}


def _unbound(forward: Callable) -> Callable:
    """Returns a forward pass as a function of the module, so that a copy has its own."""
    if isinstance(forward, MethodType):
        return forward.__func__
    return wraps(forward)(lambda self, *args, **kwargs: forward(*args, **kwargs))  # accelerate's


@contextmanager
def watching_outputs(model: nn.Module, visit: Callable[[str, list], None]) -> Iterator[None]:
    """Calls `visit` with the name and the floating-point outputs of every module, in order."""

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        visit(name, [tensor for tensor in tensors if tensor.is_floating_point()])

    with ExitStack() as hooks:
        for name, module in base_model(model).named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield


def eval_frozen(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Puts modules without a trained parameter into evaluation mode: they have no dropout."""
    inner = model.model
    for module in (inner.vision_tower, inner.language_model, inner.multi_modal_projector):
        if not trained_parameters(module):
            module.eval()
    for layer in inner.language_model.modules():
        is_checkpointed = isinstance(layer, GradientCheckpointingLayer)
        if is_checkpointed and layer.gradient_checkpointing and not layer.training:
            layer.training = True  # transformers checkpoints in training mode only
            function = layer._gradient_checkpointing_func
            if getattr(function, "func", None) is not _checkpoint_frozen:
                layer._gradient_checkpointing_func = partial(_checkpoint_frozen, layer, function)


def _checkpoint_frozen(layer: nn.Module, checkpoint: Callable, forward: Callable, *args) -> Any:
    """Checkpoints a layer in training mode, and computes it in evaluation mode if it is frozen."""

    def frozen_forward(*args):
        training = layer.training
        layer.training = bool(trained_parameters(layer))
        try:
            return forward(*args)
        finally:
            layer.training = training

    return checkpoint(frozen_forward, *args)


def prepare_sharding(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Has FSDP2 wrap the layers, or the configured classes, one by one, and the norm apart."""
    # accelerate's own list fails on classes that the model lacks. Its one policy would use gain and
    # bias, and reduce their gradients, in bfloat16, so the norm is a unit with its own policy.
    plugin = accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")  # with another one, the Trainer saves no model
    norm_class = type(projector_norm(model))
    class_names = plugin.transformer_cls_names_to_wrap
    if not class_names:
        class_names = [
            type(module).__name__
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
    plugin.transformer_cls_names_to_wrap = sorted({*class_names, norm_class.__name__})
    prepare = accelerator.prepare
    fully_shard = fsdp.fully_shard

    def shard(module: nn.Module, **kwargs: Any) -> fsdp.FSDPModule:
        if type(module) is norm_class:
            kwargs["mp_policy"] = fsdp.MixedPrecisionPolicy()
        return fully_shard(module, **kwargs)

    def prepare_with_norm(*args: Any, **kwargs: Any) -> Any:
        with replaced(fsdp, fully_shard=shard):
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_norm


def load_sharded(model: fsdp.FSDPModule, folder: Path) -> None:
    """Loads weights under FSDP2, file by file. The first process reads, and all get their part."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for file_name in sorted({*index["weight_map"].values()}):
        state = {}
        if dist.get_rank() == 0:
            state = load_file(folder / file_name)
        set_model_state_dict(model, state, options=options)


def fill_missing_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Gives zero gradients to trained parameters that have none, unless none has a gradient.

    It is registered under FSDP2, and runs before each step of the optimizer.
    """
    # Features come from an earlier layer, so the vision tower's last layers get no gradient. The
    # optimizer would save no state for them, and on resuming torch cannot load states of only some
    # parameters.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def sharding() -> str:
    """Returns how the model is divided among processes. It decides how states are saved."""
    names = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed"}
    return names.get(AcceleratorState().distributed_type, "none")


def sharding_stage() -> int:
    """Returns the stage of ZeRO that divides as much as this run does."""
    accelerator_state = AcceleratorState()
    if accelerator_state.distributed_type == DistributedType.DEEPSPEED:
        return accelerator_state.deepspeed_plugin.zero_stage
    if accelerator_state.distributed_type == DistributedType.FSDP:
        return 3
    return 0
