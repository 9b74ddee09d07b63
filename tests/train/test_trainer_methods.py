# SPDX-License-Identifier: Apache-2.0
"""Every public method of a Trainer before, between and after training; and what is set before."""

import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored
import torch
import training
from datasets import Dataset, IterableDataset
from json_files import read_json
from matplotlib.figure import Figure
from peft import LoraConfig
from PIL import Image
from torch.distributed.fsdp import FSDPModule
from transformers import AutoProcessor, EarlyStoppingCallback, TrainerCallback, TrainerState

from normalign_llava import NormAlignTrainer
from normalign_llava.checkpoint.files import LOCK
from normalign_llava.hub_cards.card import write
from normalign_llava.train import trainer as trainer_module
from normalign_llava.train.callbacks.progress import PAUSE, LossCurve, draw_losses
from normalign_llava.train.collator import ConversationCollator


pytestmark = pytest.mark.slow


def first_batch(trainer) -> dict:
    return trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])


def try_step(trainer) -> None:
    trainer.model.train()
    loss = trainer.training_step(trainer.model, first_batch(trainer))
    assert loss.isfinite()
    trainer.model.zero_grad()


def try_loss(trainer) -> None:
    for is_training in (True, False):
        trainer.model.train(is_training)
        loss = trainer.compute_loss(trainer.model, first_batch(trainer))
        loss_with_outputs, _ = trainer.compute_loss(
            trainer.model,
            first_batch(trainer),
            return_outputs=True,
        )
        assert loss.isfinite()
        assert loss_with_outputs == loss
    trainer.model.zero_grad()


def try_optimizer(trainer) -> None:
    optimizer = trainer.create_optimizer()
    assert trainer.create_optimizer() is optimizer
    trainer.create_scheduler(num_training_steps=2)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)


