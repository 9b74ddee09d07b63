# SPDX-License-Identifier: Apache-2.0
"""What gradient compensation does to gradients and to steps: the tables of docs/theory.md.

    python benchmarks/compensation.py

On the quickstart's parts: first the gradient of one batch at the projector, against the gain of the
norm. Then a few steps with and without the factor 1 / s, from the same start, with several
optimizers: how far projector and adapters moved.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoProcessor

from normalign_llava import (
    Checks,
    ConversationCollator,
    NormAlignLlavaForConditionalGeneration,
    build_checkpoint,
    convert_language,
    convert_vision,
    prepare_rows,
    training_data,
)


GAINS = [4.0**power for power in range(-3, 4)]
ROWS = 8
STEPS = 5
COMPENSATIONS = ("none", "global")


class Optimizer(NamedTuple):
    """An optimizer of the second table.

    Attributes:
        cls: Its class.
        arguments: Its arguments.
        clip: The norm that the gradients of all modules together are clipped to. None if they are
            not clipped.
    """

    cls: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    clip: float | None = None


OPTIMIZERS = {
    "AdamW": Optimizer(torch.optim.AdamW, {"lr": 1e-3}),
    "AdamW, clipped": Optimizer(torch.optim.AdamW, {"lr": 1e-3}, clip=1.0),
    "AdamW, epsilon 1e-3, clipped": Optimizer(
        torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3}, clip=1.0
    ),
    "SGD, clipped": Optimizer(torch.optim.SGD, {"lr": 0.1}, clip=1.0),
}


def load_model(checkpoint: Path, compensation: str) -> NormAlignLlavaForConditionalGeneration:
    """Loads the model in float32.

    Args:
        checkpoint: The folder of the checkpoint.
        compensation: "global" with compensation, "none" without.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, gradient_compensation=compensation
    )
    return model.requires_grad_(False).train()  # in evaluation mode nothing is compensated


def training_batches(checkpoint: Path, count: int) -> list[dict[str, Tensor]]:
    """Returns batches of the quickstart's training rows.

    Args:
        checkpoint: The folder of the checkpoint. Its processor is read.
        count: The number of batches.
    """
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    rows, _ = prepare_rows(training_data(ROWS * count, 40), Checks(processor))
    collator = ConversationCollator(processor)
    batches = []
    for start in range(0, ROWS * count, ROWS):
        batches.append(collator([rows[number] for number in range(start, start + ROWS)]))
    return batches


def norm_of(tensors: list[Tensor]) -> float:
    """Returns the L2 norm of all tensors together."""
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()


def print_gradients(checkpoint: Path, batch: dict[str, Tensor]) -> None:
    """Prints the gradient's norm at the visual tokens and at the projector, against the gain.

    Args:
        checkpoint: The folder of the checkpoint.
        batch: The inputs of the model.
    """
    print("\n| gain, in N_text / sqrt(d) | gradient at the visual tokens ", end="")
    print("| at the projector | the same, with GWC |")
    print("|---|---|---|---|")
    for gain in GAINS:
        at_tokens, *at_projector = gradients(checkpoint, batch, gain, "none")
        _, *compensated = gradients(checkpoint, batch, gain, "global")
        projector_norm = norm_of(at_projector)
        norms = f"{at_tokens.norm():.3g} | {projector_norm:.3g} | {norm_of(compensated):.3g}"
        print(f"| {gain:g} | {norms} |", flush=True)


def gradients(
    checkpoint: Path, batch: dict[str, Tensor], gain: float, compensation: str
) -> tuple[Tensor, ...]:
    """Returns gradients of the loss.

    Args:
        checkpoint: The folder of the checkpoint.
        batch: The inputs of the model.
        gain: A factor on the norm's gain.
        compensation: "global" with compensation, "none" without.

    Returns:
        The gradient at the visual tokens, and those at the parameters of the projector's linear
        layers.
    """
    model = load_model(checkpoint, compensation)
    projector = model.model.multi_modal_projector
    parameters = [*projector.linear_1.parameters(), *projector.linear_2.parameters()]
    for parameter in parameters:
        parameter.requires_grad_()
    with torch.no_grad():
        projector.norm.weight.mul_(gain)
    visual_tokens: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        visual_tokens.append(output)

    projector.register_forward_hook(keep)
    loss = model(**batch).loss
    return torch.autograd.grad(loss, [*visual_tokens, *parameters])


def print_steps(checkpoint: Path, batches: list[dict[str, Tensor]]) -> None:
    """Prints how far projector and adapters move, with and without compensation.

    Args:
        checkpoint: The folder of the checkpoint.
        batches: The inputs of the model in each step.
    """
    print("\n| | projector moved | with GWC | adapters moved | with GWC |\n|---|---|---|---|---|")
    for name, optimizer in OPTIMIZERS.items():
        projector_changes = []
        adapter_changes = []
        for compensation in COMPENSATIONS:
            projector_change, adapter_change = changes(checkpoint, batches, compensation, optimizer)
            projector_changes.append(f"{projector_change:.3g}")
            adapter_changes.append(f"{adapter_change:.3g}")
        row_cells = [name, *projector_changes, *adapter_changes]
        print(f"| {' | '.join(row_cells)} |", flush=True)


def changes(
    checkpoint: Path, batches: list[dict[str, Tensor]], compensation: str, settings: Optimizer
) -> tuple[float, float]:
    """Trains on some batches.

    Args:
        checkpoint: The folder of the checkpoint.
        batches: The inputs of the model in each step.
        compensation: "global" with compensation, "none" without.
        settings: The optimizer.

    Returns:
        How far the projector moved, and how far the adapters moved.
    """
    model = load_model(checkpoint, compensation)
    torch.manual_seed(0)
    lora_config = LoraConfig(r=8, target_modules=r".*\.language_model\..*\.(q|v)_proj")
    adapted_model: nn.Module = get_peft_model(model, lora_config)
    projector = list(model.model.multi_modal_projector.requires_grad_().parameters())
    adapters = []
    for name, parameter in adapted_model.named_parameters():
        if "lora_" in name:
            adapters.append(parameter)
    trained = projector + adapters
    optimizer = settings.cls(trained, weight_decay=0.0, **settings.arguments)
    initial_values = [parameter.detach().clone() for parameter in trained]
    for batch in batches:
        optimizer.zero_grad()
        adapted_model(**batch).loss.backward()
        if settings.clip:
            nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
    parameter_moves = []
    for parameter, earlier in zip(trained, initial_values, strict=True):
        parameter_moves.append(parameter.detach() - earlier)
    return norm_of(parameter_moves[: len(projector)]), norm_of(parameter_moves[len(projector) :])


def main() -> None:
    """Prints both tables."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        torch.manual_seed(0)
        vision = str(convert_vision(56))
        language = str(convert_language())
        build_checkpoint(vision, language, checkpoint, arm="gwc", feature_layer=-4)
        batches = training_batches(checkpoint, STEPS)
        print_gradients(checkpoint, batches[0])
        print_steps(checkpoint, batches)


if __name__ == "__main__":
    main()
