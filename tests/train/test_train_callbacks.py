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
from normalign_llava.train.callbacks.measurements import Measurements
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


class Watched(NormAlignTrainer):
    """Keeps the model that it starts from, its batches, and gradient norms before clipping."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        self.gradient_norms = []
        super().__init__(*args, **kwargs)
        self.first_model = copy.deepcopy(self.model)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            batch = {name: tensor.clone() for name, tensor in inputs.items()}
            self.batches.append(batch)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is not None:
            self.gradient_norms.append(float(grad_norm))
        return super()._get_grad_norm(model, grad_norm)


def make_trainer(checkpoint, folder, rank=0, dropout=0.0, images=1, **options) -> Watched:
    """A trainer with two batches a step; of adapters if they have a `rank`."""
    train_options = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "seed": 3,
        **options,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "constant",
    }
    if rank:
        train_options["use_peft"] = True
        train_options["lora_r"] = rank
        train_options["lora_dropout"] = dropout
    train_rows = training.rows(12, images=lambda number: images)
    return training.trainer(folder, checkpoint, train_rows, cls=Watched, **train_options)


def train(checkpoint, folder, **options) -> Watched:
    trainer = make_trainer(checkpoint, folder, **options)
    trainer.train()
    return trainer


def train_logs(trainer) -> list[dict]:
    history = trainer.state.log_history
    return [log_entry for log_entry in history if "loss" in log_entry]


def starting_with(entry: dict, *prefixes: str) -> dict:
    return {key: entry[key] for key in entry if key.startswith(prefixes)}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def part_of(parameter_name: str) -> str:
    """By hand, and stricter than what is tested: the names are spelled out."""
    without_prefix = parameter_name.removeprefix("base_model.model.").removeprefix("model.")
    module, _, name_in_module = without_prefix.partition(".")
    if module != "multi_modal_projector":
        return module
    norm_parts = {"norm.weight": "gain", "norm.bias": "bias"}
    own_name = name_in_module.replace("modules_to_save.default.", "")
    return norm_parts.get(own_name, "projector")


@pytest.fixture(scope="module", params=["full", "adapters"])
def trainer_after_a_step(request, checkpoint, tmp_path_factory):
    """A trainer after its first step, of two batches."""
    folder = tmp_path_factory.mktemp("step")
    if request.param == "full":
        return train(checkpoint, folder, max_grad_norm=0.1, max_steps=1)
    return train(
        checkpoint,
        folder,
        rank=2,
        max_grad_norm=0.0,
        gradient_checkpointing=True,
        max_steps=1,
    )


def decoder_inputs(model, batch) -> torch.Tensor:
    """The decoder's input vectors, with image features in the places of image tokens."""
    token_ids = batch["input_ids"]
    with torch.no_grad():
        vectors = model.get_input_embeddings()(token_ids)
        pixel_values = batch["pixel_values"].double()
        features = model.model.get_image_features(pixel_values, return_dict=True).pooler_output
        vectors[token_ids == model.config.image_token_id] = torch.cat(tuple(features)).double()
    return vectors


def test_token_norms_are_means_over_the_decoder_inputs_of_all_micro_batches(trainer_after_a_step):
    batches = trainer_after_a_step.batches
    assert len(batches) == 2
    is_padded = [not batch["attention_mask"].all() for batch in batches]
    assert any(is_padded)
    model = copy.deepcopy(base_model(trainer_after_a_step.first_model)).double().eval()
    visual_norms = []
    text_norms = []
    for batch in batches:
        vectors = decoder_inputs(model, batch).flatten(0, 1).tolist()
        token_ids = batch["input_ids"].flatten().tolist()
        attention_mask = batch["attention_mask"].flatten().tolist()
        for vector, token_id, attended in zip(vectors, token_ids, attention_mask, strict=True):
            norm = math.hypot(*vector)
            if attended and token_id == model.config.image_token_id:
                visual_norms.append(norm)
            elif attended:
                text_norms.append(norm)
    assert abs(mean(visual_norms) - mean(text_norms)) > 1e-3
    logged = train_logs(trainer_after_a_step)[0]
    assert logged["norm/visual"] == pytest.approx(mean(visual_norms), rel=1e-5)
    assert logged["norm/text"] == pytest.approx(mean(text_norms), rel=1e-5)


