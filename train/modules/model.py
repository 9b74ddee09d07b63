# SPDX-License-Identifier: Apache-2.0
"""The model to train: its parts by name, which are frozen, their precision and mode, sharding, and bytes."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checkpoint.files import INDEX
from ...checkpoint.weights import module_of_file
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


WEIGHTS, ADAPTERS, GRADIENTS = "weights", "adapters", "gradients"
OPTIMIZER, BATCHES, ACTIVATIONS = "optimizer", "batches", "activations"
PARTS = (WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, BATCHES, ACTIVATIONS)
"""What takes memory in a step."""

MODULES = ("language", "projector", "norm", "vision")
"""The parts with a learning rate of their own. The Trainer logs that of the first one that is trained."""

PLACES = {
    "language": ["language_model", "lm_head"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
    "vision": ["vision_tower"],
}
"""What is in the names of their parameters; the norm is within the projector."""


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter belongs to, by its name. Adapters and the head belong to `"language"`."""
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." in parameter:
        return "norm" if ".norm." in parameter else "projector"
    return "language"


def projector_norm(model: nn.Module) -> nn.Module:
    """The norm after the projector; with adapters, the trained copy."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """The model itself, without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def freeze(model: PreTrainedModel, learning_rates: dict[str, float]) -> None:
    """Makes exactly the modules with a learning rate trainable; layers under adapters stay frozen."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():  # packed 4-bit weights are not
            trained = learning_rates[module_of(name)] > 0
            parameter.requires_grad_(trained and (parameter.requires_grad or not isinstance(model, PeftModel)))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_modules(model: nn.Module) -> set[str]:
    """The modules without a trained parameter, as their files of weights are called."""
    modules = {module_of_file(name) for name, _ in model.named_parameters()}
    return modules - {module_of_file(name) for name in trained_parameters(model)}


def train_in_float32(model: nn.Module) -> None:
    """Makes what is trained float32, in which small updates do not vanish, beside frozen modules of half precision.

    Where nothing autocasts, hooks cast what goes into the projector and into modules saved with an
    adapter, and what these give.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and not is_deepspeed_zero3_enabled():  # where all is float32
            parameter.data = parameter.data.float()
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for name, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        if not is_deepspeed_zero3_enabled():  # PEFT's copies, which TRL rounds on a quantized base
            copied, original = module.modules_to_save["default"].parameters(), module.original_module.parameters()
            for parameter, value in zip(copied, original, strict=True):
                parameter.data = value.to(parameter.device, torch.float32, copy=True)
        if module_of(f"{name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(lambda module, inputs, output: _cast(output, module.original_module))


def _cast(values: Any, like: nn.Module) -> Any:
    """Floating point tensors in the precision of a module, unless autocast casts them where they are used."""
    first = next(like.parameters())
    if torch.is_autocast_enabled(first.device.type):
        return values
    return tree_map_only(Tensor, lambda value: value.to(first.dtype) if value.is_floating_point() else value, values)


def wrap_forward(model: NormAlignLlavaForConditionalGeneration, blank_image: Tensor) -> None:
    """Wraps the forward pass for training, over TRL's fused head.

    While `model.only_answers` is true, the fused head gets the hidden states that predict a label,
    `(1, labels, d)`, and not all. In a pass without images and cache, the vision tower sees a blank image,
    and the decoder does not: other processes may have images, and under FSDP2 and ZeRO-3 all must gather
    the tower's weights in the same order, after the embeddings' and before the decoder's.
    """
    inner = model.model
    with_head, of_inner = _unbound(model.forward), _unbound(inner.forward)

    @wraps(with_head)
    def forward(self, *args, labels=None, **kwargs):
        if labels is not None and kwargs.get("fused_lm_head") and self.only_answers:
            kwargs |= _answers(labels)
        else:
            kwargs["labels"] = labels
        return with_head(self, *args, **kwargs)

    @wraps(of_inner)
    def inner_forward(self, *args, answers=None, **kwargs):
        ids, no_image = kwargs.get("input_ids"), kwargs.get("pixel_values") is None
        if ids is not None and no_image and kwargs.get("use_cache") is False:
            embeddings = self.get_input_embeddings()(ids)
            features = self.get_image_features(pixel_values=blank_image.to(embeddings)).pooler_output[0]
            nowhere = torch.zeros_like(embeddings, dtype=torch.bool)  # so its gradients are zero
            kwargs |= {"input_ids": None, "inputs_embeds": embeddings.masked_scatter(nowhere, features.to(embeddings))}
        output = of_inner(self, *args, **kwargs)
        if answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][answers][None]
        return output

    model.forward, inner.forward = MethodType(forward, model), MethodType(inner_forward, inner)


@torch.compiler.disable  # the number of labels differs from batch to batch, for which graphs would be compiled again
def _answers(labels: Tensor) -> dict[str, Tensor]:
    """The labels that are learned, and at which positions they are predicted; all of them if there are none."""
    answers = labels[:, 1:] != -100
    return {"answers": answers, "shift_labels": labels[:, 1:][answers][None]} if answers.any() else {"labels": labels}


def _unbound(forward: Callable) -> Callable:
    """A forward pass as a function of the module, so that a copy of the module has its own."""
    if isinstance(forward, MethodType):
        return forward.__func__
    return wraps(forward)(lambda self, *args, **kwargs: forward(*args, **kwargs))  # accelerate's, of a divided model


