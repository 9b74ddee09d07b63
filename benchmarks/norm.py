"""What the compensated norm costs: forward and backward, compared with torch's LayerNorm and the hook form.

    python benchmarks/norm.py [--device cuda] [--json results.json]

Prints ratios of times, and of bytes kept for backward; then the time of `from_pretrained` relative to stock LLaVA's,
for a checkpoint with the norm and for one whose norm has to be aligned.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from normalign_llava import (
    GlobalWeightCompensatedLayerNorm,
    GlobalWeightCompensatedRMSNorm,
    NormAlignLlavaConfig,
    NormAlignLlavaForConditionalGeneration,
)


class HookLayerNorm(nn.Module):
    """The paper's form: LayerNorm without gain, a hook on its output's gradient, then gain and bias."""

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


def seconds(function: Callable[[], None], device: str) -> float:
    """Time of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def kept_bytes(norm: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    return sum(kept.values())


def compare_norms(width: int, tokens: int, rounds: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Median over rounds of each form's time divided by LayerNorm's in the same round, and bytes kept against its."""
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(tokens, width, device=device, dtype=dtype)
    forms: dict[str, nn.Module] = {
        "LayerNorm": nn.LayerNorm(width),
        "ours": GlobalWeightCompensatedLayerNorm(width),
        "hook": HookLayerNorm(width, 0.0134),
        "RMSNorm": nn.RMSNorm(width, eps=1e-5),
        "ours, RMS": GlobalWeightCompensatedRMSNorm(width),
    }
    for norm in forms.values():
        norm.to(device=device, dtype=dtype)
        for _ in range(3):
            step(norm, x, upstream)
    ratios: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        times = {}
        for name in random.sample(list(forms), len(forms)):  # the first finds the memory in another state
            times[name] = seconds(lambda norm=forms[name]: step(norm, x, upstream), device)
        for name, value in times.items():
            ratios[name].append(value / times["RMSNorm" if "RMS" in name else "LayerNorm"])
    result = {name: statistics.median(values) for name, values in ratios.items()}
    result["hook / ours"] = statistics.median(
        hook / ours for hook, ours in zip(ratios["hook"], ratios["ours"], strict=True)
    )
    result["kept"] = kept_bytes(forms["ours"], x) / kept_bytes(forms["LayerNorm"], x)
    return result


def compare_loading(rounds: int) -> dict[str, float]:
    """Median time of loading relative to stock LLaVA's, with the norm on disk and with the norm to be aligned."""
    parts = {
        "vision_config": CLIPVisionConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
        ),
        "text_config": LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=8
        ),
    }
    stock = LlavaForConditionalGeneration(LlavaConfig(**parts))
    ours = NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**parts))
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(f"{folder}/llava")
        ours.save_pretrained(f"{folder}/ours")
        loaders = {
            "stock": lambda: LlavaForConditionalGeneration.from_pretrained(f"{folder}/llava"),
            "ours": lambda: NormAlignLlavaForConditionalGeneration.from_pretrained(f"{folder}/ours"),
            "ours, from LLaVA": lambda: NormAlignLlavaForConditionalGeneration.from_pretrained(f"{folder}/llava"),
        }
        for load in loaders.values():
            load()
        ratios: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(rounds):
            times = {name: seconds(load, "cpu") for name, load in loaders.items()}
            for name, value in times.items():
                ratios[name].append(value / times["stock"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    """Runs the comparisons and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64 * 729, help="default: 64 images of SigLIP at 384 pixels")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()

    console = Console()
    dtype = getattr(torch, arguments.dtype)
    table = Table(title=f"Forward + backward, {arguments.tokens} tokens, {arguments.dtype}, {arguments.device}")
    for column in (
        "d",
        "ours / LayerNorm",
        "hook / LayerNorm",
        "hook / ours",
        "kept / LayerNorm",
        "RMS: ours / RMSNorm",
    ):
        table.add_column(column, justify="right")
    results: dict[str, dict[str, float]] = {}
    for width in (576, 1152, 3584):
        found = compare_norms(width, arguments.tokens, arguments.rounds, arguments.device, dtype)
        results[str(width)] = found
        shown = [found[name] for name in ("ours", "hook", "hook / ours", "kept", "ours, RMS")]
        table.add_row(str(width), *(f"{value:.3f}" for value in shown))
    console.print(table)

    results["from_pretrained"] = compare_loading(rounds=7)
    table = Table(title="from_pretrained, time relative to stock LLaVA", show_header=False)
    for name, value in results["from_pretrained"].items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
