# SPDX-License-Identifier: Apache-2.0
"""Hides messages of other libraries that a user can do nothing about, by their logger and a part of the text."""

import logging
import sys
import warnings


NOTICES = {
    "DeepSpeed": "Setting accelerator to CPU",  # on standard output, with and without it in use
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them itself
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.builder": "Setting num_proc from",  # for a split of fewer files
    "transformers.configuration_utils": "must be `None` or an integer within the vocabulary",  # of a CLIP's text part
    "transformers.modeling_utils": "| CONVERSION",  # an error follows, which has what matters of the report
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    "transformers.utils.import_utils": "requires torchvision (not installed)",  # Pillow's serve as well
}


def hide_notices() -> None:
    """Hides `NOTICES`, and deprecation warnings of libraries imported later, unless `python -W` is given."""
    if sys.warnoptions:
        return
    for name in NOTICES:
        logging.getLogger(name).addFilter(lambda record: NOTICES[record.name] not in str(record.msg))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module="_distutils_hack")  # of DeepSpeed's imports
