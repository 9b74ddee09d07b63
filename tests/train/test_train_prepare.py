# SPDX-License-Identifier: Apache-2.0
"""What is checked and completed before weights are loaded: options, checkpoint, rows."""

import copy
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_data
import training
from datasets import Dataset, IterableDataset
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
from normalign_llava.hub_cards.push import repository
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
)
from normalign_llava.train.settings import RunConfig, values_of


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def opened(checkpoint):
    return open_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture
def planned(model, opened):
    """Plans a run of the tiny model."""

    def plan(train_rows, settings, held_out=None, collator=None):
        given_model = GivenModel(model, opened.processor)
        given_data = GivenData(train_rows, held_out, collator)
        return prepare(settings, given_model, given_data)

    return plan


def stream():
    return training.rows(4).to_iterable_dataset()


@pytest.mark.parametrize("spelling", ["the same path", "another path", "a link"])
def test_a_checkpoint_is_not_written_over_by_what_is_trained_of_it(tmp_path, checkpoint, spelling):
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    output_dirs = {
        "the same path": checkpoint,
        "another path": f"{checkpoint}/../model",
        "a link": link,
    }
    settings = training.settings(output_dirs[spelling])
    with pytest.raises(ValueError, match="output_dir is the checkpoint to train"):
        open_model(GivenModel(str(checkpoint)), settings)


def test_what_is_opened_is_the_checkpoint_as_it_is_to_be_trained(tmp_path, checkpoint):
    settings = training.settings(
        tmp_path,
        arm="aligned",
        model_init_kwargs={"dtype": "bfloat16", "revision": "main"},
    )
    given_model = GivenModel(str(checkpoint), adapters=LoraConfig(r=2))
    opened = open_model(given_model, settings)
    assert opened.checkpoint.name == str(checkpoint)
    assert opened.config.gradient_compensation == "none"
    assert opened.checkpoint.config.gradient_compensation == "global"  # as it is stored
    assert opened.init_kwargs == {"dtype": "bfloat16", "revision": None}
    assert opened.adapters.modules_to_save == ["multi_modal_projector"]


def test_an_option_that_was_set_on_trls_options_counts(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), bf16=False)
    args.stage = "align"
    args.global_batch_size = 8
    options = given_options(args, None)
    assert options.stage == "align"
    assert options.global_batch_size == 8


def test_a_model_is_opened_in_float32_by_default(tmp_path, checkpoint):
    opened = open_model(GivenModel(str(checkpoint)), training.settings(tmp_path))
    assert opened.init_kwargs == {"dtype": "float32", "revision": None}


def test_the_processor_is_the_one_that_is_given_or_the_checkpoints_own(tmp_path, checkpoint):
    settings = training.settings(tmp_path, arm="aligned")
    processor = AutoProcessor.from_pretrained(checkpoint)
    opened = open_model(GivenModel(str(checkpoint), processor), settings)
    assert opened.processor is processor
    opened = open_model(GivenModel(str(checkpoint)), settings)
    assert opened.processor.image_token == processor.image_token


@pytest.fixture
def own_model(checkpoint):
    """A model that the test may change."""
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


def test_a_model_in_memory_may_be_named_with_its_own_arm(tmp_path, own_model):
    settings = training.settings(tmp_path, arm="gwc")
    opened = open_model(GivenModel(own_model), settings)
    assert opened.checkpoint is None
    assert opened.config is own_model.config
    assert opened.processor.image_token_id == own_model.config.image_token_id


def test_a_quantized_model_in_memory_needs_adapters(tmp_path, own_model):
    settings = training.settings(tmp_path, arm="gwc")
    own_model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="To quantize without adapters, give a folder"):
        open_model(GivenModel(own_model), settings)
    opened = open_model(GivenModel(own_model, adapters=LoraConfig(r=2)), settings)
    assert opened.adapters.r == 2


def test_a_processor_that_is_given_pads_as_the_checkpoint_s_own(tmp_path, checkpoint):
    given_processor = AutoProcessor.from_pretrained(checkpoint)
    given_processor.tokenizer.padding_side = "right"
    given_model = GivenModel(str(checkpoint), given_processor)
    opened = open_model(given_model, training.settings(tmp_path))
    assert opened.processor.tokenizer.padding_side == "left"