def try_metrics(trainer) -> None:
    trainer.log_metrics("eval", {"eval_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 1.0})


def try_logs(trainer) -> None:
    for is_training in (True, False):
        trainer.model.train(is_training)
        trainer.log({"loss": 1.5, "learning_rate": 1e-3})
        trainer.log({"eval_loss": 1.5})
        trainer.log({"own": 1})
        trainer.log({"train_runtime": 1.0, "train_loss": 1.0})


class Silent(TrainerCallback):
    """Does nothing."""


def try_callbacks(trainer) -> None:
    trainer.add_callback(Silent)
    trainer.remove_callback(Silent)
    trainer.add_callback(Silent())
    assert trainer.pop_callback(Silent)


def try_saves(trainer) -> None:
    output = Path(trainer.args.output_dir)
    elsewhere = Path(f"{output}-elsewhere")
    trainer.save_model(str(elsewhere))
    assert not (output / "README.md").exists()
    trainer.save_model()
    assert (output / "README.md").exists()
    assert not (elsewhere / "README.md").exists()
    for folder in (output, elsewhere):
        record = read_json(folder / "training.json")
        assert record["steps_done"] == trainer.state.global_step
    trainer.save_state()
    (output / "README.md").unlink()
    trainer.create_model_card()
    (output / "README.md").unlink()


def try_evaluations(trainer) -> None:
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.evaluate(training.rows(2))["eval_loss"] > 0
    assert trainer.evaluate({"a": training.rows(2)})["eval_a_loss"] > 0


def try_predictions(trainer) -> None:
    assert trainer.predict(training.rows(2)).metrics["test_loss"] > 0
    loader = trainer.get_test_dataloader(training.rows(2))
    assert trainer.evaluation_loop(loader, "test").num_samples == 2
    output = trainer.evaluation_loop(loader, "test", prediction_loss_only=True)
    assert output.predictions is None
    assert output.metrics["eval_loss"] > 0
    inputs = first_batch(trainer)
    loss, _, _ = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
    assert loss.isfinite()


def first_batch_size(loader) -> int:
    batch = next(iter(loader))
    return len(batch["input_ids"])


def try_loaders(trainer) -> None:
    assert first_batch_size(trainer.get_train_dataloader()) == 2
    assert first_batch_size(trainer.get_eval_dataloader()) == 3
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == len(trainer.train_dataset)
    assert trainer.set_initial_training_values(trainer.args, loader)
    batches, _ = trainer.get_batch_samples(iter(loader), 2, trainer.args.device)
    assert len(batches) == 2


def try_facts(trainer) -> None:
    trained_size = 0
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            trained_size += parameter.numel()
    assert trainer.get_num_trainable_parameters() == trained_size
    assert trainer.get_decay_parameter_names(trainer.model)
    assert trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    assert trainer.get_total_train_batch_size(trainer.args) == 2
    assert trainer.get_total_train_batch_size(SimpleNamespace(global_batch_size=12)) == 12
    assert trainer.get_sp_size() == 1
    assert trainer.get_tp_size() == 1
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.floating_point_ops({"input_ids": torch.ones(1, 3)}) >= 0
    trainer.store_flos()
    trainer.create_optimizer()
    assert trainer.get_learning_rates()
    assert trainer.get_optimizer_group()
    assert trainer.learning_rates["norm"] > 0
    assert "projector" in str(trainer.summary())
    assert trainer.estimate_memory().total > 0
    with trainer.compute_loss_context_manager():
        pass


OPTIMIZER_METHODS = [
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "create_scheduler",
]
OTHER_METHODS = {
    try_callbacks: ["add_callback", "pop_callback", "remove_callback"],
    try_loss: ["compute_loss"],
    try_saves: ["create_model_card", "save_model", "save_state"],
    try_evaluations: ["evaluate"],
    try_predictions: ["evaluation_loop", "get_test_dataloader", "predict", "prediction_step"],
    try_loaders: [
        "get_batch_samples",
        "get_eval_dataloader",
        "get_train_dataloader",
        "num_examples",
        "set_initial_training_values",
    ],
    try_facts: [
        "compute_loss_context_manager",
        "estimate_memory",
        "floating_point_ops",
        "get_decay_parameter_names",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_cls_and_kwargs",
        "get_optimizer_group",
        "get_sp_size",
        "get_total_train_batch_size",
        "get_tp_size",
        "is_local_process_zero",
        "is_world_process_zero",
        "store_flos",
        "summary",
    ],
    try_logs: ["log"],
    try_metrics: ["log_metrics", "save_metrics"],
    try_step: ["training_step"],
}
"""What is done with public methods other than those that make an optimizer, and their names."""

NOT_TRIED_HERE = {
    # Tried in other files.
    "train",
    "init_hf_repo",
    "publish",
    "push_to_hub",
    "end",
    "check_resumed",
    # These need a model_init, and SFTTrainer has none.
    "call_model_init",
    "hyperparameter_search",
    # The Trainer's own.
    "autocast_smart_context_manager",
    "compare_trainer_and_checkpoint_args",
    "create_accelerator_and_postprocess",
    "is_fsdp_xla_enabled",
    "propagate_args_to_deepspeed",
    "torch_jit_model_eval",
    "ipex_optimize_model",
    "get_cp_size",
    "tokenizer",
    "num_tokens",
    # The Trainer's fails wherever it is called as a method.
    "metrics_format",
}


def test_each_public_method_is_tried():
    methods = dict(inspect.getmembers(NormAlignTrainer, callable))
    public = {name for name in methods if not name.startswith("_")}
    tried = set(OPTIMIZER_METHODS)
    for method_names in OTHER_METHODS.values():
        tried.update(method_names)
    assert tried <= public
    assert public - tried - NOT_TRIED_HERE == set()


def make_trainer(folder, checkpoint, **options) -> NormAlignTrainer:
    return training.trainer(folder, checkpoint, held_out=training.rows(3), **options)


def losses_of_steps(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.fixture(scope="module")
def plain_losses(checkpoint, tmp_path_factory) -> list[float]:
    """Of a trainer that is asked for nothing but two steps."""
    folder = tmp_path_factory.mktemp("plain")
    trainer = make_trainer(folder, checkpoint)
    torch.manual_seed(0)
    trainer.train()
    losses = losses_of_steps(trainer)
    assert len(losses) == 2
    assert not (folder / "loss.png").exists(), "two points are no curve"
    return losses


def assert_works_around_training(trainer, attempts, plain_losses, forget_optimizer) -> None:
    """Attempts succeed before, between and after two trainings, and do not change the first."""
    for attempt in attempts:
        attempt(trainer)
    if forget_optimizer:
        # As of a trainer that was not asked.
        trainer.optimizer = None
        trainer.lr_scheduler = None
    torch.manual_seed(0)
    trainer.train()
    assert losses_of_steps(trainer)[-2:] == plain_losses
    for attempt in attempts:
        attempt(trainer)
    trainer.train()
    for attempt in attempts:
        attempt(trainer)
    trainer.save_model()
    assert stored.weights(trainer.args.output_dir)


def test_an_optimizer_is_made_before_between_and_after_training(tmp_path, checkpoint, plain_losses):
    trainer = make_trainer(tmp_path / "out", checkpoint)
    assert_works_around_training(trainer, [try_optimizer], plain_losses, forget_optimizer=False)


def test_each_method_works_before_between_and_after_training(tmp_path, checkpoint, plain_losses):
    trainer = make_trainer(tmp_path / "out", checkpoint)
    assert_works_around_training(trainer, OTHER_METHODS, plain_losses, forget_optimizer=True)


def test_batches_are_not_kept_after_training(tmp_path, checkpoint):
    trainer = make_trainer(tmp_path, checkpoint)
    trainer.train()
    for _ in range(3):
        try_loss(trainer)
    assert not trainer.finite._batches


def test_what_a_step_measured_is_not_logged_with_an_evaluation(tmp_path, checkpoint):
    trainer = make_trainer(tmp_path, checkpoint)
    trainer.train()
    trainer.probe = SimpleNamespace(collect=lambda: {"probed": 1.0})
    trainer.model.train()
    trainer.log({"own": 1.0})
    assert "probed" in trainer.state.log_history[-1]
    trainer.model.eval()
    trainer.log({"own": 1.0})
    assert "probed" not in trainer.state.log_history[-1]


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def text_rows(count: int) -> Dataset:
    """Rows as a user has them: not parsed, and without images."""
    conversations = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"user says {number}"},
            {"role": "assistant", "content": f"assistant says {number}"},
        ]
        conversations.append({"messages": messages})
    return Dataset.from_list(conversations)


def epoch_options(packing) -> dict:
    """An epoch in steps of four rows; a packed pass holds four short rows, and not four others."""
    return {
        "max_steps": -1,
        "num_train_epochs": 1,
        "packing": packing,
        "global_batch_size": 4,
        "max_length": 100,
        "per_device_train_batch_size": 2,
        "warmup_steps": 0,
    }


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_set_before_training_are_trained_on(tmp_path, checkpoint, packing):
    options = epoch_options(packing)
    reference = training.trainer(tmp_path / "given", checkpoint, text_rows(12), **options)
    parsed_rows = reference.train_dataset
    reference.train()
    for train_rows, method in ((text_rows(12), "summary"), (parsed_rows, "estimate_memory")):
        trainer = training.trainer(
            tmp_path / "set",
            checkpoint,
            training.rows(8),
            held_out=training.rows(3),
            probe_steps=[1],
            probe_rows=2,
            **options,
        )
        assert trainer.facts["steps"] == 2
        assert trainer.args.gradient_accumulation_steps == 2
        trainer.train_dataset = train_rows
        getattr(trainer, method)()
        assert trainer.facts["steps"] == 3
        passes = 1 if packing else 2
        assert trainer.args.gradient_accumulation_steps == passes
        # By this number a loss is divided.
        assert trainer.current_gradient_accumulation_steps == passes
        for data_facts in (trainer.facts["data"], trainer.record["data"]):
            used_rows = [(entry["split"], entry["used"]) for entry in data_facts]
            assert used_rows == [("train", 12), ("eval", 3)]
        padding_collator = dataclasses.replace(trainer.data_collator, padding_free=False)
        expected_probe = padding_collator(list(parsed_rows)[:2])
        assert torch.equal(trainer.probe.batch["input_ids"], expected_probe["input_ids"])
        trainer.train()
        assert trainer.facts["steps"] == 3
        assert trainer.state.max_steps == 3
        trainer.save_model()
        record = read_json(tmp_path / "set" / "training.json")
        assert record["data"][0]["used"] == 12
        assert record["run"]["steps"] == 3
        assert losses_of(trainer) == losses_of(reference)


def test_how_many_rows_may_turn_out_bad_follows_the_rows_that_are_set(tmp_path, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    collator = ConversationCollator(processor, bad_rows=0.5)
    train_options = training.arguments(tmp_path)
    trainer = NormAlignTrainer(str(checkpoint), train_options, collator, text_rows(8))
    assert trainer.data_collator.skippable == 4
    trainer.train_dataset = text_rows(4)
    trainer.summary()
    assert trainer.data_collator.skippable == 2
    assert trainer.data_collator.share == 0.0
    trainer.train_dataset = text_rows(4).to_iterable_dataset()
    trainer.summary()
    assert trainer.data_collator.share > 0


def test_rows_that_cannot_be_trained_on_are_refused_when_they_are_set(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, max_steps=-1, num_train_epochs=1)
    trainer.train_dataset = Dataset.from_list([{"prompt": "what?"}])
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(text_rows(4)))
    with pytest.raises(ValueError, match="A streamed data set has no length. Set max_steps"):
        trainer.train()
    trainer.train_dataset = [1, 2]
    with pytest.raises(TypeError, match="train_dataset is a list"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": "align", "language_learning_rate": 1e-3}, id="align"),
        pytest.param({"language_learning_rate": 0.0}, id="frozen language model"),
    ],
)
def test_rows_without_images_are_refused_when_they_are_set(tmp_path, checkpoint, options):
    trainer = training.trainer(tmp_path, checkpoint, **options)
    trainer.train_dataset = text_rows(4)
    with pytest.raises(ValueError, match="have no image"):
        trainer.summary()


