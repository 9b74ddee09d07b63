# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a DeepSpeed configuration may say, and the precision that DeepSpeed trains in."""

from typing import TYPE_CHECKING

from accelerate import DeepSpeedPlugin


if TYPE_CHECKING:
    from .arguments import NormAlignConfig


REFUSED = {
    "optimizer": "it would train every module at one learning rate. Remove it: optim and adam_beta1, for example, are "
    "options",
    "scheduler": "it would train every module at one learning rate. Remove it: lr_scheduler_type and warmup_steps are "
    "options",
    "torch_autocast": "the option bf16 sets it. Remove it",
}
"""Why a section of a configuration cannot be used, and what to use instead."""


def check_deepspeed(plugin: DeepSpeedPlugin, args: "NormAlignConfig") -> None:
    """Checks DeepSpeed's configuration and options that DeepSpeed would not follow."""
    if args.bad_steps == "skip":
        raise ValueError("bad_steps cannot be 'skip' with DeepSpeed, which takes the steps itself. Leave it out.")
    if args.fp16:
        raise ValueError("fp16 would round the gain under DeepSpeed. Use bf16, or train without DeepSpeed.")
    for section, reason in REFUSED.items():
        if section in plugin.deepspeed_config:
            raise ValueError(f"The DeepSpeed configuration has a section {section!r}: {reason}.")
    for name in ("bf16", "fp16"):
        option, enabled = bool(getattr(args, name)), plugin.get_value(f"{name}.enabled", "auto")
        if enabled not in ("auto", option):
            raise ValueError(
                f"{name} is {enabled} in the configuration of DeepSpeed or accelerate, and the option {name} is "
                f"{option}. Remove it there: the option decides."
            )


def keep_float32(plugin: DeepSpeedPlugin, args: "NormAlignConfig") -> None:
    """Has DeepSpeed autocast to bfloat16 and keep all weights in float32, as training without DeepSpeed does.

    Its section `bf16` would round every weight, the gain too, and save that. With an empty list of modules, weights
    and gradients are sent in float32: ZeRO-3 saves weights as they are sent.
    """
    if args.bf16:
        plugin.deepspeed_config.pop("bf16", None)
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        plugin.deepspeed_config["torch_autocast"] = autocast