def eval_frozen(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Puts modules without a trained parameter into evaluation mode, so that they have no dropout.

    transformers checkpoints layers in training mode only, so those stay in it, and are computed in evaluation mode.
    """
    for module in (model.model.vision_tower, model.model.language_model, model.model.multi_modal_projector):
        if not trained_parameters(module):
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
            self.layer.training = bool(trained_parameters(self.layer))
            try:
                return forward(*args)
            finally:
                self.layer.training = training

        return self.checkpoint(frozen_forward, *args)


def prepare_sharding(accelerator: Accelerator, model: NormAlignLlavaForConditionalGeneration) -> None:
    """Names the layers that FSDP2 wraps one by one, unless the user's configuration does, and the norm.

    accelerate's own list fails on classes that the model lacks. Its one policy for all units would use gain and bias,
    and reduce their gradients, in bfloat16, so the norm is a unit with a policy of its own.
    """
    plugin, prepare, norm = accelerator.state.fsdp_plugin, accelerator.prepare, type(projector_norm(model))
    plugin.set_state_dict_type("FULL_STATE_DICT")  # with another one, the Trainer saves no model
    layers = {type(layer).__name__ for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)}
    plugin.transformer_cls_names_to_wrap = sorted({*(plugin.transformer_cls_names_to_wrap or layers), norm.__name__})

    def shard(module: nn.Module, **kwargs: Any) -> FSDPModule:
        return fully_shard(module, **kwargs | ({"mp_policy": MixedPrecisionPolicy()} if type(module) is norm else {}))

    def prepare_with_norm(*args: Any, **kwargs: Any) -> Any:
        with replaced(fsdp, fully_shard=shard):
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_norm


def load_sharded(model: FSDPModule, folder: Path) -> None:
    """Loads a checkpoint's files of weights under FSDP2: the first process reads them, and each gets its part."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)  # file by file
    for name in sorted({*json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}):
        set_model_state_dict(model, load_file(folder / name) if dist.get_rank() == 0 else {}, options=options)


def fill_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Before a step under FSDP2, gives zero gradients to trained parameters that alone have none.

    The vision tower's last layers are not read, but torch loads no states of some parameters alone.
    """
    trained = [value for group in optimizer.param_groups for value in group["params"] if value.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        for parameter in (value for value in trained if value.grad is None):
            parameter.grad = torch.zeros_like(parameter)


def static_bytes(model: nn.Module, args: TrainingArguments) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on each device, by part.

    FSDP divides all by the number of processes, ZeRO-1 the states, ZeRO-2 gradients and states, ZeRO-3
    all; DDP keeps a copy of the gradients in buckets. ZeRO-1 and ZeRO-2 keep the trained weights in
    float32 once more. States of paged optimizers count although they may lie in the CPU's memory.
    """
    sizes = dict.fromkeys((WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER), 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sizes[ADAPTERS if ".lora_" in name else WEIGHTS] += (size := tensor_bytes(tensor))
        if tensor.requires_grad:
            sizes[GRADIENTS] += size
            sizes[OPTIMIZER] += _optimizer_bytes(args.optim.value, tensor, tensor in embeddings)
            sizes[OPTIMIZER] += 4 * parameter_count(tensor) if _zero_stage() in (1, 2) else 0
    shares = memory_shares(args)
    return {name: int(size * shares[name]) for name, size in sizes.items()}


def memory_shares(args: TrainingArguments) -> dict[str, float]:
    """How much of each part a process has."""
    kind, least = AcceleratorState().distributed_type, {WEIGHTS: 3, ADAPTERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
    divided = [name for name, stage in least.items() if kind == DistributedType.FSDP or _zero_stage() >= stage]
    shares = {name: 1 / args.world_size if name in divided else 1.0 for name in least}
    return shares | ({GRADIENTS: 2.0} if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU) else {})


def _zero_stage() -> int:
    state = AcceleratorState()
    return state.deepspeed_plugin.zero_stage if state.distributed_type == DistributedType.DEEPSPEED else 0


def _optimizer_bytes(name: str, parameter: Tensor, embedding: bool) -> int:
    count, states = parameter_count(parameter), 1 if "lion" in name else 2
    if name == "sgd":
        return 0
    if name == "adafactor":
        return 4 * (sum(parameter.shape) if parameter.dim() > 1 else count)
    if "8bit" in name and count >= 4096 and not embedding:  # bitsandbytes keeps small tensors in 32 bits
        return states * (count + 4 * math.ceil(count / 256))
    if "8bit" in name or "32bit" in name:
        return states * 4 * count
    return states * count * parameter.element_size()


def parameter_count(parameter: Tensor) -> int:
    """The parameters that a tensor stands for, packed or divided as it may be."""
    if type(parameter).__name__ == "Params4bit":
        return math.prod(parameter.quant_state.shape)
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, whole if ZeRO-3 divides it, with the constants of its quantization."""
    size = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    if type(tensor).__name__ == "Params4bit":
        size += sum(value.nbytes for value in tensor.quant_state.as_dict().values() if isinstance(value, Tensor))
    elif type(tensor).__name__ == "Int8Params":
        size += tensor.SCB.nbytes
    return size


@contextmanager
def evaluating(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluation mode without gradients, in training's precision; modes and random state come back."""
    devices = [torch.cuda.current_device()] if args.device.type == "cuda" else []
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    autocast = torch.autocast(args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices), autocast, torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def watching_outputs(model: nn.Module, visit: Callable[[str, list[Tensor]], None]) -> Iterator[None]:
    """Calls `visit` with each module's name and the floating-point tensors that it gives, in order."""

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        visit(name, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()])

    with ExitStack() as hooks:
        for name, module in base_model(model).named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values for a time."""
    before = {name: value for name, value in vars(owner).items() if name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)
