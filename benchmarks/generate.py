# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What generating costs: prefill and decoding of ours against stock LLaVA with the very same parts.

    python benchmarks/generate.py [--device cuda] [--bf16] [--shape 7b] [--output results.json]

Both models share vision tower, projector, language model and head, with random weights; ours has the norm besides.
They answer a prompt with an image in turns, greedily, by `generate` with its key-value cache. Prefill lasts until the
first token, decoding from there to the last; a round's decoding time is the median of its tokens.
"""

import statistics
import time

import torch
from measuring import in_turns, parser, quartiles, report, spread
from shapes import SHAPES, llava_config
from torch import Tensor
from transformers import LlavaForConditionalGeneration
from transformers.generation.streamers import BaseStreamer

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration


STOCK, OURS = "stock LLaVA", "ours"


class Clock(BaseStreamer):
    """Notes when `generate` hands over the prompt and each token, which are on the CPU by then."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt `(batch, length)`, then with the tokens `(batch,)` of each step."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def models(shape: str, device: str, dtype: torch.dtype) -> dict[str, LlavaForConditionalGeneration]:
    """Stock LLaVA and ours, which has its parts."""
    with torch.device(device):
        stock = LlavaForConditionalGeneration._from_config(llava_config(shape), dtype=dtype).eval()
    with torch.device("meta"):
        config = llava_config(shape, NormAlignLlavaConfig)
        ours = NormAlignLlavaForConditionalGeneration._from_config(config, dtype=dtype).eval()
    ours.model.vision_tower, ours.model.language_model = stock.model.vision_tower, stock.model.language_model
    ours.lm_head = stock.lm_head
    for name, part in stock.model.multi_modal_projector.named_children():
        setattr(ours.model.multi_modal_projector, name, part)
    ours.model.multi_modal_projector.norm.to_empty(device=device)
    ours.align_projector_norm()
    return {STOCK: stock, OURS: ours}


def prompt(config: NormAlignLlavaConfig, text: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """One image and `text` random words."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    ids = torch.randint(3, config.image_token_id, (1, text))
    ids = torch.cat([torch.full((1, (side // patch) ** 2), config.image_token_id), ids], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pixels = torch.randn(1, 3, side, side, dtype=dtype)
    return {name: value.to(device) for name, value in (batch | {"pixel_values": pixels}).items()}


def main() -> None:
    """Measures in turns, and prints the ratios."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="135m", choices=list(SHAPES))
    arguments.add_argument("--text", type=int, default=64, help="tokens of text in the prompt")
    arguments.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error(f"--tokens is {options.tokens}; decoding begins with the second token")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    both = models(options.shape, options.device, dtype)
    inputs = prompt(both[OURS].config, options.text, options.device, dtype)

    def generate(model: LlavaForConditionalGeneration) -> None:
        length = {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}
        model.generate(**inputs, **length, do_sample=False, streamer=clock)

    def measure(call) -> dict[str, float]:
        clock.times = [time.perf_counter()]
        call()
        start, _, first, *rest = clock.times
        each = [after - before for before, after in zip([first, *rest], rest, strict=False)]
        return {"prefill": first - start, "decoding": statistics.median(each)}

    clock = Clock()
    found = in_turns({name: lambda m=model: generate(m) for name, model in both.items()}, options.rounds, measure)
    rows, ratios, medians = [], {}, {}
    for phase in ("prefill", "decoding"):
        times = {name: [each[phase] for each in values] for name, values in found.items()}
        medians[phase] = {name: statistics.median(values) for name, values in times.items()}
        ratios[phase] = quartiles(times[OURS], times[STOCK])
        rows.append((f"generate, {phase}", f"time / {STOCK}", spread(ratios[phase])))
    length = inputs["input_ids"].shape[1]
    title = f"generate, {options.shape} shape, {length} + {options.tokens} tokens, {dtype}, {options.device}"
    report(title, rows, options, ratios=ratios, seconds=medians)


if __name__ == "__main__":
    main()
