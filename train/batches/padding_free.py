# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Batches without padding: rows one after another in one sequence, kept apart by their position ids.

transformers builds the mask of such a sequence from position ids that start again, for every implementation of
attention, if no attention mask is given and the cache is off.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from ..callbacks.depth_probe import evaluating


ROW_LENGTHS = "row_lengths"
"""Key of a batch: tokens in each of its rows, `(rows,)`. First in the batch, where the Trainer counts its rows."""


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A padded batch of B rows as one sequence of their N tokens.

    Args:
        batch: `input_ids`, `attention_mask` and `labels` `(B, T)`; `pixel_values`, which stay as they are.

    Returns:
        `row_lengths` `(B,)`; `input_ids`, `labels` and `position_ids` `(1, N)`. The first label of each row is
        masked: the token before it belongs to another row.
    """
    real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(real)), real.int().argmax(1)] = -100
    sequence = {name: batch.pop(name)[real][None] for name in ("input_ids", "labels")}
    positions = (real.long().cumsum(1) - 1)[real][None]
    return {ROW_LENGTHS: real.sum(1), **sequence, "position_ids": positions, **batch}


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart."""

    def on_train_begin(self, args, state, control, model: PreTrainedModel | None = None, **kwargs):
        """Compares a short row alone with the same row behind two others.

        Raises:
            ValueError: They differ, as they do with recurrent layers or with positions that ignore `position_ids`.
        """
        assert model is not None
        rows = torch.tensor([[5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [9, 5, 11, 7, 12, 8]], device=args.device)
        length = rows.shape[1]
        positions = torch.arange(length, device=args.device)

        def states(*chosen: Tensor) -> Tensor:
            batch = {"input_ids": torch.cat(chosen)[None], "position_ids": positions.repeat(len(chosen))[None]}
            return model(**batch, use_cache=False).logits[0, -length:].float()

        with evaluating(model, args), torch.no_grad():
            alone, behind, behind_another = states(rows[2]), states(rows[0], rows[2]), states(rows[1], rows[2])
        # Rounding depends on the shapes of products, and these, in a mixture of experts, on the other rows.
        by_place, by_others = ((behind - other).norm() / alone.norm() for other in (alone, behind_another))
        half = args.bf16 or args.fp16
        if by_place > (0.05 if half else 1e-3) or by_others > (0.01 if half else 1e-5):
            kind = model.config.get_text_config().model_type
            raise ValueError(
                f"padding_free cannot be used with this language model ({kind}): it does not keep the rows of one "
                "sequence apart. Leave it out."
            )