def backward(model, batches) -> None:
    """Gradients of the mean loss over all labels, by hand."""
    label_count = 0
    for batch in batches:
        label_count += (batch["labels"] != -100).sum()
    for batch in batches:
        output = base_model(model)(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            pixel_values=batch["pixel_values"].double(),
        )
        logits = output.logits[:, :-1].mT
        labels = batch["labels"][:, 1:]
        summed_loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (summed_loss / label_count).backward()


def test_gradient_norms_are_measured_before_clipping(trainer_after_a_step):
    model = copy.deepcopy(trainer_after_a_step.first_model).double().train()
    for module in model.modules():
        module._forward_pre_hooks.clear()  # inputs of a projector beside adapters become float32
    # TRL's forward is a closure over the model it was made for, so the copy's is the class's own.
    del base_model(model).forward
    backward(model, trainer_after_a_step.batches)
    squares = dict.fromkeys(training.GRADIENT_PARTS, 0.0)
    if not trainer_after_a_step.learning_rates["vision"]:
        del squares[training.GRADIENT_PARTS[0]]
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            squares[part_of(parameter_name)] += parameter.grad.square().sum().item()
    expected = {"grad_norm": math.sqrt(sum(squares.values()))}
    for gradient_part, square in squares.items():
        expected[f"grad_norm/{gradient_part}"] = math.sqrt(square)
    logged = train_logs(trainer_after_a_step)[0]
    assert starting_with(logged, "grad_norm") == pytest.approx(expected, rel=1e-4)


def test_clip_share_counts_the_steps_since_the_last_log(checkpoint, tmp_path):
    max_grad_norm = 3.23
    trainer = train(
        checkpoint,
        tmp_path,
        max_steps=6,
        logging_steps=3,
        learning_rate=1e-4,
        max_grad_norm=max_grad_norm,
    )
    is_clipped = [norm > max_grad_norm for norm in trainer.gradient_norms]
    assert len(is_clipped) == 6
    first_entry, second_entry = train_logs(trainer)
    assert first_entry["clip/share"] == pytest.approx(sum(is_clipped[:3]) / 3)
    assert second_entry["clip/share"] == pytest.approx(sum(is_clipped[3:]) / 3)
    assert 0 < sum(is_clipped) < 6


def test_the_time_left_does_not_count_what_comes_before_the_first_step(monkeypatch, capsys):
    seconds = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds)
    trainer_state = TrainerState(global_step=10, max_steps=14, is_world_process_zero=True)
    arguments = TrainingArguments()
    control = TrainerControl()
    progress_lines = progress.ProgressLines()

    def last_line() -> str:
        progress_lines.on_log(arguments, trainer_state, control, logs={"loss": 1.0})
        return capsys.readouterr().out.splitlines()[-1]

    progress_lines.on_train_begin(arguments, trainer_state, control)
    progress_lines.on_step_begin(arguments, trainer_state, control)
    assert last_line().endswith(" -")  # before a step was taken
    seconds += 7200
    progress_lines.on_train_begin(arguments, trainer_state, control)  # the run begins anew
    seconds += 3600  # in which a resumed run reads the rows of the steps before
    for _ in range(2):
        progress_lines.on_step_begin(arguments, trainer_state, control)
        seconds += 5.2
        trainer_state.global_step += 1
    assert last_line().endswith("0:00:10")


LOGGED = {
    "loss": 1.23456,
    "learning_rate": 2e-5,
    "norm/visual": 123.456,
    "norm/text": 0.5,
    "grad_norm": 7.0,
    "clip/share": 0.25,
}


def printed_lines(logs: list[dict], capsys, first=0, max_steps=10, **state_values) -> list[str]:
    """What is printed of logs at step 3 of 10, in a run that began at a step."""
    trainer_state = TrainerState(global_step=first, max_steps=max_steps, is_world_process_zero=True)
    arguments = TrainingArguments(max_grad_norm=2.5)
    control = TrainerControl()
    progress_lines = progress.ProgressLines()
    progress_lines.on_train_begin(arguments, trainer_state, control)
    trainer_state.global_step = 3
    for name, value in state_values.items():
        setattr(trainer_state, name, value)
    for log_entry in logs:
        progress_lines.on_log(arguments, trainer_state, control, logs=log_entry)
    return capsys.readouterr().out.splitlines()


