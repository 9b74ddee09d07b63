# SPDX-License-Identifier: Apache-2.0
"""Every public method of a Trainer before, between and after training; and what is set before."""

import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored
import torch
import training
from datasets import Dataset, IterableDataset
from torch.distributed.fsdp import FSDPModule
from transformers import AutoProcessor, EarlyStoppingCallback, TrainerCallback, TrainerState

from normalign_llava import NormAlignTrainer
from normalign_llava.checkpoint.files import LOCK
from normalign_llava.hub_cards.card import write
from normalign_llava.train import trainer as trainer_module
from normalign_llava.train.callbacks.loss_curve import PAUSE, LossCurve, draw_losses, loss_curves
from normalign_llava.train.collator import ConversationCollator


pytestmark = pytest.mark.slow


def batch(trainer) -> dict:
    return trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])


def step(trainer) -> None:
    trainer.model.train()
    loss = trainer.training_step(trainer.model, batch(trainer))
    assert loss.isfinite()
    trainer.model.zero_grad()


def loss(trainer) -> None:
    for mode in (True, False):
        trainer.model.train(mode)
        alone = trainer.compute_loss(trainer.model, batch(trainer))
        value, _ = trainer.compute_loss(trainer.model, batch(trainer), return_outputs=True)
        assert alone.isfinite() and value == alone
    trainer.model.zero_grad()


def scheduled(trainer) -> None:
    made = trainer.create_optimizer()
    assert trainer.create_optimizer() is made
    trainer.create_scheduler(num_training_steps=2)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)


