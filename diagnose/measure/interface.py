# SPDX-License-Identifier: Apache-2.0
"""L2 norms at the interface (tables 1 to 3), of the gain (5) and of embeddings (6 to 8)."""

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
    """Measures norms at the interface by hooks on encoder and projector.

    Attributes:
        newline: Which image tokens of the last pass are learned newlines, `(tokens,)`, or None if
            the model has no newlines.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        projector = parts.projector
        # A table of visual embeddings (Ovis).
        self._visual_table = projector if isinstance(projector, nn.Embedding) else None
        self._moments: defaultdict[str, RunningMoments] = defaultdict(RunningMoments)
        self._row_norms = row_norms(parts.model.get_input_embeddings())
        self.newline: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures a forward pass within the block."""
        self.newline = None
        inner = self._parts.inner
        get_image_features = inner.get_image_features  # a method, so hooks do not see its output

        def get_and_measure(*args: Any, **kwargs: Any) -> Any:
            output = get_image_features(*args, **kwargs)
            self._at_features(output)
            return output

        with ExitStack() as hooks:
            projector = self._parts.projector
            if projector is not None:
                hooks.enter_context(
                    projector.register_forward_hook(self._at_projector, with_kwargs=True)
                )
            if self._parts.norm is not None:
                hooks.enter_context(self._parts.norm.register_forward_pre_hook(self._at_norm))
            hooks.callback(delattr, inner, "get_image_features")
            inner.get_image_features = get_and_measure
            yield

    def add_text(self, ids: Tensor) -> None:
        """Adds the norms of the embedding rows of text tokens `(n,)`."""
        self._moments["text_raw"].add(self._row_norms[ids.cpu()])

    def result(self, received: dict[str, Moments]) -> Interface:
        """Returns the norms at all stages, given the norms that the decoder received, by kind."""
        config = self._parts.model.config
        stages = {stage: moments.result() for stage, moments in self._moments.items()}
        visual = received.get("visual")
        text = received.get("text")
        text_raw = stages.get("text_raw")
        scale: float | None
        if text is None or text_raw is None or not text_raw.mean:
            scale = math.prod(embedding_scales(config.get_text_config()))
        else:
            scale = text.mean / text_raw.mean
            # If rows are just multiplied by a factor, the deviation scales with the mean.
            is_uniform = abs(text.std - scale * text_raw.std) <= 0.01 * text.mean
            if not is_uniform:
                scale = None
        stored_norms = self._row_norms[counted_rows(self._row_norms, config.image_token_id)]
        vocabulary = None if scale is None else _moments(scale * stored_norms)
        if self._visual_table is not None:
            table_norms = row_norms(self._visual_table)
            visual_rows = len(table_norms) - len(config.visual_indicator_token_ids)
            stages["visual_table"] = _moments(table_norms[:visual_rows])
            stages["indicator_table"] = _moments(table_norms[visual_rows:])
        return Interface(
            **stages,
            **received,
            vocabulary_raw=_moments(stored_norms),
            vocabulary=vocabulary,
            scale=scale,
            ratio=_ratio(visual, vocabulary),
            ratio_data=_ratio(visual, text),
        )

    def _at_features(self, output: Any) -> None:
        """Measures the output of `get_image_features`, and finds the newlines in it."""
        rows = output.last_hidden_state
        if rows is not None:
            if rows.dim() == 4:  # a convolutional encoder's (images, d, height, width)
                rows = rows.flatten(2).mT
            self._add("encoder_output", rows)
        matches = []
        for parameter in self._parts.inner.parameters(recurse=False):
            if parameter.dim() == 1:  # a newline is one of the base model's own parameters
                tokens = torch.cat([features.flatten(0, -2) for features in output.pooler_output])
                if len(parameter) == tokens.shape[-1]:
                    matches.append((tokens == parameter.to(tokens)).all(-1))
        self.newline = torch.stack(matches).any(0) if matches else None

    def _at_projector(self, projector: Any, args: tuple, kwargs: dict, output: Tensor) -> None:
        features = args[0] if args else next(iter(kwargs.values()))
        if not features.is_floating_point():  # Ovis reads its indicators from the same table
            return
        if self._visual_table is None:
            registers = getattr(projector, "skipped_tokens", 0)  # not read, in this package's
            features = features[:, registers:]
            self._add("projector_input", features)
        self._add("projector_output", output)

    def _at_norm(self, norm: nn.Module, args: tuple) -> None:
        self._add("norm_input", args[0])

    def _add(self, stage: str, rows: Tensor) -> None:
        """Adds the norms of rows `(..., d)` at a stage."""
        norms = rows.to(widest(rows.device)).norm(dim=-1)
        self._moments[stage].add(norms.flatten())


def _ratio(norms: Moments | None, reference: Moments | None) -> float | None:
    """Returns the ratio of the means, or None if one is missing or the reference is zero."""
    if norms is None or reference is None or not reference.mean:
        return None
    return norms.mean / reference.mean


def _moments(norms: Tensor) -> Moments:
    return Moments(norms.mean().item(), norms.std(correction=0).item(), len(norms))


def row_norms(embeddings: nn.Module) -> Tensor:
    """Returns the L2 norms of the rows of an embedding matrix, `(V,)`, float64.

    The matrix may be offloaded.
    """
    with align_module_device(embeddings):
        return embedding_row_norms(embeddings.weight)  # type: ignore[arg-type]


def embedding_table_of(
    model: PreTrainedModel, tokenizer: Any = None, *, name: str
) -> EmbeddingStatistics:
    """Returns statistics of the embedding matrix of a loaded model, without the image token's row.

    The matrix may be offloaded.
    """
    norms = row_norms(model.get_input_embeddings())
    width = model.config.get_text_config().hidden_size
    return statistics_of(name, "", norms, width, model.config, tokenizer)


@torch.no_grad()
def gain_of(model: PreTrainedModel) -> Gain | None:
    """Returns the size of gain and bias, or None for a model without the norm.

    If PEFT trains copies of them, the copies are measured.
    """
    config = model.config
    if config.model_type != NormAlignLlavaConfig.model_type or config.projector_norm == "none":
        return None
    projector_norm = model.base_model.multi_modal_projector.norm
    # The norm of the embeddings before training.
    initial_value = initial_gain(config, config.text_embedding_norm or math.nan)
    # Rounded as the gain is, so that a gain that never moved has distance 0.
    rounded_start = torch.tensor(initial_value, dtype=projector_norm.weight.dtype).double()
    bias_mean_abs = None
    bias_distance = None
    with align_module_device(projector_norm):
        gain = projector_norm.weight.cpu().double()
        if hasattr(projector_norm, "bias"):  # an RMSNorm has none
            bias = projector_norm.bias.cpu().double()
            bias_mean_abs = bias.abs().mean().item()
            bias_distance = bias.norm().item()
    return Gain(
        l2=gain.norm().item(),
        mean_abs=gain.abs().mean().item(),
        bias_mean_abs=bias_mean_abs,
        start=initial_value,
        distance=(gain - rounded_start).norm().item(),
        bias_distance=bias_distance,
    )
