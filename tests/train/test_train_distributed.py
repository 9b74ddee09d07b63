"""Training in two real processes ends where training in one ends, however the model is sharded."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import stored
import torch
import train_data
import training
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from paths import HELPERS
from prepared import Prepared

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.data.rows.parse import DroppedRows
from normalign_llava.train.command import CONFIGS
from normalign_llava.train.keeping.checkpoints import missing_from, only_run


pytestmark = pytest.mark.slow


NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed")
DDP = "ddp"
FSDP2 = "fsdp2"
ZERO2 = pytest.param("zero2", marks=[NEEDS_DEEPSPEED, pytest.mark.nightly])
ZERO3 = pytest.param("zero3", marks=[NEEDS_DEEPSPEED, pytest.mark.nightly])
DISTRIBUTED_TYPES = {
    "ddp": "MULTI_CPU",
    "fsdp2": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}
# Images, four rows a step. Process 0 has the even rows of a step, process 1 the odd ones.
TRAIN_IMAGES = [1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1]
EVAL_IMAGES = [1, 0, 0, 1, 0, 0]
BAD_IMAGES = [1] * 108
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "COLUMNS": "500",  # long lines
}

OPTIONS = {
    "bf16": "false",
    "per_device_train_batch_size": 1,
    "global_batch_size": 4,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "vision_learning_rate": 2e-4,
    "projector_learning_rate": 5e-4,
    "norm_learning_rate": 3e-3,
    "train_sampling_strategy": "sequential",
    "max_steps": 4,
    # A larger epsilon shows gradients of a wrong scale, and hides rounding errors of true zeros.
    "adam_epsilon": 1e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 1,
    "probe_steps": 2,
    "sample_max_new_tokens": 2,
}
LORA = {
    "use_peft": "true",
    "lora_r": 4,
    "lora_dropout": 0.0,
    "vision_learning_rate": 0,
}
SAVED = {
    "save_strategy": "steps",
    "save_steps": 2,
}
# Two steps an epoch. The run is resumed in the third.
EPOCHS = {
    "global_batch_size": 8,
    "per_device_train_batch_size": 2,
    "max_steps": 10,
    "save_steps": 5,
    "save_strategy": "steps",
    "train_sampling_strategy": "random",
}
PACKED = {
    **EPOCHS,
    "packing": "true",
}
GROUPED = {
    **EPOCHS,
    "train_sampling_strategy": "group_by_length",
    "lr_scheduler_type": "constant",
}
FROZEN = {
    "language_learning_rate": 0,
    "vision_learning_rate": 0,
}
LIGHT = {
    "arm": "aligned",
    "save_steps": 1,
    "max_steps": 1,
}
RESUMED = {
    "mixed": 2,
    "half": 2,
    "frozen": 2,
    "grouped epochs": 5,
    "packed": 5,
}
"""The steps from which the runs `NAME resumed` go on."""


class Room:
    """A folder with checkpoints, data, and what runs in it left."""

    def __init__(self, folder: Path, prepared: Prepared):
        self.folder = folder
        self.prepared = prepared
        self.finished: dict[tuple, Path] = {}
        self.make_checkpoints()
        self.train_data = self.write("train", TRAIN_IMAGES)
        self.eval_data = self.write("eval", EVAL_IMAGES)
        self.bad_data = self.write("bad", BAD_IMAGES)
        for number in (103, 104):  # are opened while training, by different processes
            (folder / "bad" / f"{number}.png").write_bytes(b"no image")
        self.options = self.options_of_runs()

    def make_checkpoints(self) -> None:
        folder = self.folder
        self.aligned = training.checkpoint(folder / "aligned")
        self.bare = training.checkpoint(folder / "bare", arm="none", tied=False)
        self.half = training.checkpoint(folder / "half", tied=False)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(self.half, dtype="bfloat16")
        model.save_pretrained(self.half)
        self.wide = training.checkpoint(
            folder / "wide",
            hidden_size=256,
            intermediate_size=4096,
            head_dim=128,
        )

    def options_of_runs(self) -> dict[str, dict]:
        """The options of each run beside `OPTIONS`."""
        untied = {
            "model_name_or_path": self.bare,
            "arm": "gwc",
        }
        half = {
            **untied,
            **SAVED,
            "bf16": "true",
        }
        frozen = {
            **half,
            **FROZEN,
            "model_name_or_path": self.half,
        }
        return {
            "mixed": {
                **untied,
                **EVALUATED,
                **SAVED,
                "eval_dataset_name": self.eval_data,
            },
            "lora": LORA,
            "bfloat16": {
                "dtype": "bfloat16",
            },
            "autocast": {
                "dtype": "bfloat16",
                "bf16": "true",
            },
            "half": half,
            "frozen": frozen,
            "4 bits": {
                **frozen,
                "load_in_4bit": "true",
            },
            "light": {
                **frozen,
                **LIGHT,
                "model_name_or_path": self.wide,
            },
            "skipped": {
                "dataset_name": self.bad_data,
                "bad_rows": "skip",
            },
            "epochs": {
                **untied,
                **EPOCHS,
            },
            "grouped epochs": {
                **untied,
                **GROUPED,
            },
            "epochs lora": {
                **EPOCHS,
                **LORA,
            },
            "packed": {
                **untied,
                **PACKED,
            },
            "packed lora": {
                **PACKED,
                **LORA,
            },
            "bad step": {
                "bad_steps": "skip",
            },
            "broken": {
                "save_strategy": "steps",
                "save_steps": 1,
            },
        }

    def write(self, data_name: str, images: list[int]) -> Path:
        """Writes rows; some have an image."""
        folder = self.folder / data_name
        folder.mkdir()
        data_rows = []
        for number, has_image in enumerate(images):
            question = f"what is row {number}?"
            answer = f"it is {number * 7 % 13}" + "." * (number % 5)
            image_name = None
            if has_image:
                question = f"<image>\n{question}"
                image_name = f"{number}.png"
                (folder / image_name).write_bytes(training.image(number))
            data_rows.append(train_data.llava(question, answer, image_name))
        data_path = folder / "data.json"
        data_path.write_text(json.dumps(data_rows))
        return data_path

    def command_line(self, output: Path, **own_options) -> list[str]:
        options = {
            "model_name_or_path": self.aligned,
            "dataset_name": self.train_data,
            "output_dir": output,
            **OPTIONS,
            **own_options,
        }
        command_words = []
        for option_name, option_value in options.items():
            command_words.append(f"--{option_name}")
            command_words.append(str(option_value))
        return command_words

    def command_line_of(self, mode: str, run_name: str) -> list[str]:
        """Of a run of `options`, or of its resumption."""
        folder = self.folder / mode
        begun = run_name.removesuffix(" resumed")
        options = dict(self.options[begun])
        if run_name != begun:
            options["resume_from_checkpoint"] = folder / begun / f"checkpoint-{RESUMED[begun]}"
        return self.command_line(folder / run_name, **options)

    def runs(self, mode: str, *run_names: str) -> Path:
        """Trains `run_names` once, all in the same processes; DeepSpeed can train only one."""
        folder = self.folder / mode
        if (mode, run_names) in self.finished:
            return folder
        self.finished[mode, run_names] = folder
        folder.mkdir(exist_ok=True)
        runs_file = folder / "runs.json"
        command_lines = {}
        for run_name in run_names:
            command_lines[run_name] = self.command_line_of(mode, run_name)
        runs_file.write_text(json.dumps(command_lines))
        worker = [HELPERS / "train_worker.py", mode, runs_file, folder / "seen"]
        processes = self.start(worker, mode)
        for process in processes:
            errors = processes[0].stderr[-6000:] + processes[-1].stderr[-6000:]
            assert process.returncode == 0, errors
        with (folder / "stdout").open("a") as output_file:  # after the output of earlier runs
            output_file.writelines(process.stdout for process in processes)
        with (folder / "stderr").open("a") as error_file:
            error_file.writelines(process.stderr for process in processes)
        return folder

    def start(self, worker: list, mode: str) -> list[subprocess.CompletedProcess]:
        """Only one process, or two with what accelerate sets for a configuration."""
        if mode == "one":
            return [self.prepared.run(worker, **ENVIRONMENT)]
        environment = accelerate_environment(mode)
        return self.prepared.run_ranks(worker, **{**environment, **ENVIRONMENT})

    def launch(self, output: Path, **options) -> subprocess.Popen:
        """`normalign train` with two processes of its own."""
        command = [
            sys.executable,
            "-m",
            "normalign_llava",
            "train",
            "--accelerate_config",
            "ddp",
            "--num_processes",
            "2",
        ]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [*command, *self.command_line(output, **options)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def accelerate_environment(mode: str) -> dict[str, str]:
    """The variables that `accelerate launch` sets for a configuration and two processes."""
    parsed = launch_command_parser().parse_args(
        [
            "--main_process_port=0",
            f"--config_file={CONFIGS / mode}.yaml",
            "--num_processes=2",
            "script.py",
        ]
    )
    arguments = _validate_launch_command(parsed)[0]
    arguments.deepspeed_fields_from_accelerate_config = ""  # as for a user's own file
    if mode.startswith("zero"):
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    return dict(environment.items() - os.environ.items())


def seen(folder: Path, run_name: str, rank: int) -> dict:
    """What the worker kept of a run."""
    return json.loads((folder / f"seen.{run_name}.{rank}").read_text())


FIGURES = {
    "loss",
    "eval_loss",
    "learning_rate",
    "grad_norm",
    "gain/l2",
    "gain/mean_abs",
    "bias/mean_abs",
    "gwc/factor",
    "norm/visual",
    "norm/text",
    "clip/share",
    "cosine/visual",
    "cosine/text",
}
for gradient_part in training.GRADIENT_PARTS:
    FIGURES.add(f"grad_norm/{gradient_part}")


def log_history(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def assert_same_run(
    folder: Path,
    reference: Path,
    weight_tolerance: float,
    figure_tolerance: float,
    check_dtype: bool = True,
) -> None:
    """Weights within an absolute tolerance, losses and other logged figures in a relative one."""
    torch.testing.assert_close(
        stored.weights(folder),
        stored.weights(reference),
        rtol=0,
        atol=weight_tolerance,
        check_dtype=check_dtype,
    )
    for log_entry, expected in zip(log_history(folder), log_history(reference), strict=True):
        assert log_entry.keys() & {"loss", "eval_loss", "train_loss"}
        for figure_name in log_entry.keys() & FIGURES:
            figure = pytest.approx(expected[figure_name], rel=figure_tolerance, abs=1e-12)
            assert log_entry[figure_name] == figure, (figure_name, log_entry)


def assert_identical_run(folder: Path, reference: Path) -> None:
    assert_same_run(folder, reference, weight_tolerance=0, figure_tolerance=0)


@pytest.fixture(scope="module")
def room(tmp_path_factory, prepared) -> Room:
    return Room(tmp_path_factory.mktemp("room"), prepared)


@pytest.fixture(scope="module")
def mixed(room):
    """The folder of a run with everything that most runs have, in one process or two."""

    def folder(mode: str) -> Path:
        if mode == "fsdp2":
            return room.runs(mode, "mixed", "light")
        return room.runs(mode, "mixed")

    return folder


@pytest.fixture(scope="module")
def light_run(room, mixed):
    """A run of a frozen model whose weights are large."""

    def folder(mode: str) -> Path:
        if mode == "fsdp2":
            return mixed(mode) / "light"
        return room.runs(mode, "light") / "light"

    return folder


NIGHTLY = {
    "one": [
        "lora",
        "4 bits",
        "bfloat16",
        "half",
        "bad step",
        "epochs",
        "epochs lora",
        "packed",
        "packed resumed",
        "packed lora",
    ],
    "ddp": [
        "mixed resumed",
        "lora",
        "4 bits",
        "skipped",
        "bad step",
        "broken",
        "grouped epochs",
        "grouped epochs resumed",
        "packed",
        "packed resumed",
        "packed lora",
    ],
    "fsdp2": [
        "mixed resumed",
        "lora",
        "bfloat16",
        "autocast",
        "bad step",
        "broken",
        "packed",
        "packed resumed",
        "packed lora",
    ],
}


@pytest.fixture(scope="module")
def nightly(room, mixed):
    """The folder of the other runs of a mode; of DeepSpeed, of one of them."""

    def folder(mode: str, zero: str = "mixed") -> Path:
        mixed(mode)
        return room.runs(mode, *NIGHTLY.get(mode, [zero]))

    return folder


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_two_processes_share_the_rows_of_one(mode, mixed):
    """None, one or both had images in a step."""
    folder = mixed(mode)
    for process_rank in range(2):
        measured = seen(folder, "mixed", process_rank)
        assert measured["type"] == DISTRIBUTED_TYPES[mode]
        assert measured["wrapped"] == WRAPPERS[mode]
        assert measured["processes"] == 2
        assert measured["gain dtype"] == "torch.float32"
        expected = [TRAIN_IMAGES[row_number] == 1 for row_number in range(process_rank, 16, 2)]
        assert [has_images for _, has_images, _ in measured["batches"]] == expected
    assert seen(mixed("one"), "mixed", 0)["processes"] == 1


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_two_processes_end_with_the_weights_and_losses_of_one(mode, mixed):
    """From a checkpoint without a norm, so the gain was aligned too."""
    folder = mixed(mode) / "mixed"
    reference = mixed("one") / "mixed"
    assert_same_run(folder, reference, weight_tolerance=1e-6, figure_tolerance=1e-5)


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_two_processes_probe_what_one_probes(mode, mixed):
    (probe_line,) = probe_lines(mixed(mode) / "mixed")
    (expected,) = probe_lines(mixed("one") / "mixed")
    assert probe_line["step"] == 2
    assert expected["step"] == 2
    assert probe_line["visual"] == pytest.approx(expected["visual"], abs=1e-4)
    assert probe_line["text"] == pytest.approx(expected["text"], abs=1e-4)


def probe_lines(folder: Path) -> list[dict]:
    json_lines = (folder / "dynamics.jsonl").read_text().splitlines()
    return [json.loads(json_line) for json_line in json_lines]


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_what_was_saved_loads(mode, mixed):
    folder = mixed(mode) / "mixed"
    loaded, report = NormAlignLlavaForConditionalGeneration.from_pretrained(
        folder,
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    training.assert_equal(training.weights(loaded), stored.weights(folder))


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_what_was_saved_has_its_code(mode, mixed):
    folder = mixed(mode) / "mixed"
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    model_class = auto_map["AutoModelForImageTextToText"]
    assert model_class == "modeling_normalign_llava.NormAlignLlavaForConditionalGeneration"
    code_files = {"configuration_normalign_llava.py", "modeling_normalign_llava.py"}
    for saved in (folder, folder / "checkpoint-2", folder / "checkpoint-4"):
        assert {file_path.name for file_path in saved.glob("*llava.py")} == code_files


@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_what_was_saved_is_complete(mode, mixed):
    folder = mixed(mode) / "mixed"
    for checkpoint in (folder / "checkpoint-2", folder / "checkpoint-4"):
        assert missing_from(checkpoint, world_size=2) == []
        random_states = {file_path.name for file_path in checkpoint.glob("rng*")}
        assert random_states == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize("mode", [FSDP2, ZERO2, ZERO3])
def test_a_checkpoint_has_once_what_is_trained_and_what_is_frozen_never(mode, room, light_run):
    folder = light_run(mode)
    own_bytes = 0
    for file_path in (folder / "checkpoint-1").rglob("*"):
        file_status = file_path.stat()
        if file_status.st_nlink == 1:
            own_bytes += file_status.st_size
    weight_bytes = sum(file_path.stat().st_size for file_path in room.wide.glob("*.safetensors"))
    assert own_bytes < weight_bytes / 10
    record = json.loads((folder / "training.json").read_text())
    predicted = record["run"]["disk"]["checkpoint"]
    assert own_bytes == pytest.approx(predicted, rel=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [DDP, FSDP2])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(mode, nightly):
    folder = nightly(mode)
    batches = seen(folder, "mixed", 0)["batches"]
    assert seen(folder, "mixed resumed", 0)["batches"] == batches[4:]
    assert_identical_run(folder / "mixed resumed", folder / "mixed")


@pytest.mark.nightly
def test_a_run_resumed_in_a_later_epoch_is_in_the_order_of_that_epoch(nightly):
    folder = nightly("ddp")
    assert_identical_run(folder / "grouped epochs resumed", folder / "grouped epochs")


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["one", DDP, FSDP2, ZERO3])
def test_packing_changes_no_step(mode, nightly):
    folder = nightly(mode, zero="packed") / "packed"
    reference = nightly("one") / "epochs"
    assert_same_run(folder, reference, weight_tolerance=1e-6, figure_tolerance=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["one", DDP, FSDP2])
def test_packing_changes_no_step_of_adapters(mode, nightly):
    folder = nightly(mode) / "packed lora"
    reference = nightly("one") / "epochs lora"
    assert_same_run(folder, reference, weight_tolerance=1e-6, figure_tolerance=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["one", DDP, FSDP2])
def test_a_packed_run_is_resumed_as_if_uninterrupted(mode, nightly):
    folder = nightly(mode)
    assert_identical_run(folder / "packed resumed", folder / "packed")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "run_name", "weight_tolerance", "figure_tolerance"),
    [
        ("ddp", "lora", 1e-6, 1e-5),
        ("fsdp2", "lora", 1e-6, 1e-5),
        ("ddp", "4 bits", 5e-4, 5e-3),
    ],
)
def test_beside_frozen_layers_a_run_ends_as_in_one_process_with_a_float32_gain(
    mode, run_name, weight_tolerance, figure_tolerance, nightly
):
    folder = nightly(mode)
    reference = nightly("one") / run_name
    assert seen(folder, run_name, 1)["type"] == DISTRIBUTED_TYPES[mode]
    assert_same_run(folder / run_name, reference, weight_tolerance, figure_tolerance)
    assert_gain_moved(stored.weights(folder / run_name))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [ZERO2, ZERO3])
def test_deepspeed_in_bfloat16_trains_and_saves_float32(mode, room, nightly):
    reference = nightly("one") / "half"
    for run_name in ("half", "half resumed"):
        folder = room.runs(mode, run_name)
        result = folder / run_name
        assert_same_run(result, reference, weight_tolerance=5e-5, figure_tolerance=1e-3)
        weights = stored.weights(result)
        for parameter_name in ("weight", "bias"):
            parameter = weights[f"model.multi_modal_projector.norm.{parameter_name}"]
            rounded = parameter.bfloat16().float()
            assert parameter.std() > 1e-4  # it begins with one value in every place
            assert not torch.equal(parameter, rounded)
    assert_identical_run(folder / "half resumed", folder / "half")


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO2, ZERO3])
def test_a_projector_in_float32_is_trained_beside_frozen_modules_in_bfloat16(mode, room):
    reference = room.runs("one", "frozen") / "frozen"
    room.runs(mode, "frozen")
    folder = room.runs(mode, "frozen resumed")
    in_one_dtype = mode == "zero3"  # ZeRO-3 divides all in one dtype
    assert_same_run(
        folder / "frozen",
        reference,
        weight_tolerance=5e-4,
        figure_tolerance=5e-3,
        check_dtype=not in_one_dtype,
    )
    assert_identical_run(folder / "frozen resumed", folder / "frozen")
    weights = stored.weights(folder / "frozen")
    for parameter_name, weight in weights.items():
        expected = torch.bfloat16
        if in_one_dtype or "projector" in parameter_name:
            expected = torch.float32
        assert weight.dtype == expected, parameter_name
    assert_gain_moved(weights)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [DDP, FSDP2])
@pytest.mark.parametrize("run_name", ["half", "frozen"])
def test_in_bfloat16_the_gain_is_used_and_its_gradient_reduced_in_float32(mode, run_name, room):
    folder = room.runs(mode, run_name)
    first_gain = seen(folder, run_name, 0)["gain"]
    second_gain = seen(folder, run_name, 1)["gain"]
    assert first_gain["dtype"] == "torch.float32"
    assert second_gain["dtype"] == "torch.float32"
    first_own = torch.tensor(first_gain["own"], dtype=torch.float64)
    second_own = torch.tensor(second_gain["own"], dtype=torch.float64)
    expected = (first_own + second_own) / 2
    for measured in (first_gain, second_gain):
        gradient = torch.tensor(measured["gradient"], dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    assert "The gain is trained in" not in (folder / "stderr").read_text()


def assert_gain_moved(weights: dict[str, torch.Tensor]) -> None:
    (gain_name,) = (name for name in weights if name.endswith("projector.norm.weight"))
    gain = weights[gain_name]
    assert gain.dtype == torch.float32
    assert gain.std() > 1e-4  # it begins with one value in every place


@pytest.mark.nightly
def test_bad_rows_of_both_processes_are_skipped_and_listed_once(nightly):
    folder = nightly("ddp")  # four steps of four rows: the eight rows twice
    assert len(seen(folder, "skipped", 1)["batches"]) == 8
    dropped_rows = DroppedRows(folder / "skipped" / "dropped_rows.jsonl").read()
    assert [dropped.row for dropped in dropped_rows] == [103, 104]
    printed = (folder / "stdout").read_text()
    assert printed.count("data.json, row 103: ") == 1
    assert printed.count("(2 rows)") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [DDP, FSDP2, ZERO3])
def test_what_is_not_finite_on_one_process_stops_both(mode, nightly):
    folder = nightly(mode, zero="broken")
    error_message = seen(folder, "broken", 0)["error"]
    assert seen(folder, "broken", 1)["error"] == error_message
    assert error_message.startswith("Step 2 has values that are not finite, first in ")
    assert "the output of model.multi_modal_projector.norm. The last complete" in error_message
    broken = folder / "broken"
    assert f"checkpoint is {broken / 'checkpoint-1'}." in error_message
    assert not (broken / "checkpoint-2").exists()
    assert not list(broken.glob("*.safetensors"))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [DDP, FSDP2])
def test_a_step_that_one_process_cannot_take_is_skipped_by_both(mode, nightly):
    weights = stored.weights(nightly(mode) / "bad step")
    expected = stored.weights(nightly("one") / "bad step")
    for weight in expected.values():
        assert weight.isfinite().all()
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("run_name", ["bfloat16", "autocast"])
def test_fsdp2_trains_a_checkpoint_in_bfloat16_with_its_float32_gain(run_name, nightly):
    def losses(folder: Path, name: str) -> list[float]:
        log_history = seen(folder, name, 0)["logs"]
        return [log_entry["loss"] for log_entry in log_history if "loss" in log_entry]

    folder = nightly("fsdp2")
    assert seen(folder, run_name, 1)["gain dtype"] == "torch.float32"
    assert_gain_moved(stored.weights(folder / run_name))
    expected = losses(nightly("one"), "bfloat16")
    assert losses(folder, run_name) == pytest.approx(expected, rel=1e-2)


@pytest.mark.nightly
def test_a_launched_run_says_once_what_is_wrong(room, tmp_path):
    process = room.launch(
        tmp_path / "out",
        dataset_name=room.bad_data,
        dataset_streaming="true",
        shuffle_buffer_size=1,
        max_steps=40,
    )
    _, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "elastic" not in errors
    error_lines = [
        error_line for error_line in errors.splitlines() if re.match("Error|Then", error_line)
    ]
    assert len(error_lines) <= 2, error_lines
    assert re.search(r"bad/data.json, row 10[34]: ", error_lines[0]), error_lines
    for error_line in error_lines:
        assert re.match("(Error|Then) in process [01]: ", error_line)


def wait_for_two_steps(launcher: subprocess.Popen) -> None:
    for log_line in launcher.stdout:
        if "2/1000000 " in log_line:
            return
    raise AssertionError(launcher.stderr.read())


@pytest.mark.nightly
def test_a_killed_process_is_named(room, tmp_path):
    with room.launch(tmp_path / "out", max_steps=10**6) as launcher:
        wait_for_two_steps(launcher)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, errors = launcher.communicate()  # to the end of the last process that writes there
    assert launcher.returncode == 1
    assert "elastic" not in errors
    assert "Error: Process 1 was ended by SIGKILL." in errors


@pytest.mark.nightly
def test_an_ended_launcher_ends_the_others(room, tmp_path):
    with room.launch(tmp_path / "out", max_steps=10**6) as launcher:
        wait_for_two_steps(launcher)
        launcher.terminate()
        _, errors = launcher.communicate()  # to the end of the last process that writes there
    assert launcher.returncode == 143
    assert re.search(r"Stopped\. Step \d+ was done\. .* no complete checkpoint, so", errors), errors
    with only_run(tmp_path / "out"):
        assert not list((tmp_path / "out").glob("*.safetensors"))