@pytest.fixture
def without_weights(tmp_path, checkpoint):
    """A copy of the checkpoint without its weights."""
    model_folder = tmp_path / "model"
    shutil.copytree(checkpoint, model_folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return model_folder


def test_weights_are_needed_by_training_and_not_by_a_dry_run(tmp_path, without_weights):
    given_model = GivenModel(str(without_weights))
    open_model(given_model, training.settings(tmp_path / "out", dry_run=True))
    with pytest.raises(ValueError, match="has no weights"):
        open_model(given_model, training.settings(tmp_path / "out"))


def test_weights_that_are_damaged_are_found_before_they_are_counted(tmp_path, without_weights):
    (without_weights / "model.safetensors").write_bytes(b"cut")
    settings = training.settings(tmp_path / "out", dry_run=True)
    with pytest.raises(ValueError, match="model.safetensors"):
        open_model(GivenModel(str(without_weights)), settings)


def test_a_packed_step_has_as_many_rows_as_without_packing(tmp_path, planned):
    settings = training.settings(
        tmp_path,
        packing=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )
    plan = planned(training.rows(6), settings)
    assert plan.settings.global_batch_size == 6
    assert plan.settings.to_give().global_batch_size is None


def test_one_held_out_data_set_with_a_name_keeps_it(tmp_path, planned):
    dataset = training.rows(2)
    plan = planned(dataset, training.settings(tmp_path), held_out={"easy": dataset})
    held_out = plan.data.held_out
    assert held_out.keys() == {"easy"}
    assert len(held_out["easy"]) == 2


def test_data_arguments_name_all_rows(tmp_path, planned, opened):
    data_arguments = DataArguments(dataset_name="data")
    settings = training.settings(tmp_path)
    with pytest.raises(ValueError, match="DataArguments name all rows"):
        planned(data_arguments, settings, held_out=training.rows(2))
    with pytest.raises(ValueError, match="DataArguments name all rows"):
        planned(data_arguments, settings, collator=ConversationCollator(opened.processor))


@pytest.fixture
def mixed_rows(tmp_path):
    """A file of five rows, with and without images."""
    return train_data.write_json(tmp_path, train_data.mixed_rows())


@pytest.fixture
def skipping(mixed_rows):
    """Arguments that read the mixed rows and skip bad ones."""
    return DataArguments(dataset_name=str(mixed_rows), test_split_size=0.4, bad_rows="skip")


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_rows_are_held_out_for_an_evaluation(tmp_path, planned, skipping, strategy):
    settings = training.settings(tmp_path / "out", eval_strategy=strategy, eval_steps=1)
    data = planned(skipping, settings).data
    assert len(data.held_out) == 2
    assert len(data.train) == 3


def test_no_rows_are_held_out_without_an_evaluation(tmp_path, planned, skipping):
    settings = training.settings(tmp_path / "out", eval_strategy="no", eval_steps=1)
    data = planned(skipping, settings).data
    assert data.held_out is None
    assert len(data.train) == 5


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_the_collator_skips_and_lists_rows_as_the_options_say(
    tmp_path, planned, skipping, strategy
):
    output_dir = tmp_path / "out"
    settings = training.settings(output_dir, eval_strategy=strategy, eval_steps=1)
    data = planned(skipping, settings).data
    assert data.report.sources[0].found == 5
    assert data.collator.bad_rows == "skip"
    assert Path(data.collator.dropped_rows.path) == output_dir / DROPPED_ROWS
    assert Path(data.collator.skipped_rows.path) == output_dir / SKIPPED_ROWS


def test_rows_that_are_longer_than_max_length_are_dropped(tmp_path, planned, skipping):
    settings = training.settings(tmp_path / "out", eval_strategy="no", eval_steps=1)
    lengths = planned(skipping, settings).data.train["length"][:]
    settings = training.settings(tmp_path / "out", max_length=max(lengths) - 1)
    plan = planned(skipping, settings)
    assert len(plan.data.train) == 4


def test_a_dry_run_lists_no_rows_in_its_output_folder(tmp_path, planned, skipping):
    output_dir = tmp_path / "dry"
    settings = training.settings(output_dir, dry_run=True)
    collator = planned(skipping, settings).data.collator
    assert collator.dropped_rows is None
    assert not output_dir.exists()
    assert Path(collator.skipped_rows.path).parent != output_dir


@pytest.mark.parametrize("long_rows", ["train", "held out"])
def test_rows_may_be_as_long_as_the_model_has_positions_and_longer_ones_are_named(
    tmp_path, planned, model, monkeypatch, caplog, long_rows
):
    train_rows = training.rows(4)
    longest = max(train_rows["length"])
    held_out = None
    if long_rows == "held out":
        held_out = train_rows
        train_rows = train_rows.filter(lambda row: row["length"] < longest)
    settings = training.settings(tmp_path)

    monkeypatch.setattr(model.config.text_config, "max_position_embeddings", longest)
    planned(train_rows, settings, held_out=held_out)
    assert "tokens, and the language model has" not in caplog.text

    monkeypatch.setattr(model.config.text_config, "max_position_embeddings", longest - 1)
    planned(train_rows, settings, held_out=held_out)
    warning = f"{longest:,} tokens, and the language model has {longest - 1:,} positions"
    assert warning in caplog.text


def test_positions_without_an_end_fit_rows_of_any_length(
    tmp_path, planned, model, monkeypatch, caplog
):
    monkeypatch.setattr(model.config, "text_config", BloomConfig())
    planned(training.rows(4), training.settings(tmp_path))
    assert "positions" not in caplog.text


def test_a_run_on_long_rows_is_warned_of(tmp_path, planned, model, monkeypatch, caplog):
    monkeypatch.setattr(model.config.text_config, "max_position_embeddings", 5)
    planned(training.rows(4), training.settings(tmp_path))
    assert "the language model has 5 positions" in caplog.text


def test_which_rows_are_held_out_follows_the_seed(tmp_path, planned, opened):
    train_rows = []
    for number in range(12):
        train_rows.append(train_data.llava(f"Question {number}?", f"answer {number}"))
    data_path = train_data.write_json(tmp_path, train_rows)
    data_arguments = DataArguments(dataset_name=str(data_path), test_split_size=0.5)
    answers_by_seed = {}
    for seed in (7, 8):
        settings = training.settings(tmp_path / "out", seed=seed, eval_strategy="epoch")
        plan = planned(data_arguments, settings)
        answers = train_data.answers(plan.data.held_out)
        loaded = train_data.read(
            data_path,
            opened.processor,
            seed=seed,
            with_eval=True,
            test_split_size=0.5,
        )
        assert answers == train_data.answers(loaded.eval)
        answers_by_seed[seed] = answers
    assert answers_by_seed[7] != answers_by_seed[8]


@pytest.fixture
def text_arguments(tmp_path):
    """Arguments that read two rows without images."""
    text_row = train_data.llava("Question?", "answer")
    data_path = train_data.write_json(tmp_path, [text_row, text_row])
    return DataArguments(dataset_name=str(data_path))


def test_named_rows_without_images_tune_a_language_model(tmp_path, planned, text_arguments):
    settings = training.settings(tmp_path / "out", stage="tune", global_batch_size=2)
    plan = planned(text_arguments, settings)
    assert len(plan.data.train) == 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": "align", "global_batch_size": 2}, id="align"),
        pytest.param({"language_learning_rate": 0.0}, id="frozen language model"),
    ],
)
def test_named_rows_without_images_are_refused_where_images_are_needed(
    tmp_path, planned, text_arguments, options
):
    settings = training.settings(tmp_path / "out", **options)
    with pytest.raises(ValueError, match="no image"):
        planned(text_arguments, settings)


