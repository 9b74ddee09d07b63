# SPDX-License-Identifier: Apache-2.0
"""What the compensated norms cost, forward and backward.

    python benchmarks/norm.py [--device cuda] [--bf16] [--no-compile] [--output results.json]

Against torch's own, eager and compiled, and the hook form: ratios of times, and of bytes kept for
backward. Compiling is `torch.compile(fullgraph=True)`, which needs a C++ compiler on a CPU and
Triton on a GPU.
"""

import argparse

import torch
from measuring import in_turns, parser, quartiles, report, seconds
from torch import nn

from normalign_llava import GlobalWeightCompensatedLayerNorm, GlobalWeightCompensatedRMSNorm


LAYER = "torch's LayerNorm"
RMS = "torch's RMSNorm"
OURS = "LayerNorm, compensated"
OURS_RMS = "RMSNorm, compensated"
HOOK = "LayerNorm, hook form"
PAIRS = ((OURS, LAYER), (OURS_RMS, RMS), (HOOK, OURS))


class HookLayerNorm(nn.Module):
    """The paper's form: LayerNorm without gain, a hook on its output's gradient, gain and bias."""

    def __init__(self, hidden_size: int, gain: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), gain))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., d)` to `(..., d)`."""
        x_hat = nn.functional.layer_norm(x, self.weight.shape)
        scale = self.weight.detach().abs().mean().clamp(min=1e-3)
        x_hat.register_hook(lambda grad: grad / scale)
        return x_hat * self.weight + self.bias


def step(norm: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> None:
    """One forward and one backward pass."""
    x.grad = None
    norm.zero_grad()
    norm(x).backward(upstream)


def kept_bytes(norm: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    return sum(kept.values())


def measured_ratios(width: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Quartiles of the times of each pair, and bytes kept for backward against LayerNorm's."""
    device = options.device
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    x = torch.randn(options.tokens, width, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(options.tokens, width, device=device, dtype=dtype)
    forms: dict[str, nn.Module] = {
        LAYER: nn.LayerNorm(width),
        OURS: GlobalWeightCompensatedLayerNorm(width),
        HOOK: HookLayerNorm(width, 0.0134),
        RMS: nn.RMSNorm(width, eps=1e-5),
        OURS_RMS: GlobalWeightCompensatedRMSNorm(width),
    }
    for name, norm in forms.items():  # the gain stays float32, as in a bfloat16 model
        norm.to(device=device, dtype=None if name in (OURS, OURS_RMS) else dtype)
    kept = kept_bytes(forms[OURS], x) / kept_bytes(forms[LAYER], x)
    pairs = [*PAIRS]
    if options.compile:
        torch.compiler.reset()
        for name in (LAYER, OURS, RMS, OURS_RMS):
            forms[f"{name}, compiled"] = torch.compile(forms[name], fullgraph=True, dynamic=False)
        pairs += [(f"{ours}, compiled", f"{theirs}, compiled") for ours, theirs in PAIRS[:2]]
    calls = {name: lambda norm=norm: step(norm, x, upstream) for name, norm in forms.items()}
    times = in_turns(calls, options.rounds, lambda call: seconds(call, device))
    ratios = {
        f"{form}: time / {reference}": quartiles(times[form], times[reference])
        for form, reference in pairs
    }
    return {**ratios, f"{OURS}: kept for backward / {LAYER}": [kept] * 3}


def main() -> None:
    """Runs the comparisons and prints them."""
    arguments = parser(__doc__)
    images = "default: 64 images of SigLIP at 384 pixels"
    arguments.add_argument("--tokens", type=int, default=64 * 729, help=images)
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments.add_argument("--widths", type=int, nargs="+", default=[576, 1152, 3584], help="d")
    options = arguments.parse_args()
    ratios = {width: measured_ratios(width, options) for width in options.widths}
    rows = []
    for name in ratios[options.widths[0]]:
        what, measure = name.split(": ")
        medians = [f"{ratios[width][name][1]:.2f}" for width in options.widths]
        rows.append((what, measure, ", ".join(medians)))
    precision = "bfloat16" if options.bf16 else "float32"
    size = f"{options.tokens} tokens, d = {', '.join(map(str, options.widths))}"
    title = f"Forward + backward, {size}, {precision}, {options.device}"
    report(title, rows, options, ratios=ratios)


if __name__ == "__main__":
    main()