def test_a_line_has_what_was_logged_under_its_name(capsys):
    header, full_line, loss_line = printed_lines([LOGGED, {"loss": 2.0}], capsys)
    expected = {
        "step": "3/10",
        "loss": "1.235",
        "lr": "2e-05",
        "visual": "123",
        "text": "0.5",
        "gradient": "7",
        "clipped": "25%",
        "time": "-",
    }
    assert header.split() == [*expected, "left"]
    assert full_line.split() == list(expected.values())
    assert loss_line.split() == ["3/10", "2", "-", "-", "-", "-", "-", "-"]
    assert len(header) <= 80
    assert len(full_line) == len(header)
    assert len(loss_line) == len(header)


def test_a_line_of_many_steps_is_as_wide_as_its_header(capsys):
    header, loss_line = printed_lines([LOGGED], capsys, max_steps=20_000)
    assert len(header) <= 80
    assert len(loss_line) == len(header)


HELD_OUT = {"eval_easy_loss": 0.51239, "eval_runtime": 3.0, "epoch": 1.0}
END = {"train_runtime": 3661.4, "train_loss": 0.25}


def test_held_out_losses_and_the_end_of_a_run_have_lines(capsys):
    _, held_out_line, last_line = printed_lines([HELD_OUT, END], capsys)
    assert held_out_line.split() == ["3/10", "eval_easy_loss", "0.5124"]
    assert "3 steps in 1:01:01" in last_line
    assert last_line.endswith(" 0.25")


def test_a_run_that_is_resumed_at_its_end_took_no_steps_and_has_no_loss(capsys):
    last_line = printed_lines([END], capsys, first=3)[-1]
    assert "0 steps" in last_line
    assert "0.25" not in last_line


def test_only_the_steps_of_a_resumed_run_are_counted(capsys):
    assert "1 steps" in printed_lines([END], capsys, first=2)[-1]


def test_what_is_logged_before_training_has_lines_too(capsys):
    trainer_state = TrainerState(max_steps=10, is_world_process_zero=True)
    progress_lines = progress.ProgressLines()
    arguments = TrainingArguments()
    progress_lines.on_log(arguments, trainer_state, TrainerControl(), logs={"eval_loss": 0.5})
    progress_lines.on_log(arguments, trainer_state, TrainerControl(), logs={"loss": 2.0})
    held_out_line, loss_line = capsys.readouterr().out.splitlines()
    assert held_out_line.split() == ["0/10", "eval_loss", "0.5"]
    assert loss_line.split()[:2] == ["0/10", "2"]
    assert loss_line.endswith(" -")


def test_only_the_first_process_prints(capsys):
    header_only = printed_lines([LOGGED], capsys, is_world_process_zero=False)
    assert len(header_only) == 1


def clipping_lines(entry: dict, capsys) -> list[str]:
    """What is printed about clipping if an entry is logged twice."""
    return [line for line in printed_lines([entry, entry], capsys) if "GWC" in line]


@pytest.mark.parametrize(("factor", "clipped"), [(1.0, 0.9), (3.14159, 0.5)])
def test_clipping_is_not_explained_where_the_factor_is_1_or_half_are_clipped(
    capsys, factor, clipped
):
    log_entry = {**LOGGED, "gwc/factor": factor, "clip/share": clipped}
    assert clipping_lines(log_entry, capsys) == []


def test_clipping_is_explained_once_where_the_factor_is_large_and_most_are_clipped(capsys):
    log_entry = {**LOGGED, "gwc/factor": 3.14159, "clip/share": 0.6}
    (explanation,) = clipping_lines(log_entry, capsys)
    assert " 3.14," in explanation
    assert "max_grad_norm 2.5" in explanation


@pytest.mark.parametrize("missing", ["gwc/factor", "clip/share"])
def test_clipping_is_not_explained_where_it_was_not_measured(capsys, missing):
    log_entry = {**LOGGED, "gwc/factor": 3.14159, "clip/share": 0.9}
    del log_entry[missing]
    assert clipping_lines(log_entry, capsys) == []


class Table(TrainerCallback):
    """As the one of a notebook."""


