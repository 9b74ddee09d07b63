# SPDX-License-Identifier: Apache-2.0
"""What is checked and completed before weights are loaded: options, checkpoint, rows."""

import copy
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_data
import training
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoProcessor, BitsAndBytesConfig, BloomConfig
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from normalign_llava import NormAlignConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.data.rows.parse import DroppedRows
from normalign_llava.data.sources import mixtures
from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.hub_cards.card import metadata
from normalign_llava.hub_cards.push import record, repository
from normalign_llava.train import prepare as preparing
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.prepare import (
    DROPPED_ROWS,
    SKIPPED_ROWS,
    GivenData,
    GivenModel,
    check_best_metric,
    check_options,
    checked_rows,
    given_options,
    open_model,
    prepare,
    warn_of_positions,
)
from normalign_llava.train.settings import RunConfig, values_of


pytestmark = pytest.mark.usefixtures("cache")
BEST = dict(eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5)
BEST |= dict(load_best_model_at_end=True)


@pytest.fixture(scope="module")
def opened(checkpoint):
    return open_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture
def planned(model, opened):
    """Plans a run of the tiny model."""

    def plan(rows, args, held_out=None, collator=None):
        given = GivenModel(model, opened.processor)
        return prepare(args, given, GivenData(rows, held_out, collator))

    return plan


def stream(rows=None):
    return (rows or training.rows(4)).to_iterable_dataset()


def test_a_checkpoint_is_not_written_over_by_what_is_trained_of_it(tmp_path, checkpoint):
    for written in (checkpoint, f"{checkpoint}/../model", tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(checkpoint)
        with pytest.raises(ValueError, match="output_dir is the checkpoint to train"):
            open_model(GivenModel(str(checkpoint)), training.settings(written))


def test_what_is_opened_is_the_checkpoint_as_it_is_to_be_trained(tmp_path, checkpoint):
    how = {"dtype": "bfloat16", "revision": "main"}
    args = training.settings(tmp_path, arm="aligned", model_init_kwargs=how)
    adapters = LoraConfig(r=2)
    opened = open_model(GivenModel(str(checkpoint), adapters=adapters), args)
    assert opened.checkpoint.name == str(checkpoint)
    assert opened.config.gradient_compensation == "none"
    assert opened.checkpoint.config.gradient_compensation == "global"  # as it is stored
    assert opened.init_kwargs == {"dtype": "bfloat16", "revision": None}
    assert opened.adapters.modules_to_save == ["multi_modal_projector"]
    by_default = open_model(GivenModel(str(checkpoint)), training.settings(tmp_path))
    assert by_default.init_kwargs == {"dtype": "float32", "revision": None}
    own = AutoProcessor.from_pretrained(checkpoint)
    assert open_model(GivenModel(str(checkpoint), own), args).processor is own
    assert opened.processor.image_token == own.image_token


def test_a_model_in_memory_may_be_named_with_its_own_arm(tmp_path, checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    args = training.settings(tmp_path, arm="gwc")
    opened = open_model(GivenModel(model), args)
    assert opened.checkpoint is None and opened.config is model.config
    assert opened.processor.image_token_id == model.config.image_token_id
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="To quantize without adapters, give a folder"):
        open_model(GivenModel(model), args)
    assert open_model(GivenModel(model, adapters=LoraConfig(r=2)), args).adapters.r == 2


def test_a_processor_that_is_given_pads_as_the_checkpoint_s_own(tmp_path, checkpoint):
    given = AutoProcessor.from_pretrained(checkpoint)
    given.tokenizer.padding_side = "right"
    args = training.settings(tmp_path)
    processor = open_model(GivenModel(str(checkpoint), given), args).processor
    assert processor.tokenizer.padding_side == "left"


def test_weights_that_are_damaged_are_found_before_they_are_counted(tmp_path, checkpoint):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    args = training.settings(tmp_path / "out", dry_run=True)
    open_model(GivenModel(str(folder)), args)
    with pytest.raises(ValueError, match="has no weights"):  # which training reads
        open_model(GivenModel(str(folder)), training.settings(tmp_path / "out"))
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="model.safetensors"):
        open_model(GivenModel(str(folder)), args)