def test_a_collator_that_is_set_before_training_makes_the_batches(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    lock = tmp_path / LOCK
    batch_sizes = []
    is_locked = []
    collator = trainer.data_collator

    def collate(samples):
        batch_sizes.append(len(samples))
        is_locked.append(lock.exists())
        return collator(samples)

    trainer.data_collator = collate
    trainer.train()
    assert batch_sizes[:2] == [2, 2]
    # No other run writes there meanwhile.
    assert all(is_locked)
    assert not lock.exists()
    assert trainer.record["seconds"] > 0


def test_rows_that_are_set_reach_another_collator_as_they_are(tmp_path, checkpoint):
    train_options = training.arguments(tmp_path, max_steps=-1, num_train_epochs=1)
    trainer = NormAlignTrainer(str(checkpoint), train_options, list, text_rows(4))
    assert trainer.facts["steps"] == 2
    trainer.train_dataset = Dataset.from_list([{"number": number} for number in range(8)])
    loader = trainer.get_train_dataloader()
    assert trainer.facts["steps"] == 4
    assert trainer.facts["data"] == []
    assert trainer.record["data"] == []
    samples = next(iter(loader))
    assert samples[0].keys() == {"number"}


def test_an_error_in_a_pass_says_how_large_it_was(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)

    def fail(*arguments):
        raise RuntimeError("out of memory")

    trainer.model.register_forward_pre_hook(fail)
    inputs = first_batch(trainer)
    row_count, token_count = inputs["input_ids"].shape
    assert row_count == 2
    with pytest.raises(RuntimeError, match="out of memory") as error:
        trainer.training_step(trainer.model, dict(inputs))
    assert f" {row_count} x {token_count:,} tokens" in error.value.__notes__[0]
    without_tokens = {"pixel_values": inputs["pixel_values"]}
    with pytest.raises(RuntimeError, match="out of memory") as error:
        trainer.training_step(trainer.model, without_tokens)
    assert not getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("is_first", [True, False])
def test_deepspeed_saves_what_is_trained_and_the_first_process_the_schedule(tmp_path, is_first):
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    saves = []

    def save_checkpoint(folder, exclude_frozen_parameters):
        state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        saves.append((folder, exclude_frozen_parameters, state))

    def module_state_dict(**options):
        return model.state_dict()

    engine = SimpleNamespace(
        module_state_dict=module_state_dict,
        save_checkpoint=save_checkpoint,
    )
    trainer = SimpleNamespace(
        model=model,
        model_wrapped=engine,
        is_deepspeed_enabled=True,
        args=SimpleNamespace(should_save=is_first),
        lr_scheduler=SimpleNamespace(state_dict=lambda: {"last_epoch": 3}),
    )
    NormAlignTrainer._save_optimizer_and_scheduler(trainer, tmp_path)
    assert len(saves) == 1
    folder, excludes_frozen, state = saves[0]
    assert folder == tmp_path
    assert excludes_frozen is True
    assert state.keys() == {"weight"}
    assert torch.equal(state["weight"], model.weight)
    assert engine.module_state_dict is module_state_dict
    schedule = tmp_path / "scheduler.pt"
    assert schedule.exists() == is_first
    if is_first:
        assert torch.load(schedule) == {"last_epoch": 3}


def test_a_model_that_is_sharded_is_saved_under_its_own_name_and_read_by_parts(
    tmp_path, checkpoint, monkeypatch
):
    trainer = training.trainer(tmp_path, checkpoint)
    model_class = type(trainer.model)
    trainer.model.__class__ = type(f"FSDP{model_class.__name__}", (FSDPModule, model_class), {})
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    config = read_json(saved / "config.json")
    assert config["architectures"] == [model_class.__name__]
    assert (saved / "modeling_normalign_llava.py").exists()  # the code of its class

    trainer.weights_in = [checkpoint]
    loads = []
    monkeypatch.setattr(trainer_module, "load_sharded", lambda *given: loads.append(given))
    trainer._load_from_checkpoint(str(saved))
    assert loads == [(trainer.model, saved)]
    assert trainer.weights_in == [saved, checkpoint]  # the newest first


def test_a_scale_that_is_damaged_is_named(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    # A run in float32 has no scale.
    trainer._load_scaler(str(folder))
    trainer._load_scaler(None)
    (folder / "scaler.pt").write_bytes(b"\xff" * 60)
    with pytest.raises(ValueError, match=f"{folder}/scaler.pt is damaged"):
        trainer._load_scaler(str(folder))


def test_under_fsdp_the_best_weights_are_read_as_a_checkpoint_is(tmp_path, capsys):
    best_checkpoint = tmp_path / "checkpoint-12"
    loads = []
    trainer = SimpleNamespace(
        args=training.arguments(tmp_path, metric_for_best_model="accuracy"),
        state=TrainerState(
            best_model_checkpoint=str(best_checkpoint),
            best_metric=0.75,
            global_step=30,
        ),
        model="model",
        is_fsdp_enabled=True,
        _load_from_checkpoint=lambda *given: loads.append(given),
        _best=None,
    )
    NormAlignTrainer._load_best_model(trainer)
    assert trainer._best is None  # it is not there
    best_checkpoint.mkdir()
    NormAlignTrainer._load_best_model(trainer)
    assert loads == [(str(best_checkpoint), "model")] * 2
    assert trainer._best == {
        "step": 12,
        "of_steps": 30,
        "metric": "eval_accuracy",
        "value": 0.75,
    }
    assert "step 12 of 30" in capsys.readouterr().out


def test_a_batch_counts_while_rows_are_evaluated_if_it_has_labels():
    trainer = SimpleNamespace(_evaluated=torch.zeros(3))
    labels = torch.tensor([[-100, 1], [-100, -100], [-100, 3]])
    NormAlignTrainer._count_evaluated(trainer, {"labels": labels}, torch.tensor(1.5))
    NormAlignTrainer._count_evaluated(trainer, {}, torch.tensor(1.5))
    # The loss of each of two rows; these rows; and the other one.
    assert trainer._evaluated.tolist() == [3.0, 2.0, 1.0]
    trainer._evaluated = None
    NormAlignTrainer._count_evaluated(trainer, {"labels": labels}, torch.tensor(1.5))
    assert trainer._evaluated is None


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_in_train", [True, False])
def test_the_first_process_writes_the_card_after_training(monkeypatch, is_first, is_in_train):
    cards = []

    def write_card(*arguments, **options):
        cards.append((arguments, options))

    monkeypatch.setattr(write, "write_card", write_card)
    trainer = SimpleNamespace(
        is_world_process_zero=lambda: is_first,
        is_in_train=is_in_train,
        args=SimpleNamespace(output_dir="a/b"),
        hub_model_id="ann/b",
    )
    NormAlignTrainer.create_model_card(trainer, "arguments of", model_name="TRL's")
    if is_first and not is_in_train:
        assert cards == [((Path("a/b"),), {"repo_id": "ann/b"})]
    else:
        assert cards == []


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_process_shows_the_first_batch(
    tmp_path, checkpoint, monkeypatch, capsys, is_first
):
    trainer = training.trainer(tmp_path, checkpoint)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: is_first)
    trainer._will_show_batch = True
    capsys.readouterr()
    trainer.training_step(trainer.model, first_batch(trainer))
    assert ("Row 1 of the first batch" in capsys.readouterr().out) == is_first


def test_every_sampler_of_a_loader_is_told_the_epoch():
    epochs = []
    inner_sampler = SimpleNamespace(set_epoch=lambda epoch: epochs.append(("inner", epoch)))
    own_sampler = SimpleNamespace(
        set_epoch=lambda epoch: epochs.append(("own", epoch)),
        sampler=inner_sampler,
    )
    loader = SimpleNamespace(batch_sampler=SimpleNamespace(batch_sampler=own_sampler))
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=4, max_steps=4),
        control=SimpleNamespace(should_training_stop=False),
    )
    NormAlignTrainer._run_epoch(trainer, None, 3, loader)
    assert epochs == [("own", 3), ("inner", 3)]
    assert trainer.control.should_training_stop  # it was resumed at its end
    NormAlignTrainer._run_epoch(trainer, None, 3, SimpleNamespace())  # a loader without samplers