@pytest.mark.parametrize(
    ("callback_class", "is_terminal", "expected"),
    [
        pytest.param(
            ProgressCallback,
            True,
            {progress.Bars, progress.ProgressLines},
            id="bars in a terminal",
        ),
        pytest.param(
            ProgressCallback,
            False,
            {progress.ProgressLines},
            id="bars in a file",
        ),
        pytest.param(
            PrinterCallback,
            True,
            {progress.ProgressLines},
            id="a printer",
        ),
        pytest.param(
            Table,
            True,
            {Table},
            id="a notebook",
        ),
    ],
)
def test_bars_are_for_terminals_and_a_notebook_keeps_its_table(
    monkeypatch, callback_class, is_terminal, expected
):
    handler = CallbackHandler([callback_class()], None, None, None, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    progress.show_lines(handler)
    callback_classes = {type(callback) for callback in handler.callbacks}
    assert callback_classes - {DefaultFlowCallback} == expected


def test_the_first_step_is_measured_too_if_it_is_logged(checkpoint, tmp_path):
    trainer = train(
        checkpoint,
        tmp_path,
        max_steps=3,
        logging_steps=2,
        logging_first_step=True,
        max_grad_norm=0.0,
    )
    entries = train_logs(trainer)
    assert [log_entry["step"] for log_entry in entries] == [1, 2]
    for log_entry in entries:
        assert log_entry["norm/visual"] > 0
        assert log_entry["grad_norm/gain"] > 0
        assert "clip/share" not in log_entry  # nothing is clipped
        part_norms = [
            log_entry[f"grad_norm/{gradient_part}"] for gradient_part in training.GRADIENT_PARTS
        ]
        assert math.hypot(*part_norms) > 0


class MeasuredSteps:
    """Measurements of a tiny model, step by step, without a trainer."""

    def __init__(self, folder, max_steps=4, **options):
        self.settings = training.settings(folder, **options)
        Accelerator(cpu=True)  # the options have made accelerate forget its state
        self.measurements = Measurements(self.settings)
        self.model = tiny.model()
        # As a run that is resumed had it.
        self.state = TrainerState(max_steps=max_steps, logging_steps=1)

    def call(self, event) -> None:
        event(self.settings, self.state, control=None, model=self.model)

    def begin(self) -> None:
        self.call(self.measurements.on_train_begin)

    def begin_step(self) -> None:
        self.call(self.measurements.on_step_begin)

    def clip(self, total_norm) -> None:
        self.measurements.after_clip(total_norm)

    def end_step(self) -> None:
        self.call(self.measurements.on_pre_optimizer_step)

    def collect(self) -> dict:
        return self.measurements.collect()


@pytest.mark.parametrize(
    ("strategy", "logging_steps", "expected"),
    [
        ("steps", 2, [2, 4]),
        ("steps", 3, [3]),
        ("epoch", 2, []),
        ("epoch", 3, []),
    ],
)
def test_which_steps_are_measured_is_an_option_of_this_run(
    tmp_path, strategy, logging_steps, expected
):
    measured_run = MeasuredSteps(tmp_path, logging_strategy=strategy, logging_steps=logging_steps)
    measured_run.begin()
    measured_steps = []
    for step_number in range(1, 5):
        measured_run.state.global_step = step_number - 1
        measured_run.begin_step()
        measured_run.end_step()
        if measured_run.collect():
            measured_steps.append(step_number)
    assert measured_steps == expected


def test_steps_of_an_earlier_run_or_of_an_unknown_norm_are_not_in_the_share(tmp_path):
    measured_run = MeasuredSteps(tmp_path, max_grad_norm=1.0)
    measured_run.clip(torch.tensor(9.0))
    measured_run.begin()

    measured_run.begin_step()
    measured_run.end_step()
    measured_run.clip(None)
    assert measured_run.collect().get("clip/share") is None

    measured_run.begin_step()
    measured_run.end_step()
    for norm in (None, torch.tensor(0.5), torch.tensor(2.0)):
        measured_run.clip(norm)
    assert measured_run.collect()["clip/share"] == 0.5


def test_each_measured_step_has_its_own_norms_and_gradients_as_before_clipping(tmp_path):
    measured_run = MeasuredSteps(tmp_path, max_steps=2, max_grad_norm=4.0)
    measured_run.begin()
    model = measured_run.model
    embeddings = model.get_input_embeddings()
    gain = model.model.multi_modal_projector.norm.weight
    gain.grad = torch.full_like(gain, 0.25)
    clipped_norm = 0.25 * math.sqrt(gain.numel())

    # The second step is halved by clipping.
    for total_norm, images, factor in ((2.0, 1, 1.0), (8.0, 0, 2.0)):
        batch = tiny.inputs(images=images, text=3 + images)
        measured_run.begin_step()
        with torch.no_grad():
            model(**batch)
            text_ids = batch["input_ids"][batch["input_ids"] != tiny.IMAGE]
            text_norm = embeddings(text_ids).norm(dim=-1).mean().item()
        measured_run.clip(torch.tensor(total_norm))
        measured_run.end_step()
        measured = measured_run.collect()
        assert measured["norm/text"] == pytest.approx(text_norm, rel=1e-5)
        assert ("norm/visual" in measured) == (images > 0)
        assert measured["grad_norm/gain"] == pytest.approx(clipped_norm * factor, rel=1e-5)
        assert measured_run.collect() == {}  # as for another line of the same step
        assert not model.model._forward_pre_hooks
        assert not model.model.language_model.layers[0]._forward_pre_hooks


def test_a_line_is_in_a_file_as_soon_as_it_is_printed(monkeypatch):
    output_file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output_file))
    progress.show(TrainerState(is_world_process_zero=True), "3/10")
    assert output_file.getvalue() == b"3/10\n"