@pytest.mark.parametrize(
    "streamed, workers, expected",
    [
        pytest.param(True, 4, 1, id="stream"),
        pytest.param(True, 0, 0, id="stream without workers"),
        pytest.param(False, 4, 4, id="in memory"),
    ],
)
def test_a_stream_has_one_reader_and_every_process_reads_for_itself(
    tmp_path, planned, streamed, workers, expected
):
    train_rows = stream() if streamed else training.rows(4)
    settings = training.settings(tmp_path, dataloader_num_workers=workers)
    plan = planned(train_rows, settings, held_out=stream())
    assert plan.settings.dataloader_num_workers == expected
    assert plan.settings.accelerator_config.dispatch_batches is False


def test_a_stream_is_taken_with_steps(tmp_path, planned):
    plan = planned(stream(), training.settings(tmp_path, max_steps=1))
    assert plan.settings.max_steps == 1
    assert isinstance(plan.data.train, IterableDataset)


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param(
            {"max_steps": -1},
            "A streamed data set has no length. Set max_steps",
            id="no steps",
        ),
        pytest.param({"packing": True}, "lacks lengths for packing", id="packing"),
        pytest.param(
            {"train_sampling_strategy": "group_by_length"},
            "lacks lengths for .*group_by_length",
            id="group_by_length",
        ),
    ],
)
def test_a_stream_without_steps_or_with_a_need_of_lengths_is_refused(
    tmp_path, planned, options, message
):
    settings = training.settings(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        planned(stream(), settings)


@pytest.fixture
def trl_collator(opened):
    """TRL's collator without padding."""
    collator = DataCollatorForVisionLanguageModeling(opened.processor)
    collator.padding_free = True
    return collator


@pytest.fixture
def collators(opened, trl_collator):
    """What may be given as a collator, by its name."""
    return {
        "none": None,
        "padded": ConversationCollator(opened.processor),
        "padding-free": ConversationCollator(opened.processor, padding_free=True),
        "TRL, padding-free": trl_collator,
    }


@pytest.mark.parametrize(
    "options, collator, expected",
    [
        ({}, "none", False),
        ({"padding_free": True}, "none", True),
        ({}, "padding-free", True),
        ({}, "padded", False),
        ({"padding_free": True}, "TRL, padding-free", True),
    ],
)
def test_whether_batches_are_padded_is_the_collators_to_say(
    tmp_path, planned, collators, options, collator, expected
):
    settings = training.settings(tmp_path, **options)
    plan = planned(training.rows(4), settings, collator=collators[collator])
    assert plan.data.collator.padding_free is expected
    assert plan.settings.padding_free is expected


@pytest.mark.parametrize(
    "option, collator",
    [
        ("packing", "TRL, padding-free"),
        ("packing", "padded"),
        ("padding_free", "padded"),
    ],
)
def test_a_collator_that_pads_or_does_not_pack_is_refused_where_an_option_needs_it(
    tmp_path, planned, collators, option, collator
):
    settings = training.settings(tmp_path, **{option: True})
    with pytest.raises(ValueError, match=f"^{option} needs a ConversationCollator"):
        planned(training.rows(4), settings, collator=collators[collator])


def test_the_collator_pads_to_the_multiple_in_the_options(tmp_path, planned):
    settings = training.settings(tmp_path, pad_to_multiple_of=8)
    plan = planned(training.rows(4), settings)
    assert plan.data.collator.pad_to_multiple_of == 8


@pytest.mark.parametrize("source_count", [1, 2])
def test_how_many_rows_of_a_stream_may_turn_out_bad(tmp_path, planned, mixed_rows, source_count):
    """Of 10,000 rows, the share that may be bad of each data set."""
    sources = []
    for number in range(source_count):
        sources.append({"path": str(mixed_rows), "name": f"of {number}"})
    data_arguments = DataArguments(
        datasets=sources,
        dataset_streaming=True,
        shuffle_buffer_size=1,
        bad_rows=0.02,
    )
    collator = planned(data_arguments, training.settings(tmp_path / "out")).data.collator
    assert collator.skippable == 200 * source_count
    assert collator.share == pytest.approx(0.02)


def test_no_row_in_memory_may_turn_out_bad(tmp_path, planned, mixed_rows):
    data_arguments = DataArguments(dataset_name=str(mixed_rows), bad_rows=0.02)
    plan = planned(data_arguments, training.settings(tmp_path / "out"))
    assert plan.data.collator.share == 0.0


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
}


