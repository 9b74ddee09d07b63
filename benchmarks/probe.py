# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What measuring costs: `diagnose.probe` compared with the bare forward pass, on the quickstart's real parts.

    python benchmarks/probe.py [--device cuda] [--bf16] [--output results.json]

In turns, on the same batches of 4 sequences of 64 tokens, 16 of them visual: the base model alone; with all hooks; and
`probe`, which also reads every row of the embedding matrix first.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from measuring import in_turns, parser, quartiles, report, seconds, spread
from torch import Tensor

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.diagnose import probe
from normalign_llava.diagnose.measure.depth import DepthProbe
from normalign_llava.diagnose.measure.families import find_parts
from normalign_llava.diagnose.measure.interface import InterfaceProbe
from normalign_llava.diagnose.measure.positions import boundary_ids, token_kinds
from normalign_llava.fetched.convert import convert_language, convert_vision


SEQUENCES, TOKENS, VISUAL, PIXELS = 4, 64, 16, 56


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
    arguments = parser(__doc__)
    arguments.add_argument("--batches", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    dtype = torch.bfloat16 if options.bf16 else torch.float32

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        build_checkpoint(str(convert_vision(PIXELS)), str(convert_language()), checkpoint, feature_layer=-4)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)
    model.to(options.device).eval()
    parts, inputs = find_parts(model), batches(model, options.batches)
    special = boundary_ids(model.config)

    @torch.no_grad()
    def bare() -> None:
        for batch in inputs:
            parts.inner(**batch, use_cache=False)

    interface, depth = InterfaceProbe(parts), DepthProbe(parts.decoder.layers, parts.decoder.norm)

    def hooked() -> None:
        masks = token_kinds(inputs[0]["input_ids"], None, model.config, special)
        with interface.watching(), depth.watching(lambda: masks):
            bare()

    def whole() -> None:
        probe(model, inputs)

    bare_passes = "forward passes without it"
    names = {bare_passes: bare, "measuring, hooks alone": hooked, "measuring, probe() with its set-up": whole}
    times = in_turns(names, options.rounds, lambda call: seconds(call, options.device))
    ratios = {name: quartiles(times[name], times[bare_passes]) for name in names}
    rows = [(name, f"time / {bare_passes}", spread(ratios[name])) for name in list(names)[1:]]
    title = f"{options.batches} batches of {SEQUENCES} x {TOKENS} tokens, {dtype}, {options.device}"
    title += f"; bare {statistics.median(times[bare_passes]):.2f} s"
    report(title, rows, options, ratios=ratios, seconds=times)


if __name__ == "__main__":
    main()