def test_a_packed_step_has_as_many_rows_as_without_packing(tmp_path, planned):
    options = dict(packing=True, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    args = training.settings(tmp_path, **options)
    settings = planned(training.rows(6), args).settings
    assert settings.global_batch_size == 6 and settings.to_give().global_batch_size is None


def test_one_held_out_data_set_with_a_name_keeps_it(tmp_path, planned):
    rows = training.rows(2)
    args = training.settings(tmp_path)
    named = planned(rows, args, held_out={"easy": rows}).data.held_out
    assert named.keys() == {"easy"} and len(named["easy"]) == 2


def test_data_arguments_name_all_rows(tmp_path, planned, opened):
    named = DataArguments(dataset_name="data")
    args = training.settings(tmp_path)
    collator = ConversationCollator(opened.processor)
    for given in (dict(held_out=training.rows(2)), dict(collator=collator)):
        with pytest.raises(ValueError, match="DataArguments name all rows"):
            planned(named, args, **given)


def test_rows_that_were_named_are_read_as_the_options_say(tmp_path, planned):
    path = train_data.write_json(tmp_path, train_data.mixed_rows())
    named = DataArguments(dataset_name=str(path), test_split_size=0.4, bad_rows="skip")
    for strategy, held_out in (("steps", 2), ("epoch", 2), ("no", None)):
        args = training.settings(tmp_path / "out", eval_strategy=strategy, eval_steps=1)
        data = planned(named, args).data
        rows = data.train
        evaluated = data.held_out
        collator = data.collator
        assert (evaluated and len(evaluated)) == held_out
        assert len(rows) == 5 - (held_out or 0) and data.report.sources[0].found == 5
        assert collator.bad_rows == "skip"
        assert Path(collator.dropped_rows.path) == tmp_path / "out" / DROPPED_ROWS
        assert Path(collator.skipped_rows.path) == tmp_path / "out" / SKIPPED_ROWS
    lengths = sorted(planned(named, args).data.train["length"][:])
    cut = training.settings(tmp_path / "out", max_length=lengths[-1] - 1)
    assert len(planned(named, cut).data.train) == 4
    dry = training.settings(tmp_path / "dry", dry_run=True)
    collator = planned(named, dry).data.collator
    assert collator.dropped_rows is None and not (tmp_path / "dry").exists()
    assert Path(collator.skipped_rows.path).parent != tmp_path / "dry"


def test_rows_may_be_as_long_as_the_model_has_positions_and_longer_ones_are_named(
    tmp_path, planned, opened, caplog
):
    rows = training.rows(4)
    longest = max(rows["length"])
    short = rows.filter(lambda row: row["length"] < longest)
    reports = [planned(rows, training.settings(tmp_path)).data.report]
    reports.append(planned(short, training.settings(tmp_path), held_out=rows).data.report)
    for report in reports:
        for positions, warns in ((longest, False), (longest - 1, True)):
            caplog.clear()
            config = copy.deepcopy(opened.config)
            config.text_config.max_position_embeddings = positions
            warn_of_positions(report, config)
            said = f"{longest:,} tokens, and the language model has {positions:,} positions"
            assert (said in caplog.text) == warns
    caplog.clear()
    endless = copy.deepcopy(opened.config)
    endless.text_config = BloomConfig()  # whose positions have no end
    warn_of_positions(reports[0], endless)
    assert not caplog.text


def test_a_run_on_long_rows_is_warned_of(tmp_path, planned, model, monkeypatch, caplog):
    monkeypatch.setattr(model.config.text_config, "max_position_embeddings", 5)
    planned(training.rows(4), training.settings(tmp_path))
    assert "the language model has 5 positions" in caplog.text


def test_which_rows_are_held_out_follows_the_seed(tmp_path, planned, opened):
    rows = [train_data.llava(f"Question {number}?", f"answer {number}") for number in range(12)]
    path = train_data.write_json(tmp_path, rows)
    named = DataArguments(dataset_name=str(path), test_split_size=0.5)
    held_out = []
    for seed in (7, 8):
        args = training.settings(tmp_path / "out", seed=seed, eval_strategy="epoch")
        found = train_data.answers(planned(named, args).data.held_out)
        options = dict(seed=seed, with_eval=True, test_split_size=0.5)
        expected = train_data.read(path, opened.processor, **options).eval
        assert found == train_data.answers(expected)
        held_out.append(found)
    assert held_out[0] != held_out[1]


def test_named_rows_without_images_are_refused_where_images_are_needed(tmp_path, planned):
    path = train_data.write_json(tmp_path, [train_data.llava("Question?", "answer")] * 2)
    named = DataArguments(dataset_name=str(path))
    planned(named, training.settings(tmp_path / "out", stage="tune", global_batch_size=2))
    frozen = dict(language_learning_rate=0.0)
    for own in (dict(stage="align", global_batch_size=2), frozen):
        with pytest.raises(ValueError, match="no image"):
            planned(named, training.settings(tmp_path / "out", **own))


def test_a_stream_has_one_reader_and_every_process_reads_for_itself(tmp_path, planned):
    for given, workers, expected in (
        (stream(), 4, 1),
        (stream(), 0, 0),
        (training.rows(4), 4, 4),
    ):
        args = training.settings(tmp_path, dataloader_num_workers=workers)
        settings = planned(given, args, held_out=stream()).settings
        assert settings.dataloader_num_workers == expected
        assert settings.accelerator_config.dispatch_batches is False


def test_a_stream_is_taken_with_steps_and_without_lengths_alone(tmp_path, planned):
    for own, message in (
        (dict(max_steps=-1), "A streamed data set has no length. Set max_steps"),
        (dict(packing=True), "lacks lengths for packing"),
        (dict(train_sampling_strategy="group_by_length"), "lacks lengths for .*group_by_length"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(stream(), training.settings(tmp_path, **own))
    planned(stream(), training.settings(tmp_path, max_steps=1))


def test_whether_batches_are_padded_is_the_collators_to_say(tmp_path, planned, opened):
    processor = opened.processor
    free = ConversationCollator(processor, padding_free=True)
    theirs = DataCollatorForVisionLanguageModeling(processor)
    theirs.padding_free = True
    for own, collator, padding_free in (
        ({}, None, False),
        (dict(padding_free=True), None, True),
        ({}, free, True),
        ({}, ConversationCollator(processor), False),
        (dict(padding_free=True), theirs, True),
    ):
        args = training.settings(tmp_path, **own)
        plan = planned(training.rows(4), args, collator=collator)
        assert plan.data.collator.padding_free is padding_free
        assert plan.settings.padding_free is padding_free
    for own, collator, named in (
        (dict(packing=True), theirs, "packing"),
        (dict(packing=True), ConversationCollator(processor), "packing"),
        (dict(padding_free=True), ConversationCollator(processor), "padding_free"),
    ):
        with pytest.raises(ValueError, match=f"^{named} needs a ConversationCollator"):
            planned(training.rows(4), training.settings(tmp_path, **own), collator=collator)
    multiple = training.settings(tmp_path, pad_to_multiple_of=8)
    assert planned(training.rows(4), multiple).data.collator.pad_to_multiple_of == 8


def test_how_many_rows_of_a_stream_may_turn_out_bad(tmp_path, planned, opened):
    """Of 10,000 rows, the share that may be bad of each data set."""
    path = train_data.write_json(tmp_path, train_data.mixed_rows())
    streamed = dict(dataset_streaming=True, shuffle_buffer_size=1, bad_rows=0.02)
    for sources in (1, 2):
        listed = [{"path": str(path), "name": f"of {number}"} for number in range(sources)]
        named = DataArguments(datasets=listed, **streamed)
        collator = planned(named, training.settings(tmp_path / "out")).data.collator
        assert collator.skippable == 200 * sources
        assert collator.share == pytest.approx(0.02)
    in_memory = DataArguments(dataset_name=str(path), bad_rows=0.02)
    assert planned(in_memory, training.settings(tmp_path / "out")).data.collator.share == 0.0


def test_the_metric_of_the_best_step_is_one_that_is_measured(tmp_path):
    def check(held_out, has_metrics=False, **own):
        check_best_metric(training.settings(tmp_path, **{**BEST, **own}), held_out, has_metrics)

    one = training.rows(2)
    several = {"easy": training.rows(2), "hard": training.rows(2)}
    own = dict(metric_for_best_model="accuracy", greater_is_better=True)
    of_one = dict(metric_for_best_model="eval_hard_accuracy", greater_is_better=True)
    check(one)
    check(one, True, **own)
    check(several, metric_for_best_model="eval_hard_loss")
    check(several, True, **of_one)
    check(None, load_best_model_at_end=False)
    with pytest.raises(ValueError, match="load_best_model_at_end needs held-out rows"):
        check(None)
    for held_out, has_metrics, named in (
        (one, False, own),
        (several, True, own),
        (several, False, of_one),
        (several, False, {}),
    ):
        with pytest.raises(ValueError, match=r"is not measured here. Set it to eval_") as error:
            check(held_out, has_metrics, **named)
        names = ["eval_loss"] if held_out is one else ["eval_easy_loss", "eval_hard_loss"]
        assert all(name in str(error.value) for name in names)


def test_several_gpus_are_taken_by_a_model_that_is_placed_on_them(tmp_path):
    args = training.settings(tmp_path)
    args._n_gpu = 2  # where transformers keeps how many this process sees
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        check_options(args, "model")
    placed = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        check_options(args, placed)
    placed.hf_device_map = {"": 0}
    check_options(args, placed)
    args.model_init_kwargs = {"device_map": "auto"}
    check_options(args, "model")


def test_slow_precision_is_named_before_training_and_not_in_a_dry_run(tmp_path, caplog, processor):
    for own, warns in (
        (dict(bf16=True), True),
        (dict(model_init_kwargs={"dtype": "bfloat16"}), True),
        (dict(bf16=True, dry_run=True), False),
        ({}, False),
    ):
        processor(5.0)
        caplog.clear()
        check_options(training.settings(tmp_path, **own), "model")
        assert ("only emulates bfloat16" in caplog.text) == warns


@pytest.fixture
def looked(monkeypatch):
    """What is asked of a Hub that is not there, in order."""
    asked = []
    account = SimpleNamespace(whoami=lambda: {"name": "ann"})

    def log_in(name, token):
        asked.append((name, token))
        return account

    def find_repository(api, name, branch):
        assert api is account
        asked.append((name, branch))
        return SimpleNamespace(card=f"card of {name}")

    monkeypatch.setattr(repository, "log_in", log_in)
    monkeypatch.setattr(repository, "find_repository", find_repository)
    monkeypatch.setattr(metadata, "check_replaceable", lambda *given: asked.append(given))
    monkeypatch.setattr(record, "check_files_of_others", lambda found: asked.append(found.card))
    return asked


@pytest.mark.parametrize(
    ("folder", "own", "logged_in", "name", "branch"),
    [
        (".", {}, "my run", "ann/my run", "main"),
        ("runs/first", {}, "first", "ann/first", "main"),
        ("a", dict(hub_model_id="b", hub_revision="trial"), "b", "ann/b", "trial"),
        ("a", dict(hub_model_id="lab/b"), "lab/b", "lab/b", "main"),
    ],
)
def test_the_repository_that_is_published_to_is_looked_at_before(
    tmp_path, monkeypatch, looked, folder, own, logged_in, name, branch
):
    (tmp_path / "my run").mkdir()
    monkeypatch.chdir(tmp_path / "my run")
    args = training.settings(folder, push_to_hub=True, hub_token="hf_secret", **own)
    check_options(args, "model")
    card = f"card of {name}"
    assert looked == [(logged_in, "hf_secret"), (name, branch), (card, name), card]
    looked.clear()
    check_options(training.settings(folder), "model")
    monkeypatch.setattr(RunConfig, "process_index", 1)  # the first one looks
    check_options(args, "model")
    assert not looked


def test_rows_are_checked_by_as_many_processes_as_the_options_say(tmp_path, planned, monkeypatch):
    asked = []

    def load_data(*given, **options):
        asked.append(options["processes"])
        return mixtures.load_data(*given, **options)

    def prepare_rows(rows, checks, **options):
        asked.append(checks.processes)
        return mixtures.prepare_rows(rows, checks, **options)

    monkeypatch.setattr(preparing, "load_data", load_data)
    monkeypatch.setattr(preparing, "prepare_rows", prepare_rows)
    path = train_data.write_json(tmp_path, train_data.mixed_rows())
    for count in (None, 1):
        args = training.settings(tmp_path / "out", dataset_num_proc=count)
        planned(DataArguments(dataset_name=str(path)), args)
        planned(training.rows(2), args, held_out=training.rows(2))
    assert asked == [None] * 3 + [1] * 3


def test_accumulation_follows_the_global_batch(tmp_path, planned):
    args = training.settings(tmp_path, global_batch_size=8, per_device_train_batch_size=2)
    settings = planned(training.rows(8), args).settings
    assert settings.gradient_accumulation_steps == 4
    assert settings.to_give().gradient_accumulation_steps == 1


def test_options_of_trl_that_mean_something_else_here(tmp_path, caplog, opened):
    caplog.set_level(logging.WARNING)

    def ours(collator=None, **own) -> NormAlignConfig:
        caplog.clear()
        given = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **own)
        return given_options(given, "model", collator)

    assert ours().sample_count == 0 and "Set it to True" in caplog.text
    ours(assistant_only_loss=True)
    assert "assistant_only_loss" not in caplog.text
    ours(collator=list)
    assert "assistant_only_loss" not in caplog.text
    ours(collator=ConversationCollator(opened.processor))
    assert "assistant_only_loss is False" in caplog.text
    with pytest.raises(ValueError, match="hub_strategy cannot be used here"):
        ours(hub_strategy="checkpoint")


def test_options_of_a_trainer_are_its_own_copy(tmp_path, planned):
    args = training.arguments(tmp_path)
    before = copy.deepcopy(vars(args))
    plan = planned(training.rows(4), args)
    assert vars(args) == before
    planned_before = copy.deepcopy(values_of(plan.settings))
    own = plan.trainer_config()
    own.accelerator_config.dispatch_batches = True
    own.seed = 7
    own.settle(max_steps=9)
    assert values_of(plan.settings) == planned_before
    in_memory = torch.nn.Linear(1, 1)
    in_memory.name_or_path = "some/folder/my-model"
    for model in ("some/folder/my-model", in_memory):
        assert given_options(None, model).output_dir == "my-model-SFT"


def test_rows_are_checked_as_their_collator_says(tmp_path, opened, caplog):
    rows = [training.row(number) for number in range(3)]
    rows = [{"messages": row["messages"], "images": row["images"]} for row in rows]
    rows[1]["messages"] = rows[1]["messages"][:1]  # without an answer
    rows = Dataset.from_list(rows)
    collator = ConversationCollator(opened.processor)
    args = training.settings(tmp_path)
    with pytest.raises(ValueError, match="own rows, row 1"):
        checked_rows(rows, "own rows", collator, args, "eval")
    checked, report = checked_rows(
        rows, "own rows", replace(collator, bad_rows="skip"), args, "eval"
    )
    assert len(checked) == 2 and (report.source, report.split) == ("own rows", "eval")
    assert checked_rows(rows, "own rows", list, args, "eval") == (rows, None)
    dropped = DroppedRows(tmp_path / "dropped.jsonl")
    listing = replace(collator, bad_rows="skip", dropped_rows=dropped)
    checked_rows(rows, "own rows", listing, args, "eval")
    (line,) = (tmp_path / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == 1
    text = Dataset.from_list([{"question": "what?", "answer": "this"}] * 2)
    checked_rows(text, "words", collator, args, "train")
    with pytest.raises(ValueError, match="words have no image"):
        checked_rows(text, "words", collator, args, "train", need_images=True)
