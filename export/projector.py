# SPDX-License-Identifier: Apache-2.0
"""Writes projector and norm as tensors of llama.cpp's projector type `mlp`.

llama.cpp has two projectors with two linear layers. Without `mm.3`, it computes Linear, GELU,
Linear: the arm `none`. With `mm.3`, it computes Linear, LayerNorm, GELU, Linear, LayerNorm. That is
one LayerNorm more than ours. This module chooses weights that make the first one change nothing.

Let h = W1 x + b1 have n units, let `tower_eps` be the epsilon that llama.cpp uses for every norm of
the file, and let C be a constant far above |h|. The first linear layer then gives N = 2n + 2 units:

    h, -h, C, -C

Their mean is 0, and their variance is 2 (C^2 + |h|^2) / N. The LayerNorm divides by the root of the
variance + tower_eps, and its gain multiplies the first n units by the same root at h = 0, so GELU
receives h times a factor of 1 - |h|^2 / (2 C^2). The gain is 0 for all other units.

The second LayerNorm has tower_eps too. If its input is scaled by r = sqrt(tower_eps / eps), it
divides by sqrt(r^2 var + tower_eps) = r sqrt(var + eps), and so equals ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


MARGIN = 1000.0
"""C over the largest |h| of the sample pictures: the factor at GELU is then 1 - 5e-7."""


@dataclass(frozen=True)
class Projector:
    """Two linear layers and a LayerNorm, in float64.

    Attributes:
        weight_1: `(n, d_vision)`.
        bias_1: `(n,)`.
        weight_2: `(d, n)`.
        bias_2: `(d,)`.
        gain: The norm's gain `(d,)`, or None without a norm.
        norm_bias: The norm's bias `(d,)`, or None without a norm.
        eps: The norm's epsilon.
    """

    weight_1: Tensor
    bias_1: Tensor
    weight_2: Tensor
    bias_2: Tensor
    gain: Tensor | None
    norm_bias: Tensor | None
    eps: float

    def hidden(self, features: Tensor) -> Tensor:
        """Returns h = W1 x + b1 `(..., n)` of visual features x `(..., d_vision)`."""
        return F.linear(features, self.weight_1, self.bias_1)

    def project(self, features: Tensor) -> Tensor:
        """Returns visual tokens `(..., d)` of visual features `(..., d_vision)`."""
        tokens = F.linear(F.gelu(self.hidden(features)), self.weight_2, self.bias_2)
        if self.gain is None:
            return tokens
        return F.layer_norm(tokens, self.gain.shape, self.gain, self.norm_bias, self.eps)


def projector_tensors(
    projector: Projector, tower_eps: float, largest_hidden: float
) -> dict[str, Tensor]:
    """Returns the tensors of a projector by their names in llama.cpp, float64.

    Args:
        projector: The projector.
        tower_eps: The epsilon of all norms of the file.
        largest_hidden: The largest |h| of the sample pictures.
    """
    if projector.gain is None:
        return {
            "mm.0.weight": projector.weight_1,
            "mm.0.bias": projector.bias_1,
            "mm.2.weight": projector.weight_2,
            "mm.2.bias": projector.bias_2,
        }
    units, features = projector.weight_1.shape
    tokens = len(projector.bias_2)
    total_units = 2 * units + 2
    constant = MARGIN * largest_hidden
    constants = torch.tensor([constant, -constant]).double()
    first_gain = torch.zeros(total_units).double()
    first_gain[:units] = (2 * constant**2 / total_units + tower_eps) ** 0.5
    scale = (tower_eps / projector.eps) ** 0.5
    unused_columns = torch.zeros(tokens, total_units - units).double()
    unused_rows = torch.zeros(2, features).double()
    return {
        "mm.0.weight": torch.cat([projector.weight_1, -projector.weight_1, unused_rows]),
        "mm.0.bias": torch.cat([projector.bias_1, -projector.bias_1, constants]),
        "mm.1.weight": first_gain,
        "mm.1.bias": torch.zeros(total_units).double(),
        "mm.3.weight": torch.cat([scale * projector.weight_2, unused_columns], dim=1),
        "mm.3.bias": scale * projector.bias_2,
        "mm.4.weight": projector.gain,
        "mm.4.bias": projector.norm_bias,
    }


def computed_by_llama_cpp(tensors: dict[str, Tensor], features: Tensor, tower_eps: float) -> Tensor:
    """Returns the visual tokens `(..., d)` that llama.cpp computes from these tensors.

    Args:
        tensors: What [`projector_tensors`] returned, in the dtype that is written.
        features: Visual features `(..., d_vision)`.
        tower_eps: The epsilon of all norms of the file.
    """
    hidden = F.linear(features, tensors["mm.0.weight"], tensors["mm.0.bias"])
    has_norm = "mm.3.weight" in tensors
    if has_norm:
        first_gain = tensors["mm.1.weight"]
        hidden = F.layer_norm(hidden, first_gain.shape, first_gain, tensors["mm.1.bias"], tower_eps)
    hidden = F.gelu(hidden, approximate="tanh")
    if not has_norm:
        return F.linear(hidden, tensors["mm.2.weight"], tensors["mm.2.bias"])
    tokens = F.linear(hidden, tensors["mm.3.weight"], tensors["mm.3.bias"])
    gain = tensors["mm.4.weight"]
    return F.layer_norm(tokens, gain.shape, gain, tensors["mm.4.bias"], tower_eps)
