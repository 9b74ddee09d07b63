# SPDX-License-Identifier: Apache-2.0
"""What of a language model's `generation_config.json` a checkpoint gets, and what stays behind."""

from typing import Any

from transformers import GenerationConfig

from ..checkpoint.prompts import without_idle_flags


COPIED = frozenset(
    [
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("suppress_tokens", "max_length", "max_new_tokens"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "use_cache", "cache_implementation", "cache_config"),
    ]
)
"""Flags that are copied: tokens, lengths, how answers are drawn, and the cache.

Others, such as `repetition_penalty` and `num_beams`, change answers that are not drawn: a greedy
answer would no longer be what training made the likeliest.
"""

_OF_THE_FILE = {"transformers_version", "_from_model_config", "_commit_hash"}


def copied_generation(generation: GenerationConfig) -> tuple[GenerationConfig, dict[str, Any]]:
    """What a checkpoint gets of its language model's generation configuration, and the rest.

    Flags that are not [`COPIED`] are left out, and flags without effect, such as a temperature
    without `do_sample`, since transformers refuses to save them. Raises ValueError if transformers
    refuses the configuration for another reason.
    """
    kept, left_out = without_idle_flags(generation)
    defaults = vars(GenerationConfig())
    for name, value in flags_of(kept).items():
        if name in COPIED:
            continue
        if value is not False:  # a flag that is off says nothing
            left_out[name] = value
        if name in defaults:
            setattr(kept, name, defaults[name])
        else:  # no flag that transformers knows
            delattr(kept, name)
    return kept, left_out


def flags_of(generation: GenerationConfig) -> dict[str, Any]:
    """The flags of a generation configuration that are not transformers' defaults."""
    flags = generation.to_diff_dict()
    return {name: value for name, value in sorted(flags.items()) if name not in _OF_THE_FILE}


def in_words(flags: dict[str, Any]) -> str:
    """Flags and their values in a line."""
    return ", ".join(f"{name} {value}" for name, value in flags.items())