@pytest.fixture(scope="module")
def held_out_sets():
    """What may be held out, by its name."""
    return {
        "none": None,
        "one": training.rows(2),
        "several": {"easy": training.rows(2), "hard": training.rows(2)},
    }


def metric(metric_name):
    return {"metric_for_best_model": metric_name, "greater_is_better": True}


@pytest.mark.parametrize(
    "held_out, has_metrics, options",
    [
        pytest.param("one", False, {}, id="the loss by default"),
        pytest.param("one", True, metric("accuracy"), id="a metric"),
        pytest.param(
            "several",
            False,
            {"metric_for_best_model": "eval_hard_loss"},
            id="the loss of one set",
        ),
        pytest.param(
            "several",
            True,
            metric("eval_hard_accuracy"),
            id="a metric of one set",
        ),
        pytest.param("none", False, {"load_best_model_at_end": False}, id="no best step"),
    ],
)
def test_the_metric_of_the_best_step_may_be_one_that_is_measured(
    tmp_path, held_out_sets, held_out, has_metrics, options
):
    settings = training.settings(tmp_path, **{**BEST, **options})
    check_best_metric(settings, held_out_sets[held_out], has_metrics)


def test_the_best_step_needs_held_out_rows(tmp_path):
    settings = training.settings(tmp_path, **BEST)
    with pytest.raises(ValueError, match="load_best_model_at_end needs held-out rows"):
        check_best_metric(settings, None, False)


