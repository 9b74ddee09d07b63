# SPDX-License-Identifier: Apache-2.0
"""What must be the same when a run is resumed, and that all else changes no step."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import stored
import torch
import training
from transformers.trainer_pt_utils import AcceleratorConfig

from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.train.command import REFUSED
from normalign_llava.train.keeping.checkpoints import missing_from, resolve_resume
from normalign_llava.train.keeping.record import FREE, LEFT_OUT
from normalign_llava.train.options import ModelArguments, NormAlignConfig


pytestmark = pytest.mark.slow

COMPARED = frozenset(
    {
        # The rows of a step, and their order.
        "per_device_train_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "seed",
        "data_seed",
        "full_determinism",
        "train_sampling_strategy",
        "dataloader_drop_last",
        "dataloader_in_order",
        "accelerator_config",
        "dataset_config",
        "dataset_train_split",
        "dataset_streaming",
        "datasets",
        "columns",
        "filters",
        "test_split_size",
        "shuffle_buffer_size",
        "dataset_kwargs",
        "max_length",
        "packing",
        "padding_free",
        "pad_to_multiple_of",
        "eos_token",
        # The loss.
        "stage",
        "arm",
        "loss_type",
        "label_smoothing_factor",
        "neftune_noise_alpha",
        "average_tokens_across_devices",
        # The step.
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "optim_target_modules",
        "max_grad_norm",
        # Rounding.
        "bf16",
        "fp16",
        "tf32",
        "dtype",
        "attn_implementation",
        "model_init_kwargs",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_cache",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        # How the model is divided, and what is sent.
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        # What is trained.
        "use_peft",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_modules_to_save",
        "lora_task_type",
        "use_rslora",
        "use_dora",
        "load_in_8bit",
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        # Which checkpoint is the result, by figures that the checkpoint's state holds.
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "restore_callback_states_from_checkpoint",
    }
)
"""Options that change steps or the result."""

ADAPTERS = {"use_peft": True, "lora_dropout": 0.3}
OPTIONS = {
    **ADAPTERS,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "lr_scheduler_type": "constant",
}
"""Of the run that is resumed."""


def settable_options() -> set[str]:
    """Every option that may have another value than its default."""
    names = set()
    for options_class in (NormAlignConfig, ModelArguments, DataArguments):
        for option in dataclasses.fields(options_class):
            if not option.metadata.get("help", "").startswith(REFUSED):
                names.add(option.name)
    return names


def test_of_every_option_it_is_decided_whether_it_changes_steps():
    assert not FREE & COMPARED
    undecided = settable_options() - FREE - COMPARED
    assert not undecided, "put each into FREE of train/keeping/record.py or into COMPARED"
    assert settable_options() == FREE | COMPARED


def test_of_every_option_of_the_accelerator_it_is_decided_whether_it_changes_steps():
    names = {option.name for option in dataclasses.fields(AcceleratorConfig)}
    compared = {"even_batches", "use_seedable_sampler", "gradient_accumulation_kwargs"}
    left_out = {"split_batches", "dispatch_batches", "non_blocking", "use_configured_state"}
    assert names == compared | left_out
    assert names & LEFT_OUT == left_out


@pytest.fixture(scope="module")
def first_run(checkpoint, tmp_path_factory):
    """A run with adapters and dropout, with checkpoint-2 and checkpoint-4."""
    output_dir = tmp_path_factory.mktemp("run")
    training.trainer(output_dir, checkpoint, **OPTIONS).train()
    return output_dir


@pytest.mark.parametrize(
    "name, value",
    [
        ("dataloader_drop_last", True),
        ("accelerator_config", {"even_batches": False}),
        (
            "accelerator_config",
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        ),
        ("max_grad_norm", None),
        ("max_grad_norm", 0.5),
        ("pad_to_multiple_of", 8),
        ("adam_beta2", 0.99),
        ("optim", "sgd"),
        ("optim_args", "amsgrad=True"),
        ("lr_scheduler_kwargs", {"a": 1}),
        ("average_tokens_across_devices", False),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("data_seed", 7),
        ("lora_alpha", 64),
        ("gradient_accumulation_steps", 2),
        ("train_sampling_strategy", "sequential"),
        ("norm_learning_rate", 1e-4),
        ("padding_free", True),
    ],
)
def test_what_changes_steps_is_refused_by_name(checkpoint, first_run, tmp_path, name, value):
    trainer = training.trainer(tmp_path, checkpoint, **{**OPTIONS, name: value})
    messages = {
        "norm_learning_rate": "learning rate of norm",
        "lora_alpha": "adapters",
    }
    message = messages.get(name, name)
    with pytest.raises(ValueError, match=f"differs in .*{message}"):
        trainer.train(resume_from_checkpoint=str(first_run / "checkpoint-4"))
    assert trainer.state.global_step == 0


def test_another_attention_is_refused(checkpoint, first_run, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, **OPTIONS)
    trainer.record["options"]["attn_implementation"] = "eager"
    with pytest.raises(ValueError, match="differs in .*attn_implementation"):
        trainer.train(resume_from_checkpoint=str(first_run / "checkpoint-4"))
    assert trainer.state.global_step == 0


def test_other_rows_of_equal_counts_are_refused(checkpoint, first_run, tmp_path):
    dataset = training.rows()
    backwards = dataset.select(range(len(dataset) - 1, -1, -1))
    trainer = training.trainer(tmp_path, checkpoint, backwards, **OPTIONS)
    with pytest.raises(ValueError, match="differs in row_lengths"):
        trainer.train(resume_from_checkpoint=str(first_run / "checkpoint-4"))


def test_another_optimizer_is_refused(checkpoint, first_run, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, **OPTIONS)
    trainer.record["optimizer"] = {"class": "torch.optim.sgd.SGD", "momentum": 0.9}
    with pytest.raises(ValueError, match="differs in optimizer .*momentum"):
        trainer.check_resumed(first_run / "checkpoint-4")


def test_another_sharding_is_refused(checkpoint, first_run, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, **OPTIONS)
    trainer.record["optimizer"] = None
    trainer.record["sharding"] = "DeepSpeed"
    with pytest.raises(ValueError, match="differs in sharding .was none, is DeepSpeed"):
        trainer.check_resumed(first_run / "checkpoint-4")


FREE_CHANGES = {
    "gradient_checkpointing": True,
    "dataloader_num_workers": 2,
    "logging_steps": 2,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": 3,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "probe_steps": [2, 3],
    "save_steps": 1,
    "bad_steps": "skip",
    "torch_empty_cache_steps": 1,
    "save_total_limit": 3,
}


def test_what_may_change_changes_no_bit_of_the_steps_to_come(checkpoint, first_run, tmp_path):
    assert FREE_CHANGES.keys() <= FREE
    shutil.copytree(first_run / "checkpoint-2", tmp_path / "checkpoint-2")
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        held_out=training.rows(3),
        **{**OPTIONS, **FREE_CHANGES},
    )
    trainer.train(resume_from_checkpoint=True)
    expected = first_run / "checkpoint-4"
    resumed = tmp_path / "checkpoint-4"
    training.assert_equal(
        stored.load_file(resumed / "adapter_model.safetensors"),
        stored.load_file(expected / "adapter_model.safetensors"),
    )
    training.assert_equal(
        torch.load(resumed / "optimizer.pt")["state"],
        torch.load(expected / "optimizer.pt")["state"],
    )


def test_evaluations_and_readers_of_batches_change_no_dropout(checkpoint, tmp_path):
    readers = {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
    }
    evaluations = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        **readers,
    }

    def trained_weights(**options):
        torch.manual_seed(0)  # for adapters
        trainer = training.trainer(
            tmp_path,
            checkpoint,
            held_out=training.rows(3),
            max_steps=10,  # eight steps an epoch
            **ADAPTERS,
            **options,
        )
        trainer.train()
        return trainer.model.state_dict()

    expected = trained_weights()
    training.assert_equal(trained_weights(**readers), expected)
    training.assert_equal(trained_weights(**evaluations), expected)


def test_a_loader_without_a_seed_of_its_own_is_refused_where_a_run_is_saved(tmp_path):
    unseeded = {"accelerator_config": {"use_seedable_sampler": False}}
    with pytest.raises(ValueError, match="use_seedable_sampler false .* save_strategy: no"):
        training.settings(tmp_path, **unseeded, save_strategy="steps")
    training.settings(tmp_path, **unseeded, save_strategy="no")


@pytest.fixture
def run(first_run, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(first_run, tmp_path / "run")


def test_a_run_is_not_resumed_before_checkpoints_that_would_then_be_the_newest(run, tmp_path):
    earlier = run / "checkpoint-2"
    with pytest.raises(ValueError, match="holds checkpoint-4. .* another --output_dir"):
        resolve_resume(str(earlier), run, 1)
    assert resolve_resume(str(earlier), tmp_path / "other", 1) == earlier
    os.truncate(run / "checkpoint-4" / "trainer_state.json", 10)  # is written over
    assert resolve_resume(str(earlier), run, 1) == earlier
    shutil.rmtree(run / "checkpoint-4")
    assert resolve_resume(str(earlier), run, 1) == earlier
    assert resolve_resume("last", run, 1) == earlier


@pytest.fixture
def checkpoint_of_three(run):
    """A checkpoint with the random states of three processes."""
    folder = run / "checkpoint-4"
    random_state = (folder / "rng_state.pth").read_bytes()
    (folder / "rng_state.pth").unlink()
    for rank in range(3):
        (folder / f"rng_state_{rank}.pth").write_bytes(random_state)
    return folder


def test_states_of_as_many_processes_are_complete(checkpoint_of_three):
    assert missing_from(checkpoint_of_three, 3) == []


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_states_of_another_number_of_processes_are_refused(run, checkpoint_of_three, processes):
    expected = f"random states of {processes} process(es) (it has 3)"
    assert missing_from(checkpoint_of_three, processes) == [expected]
    with pytest.raises(ValueError, match=r"lacks random states of . process"):
        resolve_resume(str(checkpoint_of_three), run, processes)


STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_cut_short_is_named_before_anything_is_read(run, name):
    last_checkpoint = run / "checkpoint-4"
    state_path = last_checkpoint / name
    os.truncate(state_path, state_path.stat().st_size - 30)
    with pytest.raises(ValueError, match=f"lacks a whole {name} .it is damaged"):
        resolve_resume(str(last_checkpoint), run, 1)
    with pytest.raises(ValueError, match=f"checkpoint-4. It only lacks a whole {name}"):
        resolve_resume("last", run, 1)


@pytest.mark.parametrize("name", [*STATES, "adapter_model.safetensors"])
def test_a_damaged_file_is_named_and_the_remedy_works(checkpoint, run, name):
    damaged_path = run / "checkpoint-4" / name
    content = bytearray(damaged_path.read_bytes())
    start = 0 if name.endswith(".safetensors") else 80
    content[start : start + 60] = b"\xff" * 60
    damaged_path.write_bytes(content)
    options = {**OPTIONS, "max_steps": 5}
    trainer = training.trainer(run, checkpoint, **options)
    message = f"checkpoint-4/{name} is damaged: .* Remove .*checkpoint-4"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(run / "checkpoint-4")
    trainer = training.trainer(run, checkpoint, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


@pytest.mark.parametrize("content", [None, "{", "[]", '{"steps_done": 4}'])
def test_a_checkpoint_that_does_not_say_of_which_run_it_is_is_refused(checkpoint, run, content):
    record_path = run / "checkpoint-4" / "training.json"
    record_path.unlink()
    if content:
        record_path.write_text(content)
    trainer = training.trainer(run, checkpoint, **OPTIONS)
    with pytest.raises(ValueError, match="checkpoint-4/training.json is missing or damaged"):
        trainer.train(resume_from_checkpoint=True)


def test_a_record_of_an_earlier_version_is_compared_by_what_it_has(checkpoint, run):
    record_path = run / "checkpoint-4" / "training.json"
    record = json.loads(record_path.read_text())
    del record["row_lengths"]
    del record["sharding"]
    del record["optimizer"]
    record_path.write_text(json.dumps(record))
    trainer = training.trainer(run, checkpoint, **OPTIONS)
    trainer.check_resumed(run / "checkpoint-4")


KILLED_IN_REMOVAL = """
import os, signal, sys
from pathlib import Path
from normalign_llava.train.keeping.checkpoints import writing_checkpoint

def end(event, arguments):
    if event == "shutil.rmtree":
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(end)
with writing_checkpoint(sys.argv[1], 1):
    pass
"""


def test_a_checkpoint_whose_removal_was_interrupted_at_once_is_incomplete(prepared, run):
    last_checkpoint = run / "checkpoint-4"
    done = prepared.run(["-c", KILLED_IN_REMOVAL, last_checkpoint])
    assert done.returncode == -signal.SIGKILL
    assert (last_checkpoint / "optimizer.pt").exists()
    assert missing_from(last_checkpoint, 1)
    assert resolve_resume("last", run, 1) == run / "checkpoint-2"
