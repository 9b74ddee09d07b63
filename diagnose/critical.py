# SPDX-License-Identifier: Apache-2.0
"""The norm on entry above which layers hardly turn a token: `normalign gain MODEL --critical`.

This is a prediction before training, from a language model. Section 3.1 assumes that the size of a
layer's update and its angle to the state do not depend on the state's norm, so both are measured on
text.
"""

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..assembly.gain import embedding_statistics
from ..assembly.processing import text_tokenizer
from ..checkpoint.files import ADAPTER_CONFIG
from ..models import ModelOptions, resolve_model
from .criteria import CRITERIA
from .measure.depth import DepthProbe
from .measure.families import decoder_layers
from .measure.probe import moved_and_cast
from .report import KINDS


LARGEST = 1e6  # the largest norm that is tried, in N_text
PASSAGES = files(__package__).joinpath("passages.txt").read_text("utf-8").splitlines()


def rotation_angle(norm: float, update: float, angle: float) -> float:
    """Returns the angle ω between h and h + dh: tan ω = c sin φ / (‖h‖ + c cos φ) (eqs. 8, 13).

    Args:
        norm: ‖h‖, the norm of the state.
        update: c = ‖dh‖, the norm of its update.
        angle: φ, the angle between h and dh, in radians.

    Returns:
        Radians in [0, π].
    """
    return math.atan2(update * math.sin(angle), norm + update * math.cos(angle))


@dataclass(frozen=True)
class Updates:
    """Updates of a decoder's layers on text.

    Attributes:
        n_text: Mean norm of text that enters the decoder.
        sizes: For each layer, the geometric mean over tokens of the update's norm.
        angles: For each layer, the mean angle between update and state, in radians.
    """

    n_text: float
    sizes: list[float]
    angles: list[float]

    def rotation(self, norm: float) -> list[float]:
        """Returns by how many radians each layer turns a token that enters with a norm (eq. 13)."""
        angles = []
        for size, angle in zip(self.sizes, self.angles, strict=True):
            angles.append(rotation_angle(norm, size, angle))
            squared_norm = norm**2 + size**2 + 2 * norm * size * math.cos(angle)
            norm = math.sqrt(max(squared_norm, 0.0))  # below 0 only by rounding
        return angles

    def relative_rotation(self, norm: float) -> float:
        """Returns rotation by all layers but the last, over rotation at a norm of N_text."""
        return self._total_rotation(norm) / self._total_rotation(self.n_text)

    def _total_rotation(self, norm: float) -> float:
        angles = self.rotation(norm)
        return sum(angles[:-1] or angles)

    def critical_norm(self, share: float) -> float | None:
        """Returns the norm that lowers rotation to `share` of text's.

        Returns None if this norm is above `LARGEST` times N_text.
        """
        lower_bound = self.n_text
        upper_bound = LARGEST * self.n_text
        if self.relative_rotation(upper_bound) > share:
            return None
        while upper_bound / lower_bound > 1 + 1e-6:
            middle_norm = math.sqrt(lower_bound * upper_bound)
            if self.relative_rotation(middle_norm) > share:
                lower_bound = middle_norm
            else:
                upper_bound = middle_norm
        return upper_bound

    def table(self, model: str) -> Table:
        """Returns the table for the terminal."""
        table = Table(title=f"{model}: predicted rotation, by norm on entry", show_header=False)
        table.add_row("N_text, entering the decoder", f"{self.n_text:.4g}")
        table.add_row("update of layer 1", f"{self.sizes[0]:.4g}")
        for share in (CRITERIA["rotation"].matters, 0.5):
            norm = self.critical_norm(share)
            cell = "none"
            if norm is not None:
                cell = f"{norm:.3g} ({norm / self.n_text:.3g} N_text)"
            table.add_row(f"{share} of text's rotation at a norm of", cell)
        return table


def measure_updates(
    decoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n_text: float, texts: list[str]
) -> Updates:
    """Measures the updates of a language model's layers on texts, without running its head.

    Args:
        decoder: The language model without its head.
        tokenizer: Its tokenizer.
        n_text: Mean norm of text embeddings as the decoder receives them.
        texts: The texts, measured one at a time.

    Raises:
        ValueError: The layers are not found, or states are NaN, infinite or zero.
    """
    probe = DepthProbe(decoder_layers(decoder))
    for text in texts:
        token_ids = moved_and_cast(tokenizer(text, return_tensors="pt").input_ids, decoder)
        kind_masks = torch.zeros(len(KINDS), token_ids.numel(), dtype=torch.bool)
        kind_masks[KINDS.index("text"), 1:] = True  # the first may be a sink, of huge norm
        with torch.no_grad(), probe.watching(kind_masks.clone):
            decoder(input_ids=token_ids, use_cache=False)
    depth = probe.result()
    # NaN for a layer that changes no state.
    log_sizes = torch.tensor(depth.log_update["text"].mean, dtype=torch.float64)
    angles = torch.tensor(depth.update_angle["text"].mean, dtype=torch.float64)
    return Updates(n_text, log_sizes.exp().nan_to_num().tolist(), angles.nan_to_num().tolist())


def measure_model_updates(
    model: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> Updates:
    """Loads a language model, or the decoder of a vision-language model, and measures its updates.

    Raises:
        ValueError: The model is an adapter, or [`resolve_model`] or [`measure_updates`] refuse it.
        OSError: The files do not exist, or cannot be fetched.
    """
    if (Path(model) / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{model} is an adapter. Measure its base, or merge it first.")
    handle = resolve_model(
        model, ModelOptions(trust_remote_code=trust_remote_code), revision=revision
    )
    checkpoint = handle.checkpoint
    statistics = embedding_statistics(checkpoint.name, top=0, revision=checkpoint.revision)
    if handle.processor:
        tokenizer = text_tokenizer(handle.processor.tokenizer)
    else:
        tokenizer = checkpoint.preprocessor(AutoTokenizer)
    return measure_updates(handle.load().get_decoder(), tokenizer, statistics.n_text, PASSAGES)