def test_a_trainer_of_a_dry_run_does_not_train(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, dry_run=True)
    with pytest.raises(ValueError, match="dry_run"):
        trainer.train()


def test_a_run_is_not_resumed_without_a_complete_checkpoint(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    with pytest.raises(ValueError, match=f"{tmp_path} holds no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0


def test_held_out_rows_that_are_set_later_are_evaluated(tmp_path, checkpoint):
    trainer = make_trainer(tmp_path, checkpoint)
    expected = trainer.evaluate(text_rows(4))["eval_loss"]
    loss_before = trainer.evaluate()["eval_loss"]
    assert loss_before != expected
    trainer.eval_dataset = text_rows(4)
    assert trainer.evaluate()["eval_loss"] == expected
    trainer.eval_dataset = {"talk": text_rows(4), "shown": training.rows(3)}
    metrics = trainer.evaluate()
    assert metrics["eval_talk_loss"] == expected
    assert metrics["eval_shown_loss"] == pytest.approx(loss_before)


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 4,
    "load_best_model_at_end": True,
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
}
WORST_IS_BEST = {"metric_for_best_model": "loss", "greater_is_better": True}
"""The best step is an early one."""


def held_out_losses(trainer) -> dict[int, float]:
    losses = {}
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            losses[entry["step"]] = entry["eval_loss"]
    return losses


def assert_best_step_is_recorded(trainer, output_lines) -> Path:
    """Returns the checkpoint of the best of 4 steps."""
    output = Path(trainer.args.output_dir)
    losses = held_out_losses(trainer)
    best_step = max(losses, key=losses.get)
    assert best_step < 4
    record = read_json(output / "training.json")
    assert record["steps_done"] == best_step
    assert record["best"]["step"] == best_step
    assert record["best"]["of_steps"] == 4
    assert record["best"]["metric"] == "eval_loss"
    assert record["best"]["value"] == pytest.approx(losses[best_step])
    kept_lines = [line for line in output_lines if "kept" in line]
    assert len(kept_lines) == 1
    assert f"step {best_step} of 4" in kept_lines[0]
    best_checkpoint = output / f"checkpoint-{best_step}"
    checkpoint_record = read_json(best_checkpoint / "training.json")
    assert checkpoint_record["steps_done"] == best_step
    assert "best" not in checkpoint_record
    return best_checkpoint


def test_the_step_of_the_weights_that_are_kept_is_recorded_and_said(tmp_path, checkpoint, capsys):
    output = tmp_path / "out"
    trainer = make_trainer(
        output,
        checkpoint,
        vision_learning_rate=0.0,
        **BEST,
        **WORST_IS_BEST,
    )
    trainer.train()
    trainer.save_model()
    output_lines = capsys.readouterr().out.splitlines()
    best_checkpoint = assert_best_step_is_recorded(trainer, output_lines)
    training.assert_equal(stored.weights(output), stored.weights(best_checkpoint))


def test_a_best_step_is_not_recorded_if_its_weights_are_not_read(tmp_path, checkpoint, capsys):
    trainer = make_trainer(tmp_path / "out", checkpoint, use_peft=True, **BEST, **WORST_IS_BEST)
    trainer.train()
    trainer.save_model()
    output_lines = capsys.readouterr().out.splitlines()
    assert_best_step_is_recorded(trainer, output_lines)
    trainer.args.load_best_model_at_end = False
    trainer.args.max_steps = 1
    trainer.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "removed" / "checkpoint-3")
    trainer._load_best_model()  # the Trainer warns
    trainer.save_model(str(tmp_path / "again"))
    record = read_json(tmp_path / "again" / "training.json")
    assert record["steps_done"] == 1
    assert "best" not in record


