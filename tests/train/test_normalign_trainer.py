"""`NormAlignTrainer` as people who know TRL call it: what `SFTTrainer` takes, in the same order."""

import inspect
import json
import math
from dataclasses import fields, replace

import pytest
import stored
import torch
import training
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from PIL import Image
from training import SHORT, assert_equal, weights
from transformers import (
    AutoProcessor,
    BitsAndBytesConfig,
    LlavaConfig,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.llava import LlavaForConditionalGeneration
from trl import SFTConfig, SFTTrainer

from normalign_llava import NormAlignConfig, NormAlignTrainer
from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.callbacks.progress import ProgressLines
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.prepare import given_options
from normalign_llava.train.run import main
from normalign_llava.train.settings import RunConfig, complete


pytestmark = pytest.mark.slow

COLOURS = ("red", "green", "blue", "white")
ALL_LINEAR = LoraConfig(r=2, target_modules="all-linear")


@pytest.fixture
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def collator(checkpoint):
    return ConversationCollator(AutoProcessor.from_pretrained(checkpoint))


def turns(question: str, answer: str) -> list[dict]:
    """A question about an image, and its answer."""
    question_content = [
        {"type": "image"},
        {"type": "text", "text": question},
    ]
    answer_content = [
        {"type": "text", "text": answer},
    ]
    return [
        {"role": "user", "content": question_content},
        {"role": "assistant", "content": answer_content},
    ]


def chart(number: int) -> dict:
    """A row of ChartQA."""
    colour = COLOURS[number % 4]
    return {
        "image": Image.new("RGB", (20, 20), colour),
        "query": f"what is {number}?",
        "label": [colour],
    }


def messages(number: int) -> dict:
    """TRL's conversational row with a decoded image."""
    chart_row = chart(number)
    return {
        "images": [chart_row["image"]],
        "messages": turns(chart_row["query"], *chart_row["label"]),
    }


def prompt(number: int) -> dict:
    """The same as a prompt and its completion, with the image in a column of one."""
    chart_row = chart(number)
    question, answer = turns(chart_row["query"], *chart_row["label"])
    return {
        "image": chart_row["image"],
        "prompt": [question],
        "completion": [answer],
    }


def rows(form=messages, count=8) -> Dataset:
    return Dataset.from_list([form(number) for number in range(count)])


def stream(form=messages) -> IterableDataset:
    return IterableDataset.from_generator(lambda: map(form, range(8)))


def options(folder, **own_options) -> NormAlignConfig:
    """The options of a short run."""
    train_options = {
        "sample_max_new_tokens": 2,
        **SHORT,
        **own_options,
    }
    return NormAlignConfig(str(folder), **train_options)


def trained(model, train_options, train_rows=None, **arguments) -> NormAlignTrainer:
    if train_rows is None:
        train_rows = rows()
    trainer = NormAlignTrainer(model, train_options, train_dataset=train_rows, **arguments)
    trainer.train()
    return trainer


def logged(trainer, key="loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_it_takes_what_sfttrainer_takes_in_the_same_order():
    theirs = inspect.signature(SFTTrainer.__init__).parameters
    ours = inspect.signature(NormAlignTrainer.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


@pytest.fixture(scope="module")
def weights_of_a_path(checkpoint, tmp_path_factory):
    """The weights after a run from a checkpoint's path with options of this package."""
    train_options = options(tmp_path_factory.mktemp("path"))
    return weights(trained(str(checkpoint), train_options).model)


def test_a_model_trains_as_its_path(tmp_path, model, weights_of_a_path):
    trainer = trained(model, options(tmp_path))
    assert_equal(weights(trainer.model), weights_of_a_path)


def test_trl_s_options_train_as_our_own(tmp_path, checkpoint, weights_of_a_path):
    trl_options = SFTConfig(
        str(tmp_path),
        **SHORT,
        max_length=2048,
        assistant_only_loss=True,
    )
    trainer = trained(str(checkpoint), trl_options)
    assert_equal(weights(trainer.model), weights_of_a_path)


def test_a_stream_trains_as_its_rows_in_order(tmp_path, checkpoint):
    sequential = options(tmp_path, train_sampling_strategy="sequential")
    of_rows = trained(str(checkpoint), sequential)
    of_stream = trained(str(checkpoint), sequential, stream())
    assert_equal(weights(of_stream.model), weights(of_rows.model))


@pytest.mark.parametrize(("ratio", "bf16"), [(0.3, True), (5.0, False)])
def test_without_options_it_trains_on_a_cpu_by_trls_defaults(
    tmp_path, checkpoint, monkeypatch, processor, ratio, bf16
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    processor(ratio)
    arguments = NormAlignTrainer(f"~/{checkpoint.name}", train_dataset=rows(count=2)).args
    assert arguments.use_cpu == (not torch.accelerator.is_available())
    assert arguments.output_dir == "model-SFT"
    assert arguments.learning_rate == 2e-5
    assert arguments.bf16 is bf16 or not arguments.use_cpu


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "args",
            {"max_steps": 2},
            "args is a dict. Give a NormAlignConfig",
        ),
        (
            "model",
            None,
            "model is a NoneType. Give a folder",
        ),
        (
            "quantization_config",
            "4bit",
            "quantization_config is a str. Give a BitsAndBytesConfig",
        ),
    ],
)
def test_an_argument_of_another_kind_is_named(tmp_path, checkpoint, name, value, message):
    arguments = {
        "model": str(checkpoint),
        "args": options(tmp_path),
        name: value,
    }
    with pytest.raises(TypeError, match=message):
        NormAlignTrainer(**arguments, train_dataset=rows(count=2))


def test_several_gpus_in_one_process_are_refused_before_anything_is_read(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr(RunConfig, "n_gpu", 2)  # how many this process sees
    for start in (str(tmp_path / "nothing"), model):
        with pytest.raises(ValueError, match="sees 2 GPUs.*VISIBLE_DEVICES=0.*--num_processes 2"):
            NormAlignTrainer(start, options(tmp_path), train_dataset="not rows")


RUN_OPTIONS = {
    "stage": "tune",
    "global_batch_size": 4,
    "max_steps": 3,
    "seed": 3,
    "learning_rate": 1e-3,
    "norm_learning_rate": 1e-2,
}
SAME_IN_RECORDS = (
    "stage",
    "arm",
    "learning_rates",
    "quantization",
    "config_changes",
    "steps_done",
    "run",
    "before",
)


def run_command(folder, checkpoint, **own_options):
    """The result of a run of `normalign train` on `rows`."""
    data_path = folder / "rows.parquet"
    rows().to_parquet(data_path)
    command_options = {
        "model_name_or_path": checkpoint,
        "output_dir": folder / "command",
        "dataset_name": data_path,
        **SHORT,
        **RUN_OPTIONS,
        **own_options,
    }
    return main([f"--{name}={value}" for name, value in command_options.items()])


def record(folder) -> dict:
    return json.loads((folder / "training.json").read_text())


def assert_same_results(command, python, file_names) -> None:
    for file_name in file_names:
        assert (python / file_name).read_bytes() == (command / file_name).read_bytes()
    command_record = record(command)
    python_record = record(python)
    assert command_record["data"][0]["used"] == 8
    assert python_record["data"][0]["used"] == 8
    for key in SAME_IN_RECORDS:
        assert python_record[key] == command_record[key], key
    assert python_record["options"]["model_name_or_path"] == "model"
    assert "8 rows" in (python / "README.md").read_text()


def test_the_command_line_and_python_end_with_the_same(tmp_path, checkpoint):
    command = run_command(tmp_path, checkpoint)
    python = tmp_path / "python"
    trained(str(checkpoint), options(python, **RUN_OPTIONS)).save_model()
    assert_same_results(command, python, stored.FILES)
    assert record(command)["options"].get("lora_r") is None


def test_the_command_line_and_python_end_with_the_same_adapters(tmp_path, checkpoint):
    command = run_command(
        tmp_path,
        checkpoint,
        use_peft=True,
        lora_r=4,
        lora_alpha=8,
        lora_dropout=0.0,
    )
    python = tmp_path / "python"
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0)
    trainer = trained(str(checkpoint), options(python, **RUN_OPTIONS), peft_config=adapters)
    trainer.save_model()
    assert_same_results(command, python, ["adapter_model.safetensors"])
    assert record(command)["options"]["lora_r"] == 4


def test_every_option_of_trl_arrives(tmp_path):
    trl_options = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        hub_token="secret",
        seed=5,
        eval_strategy="steps",
        optim="sgd",
        accelerator_config={
            "split_batches": True,
            "gradient_accumulation_kwargs": {"num_steps": 1},
        },
        max_length=77,
        fsdp_config={"min_num_params": 3},
        report_to=["none"],
        warmup_steps=0.25,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        pad_to_multiple_of=8,
        model_init_kwargs={"dtype": "bfloat16"},
        train_sampling_strategy="sequential",
    )
    decided_by_us = {
        "assistant_only_loss": True,
        "hub_strategy": "end",
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "router_aux_loss_coef": 0.0,
    }
    our_options = given_options(trl_options, "model")
    assert isinstance(our_options, NormAlignConfig)
    assert our_options is not trl_options
    settings = complete(our_options)[0]
    for field in fields(SFTConfig):
        if field.init:
            expected = getattr(trl_options, field.name)
            if field.name in decided_by_us:
                expected = decided_by_us[field.name]
            assert getattr(settings, field.name) == expected, field.name
    learning_rates = our_options.learning_rates(use_peft=False)
    assert set(learning_rates.values()) == {2e-5}


