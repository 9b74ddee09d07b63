# SPDX-License-Identifier: Apache-2.0
"""Forward passes of training: the fused head, blank images, frozen modules, outputs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .model import base_model, trained_parameters


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
            kwargs["input_ids"] = None
            kwargs["inputs_embeds"] = _beside_blank_image(self, input_ids, blank_image)
        output = forward_of_inner(self, *args, **kwargs)
        if answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][answers][None]
        return output

    model.forward = MethodType(forward, model)
    inner.forward = MethodType(inner_forward, inner)


def _beside_blank_image(inner: nn.Module, input_ids: Tensor, blank_image: Tensor) -> Tensor:
    """Returns the embeddings of texts, after the vision tower has seen a blank image."""
    text = inner.get_input_embeddings()(input_ids)
    features = inner.get_image_features(pixel_values=blank_image.to(text)).pooler_output[0]
    nowhere = torch.zeros_like(text, dtype=torch.bool)  # so its gradients are zero
    return text.masked_scatter(nowhere, features.to(text))


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
        leaves = tree_leaves(output)
        visit(
            name, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        )

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
