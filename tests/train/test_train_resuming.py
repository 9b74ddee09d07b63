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
from normalign_llava.train.keeping.same_run import FREE, OF_ACCELERATOR
from normalign_llava.train.options import ModelArguments, NormAlignConfig


pytestmark = pytest.mark.slow

ADAPTERS = dict(use_peft=True, lora_dropout=0.3)
SAVED = dict(max_steps=4, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")

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


def options() -> set[str]:
    """Every option that may have another value than its default."""
    names = set()
    for kind in (NormAlignConfig, ModelArguments, DataArguments):
        for field in dataclasses.fields(kind):
            if not field.metadata.get("help", "").startswith(REFUSED):
                names.add(field.name)
    return names


def test_of_every_option_it_is_decided_whether_it_changes_steps():
    assert not FREE & COMPARED
    undecided = options() - FREE - COMPARED
    assert not undecided, "put each into FREE of train/keeping/same_run.py or into COMPARED"
    assert options() == FREE | COMPARED
    assert {field.name for field in dataclasses.fields(AcceleratorConfig)} == OF_ACCELERATOR.keys()


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    """A run with adapters and dropout, with checkpoint-2 and checkpoint-4."""
    root = tmp_path_factory.mktemp("run")
    training.trainer(root, checkpoint, **ADAPTERS, **SAVED).train()
    return root


CHANGES = [
    dict(dataloader_drop_last=True),
    dict(accelerator_config={"even_batches": False}),
    dict(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}),
    dict(max_grad_norm=None),
    dict(max_grad_norm=0.5),
    dict(pad_to_multiple_of=8),
    dict(adam_beta2=0.99),
    dict(optim="sgd"),
    dict(optim_args="amsgrad=True"),
    dict(lr_scheduler_kwargs={"a": 1}),
    dict(average_tokens_across_devices=False),
    dict(label_smoothing_factor=0.1),
    dict(neftune_noise_alpha=5.0),
    dict(data_seed=7),
    dict(lora_alpha=64),
    dict(gradient_accumulation_steps=2),
    dict(train_sampling_strategy="sequential"),
    dict(norm_learning_rate=1e-4),
    dict(padding_free=True),
    dict(attn_implementation="eager"),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_changes_steps_is_refused_by_name(checkpoint, written, tmp_path, change):
    of_model = change.pop("attn_implementation", None)
    trainer = training.trainer(tmp_path, checkpoint, **{**ADAPTERS, **SAVED, **change})
    if of_model:
        trainer.record["options"]["attn_implementation"] = of_model
    name = next(iter(change), "attn_implementation")
    said = {"norm_learning_rate": "learning rate of norm", "lora_alpha": "adapters"}.get(name, name)
    with pytest.raises(ValueError, match=f"differs in .*{said}"):
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))
    assert trainer.state.global_step == 0


def test_other_rows_of_equal_counts_and_another_optimizer_are_refused(
    checkpoint, written, tmp_path
):
    rows = training.rows()
    backwards = rows.select(range(len(rows) - 1, -1, -1))
    trainer = training.trainer(tmp_path, checkpoint, backwards, **ADAPTERS, **SAVED)
    with pytest.raises(ValueError, match="differs in row_lengths"):
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))
    kept = training.trainer(tmp_path, checkpoint, **ADAPTERS, **SAVED)
    kept.record["optimizer"] = {"class": "torch.optim.sgd.SGD", "momentum": 0.9}
    with pytest.raises(ValueError, match="differs in optimizer .*momentum"):
        kept.check_resumed(written / "checkpoint-4")
    kept.record |= {"optimizer": None, "sharding": "DeepSpeed"}
    with pytest.raises(ValueError, match="differs in sharding .was none, is DeepSpeed"):
        kept.check_resumed(written / "checkpoint-4")


FREELY = dict(gradient_checkpointing=True, dataloader_num_workers=2, logging_steps=2)
FREELY |= dict(dataloader_persistent_workers=False, dataloader_prefetch_factor=3)
FREELY |= dict(eval_strategy="steps", eval_steps=1, probe_steps=[2, 3], save_steps=1)
FREELY |= dict(bad_steps="skip", torch_empty_cache_steps=1, save_total_limit=3)


def test_what_may_change_changes_no_bit_of_the_steps_to_come(checkpoint, written, tmp_path):
    shutil.copytree(written / "checkpoint-2", tmp_path / "checkpoint-2")
    changed = {**ADAPTERS, **SAVED, **FREELY}
    assert {*FREELY} <= FREE
    held_out = training.rows(3)
    trainer = training.trainer(tmp_path, checkpoint, held_out=held_out, **changed)
    trainer.train(resume_from_checkpoint=True)
    names = ("checkpoint-4/adapter_model.safetensors", "checkpoint-4/optimizer.pt")
    weights = [stored.load_file(root / names[0]) for root in (written, tmp_path)]
    training.assert_equal(*weights)
    states = [torch.load(root / names[1])["state"] for root in (written, tmp_path)]
    training.assert_equal(*states)