def test_options_of_transformers_arrive_too(tmp_path):
    plain = TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=3e-4)
    assert given_options(plain, "").learning_rate == 3e-4


@pytest.fixture
def trainer_of_four(tmp_path, checkpoint):
    """Makes a trainer of four rows, the third a long one; `change` may change them."""

    def trainer_of_four(collator=None, change=None, **own_options):
        raw_rows = [messages(number) for number in range(4)]
        long_question = raw_rows[2]["messages"][0]
        long_question["content"][1]["text"] = "long " * 100
        if change is not None:
            change(raw_rows)
        train_rows = Dataset.from_list(raw_rows)
        train_options = options(tmp_path, **own_options)
        return NormAlignTrainer(str(checkpoint), train_options, collator, train_rows)

    return trainer_of_four


def remove_an_answer(raw_rows) -> None:
    raw_rows[1]["messages"] = raw_rows[1]["messages"][:1]


def test_rows_beyond_the_model_s_positions_are_warned_of(trainer_of_four, caplog):
    assert len(trainer_of_four().train_dataset) == 4
    assert "tokens, and the language model has 256 positions" in caplog.text
    assert "model_init_kwargs" not in caplog.text  # TRL would warn of it, as it gets a model


def test_rows_that_are_too_long_are_dropped(trainer_of_four, caplog):
    report = trainer_of_four(max_length=100).record["data"][0]
    assert report["valid"] == 3
    assert report["dropped"] == [2]
    assert "train_dataset: 1 of 4 rows dropped" in caplog.text
    assert "more than max_length 100" in caplog.text


