# SPDX-License-Identifier: Apache-2.0
"""Options: what is refused and why, the page that is made from them, and that they arrive."""

import dataclasses
import importlib.util
import os

import pytest
from documented import PAGE, page_from_fields
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import SFTConfig

from normalign_llava.train.options.arguments import NormAlignConfig
from normalign_llava.train.options.fields import REFUSED, TrainingOptions
from normalign_llava.train.prepare import accumulation_steps


def config(folder, **options) -> NormAlignConfig:
    return NormAlignConfig(output_dir=str(folder), bf16=False, use_cpu=True, **options)


def test_the_page_has_the_help_and_the_refusals_of_the_fields():
    assert page_from_fields(PAGE.read_text()) == PAGE.read_text(), "run tests/helpers/documented.py"


def test_tokenizers_of_workers_have_one_thread_each_unless_one_says_otherwise(tmp_path, monkeypatch):
    for before, after in ((None, "false"), ("true", "true")):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM") if before is None else monkeypatch.setenv(
            "TOKENIZERS_PARALLELISM", before
        )
        config(tmp_path, learning_rate=1e-3)
        assert os.environ["TOKENIZERS_PARALLELISM"] == after


FIELDS = {field.name: field for field in dataclasses.fields(TrainingOptions)}
REFUSALS = {name: field for name, field in FIELDS.items() if field.metadata["help"].startswith(REFUSED)}


def test_defaults_of_refused_options_are_those_of_trl():
    theirs = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    changed = {"assistant_only_loss", "hub_strategy", "remove_unused_columns", "router_aux_loss_coef"}
    assert {name for name, field in REFUSALS.items() if field.default != theirs.get(name)} == changed


@pytest.mark.parametrize("name", REFUSALS)
def test_an_option_that_does_nothing_or_harm_is_refused(tmp_path, name):
    default = FIELDS[name].default
    others = {"completion_only_loss": (True, False), "include_num_input_tokens_seen": (True, "all")}
    others["hub_strategy"] = ("every_save", "checkpoint", "all_checkpoints")
    for other in others.get(name, ({"a": 1}, "other") if default is None else (not default,)):
        with pytest.raises(ValueError, match=f"^{name} cannot be used here: .*Leave it out"):
            config(tmp_path, **{name: other})


@pytest.mark.parametrize("name", INTEGRATION_TO_CALLBACK)
def test_a_tracker_that_cannot_be_used_is_an_error_at_once(tmp_path, name):
    usable = {*get_available_reporting_integrations()}
    assert config(tmp_path, report_to="all").report_to == [*get_available_reporting_integrations()]
    for given in (name, [*usable, name], ",".join([*usable, name])):
        if name in usable:
            assert name in config(tmp_path, report_to=given).report_to
        else:
            with pytest.raises(ValueError, match=f"^report_to '{name}' cannot be used: .*(pip install|variable)"):
                config(tmp_path, report_to=given)


DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ONE_LEARNING_RATE = "would train every module at one learning rate. Remove it: "


@DEEPSPEED
@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, f"'optimizer'.*{ONE_LEARNING_RATE}optim"),
        ({"scheduler": {"type": "WarmupLR"}}, f"'scheduler'.*{ONE_LEARNING_RATE}lr_scheduler_type"),
        ({"torch_autocast": {"enabled": True}}, "'torch_autocast'.*option bf16 sets it. Remove it"),
        ({"bf16": {"enabled": True}}, "bf16 is True in the configuration .* option bf16 is False. Remove it there"),
    ],
)
def test_a_deepspeed_configuration_that_contradicts_options_is_refused(tmp_path, section, error):
    zero = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", **section}
    with pytest.raises(ValueError, match=error):
        config(tmp_path, deepspeed=zero)
    with pytest.raises(ValueError, match="fp16 would round the gain under DeepSpeed. Use bf16"):
        config(tmp_path, deepspeed=zero, fp16=True)
    with pytest.raises(ValueError, match="bad_steps cannot be 'skip' with DeepSpeed"):
        config(tmp_path, deepspeed=zero, bad_steps="skip")


def test_other_options_that_would_do_nothing_are_refused_where_they_are_read(tmp_path):
    with pytest.raises(ValueError, match="do_eval alone evaluates nothing. Set eval_strategy"):
        config(tmp_path, do_eval=True)
    num_steps = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    for change in ({"split_batches": True}, {"dispatch_batches": True}, num_steps):
        with pytest.raises(ValueError, match="accelerator_config's .* would change the rows in an optimizer step"):
            accumulation_steps(config(tmp_path, global_batch_size=8, accelerator_config=change))