def test_a_run_stops_early_and_a_resumed_one_at_the_same_step(tmp_path, checkpoint):
    options = {
        **BEST,
        "max_steps": 8,
        "early_stopping_patience": 3,
    }
    whole = make_trainer(tmp_path / "whole", checkpoint, **options)
    whole.train()
    losses = held_out_losses(whole)
    best_step = min(losses, key=losses.get)
    # By hand: the run ends three evaluations after the last that was better than all before.
    assert best_step + 3 < 8
    assert whole.state.global_step == best_step + 3

    stopped_folder = tmp_path / "stopped"
    last_step = best_step + 2
    stopped = make_trainer(stopped_folder, checkpoint, **{**options, "max_steps": last_step})
    stopped.train()
    resumed = make_trainer(stopped_folder, checkpoint, **options)
    resumed.train(resume_from_checkpoint=str(stopped_folder / f"checkpoint-{last_step}"))
    assert resumed.state.global_step == best_step + 3
    early_stopping = []
    for callback in resumed.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            early_stopping.append(callback)
    assert len(early_stopping) == 1


def steps_with_threshold(folder, checkpoint, threshold) -> int:
    """How many of 6 steps a run takes."""
    options = {
        **BEST,
        "max_steps": 6,
        "learning_rate": 1e-4,
        "early_stopping_patience": 2,
        "early_stopping_threshold": threshold,
    }
    trainer = make_trainer(folder, checkpoint, **options)
    trainer.train()
    return trainer.state.global_step


def test_a_threshold_says_how_much_better_is_better(tmp_path, checkpoint):
    assert steps_with_threshold(tmp_path / "low", checkpoint, threshold=0.0) == 6
    # The first evaluation is compared with none, or with itself once it is the best.
    assert steps_with_threshold(tmp_path / "high", checkpoint, threshold=100.0) <= 3


@pytest.mark.parametrize(
    "options, held_out_names",
    [
        pytest.param({"metric_for_best_model": "eval_accuracy"}, None, id="a metric"),
        pytest.param({}, ["easy", "hard"], id="the loss of several sets"),
        pytest.param(
            {"metric_for_best_model": "eval_medium_loss"},
            ["easy"],
            id="the loss of another set",
        ),
    ],
)
def test_what_tells_the_best_step_must_be_measured(tmp_path, checkpoint, options, held_out_names):
    held_out = training.rows(3)
    if held_out_names:
        held_out = {name: training.rows(3) for name in held_out_names}
    with pytest.raises(ValueError, match="metric_for_best_model .* is not measured here"):
        training.trainer(tmp_path, checkpoint, held_out=held_out, **BEST, **options)


def test_compute_metrics_may_measure_what_tells_the_best_step(tmp_path, checkpoint):
    train_options = training.arguments(tmp_path, metric_for_best_model="eval_accuracy", **BEST)
    trainer = NormAlignTrainer(
        str(checkpoint),
        train_options,
        train_dataset=training.rows(2),
        eval_dataset=training.rows(3),
        compute_metrics=len,
    )
    assert trainer.args.metric_for_best_model == "eval_accuracy"


def test_the_loss_of_a_named_set_tells_the_best_step(tmp_path, checkpoint):
    options = {
        **BEST,
        "metric_for_best_model": "eval_easy_loss",
        "greater_is_better": False,
        "max_steps": 1,
    }
    held_out = {"easy": training.rows(3)}
    trainer = training.trainer(tmp_path, checkpoint, held_out=held_out, **options)
    trainer.train()
    assert trainer.state.best_global_step == 1