def projector_logs(folder, **options) -> tuple[dict, torch.nn.Module]:
    """What is logged of the projector's norm after a step of a new checkpoint, and the norm."""
    checkpoint = training.checkpoint(folder, **options)
    trainer = train(checkpoint, folder / "run", max_steps=1)
    last_entry = train_logs(trainer)[-1]
    logged = starting_with(last_entry, "gain/", "bias/", "gwc/")
    return logged, trainer.model.model.multi_modal_projector.norm


def mean_absolute(parameter) -> float:
    absolute_values = [abs(value) for value in parameter.double().tolist()]
    return mean(absolute_values)


def root_of_squares(parameter) -> float:
    squares = [value * value for value in parameter.double().tolist()]
    return math.sqrt(sum(squares))


def test_without_a_norm_the_factor_of_compensation_is_1(tmp_path):
    logged, _ = projector_logs(tmp_path, arm="none")
    assert logged == pytest.approx({"gwc/factor": 1.0}, rel=1e-5)


def test_the_size_of_gain_and_bias_without_compensation(tmp_path):
    logged, projector_norm = projector_logs(tmp_path, arm="aligned")
    expected = {
        "gwc/factor": 1.0,
        "gain/l2": root_of_squares(projector_norm.weight),
        "gain/mean_abs": mean_absolute(projector_norm.weight),
        "bias/mean_abs": mean_absolute(projector_norm.bias),
    }
    assert logged == pytest.approx(expected, rel=1e-5)


def test_the_size_of_the_gain_and_the_factor_of_compensation(tmp_path):
    logged, projector_norm = projector_logs(tmp_path, norm="rms_norm")
    gain = mean_absolute(projector_norm.weight)
    expected = {
        "gwc/factor": 1 / gain,
        "gain/l2": root_of_squares(projector_norm.weight),
        "gain/mean_abs": gain,
    }
    assert logged == pytest.approx(expected, rel=1e-5)


def test_frozen_parts_have_no_entry(checkpoint, tmp_path):
    trainer = train(
        checkpoint,
        tmp_path,
        max_steps=1,
        vision_learning_rate=0.0,
        language_learning_rate=0.0,
    )
    logged = starting_with(train_logs(trainer)[0], "grad_norm/")
    assert logged.keys() == {"grad_norm/projector", "grad_norm/gain", "grad_norm/bias"}


def test_absent_images_have_no_entry(checkpoint, tmp_path):
    trainer = train(
        checkpoint,
        tmp_path,
        images=0,
        max_steps=1,
    )
    logged = train_logs(trainer)[0]
    assert "norm/visual" not in logged
    assert logged["norm/text"] > 0


