# SPDX-License-Identifier: Apache-2.0
"""Messages of other libraries that are hidden, since a user can do nothing about them."""

import logging
import sys
import warnings


# A piece of the message, by the name of its logger.
NOTICES = {
    "DeepSpeed": "Setting accelerator to CPU",  # on standard output, with and without it in use
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.builder": "Setting num_proc from",  # for a split of fewer files
    "transformers.configuration_utils": "must be `None` or an integer within the vocabulary",
    "transformers.modeling_utils": "| CONVERSION",  # the error that follows has what matters
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    "transformers.utils.import_utils": "requires torchvision (not installed)",  # Pillow serves
}


def hide_notices() -> None:
    """Hides `NOTICES`, and deprecation warnings of later imports, except with `python -W`."""
    if sys.warnoptions:
        return
    for logger_name in NOTICES:
        logging.getLogger(logger_name).addFilter(_is_worth_showing)
    warnings.filterwarnings("ignore", "", FutureWarning, r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", "", UserWarning, "_distutils_hack")  # of DeepSpeed's imports


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return NOTICES[record.name] not in str(record.msg)
