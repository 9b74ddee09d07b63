# SPDX-License-Identifier: Apache-2.0
"""What gradient compensation does to gradients and to steps: the tables of docs/theory.md.

    python benchmarks/compensation.py

On the quickstart's parts: first the gradient of one batch at the projector, against the gain of the
norm. Then a few steps with and without the factor 1 / s, from the same start, with several
optimizers: how far projector and adapters moved.
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import training_data
from normalign_llava.train.collator import ConversationCollator


GAINS = [4.0**power for power in range(-3, 4)]
ROWS = 8
STEPS = 5
CLIP = 1.0

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, None),
    "AdamW, clipped": (torch.optim.AdamW, {"lr": 1e-3}, CLIP),
    "AdamW, epsilon 1e-3, clipped": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3}, CLIP),
    "SGD, clipped": (torch.optim.SGD, {"lr": 0.1}, CLIP),
}
"""Class, arguments, and the norm to which the gradients of all modules together are clipped."""


def load_model(checkpoint: Path, compensation: str) -> NormAlignLlavaForConditionalGeneration:
    """The model in float32, with or without compensation."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, gradient_compensation=compensation
    )
    return model.requires_grad_(False).train()  # in evaluation mode nothing is compensated


def batches(checkpoint: Path, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of the quickstart's training rows."""
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    rows: Dataset = prepare_rows(training_data(ROWS * count, 40), Checks(processor))[0]
    collator = ConversationCollator(processor)
    return [collator([rows[ROWS * number + row] for row in range(ROWS)]) for number in range(count)]


def norm_of(tensors: list[torch.Tensor]) -> float:
    """L2 norm of all of them together."""
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()


def gradients(checkpoint: Path, batch: dict[str, torch.Tensor]) -> None:
    """Prints the gradient's norm at the visual tokens and at the projector, against the gain."""
    print("\n| gain, in N_text / sqrt(d) | gradient at the visual tokens ", end="")
    print("| at the projector | the same, with GWC |")
    print("|---|---|---|---|")
    for gain in GAINS:
        gradient = {}
        for compensation in ("none", "global"):
            model = load_model(checkpoint, compensation)
            projector = model.model.multi_modal_projector
            linears = [*projector.linear_1.parameters(), *projector.linear_2.parameters()]
            for parameter in linears:
                parameter.requires_grad_()
            with torch.no_grad():
                projector.norm.weight.mul_(gain)
            tokens: list[torch.Tensor] = []
            projector.register_forward_hook(lambda *args, kept=tokens: kept.append(args[-1]))
            loss = model(**batch).loss
            gradient[compensation] = torch.autograd.grad(loss, [*tokens, *linears])
        at_tokens, *at_linears = gradient["none"]
        compensated = norm_of(list(gradient["global"][1:]))
        norms = f"{at_tokens.norm():.3g} | {norm_of(at_linears):.3g} | {compensated:.3g}"
        print(f"| {gain:g} | {norms} |", flush=True)


def steps(checkpoint: Path, of_steps: list[dict[str, torch.Tensor]]) -> None:
    """Prints how far projector and adapters move, with and without compensation."""
    print("\n| | projector moved | with GWC | adapters moved | with GWC |\n|---|---|---|---|---|")
    for name, settings in OPTIMIZERS.items():
        moved = {
            compensation: _moved(checkpoint, of_steps, compensation, *settings)
            for compensation in ("none", "global")
        }
        cells = [f"{moved[which][part]:.3g}" for part in (0, 1) for which in ("none", "global")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _moved(checkpoint, of_steps, compensation, optimizer_class, arguments, clip):
    model = load_model(checkpoint, compensation)
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=r".*\.language_model\..*\.(q|v)_proj")
    adapted: nn.Module = get_peft_model(model, config)
    projector = [*model.model.multi_modal_projector.requires_grad_().parameters()]
    adapters = [p for name, p in adapted.named_parameters() if "lora_" in name]
    optimizer = optimizer_class(projector + adapters, weight_decay=0.0, **arguments)
    before = [[p.detach().clone() for p in part] for part in (projector, adapters)]
    for batch in of_steps:
        optimizer.zero_grad()
        adapted(**batch).loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(projector + adapters, clip)
        optimizer.step()
    changes = [
        norm_of([p.detach() - b for p, b in zip(now, was, strict=True)])
        for now, was in zip((projector, adapters), before, strict=True)
    ]
    return changes[0], changes[1]


def main() -> None:
    """Prints both tables."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        torch.manual_seed(0)
        vision = str(convert_vision(56))
        language = str(convert_language())
        build_checkpoint(vision, language, checkpoint, arm="gwc", feature_layer=-4)
        of_steps = batches(checkpoint, STEPS)
        gradients(checkpoint, of_steps[0])
        steps(checkpoint, of_steps)


if __name__ == "__main__":
    main()
