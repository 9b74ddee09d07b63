# SPDX-License-Identifier: Apache-2.0
"""L2 norms on the way into the language model (tables 1 to 3), of embeddings (6 to 8), gain (5)."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...assembly.gain import EmbeddingStatistics, counted_rows, statistics_of
from ...configuration_normalign_llava import NormAlignLlavaConfig, embedding_scales
from ...modeling_normalign_llava import embedding_row_norms, initial_gain
from ..report import Gain, Interface, Moments
from .depth import RunningMoments, widest
from .families import Parts


class InterfaceProbe:
    """Hooks on encoder and projector that keep running moments of the norms of rows."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._table = parts.projector if isinstance(parts.projector, nn.Embedding) else None
        self._moments: defaultdict[str, RunningMoments] = defaultdict(RunningMoments)
        self._row_norms = row_norms(parts.model.get_input_embeddings())
        self.newline: Tensor | None = None  # whether image tokens of the last pass are newlines

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures every forward pass within."""
        inner, projector, norm = self._parts.inner, self._parts.projector, self._parts.norm
        original = inner.get_image_features  # a method, so hooks do not see its output

        def measured(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self._at_features(output)
            return output

        with ExitStack() as hooks:
            if projector is not None:
                hook = projector.register_forward_hook(self._at_projector, with_kwargs=True)
                hooks.enter_context(hook)
            if norm is not None:
                hook = norm.register_forward_pre_hook(lambda _, args: self.add("norm_input", *args))
                hooks.enter_context(hook)
            hooks.callback(delattr, inner, "get_image_features")
            inner.get_image_features = measured
            yield

    def add_text(self, ids: Tensor) -> None:
        """Adds the norms of the embedding rows of text tokens `(n,)`."""
        self._moments["text_raw"].add(self._row_norms[ids.cpu()])

    def result(self, received: dict[str, Moments]) -> Interface:
        """The norms at all stages, given those that the decoder received, by kind."""
        stages = {name: moments.result() for name, moments in self._moments.items()}
        config = self._parts.model.config
        stored = self._row_norms[counted_rows(self._row_norms, config.image_token_id)]
        visual, text, raw = received.get("visual"), received.get("text"), stages.get("text_raw")
        scale: float | None = math.prod(embedding_scales(config.get_text_config()))
        if text and raw and raw.mean:
            scale = text.mean / raw.mean
            # If more than a factor changes the rows, the deviation does not scale with the mean.
            scale = scale if abs(text.std - scale * raw.std) <= 0.01 * text.mean else None
        vocabulary = None if scale is None else _moments(scale * stored)
        if self._table is not None:
            norms = row_norms(self._table)
            rows = len(norms) - len(config.visual_indicator_token_ids)
            stages["visual_table"] = _moments(norms[:rows])
            stages["indicator_table"] = _moments(norms[rows:])
        return Interface(
            **stages,
            **received,
            vocabulary_raw=_moments(stored),
            vocabulary=vocabulary,
            scale=scale,
            ratio=visual.mean / vocabulary.mean if visual and vocabulary else None,
            ratio_data=visual.mean / text.mean if visual and text and text.mean else None,
        )

    def _at_features(self, output: Any) -> None:
        if (rows := output.last_hidden_state) is not None:
            convolutional = rows.dim() == 4  # (images, d, height, width)
            self.add("encoder_output", rows.flatten(2).mT if convolutional else rows)
        learned = [row for row in self._parts.inner.parameters(recurse=False) if row.dim() == 1]
        if learned:
            rows = torch.cat([features.flatten(0, -2) for features in output.pooler_output])
            same = [(rows == row.to(rows)).all(-1) for row in learned if len(row) == rows.shape[-1]]
            self.newline = torch.stack(same).any(0) if same else None

    def _at_projector(self, projector: Any, args: tuple, kwargs: dict, output: Tensor) -> None:
        features = args[0] if args else next(iter(kwargs.values()))
        if not features.is_floating_point():  # Ovis reads its indicators from the same table
            return
        if self._table is None:
            self.add("projector_input", features)
        self.add("projector_output", output)

    def add(self, name: str, rows: Tensor) -> None:
        """Adds the norms of rows `(..., d)` at a stage."""
        self._moments[name].add(rows.to(widest(rows.device)).norm(dim=-1).flatten())


def _moments(norms: Tensor) -> Moments:
    return Moments(norms.mean().item(), norms.std(correction=0).item(), len(norms))


def row_norms(embeddings: nn.Module) -> Tensor:
    """L2 norms of the rows of an embedding matrix, which may be offloaded, `(V,)`, float64."""
    with align_module_device(embeddings):
        return embedding_row_norms(embeddings.weight)  # type: ignore[arg-type]


def embedding_table_of(
    model: PreTrainedModel, tokenizer: Any = None, *, name: str
) -> EmbeddingStatistics:
    """The table of a model in memory, which may be offloaded, without the image token's row."""
    config, norms = model.config, row_norms(model.get_input_embeddings())
    return statistics_of(name, "", norms, config.get_text_config().hidden_size, config, tokenizer)


@torch.no_grad()
def gain_of(model: PreTrainedModel) -> Gain | None:
    """Size of gain and bias, or of PEFT's copies if it trains them; None without a norm."""
    config = model.config
    if config.model_type != NormAlignLlavaConfig.model_type or config.projector_norm == "none":
        return None
    norm = model.base_model.multi_modal_projector.norm
    start = initial_gain(config, config.text_embedding_norm or math.nan)  # of initial embeddings
    # Rounded as the gain is, so that a gain that never moved has distance 0.
    stored = torch.tensor(start, dtype=norm.weight.dtype).double()
    with align_module_device(norm):
        gain, *rest = (parameter.cpu().double() for parameter in norm.parameters())
    bias = rest[0] if rest else None  # an RMSNorm has none
    return Gain(
        l2=gain.norm().item(),
        mean_abs=gain.abs().mean().item(),
        bias_mean_abs=None if bias is None else bias.abs().mean().item(),
        start=start,
        distance=(gain - stored).norm().item(),
        bias_distance=None if bias is None else bias.norm().item(),
    )
