# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a person sees of a run, with and without a terminal, and what is documented of what is logged."""

import re

import pytest
import training
from documented import documented

from normalign_llava.train.callbacks.depth_probe import CosineProbe
from normalign_llava.train.callbacks.measurements import PARTS
from normalign_llava.train.callbacks.progress import COLUMNS


pytestmark = pytest.mark.slow


def run(folder, checkpoint, **options):
    given = dict(max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=False)
    return training.trainer(folder, checkpoint, held_out=training.rows(4), **{**given, **options})


def test_a_line_for_each_logged_step_says_what_was_logged(tmp_path, checkpoint, capsys):
    trainer = run(tmp_path, checkpoint)
    capsys.readouterr()
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    held_out = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    first, *rest, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["step", *COLUMNS, "time", "left"]
    assert [row.split()[0] for row in rest] == ["2/4", "2/4", "4/4", "4/4"]
    for row, loss in zip(rest[1::2], held_out, strict=True):
        assert row.split()[1:] == ["eval_loss", f"{loss:.4g}"]
    for row, entry in zip(rest[::2], logged.values(), strict=True):
        assert len(row) == len(first) <= 80
        for (key, _, form), text in zip(COLUMNS.values(), row.split()[1:-1], strict=True):
            assert text == f"{entry[key]:{form}}"
    assert row.split()[-1] == "0:00:00"
    assert re.fullmatch(r"4 steps in \d:\d\d:\d\d, mean loss [\d.]+", last)


def test_the_keys_that_are_logged_are_those_of_the_page(tmp_path, checkpoint):
    keys = set()
    for options in ({}, dict(use_peft=True)):
        short = dict(max_steps=2, vision_learning_rate=1e-3, max_grad_norm=1e-3)
        trainer = run(tmp_path, checkpoint, **short, **options)
        trainer.add_callback(CosineProbe([2], trainer.data_collator([trainer.train_dataset[0]])))
        trainer.train()
        keys |= {key for entry in trainer.state.log_history for key in entry}
    said = documented("The log")
    assert keys == {key.replace("PART", part) for key in said for part in PARTS}