def test_evaluation_does_not_count(checkpoint, tmp_path):
    options = {
        "logging_steps": 3,
        "learning_rate": 1e-4,
        "max_grad_norm": 3.23,
    }
    without_evaluation = train(checkpoint, tmp_path, **options)
    with_evaluation = train(
        checkpoint,
        tmp_path,
        **options,
        held_out=training.rows(4),
        eval_strategy="steps",
        eval_steps=1,  # also in steps that are not logged
    )

    def measured(trainer) -> dict:
        (log_entry,) = train_logs(trainer)
        return {key: log_entry[key] for key in log_entry if "/" in key}

    assert measured(with_evaluation) == measured(without_evaluation)
    assert 0 < measured(with_evaluation)["clip/share"] < 1


def test_all_keys_that_are_logged_are_documented_and_no_others(tmp_path, checkpoint):
    logged_keys = set()
    for use_peft in (False, True):
        trainer = training.trainer(
            tmp_path,
            checkpoint,
            use_peft=use_peft,
            held_out=training.rows(4),
            eval_strategy="steps",
            eval_steps=2,
            vision_learning_rate=1e-3,
            max_grad_norm=1e-3,
            probe_steps=[2],
            probe_rows=1,
        )
        trainer.train()
        for log_entry in trainer.state.log_history:
            logged_keys.update(log_entry)
    expected = set()
    for key in documented("The log"):
        for gradient_part in training.GRADIENT_PARTS:
            expected.add(key.replace("PART", gradient_part))
    assert logged_keys == expected


def test_cosines_are_between_the_hidden_states_of_neighbouring_layers():
    model = tiny.model()
    batch = tiny.inputs(images=2, text=7, batch=3, seed=5)
    batch["attention_mask"][0, -3:] = 0
    measured = layer_cosines(model, batch)
    model.model.language_model.norm = torch.nn.Identity()  # comes before the last state
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    visual_cosines = []
    text_cosines = []
    is_visual = batch["input_ids"] == tiny.IMAGE
    is_text = batch["attention_mask"].bool() & ~is_visual
    for hidden_state, next_state in pairwise(output.hidden_states):
        cosines = torch.cosine_similarity(hidden_state.double(), next_state.double(), -1)
        visual_cosines.append(cosines[is_visual].mean().item())
        text_cosines.append(cosines[is_text].mean().item())
    assert measured["visual"] == pytest.approx(visual_cosines, abs=1e-6)
    assert measured["text"] == pytest.approx(text_cosines, abs=1e-6)
    assert measured["visual"] != pytest.approx(measured["text"], abs=1e-3)


def test_of_a_batch_without_images_the_probe_measures_only_text(tmp_path):
    settings = training.settings(tmp_path)
    model = tiny.model()
    trainer_state = TrainerState(global_step=2)
    batch = tiny.inputs(images=0, batch=2)
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.9
    expected = layer_cosines(model, batch)["text"]
    cosine_probe = CosineProbe([0, 2], batch)

    # In a run that is resumed.
    cosine_probe.on_train_begin(settings, trainer_state, None, model=model.train())
    assert not cosine_probe.collect()
    assert not (tmp_path / DYNAMICS).exists()

    trainer_state.global_step = 0
    cosine_probe.on_train_begin(settings, trainer_state, None, model=model)
    (probe_line,) = dynamics(tmp_path)
    assert probe_line["visual"] == []
    assert probe_line["text"] == pytest.approx(expected)
    assert cosine_probe.collect() == {"cosine/text": pytest.approx(sum(probe_line["text"]) / 2)}
    assert cosine_probe.collect() == {}  # it is logged once

    trainer_state.is_world_process_zero = False
    trainer_state.global_step = 2
    cosine_probe.on_step_end(settings, trainer_state, None, model=model)
    assert dynamics(tmp_path) == [probe_line]  # only the first process writes