def test_evaluations_and_readers_of_batches_change_no_dropout(checkpoint, tmp_path):
    ends = []
    options = {**ADAPTERS, "max_steps": 10}  # eight steps an epoch
    readers = dict(dataloader_num_workers=2, dataloader_persistent_workers=True)
    evaluated = dict(eval_strategy="steps", eval_steps=2, **readers)
    for more in ({}, readers, evaluated):
        torch.manual_seed(0)  # for adapters
        trainer = training.trainer(
            tmp_path, checkpoint, held_out=training.rows(3), **options, **more
        )
        trainer.train()
        ends.append(trainer.model.state_dict())
    for end in ends[1:]:
        training.assert_equal(end, ends[0])


def test_a_loader_without_a_seed_of_its_own_is_refused_where_a_run_is_saved(tmp_path):
    unseeded = dict(accelerator_config={"use_seedable_sampler": False})
    with pytest.raises(ValueError, match="use_seedable_sampler false .* save_strategy: no"):
        training.settings(tmp_path, **unseeded, save_strategy="steps")
    training.settings(tmp_path, **unseeded, save_strategy="no")


@pytest.fixture
def run(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def test_a_run_is_not_resumed_before_checkpoints_that_would_then_be_the_newest(run, tmp_path):
    named = str(run / "checkpoint-2")
    with pytest.raises(ValueError, match="holds checkpoint-4. .* another --output_dir"):
        resolve_resume(named, run, 1)
    assert resolve_resume(named, tmp_path / "other", 1) == run / "checkpoint-2"
    os.truncate(run / "checkpoint-4" / "trainer_state.json", 10)  # is written over
    assert resolve_resume(named, run, 1) == run / "checkpoint-2"
    shutil.rmtree(run / "checkpoint-4")
    assert resolve_resume(named, run, 1) == resolve_resume("last", run, 1) == run / "checkpoint-2"


def test_states_of_more_processes_are_refused(run):
    folder = run / "checkpoint-4"
    state = (folder / "rng_state.pth").read_bytes()
    (folder / "rng_state.pth").unlink()
    for rank in range(3):
        (folder / f"rng_state_{rank}.pth").write_bytes(state)
    assert missing_from(folder, 3) == []
    for processes in (1, 2, 4):
        (missing,) = missing_from(folder, processes)
        assert missing == f"random states of {processes} process(es) (it has 3)"
        with pytest.raises(ValueError, match=r"lacks random states of . process"):
            resolve_resume(str(folder), run, processes)


STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_cut_short_is_named_before_anything_is_read(run, name):
    file = run / "checkpoint-4" / name
    os.truncate(file, file.stat().st_size - 30)
    with pytest.raises(ValueError, match=f"lacks a whole {name} .it is damaged"):
        resolve_resume(str(file.parent), run, 1)
    with pytest.raises(ValueError, match=f"checkpoint-4. It only lacks a whole {name}"):
        resolve_resume("last", run, 1)


@pytest.mark.parametrize("name", [*STATES, "adapter_model.safetensors"])
def test_a_damaged_file_is_named_and_the_remedy_works(checkpoint, run, name):
    file = run / "checkpoint-4" / name
    content = bytearray(file.read_bytes())
    start = 0 if name.endswith(".safetensors") else 80
    content[start : start + 60] = b"\xff" * 60
    file.write_bytes(content)
    trainer = training.trainer(run, checkpoint, **{**ADAPTERS, **SAVED, "max_steps": 5})
    with pytest.raises(
        ValueError, match=f"checkpoint-4/{name} is damaged: .* Remove .*checkpoint-4"
    ):
        trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(file.parent)
    trainer = training.trainer(run, checkpoint, **{**ADAPTERS, **SAVED, "max_steps": 5})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


@pytest.mark.parametrize("content", [None, "{", "[]", '{"steps_done": 4}'])
def test_a_checkpoint_that_does_not_say_of_which_run_it_is_is_refused(checkpoint, run, content):
    file = run / "checkpoint-4" / "training.json"
    file.unlink()
    if content:
        file.write_text(content)
    trainer = training.trainer(run, checkpoint, **ADAPTERS, **SAVED)
    with pytest.raises(ValueError, match="checkpoint-4/training.json is missing or damaged"):
        trainer.train(resume_from_checkpoint=True)


def test_a_record_of_an_earlier_version_is_compared_by_what_it_has(checkpoint, run):
    file = run / "checkpoint-4" / "training.json"
    record = json.loads(file.read_text())
    for name in ("row_lengths", "sharding", "optimizer"):
        del record[name]
    file.write_text(json.dumps(record))
    training.trainer(run, checkpoint, **ADAPTERS, **SAVED).check_resumed(file.parent)


REMOVED = """
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
    done = prepared.run(["-c", REMOVED, run / "checkpoint-4"])
    assert done.returncode == -signal.SIGKILL
    assert (run / "checkpoint-4" / "optimizer.pt").exists()
    assert missing_from(run / "checkpoint-4", 1)
    assert resolve_resume("last", run, 1) == run / "checkpoint-2"
