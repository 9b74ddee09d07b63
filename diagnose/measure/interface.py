# SPDX-License-Identifier: Apache-2.0
"""L2 norms on the way from the vision encoder into the language model (tables 1 to 3)."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...assembly.gain import counted_rows
from ...configuration_normalign_llava import embedding_scales
from ..report import Interface, Moments
from .embeddings import row_norms
from .families import Parts
from .moments import RunningMoments, widest


class InterfaceProbe:
    """Hooks on encoder and projector that keep running moments of the norms of rows."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._table = parts.projector if isinstance(parts.projector, nn.Embedding) else None
        self._moments: defaultdict[str, RunningMoments] = defaultdict(RunningMoments)
        self._row_norms = row_norms(parts.model.get_input_embeddings())
        self.newline: Tensor | None = None
        """For each image token of the last forward pass, in order, whether it is a learned newline."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures every forward pass within."""
        handles = []
        if self._parts.projector is not None:
            handles.append(self._parts.projector.register_forward_hook(self._at_projector, with_kwargs=True))
            if self._parts.norm is not None:
                handles.append(self._parts.norm.register_forward_pre_hook(lambda _, x: self._add("norm_input", x[0])))
        inner = self._parts.inner
        original = inner.get_image_features  # a method, so hooks do not see its output

        def measured(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self._at_features(output)
            return output

        inner.get_image_features = measured
        try:
            yield
        finally:
            del inner.get_image_features
            for handle in handles:
                handle.remove()

    def add_text(self, ids: Tensor) -> None:
        """Adds the norms of the embedding rows of text tokens `(n,)`."""
        self._moments["text_raw"].add(self._row_norms[ids.cpu()])

    def result(self, received: dict[str, Moments]) -> Interface:
        """The norms at all stages, given those that the decoder received, by kind."""
        stages = {name: moments.result() for name, moments in self._moments.items()}
        stored = _moments(self._row_norms[counted_rows(self._row_norms, self._parts.model.config.image_token_id)])
        text, text_raw = received.get("text"), stages.get("text_raw")
        scale: float | None = math.prod(embedding_scales(self._parts.model.config.get_text_config()))
        if text and text_raw and text_raw.mean:
            scale = text.mean / text_raw.mean
            # If more than a factor lies between rows and decoder, the deviation does not scale with the mean.
            scale = scale if abs(text.std - scale * text_raw.std) <= 0.01 * text.mean else None
        vocabulary = None if scale is None else Moments(scale * stored.mean, scale * stored.std, stored.count)
        visual = received.get("visual")
        tables = {}
        if self._table is not None:
            norms = row_norms(self._table)
            rows = len(norms) - len(self._parts.model.config.visual_indicator_token_ids)
            tables = {"visual_table": _moments(norms[:rows]), "indicator_table": _moments(norms[rows:])}
        return Interface(
            **stages,
            **received,
            **tables,
            vocabulary_raw=stored,
            vocabulary=vocabulary,
            scale=scale,
            ratio=visual.mean / vocabulary.mean if visual and vocabulary else None,
            ratio_data=visual.mean / text.mean if visual and text and text.mean else None,
        )

    def _at_features(self, output: Any) -> None:
        if (rows := output.last_hidden_state) is not None:
            convolutional = rows.dim() == 4  # (images, d, height, width)
            self._add("encoder_output", rows.flatten(2).mT if convolutional else rows)
        learned = [row for row in self._parts.inner.parameters(recurse=False) if row.dim() == 1]
        if not learned:
            return
        rows = torch.cat([features.reshape(-1, features.shape[-1]) for features in output.pooler_output])
        same = [(rows == row.to(rows.device, rows.dtype)).all(-1) for row in learned if len(row) == rows.shape[-1]]
        self.newline = torch.stack(same).any(0) if same else None

    def _at_projector(self, projector: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        features = args[0] if args else next(iter(kwargs.values()))
        if not features.is_floating_point():  # Ovis reads its indicators from the same table
            return
        if self._table is None:
            self._add("projector_input", features)
        self._add("projector_output", output)

    def _add(self, name: str, rows: Tensor) -> None:
        self._moments[name].add(rows.to(widest(rows.device)).norm(dim=-1).flatten())


def _moments(norms: Tensor) -> Moments:
    return Moments(norms.mean().item(), norms.std(correction=0).item(), len(norms))
