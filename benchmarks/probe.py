# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What measuring costs: `diagnose.probe` compared with the bare forward pass, on the quickstart's real parts.

    python benchmarks/probe.py [--device cuda] [--batches 16] [--rounds 7] [--json results.json]

In turns, on the same batches of 4 sequences of 64 tokens, 16 of them visual: the base model alone; with all hooks; and
`probe`, which also reads every row of the embedding matrix first. Compares CPU times, or times until a GPU is idle.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.diagnose import probe
from normalign_llava.diagnose.measure.depth import DepthProbe
from normalign_llava.diagnose.measure.families import find_parts
from normalign_llava.diagnose.measure.interface import InterfaceProbe
from normalign_llava.diagnose.measure.positions import boundary_ids, token_kinds
from normalign_llava.quickstart.convert import convert_language, convert_vision


SEQUENCES, TOKENS, VISUAL, PIXELS = 4, 64, 16, 56


def seconds(function: Callable[[], object], device: str) -> float:
    """CPU time of a call or, on a GPU, the time until it is idle."""
    if device == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def batches(model: NormAlignLlavaForConditionalGeneration, count: int) -> list[dict[str, Tensor]]:
    """Random words and images."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(100, 40000, (SEQUENCES, TOKENS), generator=generator)
        ids[:, 5 : 5 + VISUAL] = model.config.image_token_id
        pixels = torch.randn(SEQUENCES, 3, PIXELS, PIXELS, generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels.to(model.dtype)}
        made.append({name: value.to(model.device) for name, value in batch.items()})
    return made


def main() -> None:
    """Measures, prints the ratios and, if asked, writes all times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        build_checkpoint(str(convert_vision(PIXELS)), str(convert_language()), checkpoint, feature_layer=-4)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    model.to(arguments.device).eval()
    parts, inputs = find_parts(model), batches(model, arguments.batches)
    special = boundary_ids(model.config)

    @torch.no_grad()
    def bare() -> None:
        for batch in inputs:
            parts.inner(**batch, use_cache=False)

    interface, depth = InterfaceProbe(parts), DepthProbe(parts.layers, parts.final_norm)

    def hooked() -> None:
        masks = token_kinds(inputs[0]["input_ids"], None, model.config, special)
        with interface.watching(), depth.watching(lambda: masks):
            bare()

    def whole() -> None:
        probe(model, inputs)

    names = {"bare passes": bare, "with hooks": hooked, "probe(), with its set-up": whole}
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(arguments.rounds + 1):
        for name, function in names.items():
            taken = seconds(function, arguments.device)
            if round_:  # the first warms up
                times[name].append(taken)

    title = f"{arguments.batches} batches of {SEQUENCES} x {TOKENS} tokens, {arguments.device}"
    table = Table("", "seconds, median", "ratio, median (quartiles)", title=title)
    ratios = {}
    for name in names:
        each = [taken / reference for taken, reference in zip(times[name], times["bare passes"], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        ratios[name] = middle
        table.add_row(name, f"{statistics.median(times[name]):.2f}", f"{middle:.3f} ({low:.3f} to {high:.3f})")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"title": title, "seconds": times, "ratios": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