def saved_metrics(trainer) -> None:
    trainer.log_metrics("eval", {"eval_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 1.0})


def logged(trainer) -> None:
    for mode in (True, False):
        trainer.model.train(mode)
        trainer.log({"loss": 1.5, "learning_rate": 1e-3})
        trainer.log({"eval_loss": 1.5})
        trainer.log({"own": 1})
        trainer.log({"train_runtime": 1.0, "train_loss": 1.0})


class Silent(TrainerCallback):
    """Does nothing."""


def callbacks(trainer) -> None:
    trainer.add_callback(Silent)
    trainer.remove_callback(Silent)
    trainer.add_callback(Silent())
    assert trainer.pop_callback(Silent)


def saved(trainer) -> None:
    output, elsewhere = (Path(f"{trainer.args.output_dir}{end}") for end in ("", "-elsewhere"))
    trainer.save_model(str(elsewhere))
    assert not (output / "README.md").exists()
    trainer.save_model()
    assert (output / "README.md").exists() and not (elsewhere / "README.md").exists()
    for folder in (output, elsewhere):
        record = json.loads((folder / "training.json").read_text())
        assert record["steps_done"] == trainer.state.global_step
    trainer.save_state()
    (output / "README.md").unlink()
    trainer.create_model_card()
    (output / "README.md").unlink()


def evaluated(trainer) -> None:
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.evaluate(training.rows(2))["eval_loss"] > 0
    assert trainer.evaluate({"a": training.rows(2)})["eval_a_loss"] > 0


def predicted(trainer) -> None:
    assert trainer.predict(training.rows(2)).metrics["test_loss"] > 0
    loader = trainer.get_test_dataloader(training.rows(2))
    assert trainer.evaluation_loop(loader, "test").num_samples == 2
    output = trainer.evaluation_loop(loader, "test", prediction_loss_only=True)
    assert output.predictions is None and output.metrics["eval_loss"] > 0
    inputs = batch(trainer)
    value, _, _ = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
    assert value.isfinite()


def loaders(trainer) -> None:
    loaded = {"train": trainer.get_train_dataloader(), "eval": trainer.get_eval_dataloader()}
    sizes = {name: len(next(iter(loader))["input_ids"]) for name, loader in loaded.items()}
    assert sizes == {"train": 2, "eval": 3}
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == len(trainer.train_dataset)
    assert trainer.set_initial_training_values(trainer.args, loader)
    batches, _ = trainer.get_batch_samples(iter(loader), 2, trainer.args.device)
    assert len(batches) == 2


def facts(trainer) -> None:
    trained = sum(value.numel() for value in trainer.model.parameters() if value.requires_grad)
    assert trainer.get_num_trainable_parameters() == trained
    assert trainer.get_decay_parameter_names(trainer.model)
    assert trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    assert trainer.get_total_train_batch_size(trainer.args) == 2
    assert trainer.get_total_train_batch_size(SimpleNamespace(global_batch_size=12)) == 12
    assert (trainer.get_sp_size(), trainer.get_tp_size()) == (1, 1)
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()
    assert trainer.floating_point_ops({"input_ids": torch.ones(1, 3)}) >= 0
    trainer.store_flos()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() and trainer.get_optimizer_group()
    assert trainer.learning_rates["norm"] > 0
    assert "projector" in str(trainer.summary())
    assert trainer.estimate_memory().total > 0
    with trainer.compute_loss_context_manager():
        pass


MAKES_OPTIMIZER = "create_optimizer create_optimizer_and_scheduler create_scheduler"
METHODS = {
    "add_callback pop_callback remove_callback": callbacks,
    "compute_loss": loss,
    "create_model_card save_model save_state": saved,
    MAKES_OPTIMIZER: scheduled,
    "evaluate": evaluated,
    "evaluation_loop get_test_dataloader predict prediction_step": predicted,
    "get_batch_samples get_eval_dataloader get_train_dataloader num_examples "
    "set_initial_training_values": loaders,
    "compute_loss_context_manager estimate_memory floating_point_ops get_decay_parameter_names "
    "get_learning_rates get_num_trainable_parameters get_optimizer_cls_and_kwargs "
    "get_optimizer_group get_sp_size get_total_train_batch_size get_tp_size is_local_process_zero "
    "is_world_process_zero store_flos summary": facts,
    "log": logged,
    "log_metrics save_metrics": saved_metrics,
    "training_step": step,
}
"""Each public method, and what is done with it."""

ELSEWHERE = {
    *("train", "init_hf_repo", "publish", "push_to_hub", "end"),  # in other files
    "check_resumed",  # in other files
    *("call_model_init", "hyperparameter_search"),  # need a model_init, which SFTTrainer has not
    *("autocast_smart_context_manager", "compare_trainer_and_checkpoint_args"),  # the Trainer's
    *("create_accelerator_and_postprocess", "is_fsdp_xla_enabled", "propagate_args_to_deepspeed"),
    "metrics_format",  # the Trainer's fails wherever it is called as a method
    *("torch_jit_model_eval", "ipex_optimize_model", "get_cp_size", "tokenizer", "num_tokens"),
}


def test_each_public_method_is_tried():
    methods = dict(inspect.getmembers(NormAlignTrainer, callable))
    public = {name for name in methods if not name.startswith("_")}
    tried = {name for names in METHODS for name in names.split()}
    assert tried <= public
    assert public - tried - ELSEWHERE == set()


def make(folder, checkpoint, **options) -> NormAlignTrainer:
    return training.trainer(folder, checkpoint, held_out=training.rows(3), **options)


def steps_losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.fixture(scope="module")
def plain_losses(checkpoint, tmp_path_factory) -> list[float]:
    """Of a trainer that is asked for nothing but two steps."""
    folder = tmp_path_factory.mktemp("plain")
    trainer = make(folder, checkpoint)
    torch.manual_seed(0)
    trainer.train()
    losses = steps_losses(trainer)
    assert len(losses) == 2
    assert not (folder / "loss.png").exists(), "two points are no curve"
    return losses


@pytest.mark.parametrize("makes_optimizer", [True, False])
def test_each_works_before_between_and_after_training(
    tmp_path, checkpoint, plain_losses, makes_optimizer
):
    tried = [METHODS[MAKES_OPTIMIZER]]
    if not makes_optimizer:
        tried = [METHODS[names] for names in METHODS if names != MAKES_OPTIMIZER]
    trainer = make(tmp_path / "out", checkpoint)

    def try_all():
        for method in tried:
            method(trainer)

    try_all()
    if not makes_optimizer:
        trainer.optimizer = trainer.lr_scheduler = None  # as of a trainer that was not asked
    torch.manual_seed(0)
    trainer.train()
    assert steps_losses(trainer)[-2:] == plain_losses
    try_all()
    trainer.train()
    try_all()
    trainer.save_model()
    assert stored.weights(tmp_path / "out")


def test_what_is_computed_after_training_is_not_kept(tmp_path, checkpoint):
    trainer = make(tmp_path, checkpoint)
    trainer.train()
    for _ in range(3):
        loss(trainer)
    assert not trainer.finite._batches
    trainer.probe = SimpleNamespace(collect=lambda: {"probed": 1.0})
    for mode in (True, False):  # what a step measured is not logged with an evaluation
        trainer.model.train(mode)
        trainer.log({"own": 1.0})
        assert ("probed" in trainer.state.log_history[-1]) is mode


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def words(count: int) -> Dataset:
    """Rows as a user has them: not parsed, and without images."""
    turns = [
        {"role": role, "content": f"{role} says {number}"}
        for number in range(count)
        for role in ("user", "assistant")
    ]
    return Dataset.from_list(
        [{"messages": turns[2 * number : 2 * number + 2]} for number in range(count)]
    )


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_set_before_training_are_trained_on(tmp_path, checkpoint, packing):
    options = dict(max_steps=-1, num_train_epochs=1, packing=packing, global_batch_size=4)
    options["max_length"] = (
        100  # a packed pass holds four rows of words, and not four of the others
    )
    options |= dict(per_device_train_batch_size=2, warmup_steps=0)
    given = training.trainer(tmp_path / "given", checkpoint, words(12), **options)
    for other, tell in ((words(12), "summary"), (given.train_dataset, "estimate_memory")):
        more = dict(held_out=training.rows(3), probe_steps=[1], probe_rows=2)
        trainer = training.trainer(
            tmp_path / "set", checkpoint, training.rows(8), **options, **more
        )
        assert trainer.facts["steps"] == 2
        assert trainer.args.gradient_accumulation_steps == 2
        trainer.train_dataset = other
        getattr(trainer, tell)()
        assert trainer.facts["steps"] == 3
        assert trainer.args.gradient_accumulation_steps == (1 if packing else 2)
        passes = trainer.current_gradient_accumulation_steps  # by which a loss is divided
        assert passes == trainer.args.gradient_accumulation_steps
        for data in (trainer.facts["data"], trainer.record["data"]):
            assert [(part["split"], part["used"]) for part in data] == [("train", 12), ("eval", 3)]
        expected = replace(trainer.data_collator, padding_free=False)(list(given.train_dataset)[:2])
        assert torch.equal(trainer.probe.batch["input_ids"], expected["input_ids"])
        trainer.train()
        assert trainer.state.max_steps == trainer.facts["steps"] == 3
        trainer.save_model()
        record = json.loads((tmp_path / "set" / "training.json").read_text())
        assert (record["data"][0]["used"], record["run"]["steps"]) == (12, 3)
        if not given.state.log_history:
            given.train()
        assert losses_of(trainer) == losses_of(given)


def test_how_many_rows_may_turn_out_bad_follows_the_rows_that_are_set(tmp_path, checkpoint):
    collator = ConversationCollator(AutoProcessor.from_pretrained(checkpoint), bad_rows=0.5)
    args = training.arguments(tmp_path)
    trainer = NormAlignTrainer(str(checkpoint), args, collator, words(8))
    assert trainer.data_collator.skippable == 4
    trainer.train_dataset = words(4)
    trainer.summary()
    assert trainer.data_collator.skippable == 2


def test_rows_that_cannot_be_trained_on_are_refused_when_they_are_set(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, max_steps=-1, num_train_epochs=1)
    trainer.train_dataset = Dataset.from_list([{"prompt": "what?"}])
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(words(4)))
    with pytest.raises(ValueError, match="A streamed data set has no length. Set max_steps"):
        trainer.train()
    trainer.train_dataset = [1, 2]
    with pytest.raises(TypeError, match="train_dataset is a list"):
        trainer.train()
    for own in (dict(stage="align", language_learning_rate=1e-3), dict(language_learning_rate=0.0)):
        trainer = training.trainer(tmp_path, checkpoint, **own)
        trainer.train_dataset = words(4)
        with pytest.raises(ValueError, match="have no image"):
            trainer.summary()


def test_a_collator_that_is_set_before_training_makes_the_batches(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    seen = []
    locked = []
    own = trainer.data_collator

    def collate(examples):
        seen.append(len(examples))
        locked.append((tmp_path / LOCK).exists())
        return own(examples)

    trainer.data_collator = collate
    trainer.train()
    assert seen[:2] == [2, 2]
    assert all(locked) and not (tmp_path / LOCK).exists()  # no other run writes there meanwhile
    assert trainer.record["seconds"] > 0


def test_rows_that_are_set_reach_another_collator_as_they_are(tmp_path, checkpoint):
    args = training.arguments(tmp_path, max_steps=-1, num_train_epochs=1)
    trainer = NormAlignTrainer(str(checkpoint), args, list, words(4))
    assert trainer.facts["steps"] == 2
    trainer.train_dataset = Dataset.from_list([{"number": number} for number in range(8)])
    loader = trainer.get_train_dataloader()
    assert trainer.facts["steps"] == 4
    assert trainer.facts["data"] == trainer.record["data"] == []
    assert next(iter(loader))[0].keys() == {"number"}


def test_an_error_in_a_pass_says_how_large_it_was(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = trainer.model.register_forward_pre_hook(fail)
    inputs = batch(trainer)
    rows, tokens = inputs["input_ids"].shape
    with pytest.raises(RuntimeError, match="out of memory") as error:
        trainer.training_step(trainer.model, dict(inputs))
    assert rows == 2 and f" {rows} x {tokens:,} tokens" in error.value.__notes__[0]
    with pytest.raises(RuntimeError, match="out of memory") as error:
        trainer.training_step(trainer.model, {"pixel_values": inputs["pixel_values"]})
    assert not getattr(error.value, "__notes__", [])
    handle.remove()


@pytest.mark.parametrize("is_first", [True, False])
def test_deepspeed_saves_what_is_trained_and_the_first_process_the_schedule(tmp_path, is_first):
    model = torch.nn.Linear(2, 3)
    saved = []
    model.bias.requires_grad_(False)

    def save_checkpoint(folder, exclude_frozen_parameters):
        state = wrapped.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        saved.append((folder, exclude_frozen_parameters, state))

    def whole(**kwargs):
        return model.state_dict()

    wrapped = SimpleNamespace(module_state_dict=whole, save_checkpoint=save_checkpoint)
    trainer = SimpleNamespace(model=model, model_wrapped=wrapped, is_deepspeed_enabled=True)
    trainer.args = SimpleNamespace(should_save=is_first)
    trainer.lr_scheduler = SimpleNamespace(state_dict=lambda: {"last_epoch": 3})
    NormAlignTrainer._save_optimizer_and_scheduler(trainer, tmp_path)
    ((folder, excluded, state),) = saved
    assert folder == tmp_path and excluded is True
    assert state.keys() == {"weight"} and torch.equal(state["weight"], model.weight)
    assert wrapped.module_state_dict is whole
    assert (tmp_path / "scheduler.pt").exists() == is_first
    if is_first:
        assert torch.load(tmp_path / "scheduler.pt") == {"last_epoch": 3}


def test_a_model_that_is_sharded_is_saved_under_its_own_name_and_read_by_parts(
    tmp_path, checkpoint, monkeypatch
):
    trainer = training.trainer(tmp_path, checkpoint)
    kind = type(trainer.model)
    trainer.model.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [kind.__name__]
    assert (tmp_path / "saved" / "modeling_normalign_llava.py").exists()  # that of its class
    trainer.weights_in = [checkpoint]
    read = []
    monkeypatch.setattr(trainer_module, "load_sharded", lambda *given: read.append(given))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert read == [(trainer.model, tmp_path / "saved")]
    assert trainer.weights_in == [tmp_path / "saved", checkpoint]  # the newest first


def test_a_scale_that_is_damaged_is_named(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    trainer._load_scaler(str(folder))  # which a run in float32 has not
    trainer._load_scaler(None)
    (folder / "scaler.pt").write_bytes(b"\xff" * 60)
    with pytest.raises(ValueError, match=f"{folder}/scaler.pt is damaged"):
        trainer._load_scaler(str(folder))


def test_under_fsdp_the_best_weights_are_read_as_a_checkpoint_is(tmp_path, capsys):
    args = training.arguments(tmp_path, metric_for_best_model="accuracy")
    best = tmp_path / "checkpoint-12"
    state = TrainerState(best_model_checkpoint=str(best), best_metric=0.75, global_step=30)
    read = []
    trainer = SimpleNamespace(args=args, state=state, model="model", is_fsdp_enabled=True)
    trainer._load_from_checkpoint = lambda *given: read.append(given)
    trainer._best = None
    NormAlignTrainer._load_best_model(trainer)
    assert trainer._best is None  # it is not there
    best.mkdir()
    NormAlignTrainer._load_best_model(trainer)
    assert read == [(str(best), "model")] * 2
    expected = {"step": 12, "of_steps": 30, "metric": "eval_accuracy", "value": 0.75}
    assert trainer._best == expected
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
    written = []
    monkeypatch.setattr(write, "write_card", lambda *given, **named: written.append((given, named)))
    trainer = SimpleNamespace(is_world_process_zero=lambda: is_first, is_in_train=is_in_train)
    trainer.args = SimpleNamespace(output_dir="a/b")
    trainer.hub_model_id = "ann/b"
    NormAlignTrainer.create_model_card(trainer, "arguments of", model_name="TRL's")
    expected = [((Path("a/b"),), {"repo_id": "ann/b"})]
    assert written == (expected if is_first and not is_in_train else [])


def test_another_process_than_the_first_shows_no_batch(capsys):
    NormAlignTrainer._show_batch(SimpleNamespace(is_world_process_zero=lambda: False), {})
    assert not capsys.readouterr().out


def test_every_sampler_of_a_loader_is_told_the_epoch():
    told = []
    inner = SimpleNamespace(set_epoch=lambda epoch: told.append(("inner", epoch)))
    own = SimpleNamespace(set_epoch=lambda epoch: told.append(("own", epoch)), sampler=inner)
    loader = SimpleNamespace(batch_sampler=SimpleNamespace(batch_sampler=own))
    ended = SimpleNamespace(global_step=4, max_steps=4)
    trainer = SimpleNamespace(state=ended, control=SimpleNamespace(should_training_stop=False))
    NormAlignTrainer._run_epoch(trainer, None, 3, loader)
    assert told == [("own", 3), ("inner", 3)]
    assert trainer.control.should_training_stop  # it was resumed at its end
    NormAlignTrainer._run_epoch(trainer, None, 3, SimpleNamespace())  # a loader without samplers


def test_what_cannot_begin_is_refused(tmp_path, checkpoint):
    counted = training.trainer(tmp_path, checkpoint, dry_run=True)
    with pytest.raises(ValueError, match="dry_run"):
        counted.train()
    trainer = training.trainer(tmp_path, checkpoint)
    with pytest.raises(ValueError, match=f"{tmp_path} holds no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0


def test_held_out_rows_that_are_set_later_are_evaluated(tmp_path, checkpoint):
    trainer = make(tmp_path, checkpoint)
    expected = trainer.evaluate(words(4))["eval_loss"]
    before = trainer.evaluate()["eval_loss"]
    trainer.eval_dataset = words(4)
    assert trainer.evaluate()["eval_loss"] == expected != before
    trainer.eval_dataset = {"talk": words(4), "shown": training.rows(3)}
    both = trainer.evaluate()
    assert both["eval_talk_loss"] == expected
    assert both["eval_shown_loss"] == pytest.approx(before)


BEST = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=4)
BEST |= dict(load_best_model_at_end=True, learning_rate=0.3, lr_scheduler_type="constant")


def held_out_losses(trainer) -> dict[int, float]:
    history = trainer.state.log_history
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_step_of_the_weights_that_are_kept_is_recorded_and_said(
    tmp_path, checkpoint, capsys, use_peft
):
    own = {} if use_peft else {"vision_learning_rate": 0.0}
    own |= dict(metric_for_best_model="loss", greater_is_better=True)  # an early step
    trainer = make(tmp_path / "out", checkpoint, use_peft=use_peft, **BEST, **own)
    trainer.train()
    trainer.save_model()
    losses = held_out_losses(trainer)
    best = max(losses, key=losses.get)
    assert best < 4
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["steps_done"] == record["best"]["step"] == best
    assert record["best"]["of_steps"] == 4
    assert record["best"]["metric"] == "eval_loss"
    assert record["best"]["value"] == pytest.approx(losses[best])
    said = [line for line in capsys.readouterr().out.splitlines() if "kept" in line]
    assert len(said) == 1 and f"step {best} of 4" in said[0]
    checkpoint_record = json.loads(
        (tmp_path / "out" / f"checkpoint-{best}" / "training.json").read_text()
    )
    assert checkpoint_record["steps_done"] == best and "best" not in checkpoint_record
    if not use_peft:
        kept = stored.weights(tmp_path / "out" / f"checkpoint-{best}")
        training.assert_equal(stored.weights(tmp_path / "out"), kept)
        return
    trainer.args.load_best_model_at_end = False
    trainer.args.max_steps = 1
    trainer.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "removed" / "checkpoint-3")
    trainer._load_best_model()  # the Trainer warns
    trainer.save_model(str(tmp_path / "again"))
    again = json.loads((tmp_path / "again" / "training.json").read_text())
    assert again["steps_done"] == 1 and "best" not in again


def test_a_run_stops_early_and_a_resumed_one_at_the_same_step(tmp_path, checkpoint):
    options = {**BEST, "max_steps": 8, "early_stopping_patience": 3}
    whole = make(tmp_path / "whole", checkpoint, **options)
    whole.train()
    losses = held_out_losses(whole)
    best = min(losses, key=losses.get)
    # By hand: the run ends three evaluations after the last that was better than all before.
    assert whole.state.global_step == best + 3 < 8
    first = make(tmp_path / "stopped", checkpoint, **{**options, "max_steps": best + 2})
    first.train()
    again = make(tmp_path / "stopped", checkpoint, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{best + 2}"))
    assert again.state.global_step == best + 3
    count = sum(isinstance(own, EarlyStoppingCallback) for own in again.callback_handler.callbacks)
    assert count == 1


def test_a_threshold_says_how_much_better_is_better(tmp_path, checkpoint):
    options = {**BEST, "max_steps": 6, "learning_rate": 1e-4, "early_stopping_patience": 2}
    steps = []
    for threshold in (0.0, 100.0):
        trainer = make(
            tmp_path / str(threshold), checkpoint, early_stopping_threshold=threshold, **options
        )
        trainer.train()
        steps.append(trainer.state.global_step)
    # The first evaluation is compared with none, or with itself once it is the best.
    assert steps[0] == 6 and steps[1] <= 3


def test_what_tells_the_best_step_must_be_measured(tmp_path, checkpoint):
    for own, held_out in (
        (dict(metric_for_best_model="eval_accuracy"), training.rows(3)),
        ({}, {"easy": training.rows(3), "hard": training.rows(3)}),
        (dict(metric_for_best_model="eval_medium_loss"), {"easy": training.rows(3)}),
    ):
        with pytest.raises(ValueError, match="metric_for_best_model .* is not measured here"):
            training.trainer(tmp_path, checkpoint, held_out=held_out, **BEST, **own)
    args = training.arguments(tmp_path, metric_for_best_model="eval_accuracy", **BEST)
    rows = dict(train_dataset=training.rows(2), eval_dataset=training.rows(3))
    NormAlignTrainer(str(checkpoint), args, compute_metrics=len, **rows)  # may measure it
    own = dict(metric_for_best_model="eval_easy_loss", greater_is_better=False, max_steps=1)
    trainer = training.trainer(
        tmp_path, checkpoint, held_out={"easy": training.rows(3)}, **{**BEST, **own}
    )
    trainer.train()
    assert trainer.state.best_global_step == 1


def unlabelled(rows: Dataset, numbers: set[int]) -> Dataset:
    """Rows of which some are not learned."""
    learned = [
        [False] * len(row["learned"]) if number in numbers else row["learned"]
        for number, row in enumerate(rows.with_format(None))
    ]
    features = rows.features
    return rows.remove_columns("learned").add_column("learned", learned).cast(features)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("packing", [False, True])
def test_a_step_without_labels_is_passed_over(tmp_path, checkpoint, smoothing, packing):
    rows = unlabelled(training.rows(12), {4, 5, 6, 7})
    options = dict(label_smoothing_factor=smoothing, train_sampling_strategy="sequential")
    options |= dict(
        per_device_train_batch_size=2, global_batch_size=4, max_steps=3, packing=packing
    )
    options |= dict(save_strategy="steps", save_steps=1, weight_decay=0.1, learning_rate=1e-2)
    trainer = training.trainer(tmp_path, checkpoint, rows, **options)
    trainer.train()
    first, second, third = (stored.weights(tmp_path / f"checkpoint-{n}") for n in (1, 2, 3))
    training.assert_equal(second, first)
    assert any(not torch.equal(first[name], third[name]) for name in first)
    assert losses_of(trainer)[1] == 0 and all(torch.tensor(losses_of(trainer)).isfinite())


def test_a_step_with_some_labels_counts_these_alone(tmp_path, checkpoint):
    options = dict(label_smoothing_factor=0.1, train_sampling_strategy="sequential", max_steps=1)
    options |= dict(per_device_train_batch_size=2, global_batch_size=4)
    rows = unlabelled(training.rows(4), {2, 3})
    trainer = training.trainer(tmp_path, checkpoint, rows, **options)
    inputs = trainer.data_collator([rows[0], rows[1]])
    with torch.no_grad():
        fields = {name: inputs[name] for name in inputs if name != "labels"}
        logits = trainer.model.train()(**fields).logits[:, :-1].double()
    labels = inputs["labels"][:, 1:]
    log_probabilities = logits.log_softmax(-1)[labels != -100]
    chosen = log_probabilities.gather(1, labels[labels != -100][:, None])
    expected = -(0.9 * chosen.mean() + 0.1 * log_probabilities.mean())
    alone = trainer.compute_loss(trainer.model, dict(inputs))  # of no step
    assert alone.item() == pytest.approx(expected.item(), rel=1e-5)
    trainer.train()
    assert losses_of(trainer)[0] == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.state.log_history[0]["num_tokens"] == sum(rows["length"])  # of the run alone


def test_the_rate_that_is_logged_is_that_of_the_first_trained_module(tmp_path, checkpoint):
    rates = dict(vision=1e-6, projector=2e-5, norm=3e-4, language=4e-3)
    order = ("language", "projector", "norm", "vision")
    for frozen in range(4):
        own = {name: 0.0 if name in order[:frozen] else rates[name] for name in rates}
        named = {f"{name}_learning_rate": rate for name, rate in own.items()}
        options = dict(lr_scheduler_type="cosine_with_min_lr", max_steps=2, warmup_steps=0)
        options |= dict(lr_scheduler_kwargs={"min_lr_rate": 0.5})
        trainer = training.trainer(tmp_path / str(frozen), checkpoint, **named, **options)
        trainer.train()
        logged_rates = [
            entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry
        ]
        first = rates[order[frozen]]
        assert logged_rates[0] == pytest.approx(first)
        assert trainer.optimizer.defaults["lr"] == pytest.approx(first)


def test_the_options_of_a_trainer_give_another_trainer_the_same(tmp_path, checkpoint):
    import dataclasses

    from peft import LoraConfig

    args = training.arguments(tmp_path, stage="tune", global_batch_size=4, max_steps=1)
    args = dataclasses.replace(args, learning_rate=None)
    before = repr(args)

    def made(options):
        adapters = LoraConfig(r=2)
        return NormAlignTrainer(
            str(checkpoint), options, train_dataset=training.rows(), peft_config=adapters
        )

    first = made(args)
    assert repr(args) == before and args.accelerator_config is None
    assert first.learning_rates["projector"] == 2e-5
    second = made(dataclasses.replace(first.args, seed=5))
    assert second.learning_rates == first.learning_rates
    smaller = made(dataclasses.replace(first.args, per_device_train_batch_size=1))
    assert smaller.args.gradient_accumulation_steps == 4


def test_a_summary_is_printed_in_python_as_by_the_command(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, stage="align", global_batch_size=4)
    text = str(trainer.summary())
    for module in trainer.facts["modules"]:
        (line,) = (
            line
            for line in text.splitlines()
            if line.split()[:1] == module["module"].split()[:1] and module["module"] in line
        )
        assert f"{module['parameters']:,}" in line
    assert "Tokens per image" in text and max(map(len, text.splitlines())) <= 100
    (row,) = trainer.facts["data"]
    assert f"{row['used']:,}" in text


class Curves:
    """Reads the points of a picture's curves from what matplotlib draws."""

    def __init__(self, monkeypatch):
        from matplotlib.figure import Figure

        self.drawn = []
        save = Figure.savefig

        def saved(figure, file, **kwargs):
            (axes,) = figure.axes
            self.axes = axes
            lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
            self.drawn.append(lines)
            return save(figure, file, **kwargs)

        monkeypatch.setattr(Figure, "savefig", saved)


def test_the_loss_curve_has_all_steps_of_a_resumed_run(tmp_path, checkpoint, monkeypatch):
    from PIL import Image

    curves = Curves(monkeypatch)
    options = dict(BEST, max_steps=2, learning_rate=1e-2)
    make(tmp_path, checkpoint, **options).train()
    trainer = make(tmp_path, checkpoint, **{**options, "max_steps": 4})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    drawn = curves.drawn[-1]
    assert [step for step, _ in drawn["training"]] == [1, 2, 3, 4]
    assert [loss for _, loss in drawn["training"]] == losses_of(trainer)
    assert dict(map(tuple, drawn["held out"])) == held_out_losses(trainer)
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (1050, 600)  # 7 by 4 inches


def test_the_curves_are_the_loss_and_every_held_out_loss():
    history = [
        {"step": 2, "loss": 3.0, "learning_rate": 0.1},
        {"step": 2, "eval_easy_loss": 5.0, "eval_hard_loss": 6.0, "eval_easy_accuracy": 0.5},
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.5},  # the step of a resumed run
        {"step": 2, "train_loss": 1.0},
        {"step": 3, "eval_loss": 7.0},
    ]
    assert loss_curves(history) == {
        "loss": [(1, 4.0), (2, 2.5)],
        "eval_easy_loss": [(2, 5.0)],
        "eval_hard_loss": [(2, 6.0)],
        "eval_loss": [(3, 7.0)],
    }


def test_each_curve_has_its_name_and_the_best_step_a_line(tmp_path, monkeypatch):
    curves = Curves(monkeypatch)
    points = {"loss": [(1, 4.0), (2, 2.5)], "eval_loss": [(2, 3.0)], "eval_hard_loss": [(2, 6.0)]}
    for best in (None, 2):
        draw_losses(points, tmp_path / "a.png", best=best)
        drawn = curves.drawn[-1]
        line = drawn.pop("best step", None)
        assert line is None if best is None else [step for step, _ in line] == [2, 2]
        assert drawn == {
            "training": [[1, 4.0], [2, 2.5]],
            "held out": [[2, 3.0]],
            "held out: hard": [[2, 6.0]],
        }
        legend = {text.get_text() for text in curves.axes.get_legend().texts}
        assert legend == drawn.keys() | ({"best step"} if best else set())
        assert all(step.is_integer() for step in curves.axes.get_xticks().tolist())
        assert (curves.axes.get_xlabel(), curves.axes.get_ylabel()) == ("step", "loss")


def logged_losses(count: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": 2.0 / step} for step in range(1, count + 1)]


def test_the_curve_is_drawn_at_a_save_once_a_minute_in_the_first_process(tmp_path, monkeypatch):
    curves = Curves(monkeypatch)
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback = LossCurve()
    state = TrainerState(log_history=logged_losses(3), best_global_step=1)
    callback.on_save(args, state, None)
    assert not curves.drawn
    callback._drawn_at -= PAUSE
    callback.on_save(args, TrainerState(log_history=logged_losses(2)), None)  # no curve yet
    assert not curves.drawn
    state.is_world_process_zero = False
    callback.on_save(args, state, None)
    assert not curves.drawn
    state.is_world_process_zero = True
    for _ in range(2):
        callback.on_save(args, state, None)
        assert len(curves.drawn) == 1
    assert "best step" in curves.drawn[0] and (tmp_path / "loss.png").exists()
    callback.on_train_end(args, TrainerState(), None)  # nothing was logged
    assert len(curves.drawn) == 1


def test_a_picture_that_cannot_be_written_does_not_stop_a_run(tmp_path, checkpoint, caplog):
    trainer = training.trainer(tmp_path, checkpoint, max_steps=3)
    (tmp_path / "loss.png").mkdir(parents=True)
    (tmp_path / "loss.png" / "full").touch()
    trainer.train()
    trainer.save_model()
    assert stored.weights(tmp_path) and "loss.png was not drawn" in caplog.text


def test_a_saved_model_has_the_notices_of_its_base_beside_a_card_by_somebody_else(
    tmp_path, checkpoint, caplog
):
    base = tmp_path / "base"
    out = tmp_path / "out"
    notice = "notices/vision/LICENSE"
    shutil.copytree(checkpoint, base)
    (base / notice).parent.mkdir(parents=True)
    (base / notice).write_text("the terms")
    build = json.loads((base / "build.json").read_text())
    (base / "build.json").write_text(json.dumps({**build, "notices": [notice]}))
    trainer = training.trainer(out, base)
    (out / "README.md").write_text("# By hand\n")
    trainer.save_model()
    assert (out / notice).read_text() == "the terms"
    assert json.loads((out / "build.json").read_text()) == {**build, "notices": [notice]}
    assert (out / "README.md").read_text() == "# By hand\n" and str(out) in caplog.text
    assert stored.weights(out)


def test_why_steps_are_clipped_is_said_once_and_with_gwc_alone(tmp_path, capsys):
    for arm, lines in (("gwc", 1), ("aligned", 0)):
        folder = training.checkpoint(tmp_path / arm, arm=arm)
        trainer = training.trainer(tmp_path / f"{arm}-run", folder, max_grad_norm=1e-6)
        trainer.train()
        factor = [entry["gwc/factor"] for entry in trainer.state.log_history if "loss" in entry]
        said = [line for line in capsys.readouterr().out.splitlines() if "clipped to" in line]
        assert len(said) == lines
        if lines:
            assert f"by {factor[0]:.3g}," in said[0]


def test_what_is_counted_between_logs_does_not_grow(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, logging_strategy="epoch", max_steps=6)
    trainer.train()
    own = vars(trainer.measurements).values()
    sizes = [len(value) for value in own if isinstance(value, list | dict)]
    sizes += [value.numel() for value in own if isinstance(value, torch.Tensor)]
    assert max(sizes) <= 5


def test_a_run_resumed_in_python_does_not_change_its_precision(tmp_path, checkpoint, processor):
    def made(**own):
        return training.trainer(
            tmp_path, checkpoint, save_strategy="steps", save_steps=1, **{"bf16": None, **own}
        )

    processor(0.3)
    first = made(max_steps=1)
    first.train()
    assert first.args.bf16
    processor(5.0)
    assert not made().args.bf16  # a new run in the same folder
    last = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="began with bf16=True.*NormAlignConfig resume_from_ch"):
        made().train(resume_from_checkpoint=last)
    resumed = made(resume_from_checkpoint=True)
    assert resumed.args.bf16
    resumed.train(resume_from_checkpoint=last)
    assert resumed.state.global_step == 2
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="differs in bf16"):  # chosen, but of another run
        made(bf16=False).train(resume_from_checkpoint=last)
    made(bf16=True).train(resume_from_checkpoint=last)


def test_seconds_of_a_resumed_run_include_those_before(tmp_path, checkpoint):
    saved_steps = dict(save_strategy="steps", save_steps=1)
    first = training.trainer(tmp_path, checkpoint, max_steps=1, **saved_steps)
    counted = first.data_collator.skipped_rows
    counted.add("data", 3, allowed=9)
    first.train()
    assert not counted.path.exists()  # a run that begins counts anew
    file = tmp_path / "checkpoint-1" / "training.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "seconds": 5000.0}))
    for resume in (str(file.parent), True):
        if resume is True:
            (tmp_path / "checkpoint-9").mkdir()  # not complete
        trainer = training.trainer(tmp_path, checkpoint, max_steps=2, **saved_steps)
        trainer.data_collator.skipped_rows.add("data", 3, allowed=9)
        trainer.train(resume_from_checkpoint=resume)
        assert counted.path.exists()
        ended = trainer.record["seconds"]
        trainer.save_model()
        written = json.loads((tmp_path / "training.json").read_text())["seconds"]
        assert 5000.0 < written < 5600.0 and written == ended  # not of saving it again
        in_checkpoint = json.loads((tmp_path / "checkpoint-2" / "training.json").read_text())
        assert 5000.0 < in_checkpoint["seconds"] <= written
        if isinstance(resume, str):
            shutil.rmtree(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_first_batch_of_a_run_is_shown_on_request(checkpoint, tmp_path, capsys, padding_free):
    rows = training.rows(4)
    options = {"padding_free": padding_free, "train_sampling_strategy": "sequential"}
    trainer = training.trainer(tmp_path, checkpoint, rows, show_first_batch=True, **options)
    trainer.train()
    shown = capsys.readouterr().out
    processor = trainer.processing_class
    decode = processor.tokenizer.decode
    for number in range(2):
        _, text = shown.split(f"Row {number + 1} of the first batch:\n\n")
        text = text.partition("\n\nRow")[0]
        (ids,) = ConversationCollator(processor)([rows[number]])["input_ids"].tolist()
        patches = ids.count(processor.image_token_id)
        assert f"{processor.image_token} x {patches}" in text
        words = decode([token for token in ids if token != processor.image_token_id])
        plain = text.replace(f"{processor.image_token} x {patches}", "")
        plain = plain.replace("[[", "").replace("]]", "")
        assert plain.startswith(words)
        answers = [turn["content"][0]["text"] for turn in rows[number]["messages"][1::2]]
        learned = re.findall(r"\[\[(.*?)\]\]", text, re.S)
        assert len(learned) == len(answers)
        for answer, part in zip(answers, learned, strict=True):
            assert part.startswith(answer)
    assert "Row 3" not in shown  # the second step's rows are not shown
    training.trainer(tmp_path / "quiet", checkpoint, rows, **options).train()
    assert "of the first batch" not in capsys.readouterr().out
