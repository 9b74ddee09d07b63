# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What one forward pass shows: the norms of its tokens, and where its text looks in the image."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Measured:
    """What one forward pass showed.

    Attributes:
        image: What the vision encoder received, `(height, width, 3)`, between 0 and 1.
        grid: Rows and columns of the visual tokens; None where they are not the patches of the image.
        vocabulary: N_text, the mean norm of text embeddings over the vocabulary, if it was measured.
        norms: Mean L2 norm of visual and of text tokens on entry to the first layer, and after each.
        shares: By layer, from 1: of the attention of the text after the image, averaged over heads and positions,
            what falls on each visual token. Layers whose mask hides a part of the image have none.
    """

    image: np.ndarray
    grid: tuple[int, int] | None
    vocabulary: float | None = None
    norms: dict[str, list[float]] = field(default_factory=lambda: {"visual": [], "text": []})
    shares: dict[int, np.ndarray] = field(default_factory=dict)


class Meter:
    """Measures what a model does with an image and words, while other threads use the same model.

    Its decoder gets hooks: a second `Meter` of the same model would measure twice.
    """

    def __init__(self, model: Any, processor: Any):
        self._model, self._processor = model, processor
        tokenizer = processor.tokenizer
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = torch.tensor(sorted(added | set(tokenizer.all_special_ids)))
        for number, layer in enumerate(model.get_decoder().layers, 1):
            layer.register_forward_hook(partial(_after_layer, number), with_kwargs=True)
            attention = dict(layer.named_children()).get("self_attn")  # layers of linear attention have none
            if attention is not None:
                attention.register_forward_hook(partial(_after_attention, number), with_kwargs=True)

    @torch.no_grad()
    def measure(self, inputs: dict[str, Tensor], answer: list[int]) -> Measured:
        """Runs a prompt, `input_ids` `(1, tokens)` and `pixel_values` `(1, 3, height, width)`, and the ids of its
        answer through the model once. Special tokens count as neither text nor visual."""
        prompt, pixels = inputs["input_ids"], inputs["pixel_values"]
        ids = torch.cat([prompt, prompt.new_tensor([answer])], dim=1)
        is_visual = ids[0] == self._model.config.image_token_id
        visual = is_visual.nonzero().flatten()
        text = (~is_visual & ~torch.isin(ids[0], self._special.to(ids.device))).nonzero().flatten()
        patch = self._processor.patch_size
        rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
        grid = (rows, columns) if rows * columns == len(visual) else None
        measured = Measured(self._shown(pixels), grid, self._model.config.text_embedding_norm)
        token = _watched.set(_Pass(measured, visual, text, text[text > visual[-1]]))
        try:
            self._model.base_model(input_ids=ids, pixel_values=pixels, use_cache=False)
        finally:
            _watched.reset(token)
        return measured

    def _shown(self, pixels: Tensor) -> np.ndarray:
        shown, images = pixels[0].float().cpu().permute(1, 2, 0).numpy(), self._processor.image_processor
        if images.do_normalize:
            shown = shown * np.array(images.image_std) + np.array(images.image_mean)
        return shown.clip(0, 1).astype(np.float32)


@dataclass
class _Pass:
    measured: Measured
    visual: Tensor
    text: Tensor
    asking: Tensor


# Other threads run the same model at the same time: each sees its own value, and its hooks act only where one is set.
_watched: ContextVar[_Pass | None] = ContextVar("watched", default=None)


def _after_layer(number: int, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
    if (watched := _watched.get()) is None:
        return
    states = [args[0] if args else kwargs["hidden_states"]] if number == 1 else []
    for state in [*states, output if isinstance(output, Tensor) else output[0]]:
        norms = state[0].double().norm(dim=-1)
        watched.measured.norms["visual"].append(norms[watched.visual].mean().item())
        watched.measured.norms["text"].append(norms[watched.text].mean().item())


def _after_attention(number: int, module: Any, args: tuple, kwargs: dict, output: tuple) -> None:
    watched = _watched.get()
    if watched is None or output[1] is None or not len(watched.asking):
        return
    mask = kwargs.get("attention_mask")  # what eager attention adds to its scores
    if mask is not None:
        # Families say in different places, or nowhere, which of their layers have a window; their masks do.
        seen = mask[0, 0, watched.asking][:, watched.visual] > torch.finfo(mask.dtype).min / 2
        if not seen.all():
            return
    row = output[1][0][:, watched.asking].mean((0, 1), dtype=torch.float32)[watched.visual]
    if row.sum() > 0:
        watched.measured.shares[number] = row.double().cpu().numpy()