def test_a_bad_row_is_named(trainer_of_four):
    with pytest.raises(ValueError, match="train_dataset, row 1: it has no assistant turn"):
        trainer_of_four(change=remove_an_answer)


def test_a_bad_row_is_skipped_if_the_collator_skips_them(trainer_of_four, collator):
    skipping = replace(collator, bad_rows="skip")
    trainer = trainer_of_four(skipping, change=remove_an_answer)
    assert len(trainer.train_dataset) == 3


@pytest.fixture(scope="module")
def evaluated(checkpoint, tmp_path_factory):
    """A trainer that evaluated two data sets, `easy` and `hard`, at two steps."""

    def token_accuracy(prediction):
        labels = prediction.label_ids[:, 1:]
        predicted = prediction.predictions[:, :-1]
        is_right = (predicted == labels)[labels != -100]
        return {"accuracy": float(is_right.mean()), "rows": len(labels)}

    def most_likely(logits, labels):
        return logits.argmax(-1)

    folder = tmp_path_factory.mktemp("evaluated")
    trainer = trained(
        str(checkpoint),
        options(folder, eval_strategy="steps", eval_steps=1),
        eval_dataset={"easy": rows(count=4), "hard": rows(prompt, count=3)},
        compute_metrics=token_accuracy,
        preprocess_logits_for_metrics=most_likely,
    )
    trainer.answers_while_training = (folder / "samples.jsonl").read_text().splitlines()
    return trainer


