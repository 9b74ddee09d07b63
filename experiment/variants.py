# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What sets a variant apart beside its arm and options: norm on entry, precision of the gain, fixed compensation."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoProcessor, TrainerCallback

from ..assembly.build import build_checkpoint
from ..checkpoint.files import finished_folder
from ..data.easy_vqa import held_out, load_image
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, initial_gain
from ..train.model import base_model, projector_norm
from .plan import Variant


MEASURED = 64
"""Images on which the norm of visual tokens is measured."""


def build_variant(vision: str, language: str, output: Path, variant: Variant, feature_layer: int) -> None:
    """Builds an untrained checkpoint whose visual tokens enter as the variant says."""
    with finished_folder(output) as folder:
        build_checkpoint(vision, language, folder, arm=variant.arm, norm=variant.norm, feature_layer=feature_layer)
        if variant.enters_at is not None:
            model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
            wanted = variant.enters_at * model.config.text_embedding_norm
            scale_visual_tokens(model, wanted / entry_norm(model, folder))
            model.save_pretrained(folder)


def scaled_checkpoint(checkpoint: Path, factor: float, output: Path) -> None:
    """Writes a checkpoint whose visual tokens are those of another, times a factor."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    scale_visual_tokens(model, factor)
    model.save_pretrained(output)
    AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False).save_pretrained(output)


@torch.no_grad()
def scale_visual_tokens(model: NormAlignLlavaForConditionalGeneration, factor: float) -> None:
    """Multiplies all visual tokens by a factor, in the last module of the projector that has weights."""
    projector = model.model.multi_modal_projector
    last = projector.linear_2 if isinstance(projector.norm, nn.Identity) else projector.norm
    for parameter in last.parameters():
        parameter.mul_(factor)


@torch.no_grad()
def entry_norm(model: NormAlignLlavaForConditionalGeneration, checkpoint: Path) -> float:
    """Mean norm of the visual tokens of held-out images."""
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    images = [load_image(question.image) for question in held_out(MEASURED // 2, 1)[:MEASURED]]
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    features = model.eval().get_image_features(pixel_values=pixels.to(model.dtype)).pooler_output
    return torch.cat(list(features)).float().norm(dim=-1).mean().item()


def callbacks_of(variant: Variant) -> list[TrainerCallback]:
    """What changes training beside its options."""
    found: list[TrainerCallback] = []
    if variant.gain_storage == "bfloat16":
        found.append(RoundedNorm())
    if variant.compensation_power is not None:
        found.append(FixedCompensation(variant.compensation_power))
    return found


class RoundedNorm(TrainerCallback):
    """Rounds gain and bias to bfloat16 before training and after each step, as if they were kept in it."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Rounds what was loaded."""
        self._round(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Rounds what the step made."""
        self._round(model)

    @torch.no_grad()
    def _round(self, model: nn.Module) -> None:
        for parameter in projector_norm(model).parameters():
            parameter.copy_(parameter.bfloat16())


class FixedCompensation(TrainerCallback):
    """Multiplies the gradient at the normalised tokens by the gain's start to the power of -`power`.

    Args:
        power: 1 for the factor of GWC (eq. 12), fixed.
    """

    def __init__(self, power: float):
        self.power = power

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Hooks the norm."""
        config = base_model(model).config
        factor = initial_gain(config, config.text_embedding_norm) ** -self.power

        def scale_gradient(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            if inputs[0].requires_grad:  # LayerNorm's backward is linear: at its input the factor is the same
                inputs[0].register_hook(lambda gradient: gradient * factor)

        self._hook = projector_norm(model).register_forward_pre_hook(scale_gradient)

    def on_train_end(self, args, state, control, **kwargs):
        """Removes the hook."""
        self._hook.remove()
