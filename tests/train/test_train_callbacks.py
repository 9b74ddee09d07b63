# SPDX-License-Identifier: Apache-2.0
"""What a run measures and prints, against figures by other means; training does not notice."""

import copy
import io
import json
import math
import shutil
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
import torch
import training
from accelerate import Accelerator
from documented import documented
from transformers import (
    AutoProcessor,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from normalign_llava import NormAlignTrainer
from normalign_llava.train.callbacks import progress
from normalign_llava.train.callbacks.depth_probe import DYNAMICS, CosineProbe, layer_cosines
from normalign_llava.train.callbacks.measurements import GRADIENT_PARTS, Measurements
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


class Watched(NormAlignTrainer):
    """Keeps the model that it starts from, its batches, and gradient norms before clipping."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        self.totals = []
        super().__init__(*args, **kwargs)
        self.start = copy.deepcopy(self.model)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self.batches.append({name: value.clone() for name, value in inputs.items()})
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        self.totals += [] if grad_norm is None else [float(grad_norm)]
        return super()._get_grad_norm(model, grad_norm)


def make_trainer(checkpoint, folder, rank=0, dropout=0.0, images=1, **options) -> Watched:
    options = dict(max_steps=3, learning_rate=1e-2, seed=3) | options
    options |= dict(gradient_accumulation_steps=2, lr_scheduler_type="constant")
    options |= dict(use_peft=True, lora_r=rank, lora_dropout=dropout) if rank else {}
    data = training.rows(12, images=lambda number: images)
    return training.trainer(folder, checkpoint, data, cls=Watched, **options)


def logs(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def part_of(name: str) -> str:
    """By hand, and stricter than what is tested: the names are spelled out."""
    module, _, rest = name.removeprefix("base_model.model.").removeprefix("model.").partition(".")
    if module == "multi_modal_projector":
        own = rest.replace("modules_to_save.default.", "")
        return {"norm.weight": "gain", "norm.bias": "bias"}.get(own, "projector")
    return module


@pytest.fixture(scope="module", params=[(0, 0.1), (2, 0.0)], ids=["full", "adapters"])
def step(request, checkpoint, tmp_path_factory):
    """A trainer after its first step, of two batches."""
    rank, clip = request.param
    options = dict(rank=rank, max_grad_norm=clip, gradient_checkpointing=rank > 0, max_steps=1)
    trainer = make_trainer(checkpoint, tmp_path_factory.mktemp("step"), **options)
    trainer.train()
    return trainer


def test_token_norms_are_those_of_the_decoders_input_over_all_micro_batches(step):
    model = copy.deepcopy(base_model(step.start)).double().eval()
    image = model.config.image_token_id
    norms = {"visual": [], "text": []}
    padded = [batch for batch in step.batches if not batch["attention_mask"].all()]
    assert len(step.batches) == 2 and padded
    for batch in step.batches:
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        with torch.no_grad():
            states = model.get_input_embeddings()(ids)
            pixels = batch["pixel_values"].double()
            features = model.model.get_image_features(pixels, return_dict=True).pooler_output
            states[ids == image] = torch.cat(tuple(features)).double()
        lists = (values.flatten(0, 1).tolist() for values in (states, ids, mask))
        for token, number, attended in zip(*lists, strict=True):
            if attended:
                norms["visual" if number == image else "text"].append(math.hypot(*token))
    expected = {f"norm/{kind}": sum(values) / len(values) for kind, values in norms.items()}
    assert abs(expected["norm/visual"] - expected["norm/text"]) > 1e-3
    assert {key: logs(step)[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_gradient_norms_are_those_before_clipping(step):
    model = copy.deepcopy(step.start).double().train()
    for module in model.modules():
        module._forward_pre_hooks.clear()  # inputs of a projector beside adapters become float32
    # TRL's forward is a closure over the model it was made for, so the copy's is the class's own.
    del base_model(model).forward
    count = sum((batch["labels"] != -100).sum() for batch in step.batches)
    for batch in step.batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        pixels = batch["pixel_values"].double()
        logits = base_model(model)(**inputs, pixel_values=pixels).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="sum")
        (loss / count).backward()
    squares = dict.fromkeys(
        GRADIENT_PARTS if step.learning_rates["vision"] else GRADIENT_PARTS[1:], 0.0
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            squares[part_of(name)] += parameter.grad.square().sum().item()
    expected = {f"grad_norm/{part}": math.sqrt(square) for part, square in squares.items()}
    expected["grad_norm"] = math.sqrt(sum(squares.values()))
    logged = {key: value for key, value in logs(step)[0].items() if key.startswith("grad_norm")}
    assert logged == pytest.approx(expected, rel=1e-4)


def test_clip_share_counts_the_steps_since_the_last_log(checkpoint, tmp_path):
    options = dict(max_steps=6, logging_steps=3, learning_rate=1e-4, max_grad_norm=3.23)
    trainer = make_trainer(checkpoint, tmp_path, **options)
    trainer.train()
    assert len(trainer.totals) == 6
    for entry, totals in zip(logs(trainer), (trainer.totals[:3], trainer.totals[3:]), strict=True):
        assert entry["clip/share"] == pytest.approx(sum(total > 3.23 for total in totals) / 3)
    assert 0 < sum(total > 3.23 for total in trainer.totals) < 6


def test_the_time_left_does_not_count_what_comes_before_the_first_step(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    state = TrainerState(global_step=10, max_steps=14, is_world_process_zero=True)
    args = TrainingArguments()
    control = TrainerControl()
    lines = progress.ProgressLines()
    lines.on_train_begin(args, state, control)
    lines.on_step_begin(args, state, control)
    lines.on_log(args, state, control, logs={"loss": 1.0})
    assert capsys.readouterr().out.splitlines()[-1].endswith(" -")  # before a step was taken
    now[0] += 7200
    lines.on_train_begin(args, state, control)  # the run begins anew
    now[0] += 3600  # in which a resumed run reads the rows of the steps before
    for _ in range(2):
        lines.on_step_begin(args, state, control)
        now[0] += 5.2
        state.global_step += 1
    lines.on_log(args, state, control, logs={"loss": 1.0})
    *_, line = capsys.readouterr().out.splitlines()
    assert line.endswith("0:00:10")


LOGGED = {"loss": 1.23456, "learning_rate": 2e-5, "norm/visual": 123.456, "norm/text": 0.5}
LOGGED |= {"grad_norm": 7.0, "clip/share": 0.25}


def told(logs: list[dict], capsys, first=0, max_steps=10, **own) -> list[str]:
    """What is printed of logs at step 3 of 10, in a run that began at a step."""
    state = TrainerState(global_step=first, max_steps=max_steps, is_world_process_zero=True)
    args = TrainingArguments(max_grad_norm=2.5)
    control = TrainerControl()
    lines = None
    lines = progress.ProgressLines()
    lines.on_train_begin(args, state, control)
    state.global_step = 3
    for name, value in own.items():
        setattr(state, name, value)
    for entry in logs:
        lines.on_log(args, state, control, logs=entry)
    return capsys.readouterr().out.splitlines()


def test_a_line_has_what_was_logged_under_its_name(capsys):
    header, line, less = told([LOGGED, {"loss": 2.0}], capsys)
    assert header.split() == [
        *("step", "loss", "lr", "visual", "text", "gradient", "clipped", "time", "left")
    ]
    assert line.split() == ["3/10", "1.235", "2e-05", "123", "0.5", "7", "25%", "-"]
    assert less.split() == ["3/10", "2", "-", "-", "-", "-", "-", "-"]
    assert len(header) == len(line) == len(less) <= 80
    header, line = told([LOGGED], capsys, max_steps=20_000)
    assert len(header) == len(line) <= 80


def test_held_out_losses_and_the_end_of_a_run_have_lines(capsys):
    held_out = {"eval_easy_loss": 0.51239, "eval_runtime": 3.0, "epoch": 1.0}
    end = {"train_runtime": 3661.4, "train_loss": 0.25}
    _, line, last = told([held_out, end], capsys)
    assert line.split() == ["3/10", "eval_easy_loss", "0.5124"]
    assert "3 steps in 1:01:01" in last and last.endswith(" 0.25")
    assert "0 steps" in told([end], capsys, first=3)[-1]  # resumed at its end
    assert "1 steps" in told([end], capsys, first=2)[-1]
    assert "0.25" not in told([end], capsys, first=3)[-1]


def test_what_is_logged_before_training_has_lines_too(capsys):
    state = TrainerState(max_steps=10, is_world_process_zero=True)
    lines = progress.ProgressLines()
    args = TrainingArguments()
    for logs in ({"eval_loss": 0.5}, {"loss": 2.0}):
        lines.on_log(args, state, TrainerControl(), logs=logs)
    held_out, line = capsys.readouterr().out.splitlines()
    assert held_out.split() == ["0/10", "eval_loss", "0.5"]
    assert line.split()[:2] == ["0/10", "2"] and line.endswith(" -")


def test_the_first_process_alone_prints(capsys):
    assert len(told([LOGGED], capsys, is_world_process_zero=False)) == 1  # its header


@pytest.mark.parametrize(
    ("factor", "clipped", "lines"), [(1.0, 0.9, 0), (3.14159, 0.5, 0), (3.14159, 0.6, 1)]
)
def test_clipping_is_explained_where_the_factor_is_large_and_most_are_clipped(
    capsys, factor, clipped, lines
):
    entry = {**LOGGED, "gwc/factor": factor, "clip/share": clipped}
    said = [line for line in told([entry, entry], capsys) if "GWC" in line]
    assert len(said) == lines
    if lines:
        assert " 3.14," in said[0] and "max_grad_norm 2.5" in said[0]


@pytest.mark.parametrize("missing", ["gwc/factor", "clip/share"])
def test_clipping_is_not_explained_where_it_was_not_measured(capsys, missing):
    entry = {**LOGGED, "gwc/factor": 3.14159, "clip/share": 0.9}
    del entry[missing]
    assert not [line for line in told([entry], capsys) if "GWC" in line]


class Table(TrainerCallback):
    """As the one of a notebook."""


@pytest.mark.parametrize(
    ("theirs", "is_terminal", "ours"),
    [
        (ProgressCallback, True, {progress.Bars, progress.ProgressLines}),
        (ProgressCallback, False, {progress.ProgressLines}),
        (PrinterCallback, True, {progress.ProgressLines}),
        (Table, True, {Table}),
    ],
)
def test_bars_are_for_terminals_and_a_notebook_keeps_its_table(
    monkeypatch, theirs, is_terminal, ours
):
    handler = CallbackHandler([theirs()], None, None, None, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    progress.show_lines(handler)
    assert {type(callback) for callback in handler.callbacks} - {DefaultFlowCallback} == ours


def test_the_first_step_is_measured_too_if_it_is_logged(checkpoint, tmp_path):
    options = dict(max_steps=3, logging_steps=2, logging_first_step=True, max_grad_norm=0.0)
    trainer = make_trainer(checkpoint, tmp_path, **options)
    trainer.train()
    assert [entry["step"] for entry in logs(trainer)] == [1, 2]
    for entry in logs(trainer):
        assert entry["norm/visual"] > 0 and entry["grad_norm/gain"] > 0
        assert "clip/share" not in entry  # nothing is clipped
        assert math.hypot(*(entry[f"grad_norm/{part}"] for part in GRADIENT_PARTS)) > 0


@pytest.mark.parametrize(
    ("options", "steps_measured"), [({"logging_steps": 2}, [2, 4]), ({"logging_steps": 3}, [3])]
)
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_which_steps_are_measured_is_an_option_of_this_run(
    tmp_path, options, steps_measured, strategy
):
    args = training.settings(tmp_path, **options, logging_strategy=strategy)
    Accelerator(cpu=True)  # the options have made accelerate forget its state
    watch = Measurements(args)
    model = tiny.model()
    found = []
    state = TrainerState(max_steps=4, logging_steps=1)  # as a run that is resumed had it
    watch.on_train_begin(args, state, None, model=model)
    for state.global_step in range(4):
        watch.on_step_begin(args, state, None)
        watch.on_pre_optimizer_step(args, state, None, model=model)
        if watch.collect():
            found.append(state.global_step + 1)
    assert found == (steps_measured if strategy == "steps" else [])


def test_steps_of_an_earlier_run_and_those_of_an_unknown_norm_are_not_in_the_share(tmp_path):
    args = training.settings(tmp_path, max_grad_norm=1.0)
    Accelerator(cpu=True)
    watch = Measurements(args)
    model = tiny.model()
    state = TrainerState(max_steps=4)
    watch.after_clip(torch.tensor(9.0))
    watch.on_train_begin(args, state, None, model=model)
    shares = []
    for norms in ([None], [None, torch.tensor(0.5), torch.tensor(2.0)]):
        watch.on_step_begin(args, state, None)
        watch.on_pre_optimizer_step(args, state, None, model=model)
        for norm in norms:
            watch.after_clip(norm)
        shares.append(watch.collect().get("clip/share"))
    assert shares == [None, 0.5]


def test_each_measured_step_has_its_own_norms_and_gradients_as_before_clipping(tmp_path):
    args = training.settings(tmp_path, max_grad_norm=4.0)
    Accelerator(cpu=True)
    watch = Measurements(args)
    model = tiny.model()
    state = TrainerState(max_steps=2)
    watch.on_train_begin(args, state, None, model=model)
    gain = model.model.multi_modal_projector.norm.weight
    gain.grad = torch.full_like(gain, 0.25)
    embed = model.get_input_embeddings()
    for total, images in ((2.0, 1), (8.0, 0)):  # the second is halved by clipping
        batch = tiny.inputs(images=images, text=3 + images)
        watch.on_step_begin(args, state, None)
        with torch.no_grad():
            model(**batch)
            words = batch["input_ids"][batch["input_ids"] != tiny.IMAGE]
            expected = embed(words).norm(dim=-1).mean().item()
        watch.after_clip(torch.tensor(total))
        watch.on_pre_optimizer_step(args, state, None, model=model)
        values = watch.collect()
        assert values["norm/text"] == pytest.approx(expected, rel=1e-5)
        assert ("norm/visual" in values) == bool(images)
        norm = 0.25 * math.sqrt(gain.numel()) * max(1.0, total / 4.0)
        assert values["grad_norm/gain"] == pytest.approx(norm, rel=1e-5)
        assert watch.collect() == {}  # as for another line of the same step
        layer = model.model.language_model.layers[0]
        assert not model.model._forward_pre_hooks and not layer._forward_pre_hooks


def test_a_line_is_in_a_file_as_soon_as_it_is_printed(monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))
    progress.show(TrainerState(is_world_process_zero=True), "3/10")
    assert file.getvalue() == b"3/10\n"


@pytest.mark.parametrize("arm", ["aligned", "rms", "none"])
def test_the_size_of_gain_and_bias_and_the_factor_of_compensation(tmp_path, arm):
    options = {"norm": "rms_norm"} if arm == "rms" else {"arm": arm}
    trainer = make_trainer(training.checkpoint(tmp_path, **options), tmp_path / "run", max_steps=1)
    trainer.train()
    entry = logs(trainer)[-1]
    shown = {name: entry[name] for name in entry if name.startswith(("gain/", "bias/", "gwc/"))}
    expected = {"gwc/factor": 1.0}
    if arm != "none":
        gain = trainer.model.model.multi_modal_projector.norm.weight.double().tolist()
        mean = sum(map(abs, gain)) / len(gain)
        expected.update({"gain/l2": math.sqrt(sum(g * g for g in gain)), "gain/mean_abs": mean})
        if arm != "aligned":
            expected["gwc/factor"] = 1 / mean
        if arm != "rms":
            bias = trainer.model.model.multi_modal_projector.norm.bias.double().tolist()
            expected["bias/mean_abs"] = sum(map(abs, bias)) / len(bias)
    assert shown == pytest.approx(expected, rel=1e-5)


def test_frozen_parts_and_absent_images_have_no_entry(checkpoint, tmp_path):
    rates = dict(vision_learning_rate=0.0, language_learning_rate=0.0)
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, **rates)
    trainer.train()
    names = {name for name in logs(trainer)[0] if name.startswith("grad_norm/")}
    assert names == {f"grad_norm/{part}" for part in ("projector", "gain", "bias")}
    text = make_trainer(checkpoint, tmp_path, images=0, max_steps=1)
    text.train()
    assert "norm/visual" not in logs(text)[0] and logs(text)[0]["norm/text"] > 0


def test_evaluation_does_not_count(checkpoint, tmp_path):
    entries = []
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "held_out": training.rows(4)}
    for options in ({}, evaluated):  # also in steps that are not logged
        options |= dict(logging_steps=3, learning_rate=1e-4, max_grad_norm=3.23)
        trainer = make_trainer(checkpoint, tmp_path, **options)
        trainer.train()
        entries.append([{k: v for k, v in entry.items() if "/" in k} for entry in logs(trainer)])
    assert entries[0] == entries[1] and len(entries[0]) == 1
    assert 0 < entries[0][0]["clip/share"] < 1


def test_the_keys_that_are_logged_are_those_of_the_page(tmp_path, checkpoint):
    keys = set()
    options = dict(held_out=training.rows(4), eval_strategy="steps", eval_steps=2)
    options |= dict(vision_learning_rate=1e-3, max_grad_norm=1e-3, probe_steps=[2], probe_rows=1)
    for use_peft in (False, True):
        trainer = training.trainer(tmp_path, checkpoint, use_peft=use_peft, **options)
        trainer.train()
        keys |= {key for entry in trainer.state.log_history for key in entry}
    assert keys == {
        key.replace("PART", part) for key in documented("The log") for part in GRADIENT_PARTS
    }


def test_cosines_are_those_of_the_hidden_states():
    model = tiny.model()
    batch = tiny.inputs(images=2, text=7, batch=3, seed=5)
    batch["attention_mask"][0, -3:] = 0
    measured = layer_cosines(model, batch)
    model.model.language_model.norm = torch.nn.Identity()  # comes before the last state
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    states = [state.double() for state in output.hidden_states]
    image = batch["input_ids"] == tiny.IMAGE
    attended = batch["attention_mask"].bool()
    for kind, mask in {"visual": image, "text": attended & ~image}.items():
        cosines = [torch.cosine_similarity(*pair, -1)[mask].mean() for pair in pairwise(states)]
        assert measured[kind] == pytest.approx(torch.stack(cosines).tolist(), abs=1e-6)
    assert measured["visual"] != pytest.approx(measured["text"], abs=1e-3)


def test_of_a_batch_without_images_the_probe_measures_text_alone(tmp_path):
    args = training.settings(tmp_path)
    model = tiny.model()
    state = TrainerState(global_step=2)
    batch = tiny.inputs(images=0, batch=2)
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.9
    expected = layer_cosines(model, batch)["text"]
    probe = CosineProbe([0, 2], batch)
    probe.on_train_begin(args, state, None, model=model.train())  # of a run that is resumed
    assert not probe.collect() and not (tmp_path / DYNAMICS).exists()
    state.global_step = 0
    probe.on_train_begin(args, state, None, model=model)
    (line,) = lines(tmp_path)
    assert line["visual"] == [] and line["text"] == pytest.approx(expected)
    assert probe.collect() == {"cosine/text": pytest.approx(sum(line["text"]) / 2)}
    assert probe.collect() == {}  # it is logged once
    state.is_world_process_zero = False
    state.global_step = 2
    probe.on_step_end(args, state, None, model=model)
    assert lines(tmp_path) == [line]  # which the first process writes


def lines(folder):
    return [json.loads(line) for line in (folder / DYNAMICS).read_text().splitlines()]


@pytest.mark.parametrize("kwargs", [{"rank": 2, "gradient_checkpointing": True}, {"bf16": True}])
def test_the_probe_writes_a_line_for_each_step(checkpoint, tmp_path, kwargs):
    trainer = make_trainer(checkpoint, tmp_path, probe_steps=[0, 1, 3], probe_rows=2, **kwargs)
    first = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    del first["labels"]
    training.assert_equal(trainer.probe.batch, dict(first))
    trainer.train()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 1, 3]
    assert all(len(line[kind]) == 2 for line in written for kind in ("visual", "text"))
    states = {0: trainer.start, 3: trainer.model}
    for line in (written[0], written[2]):
        model = states[line["step"]].eval()
        base_model(model).__dict__.pop("forward", None)  # TRL's is bound to the trained model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in kwargs):
            expected = layer_cosines(base_model(model), trainer.probe.batch)
        assert line["visual"] == pytest.approx(expected["visual"], abs=1e-6)
        assert line["text"] == pytest.approx(expected["text"], abs=1e-6)
    assert written[0]["text"] != written[2]["text"]
    _, without, logged = logs(trainer)
    assert not any(key.startswith("cosine/") for key in without)
    for kind, values in expected.items():
        assert logged[f"cosine/{kind}"] == pytest.approx(sum(values) / 2)


def test_the_probe_s_batch_has_padding_in_a_run_without(checkpoint, tmp_path):
    padded = ConversationCollator(AutoProcessor.from_pretrained(checkpoint))
    rows = list(training.rows(4))
    args = training.settings(tmp_path, probe_rows=3, probe_steps=[1])
    probe = CosineProbe.of_rows(rows, replace(padded, padding_free=True), args)
    expected = dict(padded(rows[:3]))
    del expected["labels"]
    training.assert_equal(probe.batch, expected)
    args.probe_steps = None
    of_another_collator = CosineProbe.of_rows(rows, lambda given: {"rows": given}, args)
    assert of_another_collator.batch == {"rows": rows[:3]} and not of_another_collator.steps


def test_a_step_measured_again_replaces_its_line(checkpoint, tmp_path):
    options = dict(probe_steps=[0, 2, 3], save_strategy="steps", save_steps=1)
    make_trainer(checkpoint, tmp_path, **options).train()
    first = lines(tmp_path)
    again = make_trainer(checkpoint, tmp_path, **options)
    for step in (2, 3):  # beside which the run would not go on from the first one
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 3]
    assert lines(tmp_path)[0] == first[0]


def test_training_is_bitwise_the_same_with_all_that_watches_it(checkpoint, tmp_path):
    runs = []
    for probe_steps in (None, [0, 1, 2]):
        torch.manual_seed(0)  # for adapters
        trainer = make_trainer(checkpoint, tmp_path, rank=2, dropout=0.3, probe_steps=probe_steps)
        for layer in base_model(trainer.model).model.language_model.layers:
            layer.self_attn.attention_dropout = 0.3
        if probe_steps is None:
            trainer.remove_callback(trainer.measurements)
        trainer.train()
        runs.append((trainer.model.state_dict(), [entry["loss"] for entry in logs(trainer)]))
    assert (tmp_path / DYNAMICS).exists()
    (plain, losses), (seen, same_losses) = runs
    assert losses == same_losses
    training.assert_equal(seen, plain)
