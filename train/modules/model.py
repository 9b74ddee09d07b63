# SPDX-License-Identifier: Apache-2.0
"""The model to train: modules by name, what is frozen, precision, passes, mode, sharding, bytes."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any, TypeAlias

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
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checkpoint.files import INDEX
from ...checkpoint.weights import module_of_file
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


MODULES = ("language", "projector", "norm", "vision")
"""What has a learning rate of its own. The Trainer logs that of the first one that is trained."""

PLACES = {"language": ["language_model", "lm_head"], "vision": ["vision_tower"]}
PLACES |= {"projector": ["multi_modal_projector"], "norm": ["multi_modal_projector.norm"]}
"""What is in the names of their parameters; the norm is within the projector."""

PARAMETERS, ADAPTERS, GRADIENTS = "weights", "adapters", "gradients"
OPTIMIZER, BATCHES, ACTIVATIONS = "optimizer", "batches", "activations"
COPIES = "half-precision copies of weights"
MEMORY_PARTS = (PARAMETERS, ADAPTERS, COPIES, GRADIENTS, OPTIMIZER, BATCHES, ACTIVATIONS)
"""What takes memory in a step. Copies are those that autocast makes, and that live at its peak."""

STATES = {"lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 1, "lars": 1, "ademamix": 3}
"""States of a parameter that bitsandbytes' optimizers keep, by what is in their names; else 2."""

OptimizerClass: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter is in, by its name. Adapters and the head are `"language"`."""
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
    """Makes just the modules with a learning rate trainable; layers under adapters stay frozen."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():  # packed 4-bit weights are not
            may_train = parameter.requires_grad or not isinstance(model, PeftModel)
            parameter.requires_grad_(may_train and learning_rates[module_of(name)] > 0)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def frozen_modules(model: nn.Module) -> set[str]:
    """The modules without a trained parameter, as their files of weights are called."""
    modules = {module_of_file(name) for name, _ in model.named_parameters()}
    return modules - {module_of_file(name) for name in trained_parameters(model)}


def train_in_float32(model: nn.Module) -> None:
    """Makes what is trained float32, in which small updates do not vanish."""
    for parameter in model.parameters():
        if parameter.requires_grad and not is_deepspeed_zero3_enabled():  # where all is float32
            parameter.data = parameter.data.float()
    # Without autocast, hooks cast what goes into the projector, and into and out of saved modules.
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for name, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        if not is_deepspeed_zero3_enabled():  # PEFT's copies, which TRL rounds on a quantized base
            copied, original = module.modules_to_save["default"], module.original_module
            for parameter, value in zip(copied.parameters(), original.parameters(), strict=True):
                parameter.data = value.to(parameter.device, torch.float32, copy=True)
        if module_of(f"{name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(
                lambda module, inputs, output: _cast(output, module.original_module)
            )


def _cast(values: Any, like: nn.Module) -> Any:
    """Floating-point tensors in a module's precision, unless autocast casts them where used."""
    first = next(like.parameters())
    if torch.is_autocast_enabled(first.device.type):
        return values
    return tree_map_only(
        Tensor, lambda value: value.to(first.dtype) if value.is_floating_point() else value, values
    )


