# SPDX-License-Identifier: Apache-2.0
"""A check that a language model keeps the rows of one sequence apart."""

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..modules.precision import evaluating


ROWS = [[5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [9, 5, 11, 7, 12, 8]]
"""Rows of token ids that every vocabulary has."""


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart.

    Layers with recurrence do not, nor do positions that ignore `position_ids`.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Raises ValueError if a row's logits depend on the rows before it."""
        first, second, last = torch.tensor(ROWS, device=args.device)
        with evaluating(model, args):
            without_others = last_logits(model, [last])
            behind_first = last_logits(model, [first, last])
            behind_second = last_logits(model, [second, last])
        # Rounding depends on shapes of products. Other rows change them in a mixture of experts.
        place_change = (behind_first - without_others).norm() / without_others.norm()
        rows_change = (behind_first - behind_second).norm() / without_others.norm()
        most_by_place = 1e-3
        most_by_rows = 1e-5
        if args.bf16 or args.fp16:
            most_by_place = 0.05
            most_by_rows = 0.01
        if place_change > most_by_place or rows_change > most_by_rows:
            kind = model.config.get_text_config().model_type
            raise ValueError(f"padding_free would mix rows in a {kind}. Leave it out.")


def last_logits(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """Returns the logits `(T, V)` of the last of some rows `(T,)` in one sequence."""
    length = len(rows[-1])
    positions = torch.arange(length, device=rows[0].device)
    logits = model(
        input_ids=torch.cat(rows)[None],
        position_ids=positions.repeat(len(rows))[None],
        use_cache=False,
    ).logits
    return logits[0, -length:].float()