@pytest.fixture
def without_metrics(evaluated, monkeypatch):
    monkeypatch.setattr(evaluated, "compute_metrics", None)
    return evaluated


def test_every_held_out_row_is_evaluated_at_each_step(evaluated):
    assert logged(evaluated, "eval_easy_rows") == [4, 4]
    assert logged(evaluated, "eval_hard_rows") == [3, 3]


def test_by_default_four_held_out_rows_are_answered_at_each_step(evaluated):
    answers = [json.loads(line) for line in evaluated.answers_while_training]
    assert len(answers) == 2 * 4


def test_metrics_see_the_predictions_of_learned_tokens(evaluated):
    batch = evaluated.data_collator(list(evaluated.eval_dataset["easy"]))
    with torch.no_grad():
        logits = evaluated.model.eval()(**batch).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    is_right = (logits.argmax(-1) == labels)[labels != -100]
    accuracy = pytest.approx(is_right.float().mean().item())
    # Rows as a user has them, given later.
    metrics = evaluated.evaluate(rows(count=4))
    predicted = evaluated.predict(rows(count=4)).metrics
    assert metrics["eval_accuracy"] == accuracy
    assert predicted["test_accuracy"] == accuracy


def test_losses_of_rows_that_are_given_later_are_the_same(evaluated):
    easy = logged(evaluated, "eval_easy_loss")[-1]
    metrics = evaluated.evaluate(rows(count=4))
    assert metrics["eval_loss"] == pytest.approx(easy, rel=1e-5)


def test_rows_that_cannot_be_evaluated_are_named(evaluated):
    without_answer = Dataset.from_list([{"prompt": "what?"}])
    with pytest.raises(ValueError, match="eval_dataset"):
        evaluated.evaluate(without_answer)


def test_losses_of_held_out_rows_are_the_same_without_metrics(without_metrics):
    easy = logged(without_metrics, "eval_easy_loss")[-1]
    metrics = without_metrics.evaluate(without_metrics.eval_dataset["easy"])
    assert metrics["eval_loss"] == pytest.approx(easy, rel=1e-5)


def test_losses_of_held_out_rows_are_the_same_in_workers_that_stay(without_metrics, monkeypatch):
    easy = logged(without_metrics, "eval_easy_loss")[-1]
    hard = logged(without_metrics, "eval_hard_loss")[-1]
    monkeypatch.setattr(without_metrics.args, "dataloader_num_workers", 1)
    monkeypatch.setattr(without_metrics.args, "dataloader_persistent_workers", True)
    hard_metrics = without_metrics.evaluate(rows(prompt, 3))
    easy_metrics = without_metrics.evaluate(rows(count=4))
    assert hard_metrics["eval_loss"] == pytest.approx(hard, rel=1e-5)
    assert easy_metrics["eval_loss"] == pytest.approx(easy, rel=1e-5)


def test_a_loss_of_ones_own_sees_logits_and_labels(tmp_path, checkpoint):
    def summed_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        return loss / num_items_in_batch

    default = trained(str(checkpoint), options(tmp_path))
    own = trained(str(checkpoint), options(tmp_path), compute_loss_func=summed_loss)
    assert logged(own) == pytest.approx(logged(default), rel=1e-4)