@pytest.mark.parametrize(
    "held_out, has_metrics, options, measured",
    [
        pytest.param(
            "one",
            False,
            metric("accuracy"),
            ["eval_loss"],
            id="a metric without metrics",
        ),
        pytest.param(
            "several",
            True,
            metric("accuracy"),
            ["eval_easy_loss", "eval_hard_loss"],
            id="a metric of no set",
        ),
        pytest.param(
            "several",
            False,
            metric("eval_hard_accuracy"),
            ["eval_easy_loss", "eval_hard_loss"],
            id="a metric of one set without metrics",
        ),
        pytest.param(
            "several",
            False,
            {},
            ["eval_easy_loss", "eval_hard_loss"],
            id="the loss of no set",
        ),
    ],
)
def test_a_metric_of_the_best_step_that_is_not_measured_is_refused(
    tmp_path, held_out_sets, held_out, has_metrics, options, measured
):
    settings = training.settings(tmp_path, **{**BEST, **options})
    with pytest.raises(ValueError, match=r"is not measured here. Set it to eval_") as error:
        check_best_metric(settings, held_out_sets[held_out], has_metrics)
    for metric_name in measured:
        assert metric_name in str(error.value)


@pytest.fixture
def two_gpus(tmp_path):
    settings = training.settings(tmp_path)
    settings._n_gpu = 2  # where transformers keeps how many this process sees
    return settings


def test_several_gpus_are_refused_for_a_model_that_is_not_placed_on_them(two_gpus):
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        check_options(two_gpus, "model")
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        check_options(two_gpus, torch.nn.Linear(1, 1))


def test_several_gpus_are_taken_by_a_model_that_is_placed_on_them(two_gpus):
    placed_model = torch.nn.Linear(1, 1)
    placed_model.hf_device_map = {"": 0}
    check_options(two_gpus, placed_model)


def test_several_gpus_are_taken_by_a_model_that_will_be_placed_on_them(two_gpus):
    two_gpus.model_init_kwargs = {"device_map": "auto"}
    check_options(two_gpus, "model")


@pytest.mark.parametrize(
    "options, warns",
    [
        pytest.param({"bf16": True}, True, id="bf16"),
        pytest.param({"model_init_kwargs": {"dtype": "bfloat16"}}, True, id="dtype"),
        pytest.param({"bf16": True, "dry_run": True}, False, id="dry run"),
        pytest.param({}, False, id="float32"),
    ],
)
def test_slow_precision_is_named_before_training_and_not_in_a_dry_run(
    tmp_path, caplog, processor, options, warns
):
    processor(5.0)
    caplog.clear()
    check_options(training.settings(tmp_path, **options), "model")
    assert ("only emulates bfloat16" in caplog.text) == warns


