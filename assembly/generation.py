# SPDX-License-Identifier: Apache-2.0
"""The flags of a language model's `generation_config.json` that a checkpoint gets."""

from typing import Any

from transformers import GenerationConfig

from ..checkpoint.prompts import without_idle_flags


COPIED = frozenset(
    [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "suppress_tokens",
        "max_length",
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "use_cache",
        "cache_implementation",
        "cache_config",
    ]
)
"""Flags that are copied: tokens, lengths, how answers are drawn, and the cache.

Others, such as `repetition_penalty` and `num_beams`, change answers that are not drawn. A greedy
answer would no longer be what training made the likeliest.
"""

_ABOUT_THE_FILE = {"transformers_version", "_from_model_config", "_commit_hash"}


def generation_for_checkpoint(
    generation: GenerationConfig,
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Divides a language model's generation configuration: what a checkpoint gets, and the rest.

    Flags that are not [`COPIED`] are left out. So are flags without effect, such as a temperature
    without `do_sample`, since transformers refuses to save them.

    Raises:
        ValueError: If transformers refuses the configuration for another reason.
    """
    copied, left_out = without_idle_flags(generation)
    defaults = vars(GenerationConfig())
    for flag_name, value in flags_of(copied).items():
        if flag_name in COPIED:
            continue
        if value is not False:  # a flag that is off says nothing
            left_out[flag_name] = value
        if flag_name in defaults:
            setattr(copied, flag_name, defaults[flag_name])
        else:  # transformers does not know this flag
            delattr(copied, flag_name)
    return copied, left_out


def flags_of(generation: GenerationConfig) -> dict[str, Any]:
    """Returns the flags of a generation configuration that are not transformers' defaults."""
    flags = generation.to_diff_dict()
    names = sorted(flags.keys() - _ABOUT_THE_FILE)
    return {name: flags[name] for name in names}


def in_words(flags: dict[str, Any]) -> str:
    """Returns flags and their values in one line."""
    return ", ".join(f"{name} {value}" for name, value in flags.items())