def unlabelled(dataset: Dataset, numbers: set[int]) -> Dataset:
    """Rows of which some are not learned."""
    learned = []
    for number, sample_row in enumerate(dataset.with_format(None)):
        if number in numbers:
            learned.append([False] * len(sample_row["learned"]))
        else:
            learned.append(sample_row["learned"])
    without_column = dataset.remove_columns("learned")
    return without_column.add_column("learned", learned).cast(dataset.features)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("packing", [False, True])
def test_a_step_without_labels_is_passed_over(tmp_path, checkpoint, smoothing, packing):
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        unlabelled(training.rows(12), {4, 5, 6, 7}),
        label_smoothing_factor=smoothing,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=2,
        global_batch_size=4,
        max_steps=3,
        packing=packing,
        save_strategy="steps",
        save_steps=1,
        weight_decay=0.1,
        learning_rate=1e-2,
    )
    trainer.train()
    first = stored.weights(tmp_path / "checkpoint-1")
    second = stored.weights(tmp_path / "checkpoint-2")
    third = stored.weights(tmp_path / "checkpoint-3")
    training.assert_equal(second, first)
    assert any(not torch.equal(first[name], third[name]) for name in first)
    losses = losses_of(trainer)
    assert losses[1] == 0
    assert all(torch.tensor(losses).isfinite())


def smoothed_loss(model, inputs, smoothing) -> float:
    """The mean over the labels, in float64."""
    fields = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**fields).logits[:, :-1].double()
    labels = inputs["labels"][:, 1:]
    learned = labels != -100
    log_probabilities = logits.log_softmax(-1)[learned]
    of_labels = log_probabilities.gather(1, labels[learned][:, None])
    loss = -((1 - smoothing) * of_labels.mean() + smoothing * log_probabilities.mean())
    return loss.item()


def test_a_step_counts_only_its_labels(tmp_path, checkpoint):
    dataset = unlabelled(training.rows(4), {2, 3})
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        dataset,
        label_smoothing_factor=0.1,
        train_sampling_strategy="sequential",
        max_steps=1,
        per_device_train_batch_size=2,
        global_batch_size=4,
    )
    inputs = trainer.data_collator([dataset[0], dataset[1]])
    expected = smoothed_loss(trainer.model.train(), inputs, smoothing=0.1)
    loss_of_no_step = trainer.compute_loss(trainer.model, dict(inputs))
    assert loss_of_no_step.item() == pytest.approx(expected, rel=1e-5)
    trainer.train()
    assert losses_of(trainer)[0] == pytest.approx(expected, rel=1e-5)
    # Only tokens of the run are counted.
    assert trainer.state.log_history[0]["num_tokens"] == sum(dataset["length"])


LEARNING_RATES = {
    "vision_learning_rate": 1e-6,
    "projector_learning_rate": 2e-5,
    "norm_learning_rate": 3e-4,
    "language_learning_rate": 4e-3,
}


@pytest.mark.parametrize(
    "frozen, expected",
    [
        pytest.param([], 4e-3, id="nothing frozen"),
        pytest.param(["language"], 2e-5, id="frozen language model"),
        pytest.param(["language", "projector"], 3e-4, id="norm and vision trained"),
        pytest.param(["language", "projector", "norm"], 1e-6, id="vision trained"),
    ],
)
def test_the_learning_rate_of_the_first_trained_module_is_logged(
    tmp_path, checkpoint, frozen, expected
):
    frozen_rates = {f"{module}_learning_rate": 0.0 for module in frozen}
    learning_rates = {**LEARNING_RATES, **frozen_rates}
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.5},
        max_steps=2,
        warmup_steps=0,
        **learning_rates,
    )
    trainer.train()
    logged_rates = []
    for entry in trainer.state.log_history:
        if "loss" in entry:
            logged_rates.append(entry["learning_rate"])
    assert logged_rates[0] == pytest.approx(expected)
    assert trainer.optimizer.defaults["lr"] == pytest.approx(expected)


def test_the_options_of_a_trainer_give_another_trainer_the_same(tmp_path, checkpoint):
    def make(train_options):
        return NormAlignTrainer(
            str(checkpoint),
            train_options,
            train_dataset=training.rows(),
            peft_config=LoraConfig(r=2),
        )

    train_options = training.arguments(tmp_path, stage="tune", global_batch_size=4, max_steps=1)
    train_options = dataclasses.replace(train_options, learning_rate=None)
    before = repr(train_options)
    first = make(train_options)
    assert repr(train_options) == before
    assert train_options.accelerator_config is None
    assert first.learning_rates["projector"] == 2e-5
    second = make(dataclasses.replace(first.args, seed=5))
    assert second.learning_rates == first.learning_rates
    smaller = make(dataclasses.replace(first.args, per_device_train_batch_size=1))
    assert smaller.args.gradient_accumulation_steps == 4


def test_a_summary_is_printed_in_python_as_by_the_command(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, stage="align", global_batch_size=4)
    text = str(trainer.summary())
    lines = text.splitlines()
    for module_facts in trainer.facts["modules"]:
        name = module_facts["module"]
        first_word = name.split()[0]
        module_lines = []
        for line in lines:
            if line.split()[:1] == [first_word] and name in line:
                module_lines.append(line)
        assert len(module_lines) == 1
        assert f"{module_facts['parameters']:,}" in module_lines[0]
    assert "Tokens per image" in text
    assert max(map(len, lines)) <= 100
    data_facts = trainer.facts["data"]
    assert len(data_facts) == 1
    assert f"{data_facts[0]['used']:,}" in text


class Curves:
    """Reads the points of a picture's curves from what matplotlib draws."""

    def __init__(self, monkeypatch):
        self.drawn = []
        save_figure = Figure.savefig

        def read_and_save(figure, file, **options):
            assert len(figure.axes) == 1
            self.axes = figure.axes[0]
            curves = {}
            for line in self.axes.lines:
                curves[line.get_label()] = line.get_xydata().tolist()
            self.drawn.append(curves)
            return save_figure(figure, file, **options)

        monkeypatch.setattr(Figure, "savefig", read_and_save)