@pytest.fixture
def hub_calls(monkeypatch):
    """What is asked of a Hub that is not there, in order."""
    calls = []
    account = SimpleNamespace(whoami=lambda: {"name": "ann"})

    def log_in(name, token):
        calls.append((name, token))
        return account

    def find_repository(api, name, branch):
        assert api is account
        calls.append((name, branch))
        return SimpleNamespace(card=f"card of {name}")

    def check_replaceable(*arguments):
        calls.append(arguments)

    def check_files_of_others(found_repository):
        calls.append(found_repository.card)

    monkeypatch.setattr(repository, "log_in", log_in)
    monkeypatch.setattr(repository, "find_repository", find_repository)
    monkeypatch.setattr(metadata, "check_replaceable", check_replaceable)
    monkeypatch.setattr(repository, "check_files_of_others", check_files_of_others)
    return calls


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The working directory `my run`."""
    folder = tmp_path / "my run"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize(
    "output_dir, options, logged_in, repository_name, branch",
    [
        pytest.param(".", {}, "my run", "ann/my run", "main", id="working directory"),
        pytest.param("runs/first", {}, "first", "ann/first", "main", id="folder"),
        pytest.param(
            "a",
            {"hub_model_id": "b", "hub_revision": "trial"},
            "b",
            "ann/b",
            "trial",
            id="name and branch",
        ),
        pytest.param(
            "a",
            {"hub_model_id": "lab/b"},
            "lab/b",
            "lab/b",
            "main",
            id="name with owner",
        ),
    ],
)
def test_the_repository_that_is_published_to_is_looked_at_before(
    hub_calls, output_dir, options, logged_in, repository_name, branch
):
    settings = training.settings(output_dir, push_to_hub=True, hub_token="hf_secret", **options)
    check_options(settings, "model")
    card = f"card of {repository_name}"
    assert hub_calls == [
        (logged_in, "hf_secret"),
        (repository_name, branch),
        (card, repository_name),
        card,
    ]


@pytest.mark.usefixtures("run_folder")
def test_no_repository_is_looked_at_if_none_is_published_to(hub_calls):
    check_options(training.settings("a"), "model")
    assert not hub_calls


@pytest.mark.usefixtures("run_folder")
def test_only_the_first_process_looks_at_the_repository(hub_calls, monkeypatch):
    settings = training.settings("a", push_to_hub=True, hub_token="hf_secret")
    monkeypatch.setattr(RunConfig, "process_index", 1)
    check_options(settings, "model")
    assert not hub_calls


@pytest.mark.parametrize("process_count", [None, 1])
def test_rows_are_checked_by_as_many_processes_as_the_options_say(
    tmp_path, planned, mixed_rows, monkeypatch, process_count
):
    process_counts = []

    def load_data(*arguments, **options):
        process_counts.append(options["processes"])
        return mixtures.load_data(*arguments, **options)

    def prepare_rows(rows, checks, **options):
        process_counts.append(checks.processes)
        return mixtures.prepare_rows(rows, checks, **options)

    monkeypatch.setattr(preparing, "load_data", load_data)
    monkeypatch.setattr(preparing, "prepare_rows", prepare_rows)
    settings = training.settings(tmp_path / "out", dataset_num_proc=process_count)
    planned(DataArguments(dataset_name=str(mixed_rows)), settings)
    planned(training.rows(2), settings, held_out=training.rows(2))
    assert process_counts == [process_count] * 3


def test_accumulation_follows_the_global_batch(tmp_path, planned):
    settings = training.settings(tmp_path, global_batch_size=8, per_device_train_batch_size=2)
    plan = planned(training.rows(8), settings)
    assert plan.settings.gradient_accumulation_steps == 4
    assert plan.settings.to_give().gradient_accumulation_steps == 1


@pytest.fixture
def options_of_trl(tmp_path, caplog):
    """Completes an SFTConfig, with a log of its warnings only."""
    caplog.set_level(logging.WARNING)

    def complete(collator=None, **options) -> NormAlignConfig:
        caplog.clear()
        trl_config = SFTConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            **options,
        )
        return given_options(trl_config, "model", collator)

    return complete


def test_a_config_of_trl_asks_for_no_sample_answers(options_of_trl):
    assert options_of_trl().sample_count == 0


@pytest.mark.parametrize(
    "collator, options, warning",
    [
        pytest.param(None, {}, "Set it to True", id="by default"),
        pytest.param(None, {"assistant_only_loss": True}, None, id="set"),
        pytest.param("another", {}, None, id="another collator"),
        pytest.param("own", {}, "assistant_only_loss is False", id="own collator"),
    ],
)
def test_loss_on_all_tokens_is_warned_of_where_only_answers_are_learned(
    opened, options_of_trl, caplog, collator, options, warning
):
    collators = {
        None: None,
        "another": list,
        "own": ConversationCollator(opened.processor),
    }
    options_of_trl(collators[collator], **options)
    if warning is None:
        assert "assistant_only_loss" not in caplog.text
    else:
        assert warning in caplog.text


def test_options_of_trl_that_mean_something_else_here_are_refused(options_of_trl):
    with pytest.raises(ValueError, match="hub_strategy cannot be used here"):
        options_of_trl(hub_strategy="checkpoint")


def test_a_plan_leaves_the_options_as_they_were(tmp_path, planned):
    train_options = training.arguments(tmp_path)
    before = copy.deepcopy(vars(train_options))
    planned(training.rows(4), train_options)
    assert vars(train_options) == before


def test_options_of_a_trainer_are_its_own_copy(tmp_path, planned):
    plan = planned(training.rows(4), training.arguments(tmp_path))
    before = copy.deepcopy(values_of(plan.settings))
    trainer_config = plan.trainer_config()
    trainer_config.accelerator_config.dispatch_batches = True
    trainer_config.seed = 7
    trainer_config.set_derived(max_steps=9)
    assert values_of(plan.settings) == before


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_output_folder_is_named_by_the_model(in_memory):
    model = "some/folder/my-model"
    if in_memory:
        model = torch.nn.Linear(1, 1)
        model.name_or_path = "some/folder/my-model"
    assert given_options(None, model).output_dir == "my-model-SFT"


@pytest.fixture
def own_rows():
    """Three rows without lengths, the second without an answer."""
    dataset_rows = []
    for number in range(3):
        conversation = training.row(number)
        dataset_rows.append(
            {
                "messages": conversation["messages"],
                "images": conversation["images"],
            }
        )
    del dataset_rows[1]["messages"][1:]
    return Dataset.from_list(dataset_rows)


def test_bad_rows_are_refused_by_default(tmp_path, opened, own_rows):
    collator = ConversationCollator(opened.processor)
    with pytest.raises(ValueError, match="own rows, row 1"):
        checked_rows(own_rows, "own rows", collator, training.settings(tmp_path), "eval")


def test_bad_rows_are_skipped_if_the_collator_skips_them(tmp_path, opened, own_rows):
    collator = ConversationCollator(opened.processor, bad_rows="skip")
    settings = training.settings(tmp_path)
    checked, (report,) = checked_rows(own_rows, "own rows", collator, settings, "eval")
    assert len(checked) == 2
    assert report.source == "own rows"
    assert report.split == "eval"


def test_rows_of_another_collator_are_not_checked(tmp_path, own_rows):
    settings = training.settings(tmp_path)
    assert checked_rows(own_rows, "own rows", list, settings, "eval") == (own_rows, [])


def test_dropped_rows_are_listed_as_the_collator_says(tmp_path, opened, own_rows):
    list_path = tmp_path / "dropped.jsonl"
    collator = ConversationCollator(
        opened.processor,
        bad_rows="skip",
        dropped_rows=DroppedRows(list_path),
    )
    checked_rows(own_rows, "own rows", collator, training.settings(tmp_path), "eval")
    lines = list_path.read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["row"] == 1


def test_rows_without_images_are_refused_where_images_are_needed(tmp_path, opened):
    text_rows = Dataset.from_list([{"question": "what?", "answer": "this"}] * 2)
    collator = ConversationCollator(opened.processor)
    settings = training.settings(tmp_path)
    checked_rows(text_rows, "words", collator, settings, "train")
    with pytest.raises(ValueError, match="words have no image"):
        checked_rows(text_rows, "words", collator, settings, "train", need_images=True)
