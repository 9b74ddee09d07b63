# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is measured of a run's checkpoints beside scores: visual tokens' norm and rotation, and the way trained."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from ..checkpoint.names import WEIGHTS
from ..diagnose.data import batches, load_samples
from ..diagnose.measure.probe import probe
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


PROJECTOR, GAIN = "multi_modal_projector.linear", "multi_modal_projector.norm.weight"
DIRECTIONS = 64
BATCH_SIZE = 16


def measure_tokens(checkpoint: Path, samples: int) -> dict[str, Any]:
    """Norms on entry, and rotation of visual tokens over that of text, of held-out images.

    Returns:
        `"n_text"`; `"norm"` and `"text_norm"` on entry to the decoder; `"asymmetry"`, the mean rotation over all
        layers but the last of visual tokens over text; and `"rotation"`, of each layer, by kind, in radians.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    drawn = load_samples(None, samples).samples
    report = probe(model, batches(processor, drawn, BATCH_SIZE), tokenizer=processor.tokenizer)
    depth = report.depth
    assert depth is not None  # of a vision-language model it is measured
    return {
        "n_text": model.config.text_embedding_norm,
        "norm": depth.norm["visual"].mean[0],
        "text_norm": depth.norm["text"].mean[0],
        "asymmetry": depth.asymmetry,
        "rotation": {kind: depth.rotation[kind].mean for kind in ("visual", "text")},
    }


def trained_change(before: Path, after: Path) -> dict[str, Any]:
    """How far training moved the projector's linear layers, and where, in a form small enough to keep.

    Returns:
        `"relative"`, ||after - before|| / ||before||, and `"directions"`, the products of after - before with
        random directions, the same ones for every run. From these of two runs ||change - other change|| / ||change||
        follows, to about an eighth. `"gain"`, ||after - before|| / ||before|| of the norm's gain, if there is one.
    """
    (old, old_gain), (new, new_gain) = (_projector(folder) for folder in (before, after))
    change, generator = new - old, torch.Generator().manual_seed(0)
    directions = [
        (change @ torch.randn(len(change), generator=generator)).item() / DIRECTIONS**0.5 for _ in range(DIRECTIONS)
    ]
    found = {"relative": (change.norm() / old.norm()).item(), "directions": directions}
    if old_gain is not None:
        found["gain"] = ((new_gain - old_gain).norm() / old_gain.norm()).item()
    return found


def _projector(folder: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights and biases of the linear layers in one vector, and the gain of the norm, if there is one."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    linear = torch.cat([tensors[name].flatten() for name in sorted(tensors) if PROJECTOR in name])
    return linear, next((tensor for name, tensor in tensors.items() if name.endswith(GAIN)), None)
