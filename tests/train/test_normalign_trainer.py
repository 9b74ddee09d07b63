"""`NormAlignTrainer` as people who know TRL call it: what `SFTTrainer` takes, in the same order."""

import copy
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


def turns(question: str, answer: str) -> list[dict]:
    asked = [{"type": "image"}, {"type": "text", "text": question}]
    said = [{"type": "text", "text": answer}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def chart(number: int) -> dict:
    """A row of ChartQA."""
    colour = COLOURS[number % 4]
    image = Image.new("RGB", (20, 20), colour)
    return {"image": image, "query": f"what is {number}?", "label": [colour]}


def messages(number: int) -> dict:
    """TRL's conversational row with a decoded image."""
    row = chart(number)
    return {"images": [row["image"]], "messages": turns(row["query"], *row["label"])}


def prompt(number: int) -> dict:
    """The same as a prompt and its completion, with the image in a column of one."""
    row = chart(number)
    asked, said = turns(row["query"], *row["label"])
    return {"image": row["image"], "prompt": [asked], "completion": [said]}


def rows(kind=messages, count=8) -> Dataset:
    return Dataset.from_list([kind(number) for number in range(count)])


def stream(kind=messages) -> IterableDataset:
    return IterableDataset.from_generator(lambda: map(kind, range(8)))


def options(folder, **kwargs) -> NormAlignConfig:
    return NormAlignConfig(str(folder), **{"sample_max_new_tokens": 2, **SHORT, **kwargs})


def trained(model, args, data=None, **given) -> NormAlignTrainer:
    trainer = NormAlignTrainer(model, args, train_dataset=rows() if data is None else data, **given)
    trainer.train()
    return trainer


def logged(trainer, key="loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_it_takes_what_sfttrainer_takes_in_the_same_order():
    theirs = inspect.signature(SFTTrainer.__init__).parameters
    ours = inspect.signature(NormAlignTrainer.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def test_a_path_a_model_a_stream_and_trls_options_train_the_same(tmp_path, checkpoint, model):
    path = str(checkpoint)
    args = options(tmp_path)
    trls = SFTConfig(str(tmp_path), **SHORT, max_length=2048, assistant_only_loss=True)
    sequential = options(tmp_path, train_sampling_strategy="sequential")
    pairs = [((path, args), (model, args)), ((path, args), (path, trls))]
    for first, second in [*pairs, ((path, sequential), (path, sequential, stream()))]:
        assert_equal(*(weights(trained(*given).model) for given in (first, second)))


def test_without_options_it_trains_on_a_cpu_by_trls_defaults(
    tmp_path, checkpoint, monkeypatch, processor
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    for ratio, bf16 in ((0.3, True), (5.0, False)):
        processor(ratio)
        args = NormAlignTrainer(f"~/{checkpoint.name}", train_dataset=rows(count=2)).args
        assert args.use_cpu == (not torch.accelerator.is_available())
        assert (args.output_dir, args.learning_rate) == ("model-SFT", 2e-5)
        assert args.bf16 is bf16 or not args.use_cpu


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("args", {"max_steps": 2}, "args is a dict. Give a NormAlignConfig"),
        ("model", None, "model is a NoneType. Give a folder"),
        ("quantization_config", "4bit", "quantization_config is a str. Give a BitsAndBytesConfig"),
    ],
)
def test_an_argument_of_another_kind_is_named(tmp_path, checkpoint, name, value, said):
    given = {"model": str(checkpoint), "args": options(tmp_path), name: value}
    with pytest.raises(TypeError, match=said):
        NormAlignTrainer(**given, train_dataset=rows(count=2))


def test_several_gpus_in_one_process_are_refused_before_anything_is_read(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr(RunConfig, "n_gpu", 2)  # how many this process sees
    args = options(tmp_path)
    for start in (str(tmp_path / "nothing"), model):
        with pytest.raises(ValueError, match="sees 2 GPUs.*VISIBLE_DEVICES=0.*--num_processes 2"):
            NormAlignTrainer(start, args, train_dataset="not rows")


@pytest.mark.parametrize("use_peft", [False, True], ids=["full", "lora"])
def test_the_command_line_and_python_end_with_the_same(tmp_path, checkpoint, use_peft):
    data = tmp_path / "rows.parquet"
    lora = dict(lora_alpha=8, lora_dropout=0.0)
    rows().to_parquet(data)
    rates = dict(learning_rate=1e-3, norm_learning_rate=1e-2)
    shared = dict(stage="tune", global_batch_size=4, max_steps=3, seed=3, **rates)
    words = dict(model_name_or_path=checkpoint, output_dir=tmp_path / "command", dataset_name=data)
    words |= {**SHORT, **shared}
    words |= dict(use_peft=True, lora_r=4, **lora) if use_peft else {}
    command = main([f"--{name}={words[name]}" for name in words])
    python = tmp_path / "python"
    adapters = LoraConfig(r=4, **lora) if use_peft else None
    trained(str(checkpoint), options(python, **shared), peft_config=adapters).save_model()
    for name in {"adapter_model.safetensors"} if use_peft else stored.FILES:
        assert (python / name).read_bytes() == (command / name).read_bytes()
    records = [json.loads((folder / "training.json").read_text()) for folder in (command, python)]
    assert [record["data"][0]["used"] for record in records] == [8, 8]
    same = {"stage", "arm", "learning_rates", "quantization", "config_changes", "steps_done"}
    for key in same | {"run", "before"}:
        assert records[0][key] == records[1][key], key
    assert records[1]["options"]["model_name_or_path"] == "model"
    assert records[0]["options"].get("lora_r") == (4 if use_peft else None)
    assert "8 rows" in (python / "README.md").read_text()


def test_every_option_of_trl_arrives(tmp_path):
    accelerator = {"split_batches": True, "gradient_accumulation_kwargs": {"num_steps": 1}}
    given = SFTConfig(
        **dict(use_cpu=True, bf16=False, output_dir=str(tmp_path), hub_token="secret", seed=5),
        **dict(eval_strategy="steps", optim="sgd", accelerator_config=accelerator, max_length=77),
        **dict(fsdp_config={"min_num_params": 3}, report_to=["none"], warmup_steps=0.25),
        **dict(gradient_checkpointing_kwargs={"use_reentrant": True}, pad_to_multiple_of=8),
        **dict(model_init_kwargs={"dtype": "bfloat16"}, train_sampling_strategy="sequential"),
    )
    decided = dict(assistant_only_loss=True, hub_strategy="end", logging_nan_inf_filter=False)
    decided |= dict(remove_unused_columns=False, router_aux_loss_coef=0.0)
    ours = given_options(given, "model")
    assert isinstance(ours, NormAlignConfig) and ours is not given
    settings = complete(ours)[0]
    for name in (field.name for field in fields(SFTConfig) if field.init):
        assert getattr(settings, name) == decided.get(name, getattr(given, name)), name
    assert {*ours.learning_rates(use_peft=False).values()} == {2e-5}
    plain = TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=3e-4)
    assert given_options(plain, "").learning_rate == 3e-4


def test_rows_that_are_too_long_are_dropped_and_bad_ones_named(tmp_path, checkpoint, caplog):
    data = [messages(number) for number in range(4)]
    data[2]["messages"][0]["content"][1]["text"] = "long " * 100

    def make(collator=None, **given):
        args = options(tmp_path, **given)
        given_rows = Dataset.from_list(data)
        return NormAlignTrainer(str(checkpoint), args, collator, given_rows)

    assert len(make().train_dataset) == 4
    assert "tokens, and the language model has 256 positions" in caplog.text
    assert "model_init_kwargs" not in caplog.text  # which TRL would warn of, as it gets a model
    report = make(max_length=100).record["data"][0]
    assert (report["valid"], report["dropped"]) == (3, [2])
    assert "train_dataset: 1 of 4 rows dropped" in caplog.text
    assert "more than max_length 100" in caplog.text
    data[1]["messages"] = data[1]["messages"][:1]
    with pytest.raises(ValueError, match="train_dataset, row 1: it has no assistant turn"):
        make()
    skipping = ConversationCollator(AutoProcessor.from_pretrained(checkpoint), bad_rows="skip")
    assert len(make(skipping).train_dataset) == 3


def test_held_out_rows_and_metrics(tmp_path, checkpoint):
    def accuracy(prediction):
        labels = prediction.label_ids[:, 1:]
        answered = prediction.predictions[:, :-1]
        return {"accuracy": float((answered == labels)[labels != -100].mean()), "rows": len(labels)}

    held_out = {"easy": rows(count=4), "hard": rows(prompt, count=3)}
    args = options(tmp_path, eval_strategy="steps", eval_steps=1)
    given = dict(eval_dataset=held_out, compute_metrics=accuracy)
    given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer = trained(str(checkpoint), args, **given)
    assert logged(trainer, "eval_easy_rows") == [4, 4]
    assert logged(trainer, "eval_hard_rows") == [3, 3]
    answered = [*map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())]
    assert len(answered) == 2 * 4  # by default four of them, at each evaluation
    inputs = trainer.data_collator(list(trainer.eval_dataset["easy"]))
    with torch.no_grad():
        logits = trainer.model.eval()(**inputs).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    expected = (logits.argmax(-1) == labels)[labels != -100].float().mean().item()
    fresh = trainer.evaluate(rows(count=4))  # rows as a user has them, given later
    predicted = trainer.predict(rows(count=4)).metrics
    assert fresh["eval_accuracy"] == pytest.approx(expected) == predicted["test_accuracy"]
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.evaluate(Dataset.from_list([{"prompt": "what?"}]))
    trainer.compute_metrics = None
    hard = logged(trainer, "eval_hard_loss")[-1]
    easy = fresh["eval_loss"]
    losses = [trainer.evaluate(trainer.eval_dataset["easy"])["eval_loss"]]
    trainer.args.dataloader_num_workers = 1
    trainer.args.dataloader_persistent_workers = True
    losses += [trainer.evaluate(given)["eval_loss"] for given in (rows(prompt, 3), rows(count=4))]
    assert losses == pytest.approx([easy, hard, easy], rel=1e-5)


def test_a_loss_of_ones_own_sees_logits_and_labels(tmp_path, checkpoint):
    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        summed = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return summed / num_items_in_batch

    ours = trained(str(checkpoint), options(tmp_path))
    own = trained(str(checkpoint), options(tmp_path), compute_loss_func=loss)
    assert logged(own) == pytest.approx(logged(ours), rel=1e-4)


def test_what_cannot_be_trained_is_refused_by_name(tmp_path, checkpoint, model):
    parts = dict(vision_config=model.config.vision_config, text_config=model.config.text_config)
    stock = LlavaForConditionalGeneration(LlavaConfig(**parts))
    processor = AutoProcessor.from_pretrained(checkpoint)
    unnamed = copy.deepcopy(model)
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    unnamed.name_or_path = ""
    adapted = get_peft_model(copy.deepcopy(model), ALL_LINEAR)
    sgd = torch.optim.SGD
    by_length = dict(train_sampling_strategy="group_by_length")
    prefix = PrefixTuningConfig
    free = ConversationCollator(processor, padding_free=True)
    for message, args, given in (
        ("is a 'llava' model. Make a NormAlign-LLaVA of it", {}, dict(model=stock)),
        ("is of arm 'gwc'. To train 'unit', give its path", dict(arm="unit"), {}),
        ("Give a LlavaProcessor", {}, dict(processing_class=processor.tokenizer)),
        ("The model names no folder with its processor", {}, dict(model=unnamed)),
        ("for a model loaded here", {}, dict(quantization_config=four_bits)),
        ("padding_free needs a Conv", dict(padding_free=True), dict(data_collator=list)),
        ("train_dataset is a list. Give a Dataset", {}, dict(train_dataset=[messages(1)])),
        ("no length. Set max_steps", dict(max_steps=-1), dict(train_dataset=stream())),
        ("lacks lengths for", by_length, dict(train_dataset=stream())),
        ("Tuning.*. Give a LoraConfig", {}, dict(peft_config=prefix(num_virtual_tokens=2))),
        ("its learning rate is 0", dict(language_learning_rate=0.0), dict(peft_config=ALL_LINEAR)),
        ("Give optimizer_cls_and_kwargs", {}, dict(optimizers=(sgd(model.parameters()), None))),
        ("has adapters. .* merge them first", {}, dict(model=adapted)),
        ("Give optimizer_cls_and_kwargs", {}, dict(optimizers=(None, object()))),
        ("formatting_func", {}, dict(formatting_func=str)),
        ("compute_metrics needs rows", dict(padding_free=True), dict(compute_metrics=len)),
        ("compute_metrics needs rows", {}, dict(compute_metrics=len, data_collator=free)),
    ):
        given = {"model": model, "train_dataset": rows(), **given}
        with pytest.raises((ValueError, TypeError), match=message):
            NormAlignTrainer(args=options(tmp_path, **args), **given)
    trained(unnamed, options(tmp_path), processing_class=processor).save_model()
    saved = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert saved.config.model_type == "normalign_llava"


def test_rows_without_images_are_refused_where_they_train_nothing(tmp_path, checkpoint, model):
    text = Dataset.from_list([{"question": f"what is {n}?", "answer": "A"} for n in range(8)])
    trained_too = dict(stage="align", language_learning_rate=1e-3)
    for args in (dict(language_learning_rate=0.0), dict(stage="align"), trained_too):
        with pytest.raises(ValueError, match="train_dataset have no image. .* nothing is trained"):
            NormAlignTrainer(model, options(tmp_path, **args), train_dataset=text)
    model.generation_config.eos_token_id = 5
    trainer = NormAlignTrainer(model, options(tmp_path), train_dataset=text)
    end = trainer.processing_class.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in trainer.model.generation_config.eos_token_id  # as labels end


def test_rows_without_a_known_column_reach_another_collator_as_they_are(tmp_path, checkpoint):
    counted = Dataset.from_list([{"number": number} for number in range(4)])
    args = options(tmp_path, seed=7)
    trainer = NormAlignTrainer(str(checkpoint), args, list, counted)
    loader = trainer.get_train_dataloader()
    rows_of_a_batch = next(iter(loader))
    assert all(row.keys() == {"number"} for row in rows_of_a_batch)
    own = getattr(loader, "base_dataloader", loader)
    assert own.generator.initial_seed() == 7


def test_what_a_trainer_is_given_beside_its_options_is_used_and_recorded(tmp_path, checkpoint):
    optimizer = (torch.optim.SGD, {"lr": 3e-4, "momentum": 0.9})
    args = options(tmp_path, stage="tune", global_batch_size=4, hub_token="hf_secret")
    watching = TrainerCallback()
    trainer = NormAlignTrainer(
        str(checkpoint),
        args,
        train_dataset=rows(count=4),
        callbacks=[watching],
        optimizer_cls_and_kwargs=optimizer,
        peft_config=LoraConfig(r=2),
    )
    assert watching in trainer.callback_handler.callbacks
    assert any(isinstance(own, ProgressLines) for own in trainer.callback_handler.callbacks)
    rate = dict.fromkeys(("projector", "norm", "language"), 3e-4)  # and no stage's own
    assert trainer.learning_rates == {"vision": 0.0, **rate}
    record = trainer.record
    assert record["optimizer"] == {"class": "torch.optim.sgd.SGD", "lr": 3e-4, "momentum": 0.9}
    assert record["adapters"]["r"] == 2
    assert record["run"]["steps"] == 2 and "data" not in record["run"]
    assert (trainer.hub_token, trainer.args.hub_token) == ("hf_secret", None)  # options are saved
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        trainer.get_eval_dataloader()


def test_another_collator_gets_rows_of_any_columns_as_from_sfttrainer(tmp_path, checkpoint, caplog):
    processor = AutoProcessor.from_pretrained(checkpoint)

    def collate(examples):
        """That of TRL's tutorials: every token but padding and image tokens is a label."""
        texts = []
        for example in examples:
            texts.append(processor.apply_chat_template(turns(example["query"], *example["label"])))
        images = [[example["image"]] for example in examples]
        batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels.masked_fill(labels == processor.image_token_id, -100)}

    shared = dict(eval_strategy="steps", eval_steps=1, train_sampling_strategy="sequential")
    shared |= dict(dataset_kwargs={"skip_prepare_dataset": True})
    whole = dict(remove_unused_columns=False, max_length=None)
    theirs = SFTConfig(str(tmp_path), **SHORT, **shared, **whole)
    ours = options(tmp_path, **shared)
    charts = rows(chart)
    losses = {}
    for name, trainer_class, args, data in (
        ("stock", SFTTrainer, theirs, charts),
        ("memory", NormAlignTrainer, theirs, charts),
        ("stream", NormAlignTrainer, ours, stream(chart)),
    ):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
        trainer = trainer_class(model, args, collate, data, data, processing_class=processor)
        trainer.train()
        losses[name] = logged(trainer) + logged(trainer, "eval_loss")
    for name in ("memory", "stream"):
        assert losses[name] == pytest.approx(losses["stock"], rel=1e-4), name
    assert "assistant_only_loss" not in caplog.text


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("bad", [(0, 1), (1,), (0, 3)])
def test_held_out_rows_that_are_skipped_are_in_no_mean(tmp_path, checkpoint, bad, free):
    """Whole batches of them, and a part of one: the means are those of the others."""

    held_out = [training.row(number) for number in range(4)]
    for number in bad:
        whole = held_out[number]["images"][0]["bytes"]
        held_out[number]["images"] = [{"path": None, "bytes": whole[:60]}]
    processor = AutoProcessor.from_pretrained(checkpoint)
    skipping = ConversationCollator(processor, bad_rows="skip", padding_free=free)
    args = options(tmp_path, per_device_eval_batch_size=2)
    parsed = Dataset.from_list(held_out, features=FEATURES)
    trainer = NormAlignTrainer(str(checkpoint), args, skipping, rows(count=2), eval_dataset=parsed)
    trainer.train()
    found = trainer.evaluate()
    none = trainer.evaluate(trainer.eval_dataset.select(bad))
    assert math.isnan(none["eval_loss"]) and trainer._evaluated is None
    values = []
    tokens = []
    entropies = []
    for batch in ((0, 1), (2, 3)):
        good = [number for number in batch if number not in bad]
        if good:
            inputs = replace(skipping, padding_free=False)([training.row(n) for n in good])
            with torch.no_grad():
                logits = trainer.model(**inputs).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            values += [loss.item()] * len(good)
            right = (logits.argmax(-1) == labels)[labels != -100]
            tokens.append(right.float().mean().item())
            learned = logits[labels != -100].double().log_softmax(-1)
            entropies.append(-(learned.exp() * learned).sum(-1).mean().item())
    named = trainer.evaluate(metric_key_prefix="test")
    assert named["test_loss"] == pytest.approx(found["eval_loss"]) and "eval_loss" not in named
    assert found["eval_loss"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert found["eval_mean_token_accuracy"] == pytest.approx(sum(tokens) / len(tokens))
    assert found["eval_entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
