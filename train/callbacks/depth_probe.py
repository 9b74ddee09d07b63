# SPDX-License-Identifier: Apache-2.0
"""How far decoder layers move visual and text tokens, at chosen steps, on one batch (figure 5)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import DataCollator, TrainerCallback

from ...checkpoint.files import DYNAMICS
from ...diagnose.measure.depth import DepthProbe
from ...diagnose.measure.families import decoder_layers, token_positions
from ...diagnose.report import KINDS
from ..collator import ConversationCollator
from ..modules.model import base_model
from ..modules.precision import evaluating
from ..settings import RunConfig
from .step_lines import write_step


class CosineProbe(TrainerCallback):
    """Records the cosine similarity of a token's hidden states before and after every layer (RQ3).

    A line of `dynamics.jsonl` is `{"step": 0, "visual": [...], "text": [...]}`: for every layer the
    mean over image tokens, and over the other attended tokens. The last layer's output is taken
    before the final norm. A list is empty if the batch has no such tokens. Step 0 is before
    training. Lines of this step or later ones, from before a run was resumed, are dropped. The
    probe does not change the run.

    Args:
        steps: The steps to record.
        batch: A batch, the same in every process. Its labels are ignored.
    """

    def __init__(self, steps: Sequence[int], batch: dict[str, Tensor]):
        self.steps = frozenset(steps)
        self.batch = dict(batch)
        self.batch.pop("labels", None)
        self._means: dict[str, float] = {}

    @classmethod
    def of_rows(cls, rows: Iterable, collator: DataCollator, args: RunConfig) -> Self:
        """Returns the probe on the first `probe_rows` training rows, padded."""
        if isinstance(collator, ConversationCollator):
            collator = replace(collator, padding_free=False)
        first_rows = list(islice(rows, args.probe_rows))
        return cls(args.probe_steps or (), collator(first_rows))

    def collect(self) -> dict[str, float]:
        """Returns the means over the layers, if they were measured since the last call."""
        means = self._means
        self._means = {}
        return means

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Measures step 0, unless the run is resumed at a later one."""
        if state.global_step == 0:
            self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Measures every layer, and writes the line of this step."""
        if state.global_step not in self.steps:
            return
        batch = {name: tensor.to(args.device) for name, tensor in self.batch.items()}
        with evaluating(model, args):
            cosines = layer_cosines(model, batch)
        self._means = {}
        for kind, layer_means in cosines.items():
            if layer_means:
                self._means[f"cosine/{kind}"] = sum(layer_means) / len(layer_means)
        if state.is_world_process_zero:
            write_step(Path(args.output_dir) / DYNAMICS, state.global_step, [cosines])


def layer_cosines(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[float]]:
    """Returns the mean cosine of input and output of every decoder layer.

    The lists of `"visual"` and `"text"` tokens are empty if the batch has none.
    """
    unwrapped = base_model(model)
    input_ids = batch["input_ids"]
    image_token = unwrapped.config.image_token_id
    positions = token_positions(input_ids, batch.get("attention_mask"), image_token)
    nowhere = torch.zeros_like(input_ids, dtype=torch.bool)
    token_masks = torch.stack([positions.get(kind, nowhere).flatten() for kind in KINDS])
    depth_probe = DepthProbe(decoder_layers(unwrapped.model.language_model))
    with torch.no_grad(), depth_probe.watching(lambda: token_masks):
        model(**batch, use_cache=False, logits_to_keep=1)
    cosines: dict[str, list[float]] = {"visual": [], "text": []}
    curves = depth_probe.result().cosine
    for kind in cosines.keys() & curves.keys():
        cosines[kind] = curves[kind].mean
    return cosines