def wrap_forward(model: NormAlignLlavaForConditionalGeneration, blank_image: Tensor) -> None:
    """Wraps the forward pass for training, over TRL's fused head.

    While `model.only_answers` is true, the fused head gets the hidden states that predict a label,
    `(1, labels, d)`, and not all. In a pass without images and cache, the vision tower sees a blank
    image, the decoder none: other processes may have images, and under FSDP2 and ZeRO-3 all must
    gather the tower's weights in the same order, after the embeddings' and before the decoder's.
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
            text = self.get_input_embeddings()(ids)
            features = self.get_image_features(pixel_values=blank_image.to(text)).pooler_output[0]
            nowhere = torch.zeros_like(text, dtype=torch.bool)  # so its gradients are zero
            text = text.masked_scatter(nowhere, features.to(text))
            kwargs |= {"input_ids": None, "inputs_embeds": text}
        output = of_inner(self, *args, **kwargs)
        if answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][answers][None]
        return output

    model.forward, inner.forward = MethodType(forward, model), MethodType(inner_forward, inner)


@torch.compiler.disable  # or graphs would be compiled again for every number of labels
def _answers(labels: Tensor) -> dict[str, Tensor]:
    """The labels that are learned, and where they are predicted; all labels if none is learned."""
    answers = labels[:, 1:] != -100
    learned = {"answers": answers, "shift_labels": labels[:, 1:][answers][None]}
    return learned if answers.any() else {"labels": labels}


def _unbound(forward: Callable) -> Callable:
    """A forward pass as a function of the module, so that a copy of the module has its own."""
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
        checkpoints = isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        if checkpoints and not layer.training:  # transformers checkpoints in training mode only
            layer.training, function = True, layer._gradient_checkpointing_func
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


@contextmanager
def evaluating(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluation without gradients, in training's precision; restores modes and random state."""
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


def prepare_sharding(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Names what FSDP2 wraps one by one: the layers, or what the configuration names; the norm."""
    # accelerate's own list fails on classes that the model lacks. Its one policy would use gain and
    # bias, and reduce their gradients, in bfloat16, so the norm is a unit with a policy of its own.
    plugin, prepare, wrap = accelerator.state.fsdp_plugin, accelerator.prepare, fsdp.fully_shard
    plugin.set_state_dict_type("FULL_STATE_DICT")  # with another one, the Trainer saves no model
    norm, classes = type(projector_norm(model)), {type(module) for module in model.modules()}
    layers = [cls.__name__ for cls in classes if issubclass(cls, GradientCheckpointingLayer)]
    names = {*(plugin.transformer_cls_names_to_wrap or layers), norm.__name__}
    plugin.transformer_cls_names_to_wrap = sorted(names)

    def shard(module: nn.Module, **kwargs: Any) -> fsdp.FSDPModule:
        policy = {"mp_policy": fsdp.MixedPrecisionPolicy()} if type(module) is norm else {}
        return wrap(module, **kwargs | policy)

    def prepare_with_norm(*args: Any, **kwargs: Any) -> Any:
        with replaced(fsdp, fully_shard=shard):
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_norm


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


def load_sharded(model: fsdp.FSDPModule, folder: Path) -> None:
    """Loads weights under FSDP2, file by file: the first process reads, and all get their part."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for name in sorted({*index["weight_map"].values()}):
        state = load_file(folder / name) if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=options)