@pytest.fixture
def curves(monkeypatch):
    return Curves(monkeypatch)


def test_the_loss_curve_has_all_steps_of_a_resumed_run(tmp_path, checkpoint, curves):
    options = {
        **BEST,
        "max_steps": 2,
        "learning_rate": 1e-2,
    }
    make_trainer(tmp_path, checkpoint, **options).train()
    trainer = make_trainer(tmp_path, checkpoint, **{**options, "max_steps": 4})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    drawn = curves.drawn[-1]
    assert [step for step, _ in drawn["training"]] == [1, 2, 3, 4]
    assert [loss for _, loss in drawn["training"]] == losses_of(trainer)
    drawn_held_out = {step: loss for step, loss in drawn["held out"]}
    assert drawn_held_out == held_out_losses(trainer)
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (1050, 600)  # 7 by 4 inches


def test_the_curves_are_the_loss_and_every_held_out_loss(tmp_path, curves):
    history = [
        {"step": 2, "loss": 3.0, "learning_rate": 0.1},
        {
            "step": 2,
            "eval_easy_loss": 5.0,
            "eval_hard_loss": 6.0,
            "eval_easy_accuracy": 0.5,
        },
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.5},  # the step of a resumed run
        {"step": 2, "train_loss": 1.0},
        {"step": 3, "loss": 2.0},
        {"step": 3, "eval_loss": 7.0},
    ]
    train_options = SimpleNamespace(output_dir=str(tmp_path))
    LossCurve().on_train_end(train_options, TrainerState(log_history=history), None)
    assert curves.drawn == [
        {
            "training": [[1, 4.0], [2, 2.5], [3, 2.0]],
            "held out: easy": [[2, 5.0]],
            "held out: hard": [[2, 6.0]],
            "held out": [[3, 7.0]],
        }
    ]


@pytest.mark.parametrize("best_step", [None, 2])
def test_each_curve_has_its_name_and_the_best_step_a_line(tmp_path, curves, best_step):
    losses = {
        "loss": {1: 4.0, 2: 2.5},
        "eval_loss": {2: 3.0},
        "eval_hard_loss": {2: 6.0},
    }
    draw_losses(losses, tmp_path / "a.png", best=best_step)
    expected = {
        "training": [[1, 4.0], [2, 2.5]],
        "held out": [[2, 3.0]],
        "held out: hard": [[2, 6.0]],
    }
    expected_legend = set(expected)
    drawn = curves.drawn[-1]
    best_line = drawn.pop("best step", None)
    if best_step is None:
        assert best_line is None
    else:
        assert [step for step, _ in best_line] == [2, 2]
        expected_legend.add("best step")
    assert drawn == expected
    legend = {text.get_text() for text in curves.axes.get_legend().texts}
    assert legend == expected_legend
    for tick in curves.axes.get_xticks().tolist():
        assert tick.is_integer()
    assert curves.axes.get_xlabel() == "step"
    assert curves.axes.get_ylabel() == "loss"


def logged_losses(count: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": 2.0 / step} for step in range(1, count + 1)]


def test_the_curve_is_drawn_at_a_save_once_a_minute_in_the_first_process(tmp_path, curves):
    train_options = SimpleNamespace(output_dir=str(tmp_path))
    callback = LossCurve()
    state = TrainerState(log_history=logged_losses(3), best_global_step=1)
    callback.on_save(train_options, state, None)
    assert not curves.drawn
    callback._drawn_at -= PAUSE
    state_of_two_steps = TrainerState(log_history=logged_losses(2))
    callback.on_save(train_options, state_of_two_steps, None)  # no curve yet
    assert not curves.drawn
    state.is_world_process_zero = False
    callback.on_save(train_options, state, None)
    assert not curves.drawn
    state.is_world_process_zero = True
    callback.on_save(train_options, state, None)
    assert len(curves.drawn) == 1
    callback.on_save(train_options, state, None)
    assert len(curves.drawn) == 1
    assert "best step" in curves.drawn[0]
    assert (tmp_path / "loss.png").exists()
    callback.on_train_end(train_options, TrainerState(), None)  # nothing was logged
    assert len(curves.drawn) == 1


def test_a_picture_that_cannot_be_written_does_not_stop_a_run(tmp_path, checkpoint, caplog):
    trainer = training.trainer(tmp_path, checkpoint, max_steps=3)
    (tmp_path / "loss.png").mkdir(parents=True)
    (tmp_path / "loss.png" / "full").touch()
    trainer.train()
    trainer.save_model()
    assert stored.weights(tmp_path)
    assert "loss.png was not drawn" in caplog.text


def test_a_saved_model_has_the_notices_of_its_base_beside_a_card_by_somebody_else(
    tmp_path, checkpoint, caplog
):
    base = tmp_path / "base"
    output = tmp_path / "out"
    notice = "notices/vision/LICENSE"
    shutil.copytree(checkpoint, base)
    (base / notice).parent.mkdir(parents=True)
    (base / notice).write_text("the terms")
    build_record = read_json(base / "build.json")
    build_record["notices"] = [notice]
    (base / "build.json").write_text(json.dumps(build_record))
    trainer = training.trainer(output, base)
    (output / "README.md").write_text("# By hand\n")
    trainer.save_model()
    assert (output / notice).read_text() == "the terms"
    assert read_json(output / "build.json") == build_record
    assert (output / "README.md").read_text() == "# By hand\n"
    assert str(output) in caplog.text
    assert stored.weights(output)


def train_clipped(tmp_path, capsys, arm):
    """Trains with clipped steps: the first logged factor, and the lines about clipping."""
    checkpoint = training.checkpoint(tmp_path / arm, arm=arm)
    trainer = training.trainer(tmp_path / "run", checkpoint, max_grad_norm=1e-6)
    trainer.train()
    factors = [entry["gwc/factor"] for entry in trainer.state.log_history if "loss" in entry]
    output_lines = capsys.readouterr().out.splitlines()
    clipping_lines = [line for line in output_lines if "clipped to" in line]
    return factors[0], clipping_lines


def test_why_steps_are_clipped_is_said_once_with_gwc(tmp_path, capsys):
    factor, clipping_lines = train_clipped(tmp_path, capsys, arm="gwc")
    assert len(clipping_lines) == 1
    assert f"by {factor:.3g}," in clipping_lines[0]


def test_why_steps_are_clipped_is_not_said_without_gwc(tmp_path, capsys):
    _, clipping_lines = train_clipped(tmp_path, capsys, arm="aligned")
    assert clipping_lines == []


def test_what_is_counted_between_logs_does_not_grow(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, logging_strategy="epoch", max_steps=6)
    trainer.train()
    sizes = []
    for attribute in vars(trainer.measurements).values():
        if isinstance(attribute, list | dict):
            sizes.append(len(attribute))
        elif isinstance(attribute, torch.Tensor):
            sizes.append(attribute.numel())
    assert max(sizes) <= 5


def test_a_run_resumed_in_python_does_not_change_its_precision(tmp_path, checkpoint, processor):
    def make(**options):
        options = {"bf16": None, **options}
        return training.trainer(
            tmp_path,
            checkpoint,
            save_strategy="steps",
            save_steps=1,
            **options,
        )

    processor(0.3)
    first = make(max_steps=1)
    first.train()
    assert first.args.bf16
    processor(5.0)
    assert not make().args.bf16  # a new run in the same folder
    last_checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="began with bf16=True.*NormAlignConfig resume_from_ch"):
        make().train(resume_from_checkpoint=last_checkpoint)
    resumed = make(resume_from_checkpoint=True)
    assert resumed.args.bf16
    resumed.train(resume_from_checkpoint=last_checkpoint)
    assert resumed.state.global_step == 2
    shutil.rmtree(tmp_path / "checkpoint-2")
    # The precision is chosen, but the run has another.
    with pytest.raises(ValueError, match="differs in bf16"):
        make(bf16=False).train(resume_from_checkpoint=last_checkpoint)
    make(bf16=True).train(resume_from_checkpoint=last_checkpoint)


