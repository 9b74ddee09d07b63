# SPDX-License-Identifier: Apache-2.0
"""`normalign train RECIPE --dry_run`: what to change if a step does not fit in memory."""

from collections.abc import Callable
from contextlib import suppress

from peft import PeftModel

from .modules.model import base_model
from .trainer import NormAlignTrainer


def remedy(trainer: NormAlignTrainer, make: Callable[[list[str]], NormAlignTrainer]) -> str:
    """Which options would make a step fit that does not: the first of some changes that does, from small to large.

    They are fewer rows in a pass, halved each time; gradient checkpointing; adapters, or bfloat16 if the
    language model is frozen; 4 bits; all of that. The step is estimated again with each.

    Args:
        trainer: That of the options as they are.
        make: Returns one with further words on the command line.
    """
    args = trainer.args
    halves = [args.per_device_train_batch_size // 2**n for n in range(1, 16)]
    smaller = [["--per_device_train_batch_size", str(rows)] for rows in halves if rows]
    checkpointing = [] if args.gradient_checkpointing else ["--gradient_checkpointing", "true"]
    half = ["--dtype", "bfloat16"] if args.model_init_kwargs["dtype"] == "float32" else []
    in_full = trainer.learning_rates["language"] > 0 and not isinstance(trainer.model, PeftModel)
    adapters = ["--use_peft", "true"] if in_full else half
    in_4_bits = [*(adapters if in_full else []), "--load_in_4bit", "true", *half]
    if getattr(base_model(trainer.model), "is_loaded_in_4bit", False):
        in_4_bits = []
    every = [*checkpointing, *in_4_bits, *(smaller[-1] if smaller else [])]
    for words in filter(None, (*smaller, checkpointing, adapters, in_4_bits, every)):
        with suppress(ValueError, NameError, ImportError):  # options that do not go together; no bitsandbytes
            if (estimate := make(words).estimate_memory()).fits:
                return f"Would fit: {' '.join(words)}. {estimate.verdict}"
    tried = f", not even {' '.join(every)}" if every else ""
    return f"Nothing that was tried fits{tried}. Fewer tokens may: lower --max_length."