def fill_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Before an FSDP2 step, gives zero gradients to the trained parameters that alone have none."""
    # The vision tower's last layers are not read, but torch loads no states of some parameters.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def static_bytes(
    model: nn.Module, args: TrainingArguments, optimizer: OptimizerClass | None = None
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on each device, by part.

    `optimizer` is a class and its arguments, in place of `args.optim`.

    FSDP and ZeRO-3 divide all by the number of processes, ZeRO-2 gradients and states, ZeRO-1 the
    states; DDP keeps a copy of the gradients in buckets. ZeRO-1 and ZeRO-2 keep the trained weights
    in float32 once more. Paged optimizers' states count, although they may lie in the CPU's memory.
    """
    sizes = dict.fromkeys((PARAMETERS, ADAPTERS, GRADIENTS, OPTIMIZER), 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    trained: list[Tensor] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        size = tensor_bytes(tensor)
        sizes[ADAPTERS if ".lora_" in name else PARAMETERS] += size
        if tensor.requires_grad:
            trained.append(tensor)
            sizes[GRADIENTS] += size
            if _zero_stage() in (1, 2):
                sizes[OPTIMIZER] += 4 * parameter_count(tensor)
    sizes[OPTIMIZER] += optimizer_bytes(trained, args, optimizer, embeddings)
    shares = memory_shares(args)
    return {name: int(size * shares[name]) for name, size in sizes.items()}


def memory_shares(args: TrainingArguments) -> dict[str, float]:
    """How much of each part a process has."""
    least = {PARAMETERS: 3, ADAPTERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
    divided = [name for name, stage in least.items() if _zero_stage() >= stage]
    shares = {name: 1 / args.world_size if name in divided else 1.0 for name in least}
    kind = AcceleratorState().distributed_type
    if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        shares[GRADIENTS] = 2.0
    return shares


def sharding() -> str:
    """How the model is divided among processes, which decides how its states are saved."""
    kind = AcceleratorState().distributed_type
    names = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed"}
    return names.get(kind, "none")


def _zero_stage() -> int:
    """Which stage of ZeRO divides as much as this run does."""
    state = AcceleratorState()
    if state.distributed_type == DistributedType.DEEPSPEED:
        return state.deepspeed_plugin.zero_stage
    return 3 if state.distributed_type == DistributedType.FSDP else 0


def optimizer_bytes(
    trained: Sequence[Tensor],
    args: TrainingArguments,
    optimizer: OptimizerClass | None,
    embeddings: Collection[Tensor],
) -> int:
    """Bytes of the states that an optimizer keeps of the parameters `trained`.

    bitsandbytes' are counted by its rules. Any other optimizer takes a step on tensors that have
    shapes alone; one that cannot is counted as AdamW, with two states of each parameter's size.
    """
    name = args.optim.value
    if optimizer is not None:
        name = optimizer[0].__name__.lower()
    if "8bit" in name or "32bit" in name:
        return sum(_bitsandbytes_state(name, tensor, tensor in embeddings) for tensor in trained)
    try:
        cls, arguments = optimizer or Trainer.get_optimizer_cls_and_kwargs(args)
        size = _states_of_step(cls, arguments, trained)
    except Exception:  # of any optimizer: it needs a model, values, or a GPU
        size = None
    if size is None:
        return sum(2 * parameter_count(tensor) * tensor.element_size() for tensor in trained)
    return size


def _states_of_step(
    cls: type[torch.optim.Optimizer], arguments: dict[str, Any], trained: Sequence[Tensor]
) -> int | None:
    """Bytes of the states after a step on meta, without numbers such as the count of steps.

    Of parameters with the same shape and type one takes the step: a model has hundreds of them,
    and a state is as large for each. Optimizers that read values fail in the step; the states that
    all parameters had by then are the answer. None if some had none.
    """
    alike = Counter((getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) for tensor in trained)
    parameters = []
    for shape, dtype in alike:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        parameters.append(parameter)
    on_meta = {name: value for name, value in arguments.items() if name not in ("fused", "foreach")}
    optimizer = cls(parameters, **on_meta)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        if len(optimizer.state) < len(parameters):
            return None
    size = 0
    for parameter, count in zip(parameters, alike.values(), strict=True):
        for state in optimizer.state[parameter].values():
            if isinstance(state, Tensor) and state.dim():
                size += count * state.nbytes
    return size


def _bitsandbytes_state(name: str, parameter: Tensor, embedding: bool) -> int:
    count = parameter_count(parameter)
    states = next((number for kind, number in STATES.items() if kind in name), 2)
    if "8bit" in name and count >= 4096 and not embedding:  # small tensors stay in 32 bits
        return states * (count + 4 * math.ceil(count / 256))
    return states * 4 * count


def parameter_count(parameter: Tensor) -> int:
    """The parameters that a tensor stands for, packed or divided as it may be."""
    if type(parameter).__name__ == "Params4bit":
        return math.prod(parameter.quant_state.shape)
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, whole if ZeRO-3 divides it, with the constants of its quantization."""
    size = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    if type(tensor).__name__ == "Params4bit":
        constants = tensor.quant_state.as_dict().values()
        size += sum(value.nbytes for value in constants if isinstance(value, Tensor))
    elif type(tensor).__name__ == "Int8Params":
        size += tensor.SCB.nbytes
    return size
