# SPDX-License-Identifier: Apache-2.0
"""What is documented of what is logged."""

import pytest
import training
from documented import documented

from normalign_llava.train.callbacks.measurements import PARTS


pytestmark = pytest.mark.slow


def run(folder, checkpoint, **options):
    given = dict(max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=False)
    return training.trainer(folder, checkpoint, held_out=training.rows(4), **{**given, **options})


def test_the_keys_that_are_logged_are_those_of_the_page(tmp_path, checkpoint):
    keys = set()
    for options in ({}, dict(use_peft=True)):
        short = dict(max_steps=2, vision_learning_rate=1e-3, max_grad_norm=1e-3, probe_steps=[2], probe_rows=1)
        trainer = run(tmp_path, checkpoint, **short, **options)
        trainer.train()
        keys |= {key for entry in trainer.state.log_history for key in entry}
    said = documented("The log")
    assert keys == {key.replace("PART", part) for key in said for part in PARTS}