def assert_refused(folder, model, message, own_options=None, **arguments) -> None:
    trainer_arguments = {
        "model": model,
        "args": options(folder, **(own_options or {})),
        "train_dataset": rows(),
        **arguments,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        NormAlignTrainer(**trainer_arguments)


def test_a_model_of_another_kind_is_refused(tmp_path, model):
    config = LlavaConfig(
        vision_config=model.config.vision_config,
        text_config=model.config.text_config,
    )
    stock = LlavaForConditionalGeneration(config)
    assert_refused(tmp_path, stock, "is a 'llava' model. Make a NormAlign-LLaVA of it")


def test_a_model_of_another_arm_is_refused(tmp_path, model):
    message = "is of arm 'gwc'. To train 'unit', give its path"
    assert_refused(tmp_path, model, message, {"arm": "unit"})


def test_a_model_with_adapters_is_refused(tmp_path, model):
    adapted = get_peft_model(model, ALL_LINEAR)
    assert_refused(tmp_path, adapted, "has adapters. .* merge them first")


def test_a_processor_of_another_kind_is_refused(tmp_path, model, collator):
    assert_refused(
        tmp_path,
        model,
        "Give a LlavaProcessor",
        processing_class=collator.processor.tokenizer,
    )


@pytest.mark.parametrize(
    ("own_options", "message"),
    [
        pytest.param(
            {"train_sampling_strategy": "group_by_length"},
            "lacks lengths for",
            id="lengths of a stream",
        ),
        pytest.param(
            {"max_steps": -1},
            "no length. Set max_steps",
            id="epochs of a stream",
        ),
    ],
)
def test_options_that_need_the_length_of_a_stream_are_refused(
    tmp_path, model, own_options, message
):
    assert_refused(tmp_path, model, message, own_options, train_dataset=stream())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            "for a model loaded here",
            id="quantization of a loaded model",
        ),
        pytest.param(
            {"train_dataset": [messages(1)]},
            "train_dataset is a list. Give a Dataset",
            id="a list of rows",
        ),
        pytest.param(
            {"peft_config": PrefixTuningConfig(num_virtual_tokens=2)},
            "Tuning.*. Give a LoraConfig",
            id="another kind of adapters",
        ),
        pytest.param(
            {"optimizers": (None, object())},
            "Give optimizer_cls_and_kwargs",
            id="a scheduler",
        ),
        pytest.param(
            {"formatting_func": str},
            "formatting_func",
            id="a formatting function",
        ),
    ],
)
def test_arguments_that_are_not_used_are_refused(tmp_path, model, arguments, message):
    assert_refused(tmp_path, model, message, **arguments)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters())
    assert_refused(
        tmp_path,
        model,
        "Give optimizer_cls_and_kwargs",
        optimizers=(optimizer, None),
    )


def test_adapters_with_a_learning_rate_of_0_are_refused(tmp_path, model):
    assert_refused(
        tmp_path,
        model,
        "its learning rate is 0",
        {"language_learning_rate": 0.0},
        peft_config=ALL_LINEAR,
    )


def test_batches_without_padding_need_our_collator(tmp_path, model):
    assert_refused(
        tmp_path,
        model,
        "padding_free needs a Conv",
        {"padding_free": True},
        data_collator=list,
    )


def test_metrics_of_batches_without_padding_are_refused(tmp_path, model):
    assert_refused(
        tmp_path,
        model,
        "compute_metrics needs rows",
        {"padding_free": True},
        compute_metrics=len,
    )


def test_metrics_of_a_collator_without_padding_are_refused(tmp_path, model, collator):
    assert_refused(
        tmp_path,
        model,
        "compute_metrics needs rows",
        compute_metrics=len,
        data_collator=replace(collator, padding_free=True),
    )


def test_a_model_without_a_folder_is_refused_without_its_processor(tmp_path, model):
    model.name_or_path = ""
    assert_refused(tmp_path, model, "The model names no folder with its processor")


def test_a_model_without_a_folder_is_trained_with_its_processor(tmp_path, model, collator):
    model.name_or_path = ""
    trainer = trained(model, options(tmp_path), processing_class=collator.processor)
    trainer.save_model()
    saved = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert saved.config.model_type == "normalign_llava"


@pytest.fixture
def text_rows():
    """Rows without images."""
    raw_rows = []
    for number in range(8):
        raw_rows.append({"question": f"what is {number}?", "answer": "A"})
    return Dataset.from_list(raw_rows)