def dynamics(folder) -> list[dict]:
    """The lines that the probe wrote."""
    probe_lines = (folder / DYNAMICS).read_text().splitlines()
    return [json.loads(probe_line) for probe_line in probe_lines]


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "gradient_checkpointing": True},
        {"bf16": True},
    ],
    ids=["adapters", "bf16"],
)
def test_the_probe_writes_a_line_for_each_step(checkpoint, tmp_path, options):
    trainer = make_trainer(
        checkpoint,
        tmp_path,
        probe_steps=[0, 1, 3],
        probe_rows=2,
        **options,
    )
    first_rows = [trainer.train_dataset[0], trainer.train_dataset[1]]
    expected_batch = dict(trainer.data_collator(first_rows))
    del expected_batch["labels"]
    training.assert_equal(trainer.probe.batch, expected_batch)
    trainer.train()

    def expected_cosines(trained_model) -> dict[str, list[float]]:
        model = base_model(trained_model.eval())
        model.__dict__.pop("forward", None)  # TRL's is bound to the trained model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in options):
            return layer_cosines(model, trainer.probe.batch)

    probe_lines = dynamics(tmp_path)
    assert [probe_line["step"] for probe_line in probe_lines] == [0, 1, 3]
    for probe_line in probe_lines:
        assert len(probe_line["visual"]) == 2
        assert len(probe_line["text"]) == 2
    before, _, after = probe_lines
    assert before["text"] != after["text"]
    first_cosines = expected_cosines(trainer.first_model)
    assert before["visual"] == pytest.approx(first_cosines["visual"], abs=1e-6)
    assert before["text"] == pytest.approx(first_cosines["text"], abs=1e-6)
    last_cosines = expected_cosines(trainer.model)
    assert after["visual"] == pytest.approx(last_cosines["visual"], abs=1e-6)
    assert after["text"] == pytest.approx(last_cosines["text"], abs=1e-6)
    _, second_entry, last_entry = train_logs(trainer)
    assert starting_with(second_entry, "cosine/") == {}
    assert last_entry["cosine/visual"] == pytest.approx(sum(last_cosines["visual"]) / 2)
    assert last_entry["cosine/text"] == pytest.approx(sum(last_cosines["text"]) / 2)


def test_the_probe_s_batch_has_padding_in_a_run_without(checkpoint, tmp_path):
    padding = ConversationCollator(AutoProcessor.from_pretrained(checkpoint))
    parsed_rows = list(training.rows(4))
    settings = training.settings(tmp_path, probe_rows=3, probe_steps=[1])
    padding_free = replace(padding, padding_free=True)
    cosine_probe = CosineProbe.of_rows(parsed_rows, padding_free, settings)
    expected = dict(padding(parsed_rows[:3]))
    del expected["labels"]
    training.assert_equal(cosine_probe.batch, expected)


def test_the_probe_s_batch_can_be_of_another_collator(tmp_path):
    parsed_rows = list(training.rows(4))
    settings = training.settings(tmp_path, probe_rows=3, probe_steps=[1])
    settings.probe_steps = None
    cosine_probe = CosineProbe.of_rows(parsed_rows, lambda chosen: {"rows": chosen}, settings)
    assert cosine_probe.batch == {"rows": parsed_rows[:3]}
    assert not cosine_probe.steps


def test_a_step_measured_again_replaces_its_line(checkpoint, tmp_path):
    options = {
        "probe_steps": [0, 2, 3],
        "save_strategy": "steps",
        "save_steps": 1,
    }
    make_trainer(checkpoint, tmp_path, **options).train()
    first_lines = dynamics(tmp_path)
    resumed = make_trainer(checkpoint, tmp_path, **options)
    # Beside them the run would not go on from the first one.
    shutil.rmtree(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-3")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed_lines = dynamics(tmp_path)
    assert [probe_line["step"] for probe_line in resumed_lines] == [0, 2, 3]
    assert resumed_lines[0] == first_lines[0]


def test_training_is_bitwise_the_same_with_all_that_watches_it(checkpoint, tmp_path):
    def make(probe_steps) -> Watched:
        torch.manual_seed(0)  # for adapters
        trainer = make_trainer(checkpoint, tmp_path, rank=2, dropout=0.3, probe_steps=probe_steps)
        for layer in base_model(trainer.model).model.language_model.layers:
            layer.self_attn.attention_dropout = 0.3
        return trainer

    def losses(trainer) -> list[float]:
        return [log_entry["loss"] for log_entry in train_logs(trainer)]

    unwatched = make(probe_steps=None)
    unwatched.remove_callback(unwatched.measurements)
    unwatched.train()
    assert not (tmp_path / DYNAMICS).exists()
    watched = make(probe_steps=[0, 1, 2])
    watched.train()
    assert (tmp_path / DYNAMICS).exists()
    assert losses(watched) == losses(unwatched)
    training.assert_equal(watched.model.state_dict(), unwatched.model.state_dict())
