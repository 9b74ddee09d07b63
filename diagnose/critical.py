# SPDX-License-Identifier: Apache-2.0
"""The norm on entry from which on a language model's layers hardly turn a token: `normalign gain MODEL --critical`.

A prediction before training, from a language model alone. Section 3.1 takes a layer's update to have the same size and
the same angle to the state whatever the state's norm; so both are measured on text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import torch
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..assembly.gain import embedding_statistics
from ..assembly.processing import text_tokenizer
from .load import resolve_model
from .measure.depth import DepthProbe
from .measure.families import decoder_layers
from .measure.probe import placed
from .report import KINDS


SHARES = (0.9, 0.5)  # of text's rotation, whose norms are given
LARGEST = 1e6  # norm that is tried, in N_text
PASSAGES = files(__package__).joinpath("passages.txt").read_text(encoding="utf-8").splitlines()


def rotation_angle(norm: float, update: float, angle: float) -> float:
    """Angle between a state h and h + dh, in [0, pi]: tan(omega) = c sin(phi) / (||h|| + c cos(phi)) (eqs. 8, 13).

    `norm` is ||h||, `update` c, the norm of dh, and `angle` phi, the angle between both, in radians.
    """
    return math.atan2(update * math.sin(angle), norm + update * math.cos(angle))


@dataclass(frozen=True)
class Updates:
    """Updates of a decoder's layers on text, which enters with the mean norm N_text."""

    n_text: float
    sizes: list[float]  # by layer, the geometric mean over tokens of the update's norm
    angles: list[float]  # the mean angle of update and state, in radians

    def rotation(self, norm: float) -> list[float]:
        """Rotation by each layer, in radians, of a token that enters with a norm (eq. 13)."""
        angles = []
        for size, angle in zip(self.sizes, self.angles, strict=True):
            angles.append(rotation_angle(norm, size, angle))
            norm = math.sqrt(max(norm**2 + size**2 + 2 * norm * size * math.cos(angle), 0.0))
        return angles

    def relative_rotation(self, norm: float) -> float:
        """Mean rotation over the layers but the last of a token that enters with a norm, over that of N_text."""
        rotated, of_text = (sum(self.rotation(size)[:-1] or self.rotation(size)) for size in (norm, self.n_text))
        return rotated / of_text

    def critical_norm(self, share: float) -> float | None:
        """The norm above N_text at which the relative rotation has fallen to `share`; None above `LARGEST` N_text."""
        low, high = self.n_text, LARGEST * self.n_text
        if self.relative_rotation(high) > share:
            return None
        while high / low > 1 + 1e-6:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.relative_rotation(middle) > share else (low, middle)
        return high

    def table(self, model: str) -> Table:
        """The table for the terminal."""
        table = Table(title=f"{model}: predicted rotation of a token by its norm on entry", show_header=False)
        table.add_row("N_text, entering the decoder", f"{self.n_text:.4g}")
        table.add_row("update of layer 1", f"{self.sizes[0]:.4g}")
        for share in SHARES:
            norm = self.critical_norm(share)
            shown = "none" if norm is None else f"{norm:.3g} ({norm / self.n_text:.3g} N_text)"
            table.add_row(f"{share} of text's rotation at a norm of", shown)
        return table


def measure_updates(
    decoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n_text: float, texts: Sequence[str] = PASSAGES
) -> Updates:
    """Measures the updates of the layers of a language model without its head on some texts.

    Their first tokens are left out: many models keep a state of huge norm there (attention sink).
    """
    probe = DepthProbe(decoder_layers(decoder))
    for text in texts:
        ids = placed(tokenizer(text, return_tensors="pt").input_ids, decoder)
        masks = torch.zeros(len(KINDS), ids.numel(), dtype=torch.bool)
        masks[KINDS.index("text"), 1:] = True
        with torch.no_grad(), probe.watching(partial(torch.clone, masks)):
            decoder(input_ids=ids, use_cache=False)
    depth = probe.result()
    sizes, angles = ([*curve["text"].mean] for curve in (depth.log_update, depth.update_angle))
    for layer in (layer for layer, size in enumerate(sizes) if not math.isfinite(size)):  # it changes nothing
        sizes[layer], angles[layer] = -math.inf, 0.0
    return Updates(n_text, list(map(math.exp, sizes)), angles)


def updates_of(model: str, revision: str | None = None) -> Updates:
    """Measures a language model, or the decoder of a vision-language model."""
    handle = resolve_model(model, revision)
    checkpoint = handle.checkpoint
    n_text = embedding_statistics(checkpoint.name, top=0, revision=checkpoint.revision).n_text
    decoder = handle.load().get_decoder()
    if handle.processor:
        return measure_updates(decoder, text_tokenizer(handle.processor.tokenizer), n_text)
    return measure_updates(decoder, checkpoint.preprocessor(AutoTokenizer), n_text)