@pytest.mark.parametrize(
    "own_options",
    [
        {"language_learning_rate": 0.0},
        {"stage": "align"},
        {"stage": "align", "language_learning_rate": 1e-3},
    ],
    ids=["a frozen language model", "stage 1", "stage 1 with the language model"],
)
def test_rows_without_images_are_refused_where_they_train_nothing(
    tmp_path, model, text_rows, own_options
):
    train_options = options(tmp_path, **own_options)
    with pytest.raises(ValueError, match="train_dataset have no image. .* nothing is trained"):
        NormAlignTrainer(model, train_options, train_dataset=text_rows)


def test_generation_ends_as_labels_do(tmp_path, model, text_rows):
    model.generation_config.eos_token_id = 5
    trainer = NormAlignTrainer(model, options(tmp_path), train_dataset=text_rows)
    end_of_turn = trainer.processing_class.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn in trainer.model.generation_config.eos_token_id


def test_rows_without_a_known_column_reach_another_collator_as_they_are(tmp_path, checkpoint):
    numbers = Dataset.from_list([{"number": number} for number in range(4)])
    trainer = NormAlignTrainer(
        str(checkpoint),
        options(tmp_path, seed=7),
        data_collator=list,
        train_dataset=numbers,
    )
    loader = trainer.get_train_dataloader()
    for loaded_row in next(iter(loader)):
        assert loaded_row.keys() == {"number"}
    torch_loader = getattr(loader, "base_dataloader", loader)
    assert torch_loader.generator.initial_seed() == 7


@pytest.fixture(scope="module")
def callback():
    return TrainerCallback()


@pytest.fixture(scope="module")
def furnished(tmp_path_factory, checkpoint, callback):
    """A trainer that is given a callback, an optimizer, adapters and a token."""
    train_options = options(
        tmp_path_factory.mktemp("furnished"),
        stage="tune",
        global_batch_size=4,
        hub_token="hf_secret",
    )
    return NormAlignTrainer(
        str(checkpoint),
        train_options,
        train_dataset=rows(count=4),
        callbacks=[callback],
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 3e-4, "momentum": 0.9}),
        peft_config=LoraConfig(r=2),
    )


def test_callbacks_that_are_given_are_beside_our_own(furnished, callback):
    callbacks = furnished.callback_handler.callbacks
    assert callback in callbacks
    assert any(isinstance(own_callback, ProgressLines) for own_callback in callbacks)


def test_an_optimizer_that_is_given_has_one_learning_rate_for_all_modules(furnished):
    assert furnished.learning_rates == {
        "vision": 0.0,
        "projector": 3e-4,
        "norm": 3e-4,
        "language": 3e-4,  # and no stage's own
    }


def test_what_a_trainer_is_given_beside_its_options_is_recorded(furnished):
    assert furnished.record["optimizer"] == {
        "class": "torch.optim.sgd.SGD",
        "lr": 3e-4,
        "momentum": 0.9,
    }
    assert furnished.record["adapters"]["r"] == 2
    assert furnished.record["run"]["steps"] == 2
    assert "data" not in furnished.record["run"]


def test_a_token_is_used_and_not_in_the_options_that_are_saved(furnished):
    assert furnished.hub_token == "hf_secret"
    assert furnished.args.hub_token is None


def test_evaluation_without_held_out_rows_is_refused(furnished):
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        furnished.get_eval_dataloader()


@pytest.fixture
def collate_charts(checkpoint):
    """The collator of TRL's tutorials: all tokens but padding and image tokens are labels."""
    processor = AutoProcessor.from_pretrained(checkpoint)

    def collate_charts(examples):
        texts = []
        images = []
        for example in examples:
            conversation = turns(example["query"], *example["label"])
            texts.append(processor.apply_chat_template(conversation))
            images.append([example["image"]])
        batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
        is_padding = batch["attention_mask"] == 0
        is_image = batch["input_ids"] == processor.image_token_id
        labels = batch["input_ids"].masked_fill(is_padding | is_image, -100)
        return {**batch, "labels": labels}

    return collate_charts