def one_step_more(tmp_path, checkpoint, max_steps):
    return training.trainer(
        tmp_path,
        checkpoint,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=1,
    )


@pytest.mark.parametrize("named", [True, False], ids=["named checkpoint", "last checkpoint"])
def test_seconds_of_a_resumed_run_include_those_before(tmp_path, checkpoint, named):
    first = one_step_more(tmp_path, checkpoint, max_steps=1)
    skipped_rows = first.data_collator.skipped_rows
    skipped_rows.add("data", 3, allowed=9)
    first.train()
    assert not skipped_rows.path.exists()  # a run that begins counts anew
    first_checkpoint = tmp_path / "checkpoint-1"
    record = read_json(first_checkpoint / "training.json")
    record["seconds"] = 5000.0
    (first_checkpoint / "training.json").write_text(json.dumps(record))
    resume_from = str(first_checkpoint)
    if not named:
        (tmp_path / "checkpoint-9").mkdir()  # not complete
        resume_from = True

    trainer = one_step_more(tmp_path, checkpoint, max_steps=2)
    trainer.data_collator.skipped_rows.add("data", 3, allowed=9)
    trainer.train(resume_from_checkpoint=resume_from)
    assert skipped_rows.path.exists()
    seconds_at_end = trainer.record["seconds"]
    trainer.save_model()
    seconds = read_json(tmp_path / "training.json")["seconds"]
    assert 5000.0 < seconds < 5600.0
    assert seconds == seconds_at_end  # saving it again is not counted
    seconds_in_checkpoint = read_json(tmp_path / "checkpoint-2" / "training.json")["seconds"]
    assert 5000.0 < seconds_in_checkpoint <= seconds


def assert_row_is_shown(shown, number, sample_row, processor) -> None:
    """A row of the first batch, with its images' patches counted and its answers marked."""
    image_token = processor.image_token
    parts = shown.split(f"Row {number + 1} of the first batch:\n\n")
    assert len(parts) == 2
    text = parts[1].partition("\n\nRow")[0]
    batch = ConversationCollator(processor)([sample_row])
    assert len(batch["input_ids"]) == 1
    token_ids = batch["input_ids"][0].tolist()
    patches = f"{image_token} x {token_ids.count(processor.image_token_id)}"
    assert patches in text
    text_ids = [token for token in token_ids if token != processor.image_token_id]
    plain_text = text.replace(patches, "").replace("[[", "").replace("]]", "")
    assert plain_text.startswith(processor.tokenizer.decode(text_ids))
    answers = [turn["content"][0]["text"] for turn in sample_row["messages"][1::2]]
    learned_parts = re.findall(r"\[\[(.*?)\]\]", text, re.S)
    assert len(learned_parts) == len(answers)
    for answer, learned in zip(answers, learned_parts, strict=True):
        assert learned.startswith(answer)


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_first_batch_of_a_run_is_shown_on_request(checkpoint, tmp_path, capsys, padding_free):
    dataset = training.rows(4)
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        dataset,
        show_first_batch=True,
        padding_free=padding_free,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    shown = capsys.readouterr().out
    for number in range(2):
        assert_row_is_shown(shown, number, dataset[number], trainer.processing_class)
    assert "Row 3" not in shown  # the second step's rows are not shown


@pytest.mark.parametrize("padding_free", [False, True])
def test_no_batch_is_shown_by_default(checkpoint, tmp_path, capsys, padding_free):
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        training.rows(4),
        padding_free=padding_free,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    assert "of the first batch" not in capsys.readouterr().out
