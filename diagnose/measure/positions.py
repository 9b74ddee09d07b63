# SPDX-License-Identifier: Apache-2.0
"""The kind of every token of a sequence: `report.KINDS`."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def boundary_ids(config: PreTrainedConfig) -> set[int]:
    """Ids in a configuration of starts and ends of vision, of a sequence, and padding."""
    ids: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")) and not name.startswith("visual_indicator"):
                ids.update(number for number in (value if isinstance(value, list) else [value]) if type(number) is int)
    return ids - {config.image_token_id}


def tokenizer_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids of a tokenizer's special tokens, including those added later."""
    if tokenizer is None:
        return set()
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def token_positions(ids: Tensor, attention_mask: Tensor | None, image_token: int) -> dict[str, Tensor]:
    """Masks `(batch, tokens)` of `"visual"` tokens and of all others, `"text"`; padding (mask 0) is neither."""
    image = ids == image_token
    attended = torch.ones_like(image)
    if attention_mask is not None and attention_mask.dim() == 2:
        attended = attention_mask.to(ids.device).bool()
    return {"visual": image & attended, "text": ~image & attended}


def token_kinds(
    inputs: Mapping[str, Any], config: PreTrainedConfig, special: set[int], newline: Tensor | None = None
) -> Tensor:
    """Boolean masks `(kinds, batch * tokens)` in the order of `report.KINDS`; padding is in none.

    `special` are ids that are neither text nor visual; `newline` has for each image token in order
    whether its row is a learned newline.
    """
    ids = inputs["input_ids"]
    image, text = token_positions(ids, inputs.get("attention_mask"), config.image_token_id).values()
    ends = torch.zeros_like(image)
    if newline is not None:
        ends[ids == config.image_token_id] = newline.to(ids.device)

    def among(wanted: Iterable[int]) -> Tensor:
        return torch.isin(ids, torch.tensor(sorted(wanted), dtype=ids.dtype, device=ids.device))

    indicators = among(getattr(config, "visual_indicator_token_ids", None) or ())
    other = among(special) & ~indicators
    kinds = (image & ~ends, text & ~indicators & ~other, text & other, image & ends, text & indicators)
    return torch.stack([mask.flatten() for mask in kinds])