def test_another_collator_gets_rows_of_any_columns_as_from_sfttrainer(
    tmp_path, checkpoint, collate_charts, caplog
):
    shared_options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "train_sampling_strategy": "sequential",
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    trl_options = SFTConfig(
        str(tmp_path),
        **SHORT,
        **shared_options,
        remove_unused_columns=False,
        max_length=None,
    )
    our_options = options(tmp_path, **shared_options)

    def losses(trainer_class, train_options, charts) -> list[float]:
        trainer = trainer_class(
            NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint),
            train_options,
            data_collator=collate_charts,
            train_dataset=charts,
            eval_dataset=charts,
            processing_class=AutoProcessor.from_pretrained(checkpoint),
        )
        trainer.train()
        return logged(trainer) + logged(trainer, "eval_loss")

    expected = losses(SFTTrainer, trl_options, rows(chart))
    of_rows = losses(NormAlignTrainer, trl_options, rows(chart))
    of_stream = losses(NormAlignTrainer, our_options, stream(chart))
    assert of_rows == pytest.approx(expected, rel=1e-4)
    assert of_stream == pytest.approx(expected, rel=1e-4)
    assert "assistant_only_loss" not in caplog.text


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def cut_off(parsed_row) -> None:
    """Cuts off the image of a row."""
    image_bytes = parsed_row["images"][0]["bytes"]
    parsed_row["images"] = [{"path": None, "bytes": image_bytes[:60]}]


BAD_ROWS = {
    "a whole batch": (0, 1),
    "one row": (1,),
    "a row of each batch": (0, 3),
}


@pytest.fixture(scope="module", params=BAD_ROWS.values(), ids=BAD_ROWS.keys())
def bad_rows(request):
    """The numbers of rows with a bad image, of four in batches of two."""
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "padding-free"])
def skipping_trainer(request, tmp_path_factory, collator, checkpoint, bad_rows):
    """A trained trainer with `bad_rows` among its held-out rows."""
    held_out = [training.row(number) for number in range(4)]
    for number in bad_rows:
        cut_off(held_out[number])
    skipping_collator = ConversationCollator(
        collator.processor,
        bad_rows="skip",
        padding_free=request.param,
    )
    trainer = NormAlignTrainer(
        str(checkpoint),
        options(tmp_path_factory.mktemp("skipping"), per_device_eval_batch_size=2),
        data_collator=skipping_collator,
        train_dataset=rows(count=2),
        eval_dataset=Dataset.from_list(held_out, features=FEATURES),
    )
    trainer.train()
    return trainer


def good_batches(bad_rows) -> list[list[dict]]:
    """The batches of held-out rows without the bad ones."""
    batches = []
    for numbers in ((0, 1), (2, 3)):
        batch = [training.row(number) for number in numbers if number not in bad_rows]
        if batch:
            batches.append(batch)
    return batches


def test_held_out_rows_that_are_skipped_are_in_no_mean(skipping_trainer, collator, bad_rows):
    """The means are those of the other rows; losses count by rows, the others by batches."""
    losses = []
    accuracies = []
    entropies = []
    model = skipping_trainer.model.eval()
    for parsed_rows in good_batches(bad_rows):
        batch = collator(parsed_rows)
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        losses += [loss.item()] * len(parsed_rows)
        is_label = labels != -100
        is_right = (logits.argmax(-1) == labels)[is_label]
        accuracies.append(is_right.float().mean().item())
        log_probabilities = logits[is_label].double().log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        entropies.append(entropy.mean().item())
    metrics = skipping_trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(mean(losses), rel=1e-5)
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(mean(accuracies))
    assert metrics["eval_entropy"] == pytest.approx(mean(entropies), rel=1e-5)
    named = skipping_trainer.evaluate(metric_key_prefix="test")
    assert named["test_loss"] == pytest.approx(metrics["eval_loss"])
    assert "eval_loss" not in named


def test_of_held_out_rows_that_are_all_skipped_there_is_no_mean(skipping_trainer, bad_rows):
    metrics = skipping_trainer.evaluate(skipping_trainer.eval_dataset.select(bad_rows))
    assert math.isnan(metrics["eval_loss"])
    assert skipping_trainer._evaluated is None
