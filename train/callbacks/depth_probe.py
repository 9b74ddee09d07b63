# SPDX-License-Identifier: Apache-2.0
"""How far each decoder layer moves visual and text tokens, at chosen steps of a run, on one fixed batch (figure 5)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import DataCollator, TrainerCallback

from ...checkpoint.files import DYNAMICS, atomic_write
from ...diagnose.measure.depth import DepthProbe
from ...diagnose.measure.families import decoder_layers, token_positions
from ...diagnose.report import KINDS
from ..collator import ConversationCollator
from ..modules.model import base_model, evaluating
from ..options import NormAlignConfig


class CosineProbe(TrainerCallback):
    """Records the cosine similarity of consecutive hidden states of a token at every decoder layer (RQ3).

    A line of `dynamics.jsonl` is `{"step": 0, "visual": [...], "text": [...]}`: for each layer the mean cosine between
    its input and its output, over image tokens and over the other attended tokens. The last layer's output is taken
    before the final norm. A list is empty if the batch has no such tokens. Lines of the same step or later ones, which
    a run wrote before it was resumed, are dropped.

    A run is the same with and without the probe. Step 0 is before training. `batch` is the same on every process.
    """

    def __init__(self, steps: Sequence[int], batch: dict[str, Tensor]):
        self.steps = frozenset(steps)
        self.batch = {name: value for name, value in batch.items() if name != "labels"}
        self._means: dict[str, float] = {}

    @classmethod
    def of_rows(cls, rows: Dataset | IterableDataset, collator: DataCollator, args: NormAlignConfig) -> "CosineProbe":
        """The probe on the first `probe_rows` training rows, padded."""
        if isinstance(collator, ConversationCollator):
            collator = replace(collator, padding_free=False)
        return cls(args.probe_steps or (), collator(list(islice(rows, args.probe_rows))))

    def collect(self) -> dict[str, float]:
        """The means over the layers, if they were measured since the last call."""
        means, self._means = self._means, {}
        return means

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step not in self.steps:
            return
        batch = {name: value.to(args.device) for name, value in self.batch.items()}
        with evaluating(model, args):
            curves = layer_cosines(model, batch)
        self._means = {f"cosine/{kind}": sum(curve) / len(curve) for kind, curve in curves.items() if curve}
        if state.is_world_process_zero:
            path, line = Path(args.output_dir) / DYNAMICS, {"step": state.global_step, **curves}
            texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            texts = [text for text in texts if json.loads(text)["step"] < line["step"]] + [json.dumps(line)]
            with atomic_write(path) as written:
                written.write_text("\n".join(texts) + "\n", encoding="utf-8")


def layer_cosines(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[float]]:
    """Mean cosine between input and output of every decoder layer, for `"visual"` and `"text"` tokens, if any."""
    inner = base_model(model)
    positions = token_positions(batch["input_ids"], batch.get("attention_mask"), inner.config.image_token_id)
    none = torch.zeros_like(positions["text"])
    masks = torch.stack([positions.get(kind, none).flatten() for kind in KINDS])
    depth = DepthProbe(decoder_layers(inner.model.language_model))
    with torch.no_grad(), depth.watching(lambda: masks):
        model(**batch, use_cache=False, logits_to_keep=1)
    curves = depth.result().cosine
    return {kind: curves[kind].mean if kind in curves else [] for kind in ("visual", "text")}
