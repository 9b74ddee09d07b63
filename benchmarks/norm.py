# SPDX-License-Identifier: Apache-2.0
"""What the compensated norms cost, forward and backward.

    python benchmarks/norm.py [--device cuda] [--bf16] [--no-compile] [--output results.json]

They are compared with torch's own, eager and compiled, and with the hook form, in ratios of times,
and of bytes kept for backward. Compiling is `torch.compile(fullgraph=True)`. It needs a C++
compiler on a CPU and Triton on a GPU.
"""

import argparse
from functools import partial

import torch
from measuring import in_turns, parser, precision, quartiles, report, seconds
from torch import nn

from normalign_llava import GlobalWeightCompensatedLayerNorm, GlobalWeightCompensatedRMSNorm


LAYER = "torch's LayerNorm"
RMS = "torch's RMSNorm"
OURS = "LayerNorm, compensated"
OURS_RMS = "RMSNorm, compensated"
HOOK = "LayerNorm, hook form"
PAIRS = ((OURS, LAYER), (OURS_RMS, RMS), (HOOK, OURS))


class HookLayerNorm(nn.Module):
    """The paper's form: LayerNorm without gain, a hook on its output's gradient, gain and bias.

    Args:
        hidden_size: The number of features, d.
        gain: Every element of the gain.
    """

    def __init__(self, hidden_size: int, gain: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), gain))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalizes the last dimension.

        Args:
            hidden_states: Tokens of shape `(..., d)`.

        Returns:
            Normalized tokens of the same shape.
        """
        normalized = nn.functional.layer_norm(hidden_states, self.weight.shape)
        scale = self.weight.detach().abs().mean().clamp(min=1e-3)
        normalized.register_hook(lambda gradient: gradient / scale)
        return normalized * self.weight + self.bias


def step(norm: nn.Module, tokens: torch.Tensor, upstream: torch.Tensor) -> None:
    """Makes one forward and one backward pass.

    Args:
        norm: The norm.
        tokens: Its input, of shape `(tokens, d)`. Its gradient is set.
        upstream: The gradient at its output, of the same shape.
    """
    tokens.grad = None
    norm.zero_grad()
    norm(tokens).backward(upstream)


def kept_bytes(norm: nn.Module, tokens: torch.Tensor) -> int:
    """Measures the bytes of distinct storages that autograd keeps from forward to backward.

    Args:
        norm: The norm.
        tokens: Its input, of shape `(tokens, d)`.
    """
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(tokens)
    return sum(sizes.values())


def norm_forms(width: int, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Returns the norms by name.

    Args:
        width: The number of features, d.
        device: The device of all norms.
        dtype: The dtype of torch's norms and of the hook form. The gain of ours stays float32, as
            in a bfloat16 model.
    """
    compensated: dict[str, nn.Module] = {
        OURS: GlobalWeightCompensatedLayerNorm(width),
        OURS_RMS: GlobalWeightCompensatedRMSNorm(width),
    }
    others: dict[str, nn.Module] = {
        LAYER: nn.LayerNorm(width),
        HOOK: HookLayerNorm(width, 0.0134),
        RMS: nn.RMSNorm(width, eps=1e-5),
    }
    for norm in compensated.values():
        norm.to(device)
    for norm in others.values():
        norm.to(device, dtype)
    return compensated | others


def measured_ratios(width: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measures ratios of times of each pair, and of the bytes kept for backward.

    Args:
        width: The number of features, d.
        options: The options of the script.

    Returns:
        The outer quartiles and the median of each ratio, by its name.
    """
    device = options.device
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    tokens = torch.randn(options.tokens, width, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(options.tokens, width, device=device, dtype=dtype)
    forms = norm_forms(width, device, dtype)
    kept_ratio = kept_bytes(forms[OURS], tokens) / kept_bytes(forms[LAYER], tokens)
    compared_pairs = list(PAIRS)
    if options.compile:
        torch.compiler.reset()
        for name in (LAYER, OURS, RMS, OURS_RMS):
            forms[f"{name}, compiled"] = torch.compile(forms[name], fullgraph=True, dynamic=False)
        for form, reference in PAIRS[:2]:
            compared_pairs.append((f"{form}, compiled", f"{reference}, compiled"))
    call_by_name = {name: partial(step, norm, tokens, upstream) for name, norm in forms.items()}
    times_by_name = in_turns(call_by_name, options.rounds, lambda call: seconds(call, device))
    time_ratios = {}
    for form, reference in compared_pairs:
        time_ratios[f"{form}: time / {reference}"] = quartiles(
            times_by_name[form], times_by_name[reference]
        )
    time_ratios[f"{OURS}: kept for backward / {LAYER}"] = [kept_ratio] * 3
    return time_ratios


def main() -> None:
    """Runs the comparisons and prints them."""
    arguments = parser(__doc__)
    images = "default: 64 images of SigLIP at 384 pixels"
    arguments.add_argument("--tokens", type=int, default=64 * 729, help=images)
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments.add_argument("--widths", type=int, nargs="+", default=[576, 1152, 3584], help="d")
    options = arguments.parse_args()
    time_ratios = {width: measured_ratios(width, options) for width in options.widths}
    table_rows = []
    for name in time_ratios[options.widths[0]]:
        form, measured = name.split(": ")
        medians = []
        for width in options.widths:
            _, median, _ = time_ratios[width][name]
            medians.append(f"{median:.2f}")
        table_rows.append((form, measured, ", ".join(medians)))
    widths = ", ".join(map(str, options.widths))
    size = f"{options.tokens} tokens, d = {widths}"
    title = f"Forward + backward, {size}, {precision(options)}, {options.device}"
    report(title, table_rows, options, ratios=time_ratios)


if __name__ == "__main__":
    main()
