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
from normalign_llava.train.callbacks.measurements import GRADIENT_PARTS
from normalign_llava.train.command import CONFIGS
from normalign_llava.train.keeping.checkpoints import missing_from, only_run


pytestmark = pytest.mark.slow


ZERO = [pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed"), pytest.mark.nightly]
MODES = ["ddp", "fsdp2", pytest.param("zero2", marks=ZERO), pytest.param("zero3", marks=ZERO)]
KINDS = {"ddp": ("MULTI_CPU", "DistributedDataParallel"), "fsdp2": ("FSDP", "FSDP2")}
KINDS |= dict.fromkeys(("zero2", "zero3"), ("DEEPSPEED", "DeepSpeedEngine"))
# Images, four rows a step. Process 0 has the even rows of a step, process 1 the odd ones.
IMAGES = [1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "COLUMNS": "500"}  # long lines

OPTIONS = dict(bf16="false", per_device_train_batch_size=1, global_batch_size=4, warmup_steps=0)
OPTIONS |= dict(learning_rate=1e-3, vision_learning_rate=2e-4, projector_learning_rate=5e-4)
OPTIONS |= dict(norm_learning_rate=3e-3, train_sampling_strategy="sequential", max_steps=4)
# A larger epsilon shows gradients of a wrong scale, and hides rounding errors of true zeros.
OPTIONS |= dict(adam_epsilon=1e-5, logging_steps=1, save_strategy="no", report_to="none")
EVALUATED = dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1, probe_steps=2)
EVALUATED |= dict(sample_max_new_tokens=2)
LORA = dict(use_peft="true", lora_r=4, lora_dropout=0.0, vision_learning_rate=0)
SAVED = dict(save_strategy="steps", save_steps=2)
# Two steps an epoch. The run is resumed in the third.
EPOCHS = dict(global_batch_size=8, per_device_train_batch_size=2, max_steps=10, save_steps=5)
EPOCHS |= dict(save_strategy="steps", train_sampling_strategy="random")
PACKED = {**EPOCHS, "packing": "true"}
GROUPED = {**EPOCHS, "train_sampling_strategy": "group_by_length", "lr_scheduler_type": "constant"}
FROZEN = dict(language_learning_rate=0, vision_learning_rate=0)
LIGHT = dict(arm="aligned", save_steps=1, max_steps=1)
RESUMED = {"mixed": 2, "half": 2, "frozen": 2, "grouped epochs": 5, "packed": 5}
"""The steps from which the runs `NAME resumed` go on."""


class Room:
    """A folder with checkpoints, data, and what runs in it left."""

    def __init__(self, folder: Path, prepared: Prepared):
        self.folder = folder
        self.prepared = prepared
        self.aligned = training.checkpoint(folder / "aligned")
        self.bare = training.checkpoint(folder / "bare", arm="none", tied=False)
        self.half = training.checkpoint(folder / "half", tied=False)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(self.half, dtype="bfloat16")
        model.save_pretrained(self.half)
        images = {"train": IMAGES, "eval": [1, 0, 0, 1, 0, 0], "bad": [1] * 108}
        self.data = {name: self.write(name, shown) for name, shown in images.items()}
        for number in (103, 104):  # are opened while training, by different processes
            (folder / "bad" / f"{number}.png").write_bytes(b"no image")
        sizes = dict(hidden_size=256, intermediate_size=4096, head_dim=128)
        self.wide = training.checkpoint(folder / "wide", **sizes)
        untied = {"model_name_or_path": self.bare, "arm": "gwc"}
        half = {**untied, **SAVED, "bf16": "true"}
        frozen = {**half, **FROZEN, "model_name_or_path": self.half}
        self.options = {
            "mixed": {**untied, **EVALUATED, **SAVED, "eval_dataset_name": self.data["eval"]},
            "lora": LORA,
            "bfloat16": {"dtype": "bfloat16"},
            "autocast": {"dtype": "bfloat16", "bf16": "true"},
            "half": half,
            "frozen": frozen,
            "4 bits": {**frozen, "load_in_4bit": "true"},
            "light": {**frozen, **LIGHT, "model_name_or_path": self.wide},
            "skipped": {"dataset_name": self.data["bad"], "bad_rows": "skip"},
            "epochs": {**untied, **EPOCHS},
            "grouped epochs": {**untied, **GROUPED},
            "epochs lora": {**EPOCHS, **LORA},
            "packed": {**untied, **PACKED},
            "packed lora": {**PACKED, **LORA},
            "bad step": {"bad_steps": "skip"},
            "broken": {"save_strategy": "steps", "save_steps": 1},
        }
        self.done: dict[tuple, Path] = {}

    def write(self, name: str, images: list[int]) -> Path:
        (self.folder / name).mkdir()
        rows = []
        for number, has_image in enumerate(images):
            if has_image:
                (self.folder / name / f"{number}.png").write_bytes(training.image(number))
            question = ("<image>\n" if has_image else "") + f"what is row {number}?"
            answer = f"it is {number * 7 % 13}" + "." * (number % 5)
            rows.append(train_data.llava(question, answer, f"{number}.png" if has_image else None))
        path = self.folder / name / "data.json"
        path.write_text(json.dumps(rows))
        return path

    def words(self, output: Path, **options) -> list[str]:
        options = {"dataset_name": self.data["train"], "output_dir": output, **OPTIONS, **options}
        options = {"model_name_or_path": self.aligned, **options}.items()
        return [str(word) for key, value in options for word in (f"--{key}", value)]

    def runs(self, mode: str, *names: str) -> Path:
        """Trains `names` once, all in the same processes; DeepSpeed can train only one in them."""
        folder = self.folder / mode
        place = (mode, names)
        if place not in self.done:
            self.done[place] = folder
            words = {}
            for name in names:
                begun = name.removesuffix(" resumed")
                checkpoint = folder / begun / f"checkpoint-{RESUMED.get(begun)}"
                resume = {} if name == begun else {"resume_from_checkpoint": checkpoint}
                words[name] = self.words(folder / name, **self.options[begun], **resume)
            folder.mkdir(exist_ok=True)
            (folder / "runs.json").write_text(json.dumps(words))
            worker = [HELPERS / "train_worker.py", mode, folder / "runs.json", folder / "seen"]
            done = self.start(worker, mode)
            for process in done:
                assert process.returncode == 0, done[0].stderr[-6000:] + done[-1].stderr[-6000:]
            for stream in ("stdout", "stderr"):  # after that of earlier runs
                with open(folder / stream, "a") as file:
                    file.writelines(getattr(process, stream) for process in done)
        return self.done[place]

    def start(self, worker: list, mode: str) -> list[subprocess.CompletedProcess]:
        """One process alone, or two with what accelerate sets for a configuration."""
        if mode == "one":
            return [self.prepared.run(worker, **ENVIRONMENT)]
        prepare = prepare_deepspeed_cmd_env if mode.startswith("zero") else prepare_multi_gpu_env
        words = [f"--config_file={CONFIGS / mode}.yaml", "--num_processes=2", "script.py"]
        parsed = launch_command_parser().parse_args(["--main_process_port=0", *words])
        arguments = _validate_launch_command(parsed)[0]
        arguments.deepspeed_fields_from_accelerate_config = ""  # as for a user's own file
        made = prepare(arguments)
        environment = made[1] if isinstance(made, tuple) else made
        accelerates = dict(environment.items() - os.environ.items())
        return self.prepared.run_ranks(worker, **{**accelerates, **ENVIRONMENT})

    def launch(self, output: Path, **options) -> subprocess.Popen:
        """`normalign train` with two processes of its own."""
        command = [sys.executable, "-m", "normalign_llava", "train", "--accelerate_config", "ddp"]
        command += ["--num_processes", "2", *self.words(output, **options)]
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **pipes)


def seen(folder: Path, name: str, rank: int) -> dict:
    return json.loads((folder / f"seen.{name}.{rank}").read_text())


def assert_same_run(ours: Path, reference: Path, weights, figures, check_dtype=True) -> None:
    """Weights within an absolute tolerance, losses and other logged figures in a relative one."""
    found, expected = (stored.weights(folder) for folder in (ours, reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=weights, check_dtype=check_dtype)
    states = [(folder / "trainer_state.json").read_text() for folder in (ours, reference)]
    for step, other in zip(*(json.loads(state)["log_history"] for state in states), strict=True):
        assert step.keys() & {"loss", "eval_loss", "train_loss"}
        for key in step.keys() & FIGURES:
            assert step[key] == pytest.approx(other[key], rel=figures, abs=1e-12), (key, step)


FIGURES = {"loss", "eval_loss", "learning_rate", "grad_norm", "gain/l2", "gain/mean_abs"}
FIGURES |= {"gwc/factor", "norm/visual", "norm/text", "clip/share", "cosine/visual", "cosine/text"}
FIGURES |= {"bias/mean_abs", *(f"grad_norm/{part}" for part in GRADIENT_PARTS)}


@pytest.fixture(scope="module")
def room(tmp_path_factory, prepared) -> Room:
    return Room(tmp_path_factory.mktemp("room"), prepared)


@pytest.fixture(scope="module")
def mixed(room):
    """The folder of a run with everything that most runs have, in one process or two."""
    return lambda mode: room.runs(mode, "mixed", *(["light"] if mode == "fsdp2" else []))


PACKING = ("packed", "packed resumed", "packed lora")
NIGHTLY = {
    "one": ("lora", "4 bits", "bfloat16", "half", "bad step", "epochs", "epochs lora", *PACKING),
    "ddp": ("mixed resumed", "lora", "4 bits", "skipped", "bad step", "broken")
    + ("grouped epochs", "grouped epochs resumed", *PACKING),
    "fsdp2": ("mixed resumed", "lora", "bfloat16", "autocast", "bad step", "broken", *PACKING),
}


@pytest.fixture(scope="module")
def nightly(room, mixed):
    """The folder of the other runs of a mode; of DeepSpeed, of one of them."""

    def folder(mode: str, zero: str = "mixed") -> Path:
        mixed(mode)
        return room.runs(mode, *NIGHTLY.get(mode, (zero,)))

    return folder


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_end_with_the_weights_and_losses_of_one(mode, mixed):
    # From a checkpoint without a norm, so the gain was aligned too; none, one or both had images.
    folder = mixed(mode)
    one = mixed("one")
    for rank in range(2):
        found = seen(folder, "mixed", rank)
        assert (found["type"], found["wrapped"]) == KINDS[mode]
        assert (found["processes"], found["gain dtype"]) == (2, "torch.float32")
        expected = [IMAGES[row] == 1 for row in range(rank, 16, 2)]
        assert [image for _, image, _ in found["batches"]] == expected
    assert seen(one, "mixed", 0)["processes"] == 1
    assert_same_run(folder / "mixed", one / "mixed", weights=1e-6, figures=1e-5)
    lines = [(at / "mixed" / "dynamics.jsonl").read_text() for at in (folder, one)]
    found, expected = map(json.loads, lines)
    assert found["step"] == expected["step"] == 2
    for kind in ("visual", "text"):
        assert found[kind] == pytest.approx(expected[kind], abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_saved_loads_and_is_complete(mode, mixed):
    folder = mixed(mode) / "mixed"
    cls = NormAlignLlavaForConditionalGeneration
    loaded, report = cls.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    training.assert_equal(training.weights(loaded), stored.weights(folder))
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForImageTextToText"] == f"modeling_normalign_llava.{cls.__name__}"
    code = {"configuration_normalign_llava.py", "modeling_normalign_llava.py"}
    for saved in (folder, folder / "checkpoint-2", folder / "checkpoint-4"):
        assert {path.name for path in saved.glob("*llava.py")} == code
    for step in (2, 4):
        assert missing_from(folder / f"checkpoint-{step}", world_size=2) == []
        states = {path.name for path in (folder / f"checkpoint-{step}").glob("rng*")}
        assert states == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_checkpoint_has_once_what_is_trained_and_what_is_frozen_never(mode, room, mixed):
    folder = (mixed(mode) if mode == "fsdp2" else room.runs(mode, "light")) / "light"
    files = [path.stat() for path in (folder / "checkpoint-1").rglob("*")]
    own = sum(file.st_size for file in files if file.st_nlink == 1)
    weights = sum(path.stat().st_size for path in room.wide.glob("*.safetensors"))
    assert own < weights / 10
    disk = json.loads((folder / "training.json").read_text())["run"]["disk"]
    assert own == pytest.approx(disk["checkpoint"], rel=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(mode, nightly):
    folder = nightly(mode)
    assert seen(folder, "mixed resumed", 0)["batches"] == seen(folder, "mixed", 0)["batches"][4:]
    assert_same_run(folder / "mixed resumed", folder / "mixed", weights=0, figures=0)
    if mode == "ddp":  # in a later epoch, in the order of that epoch
        assert_same_run(folder / "grouped epochs resumed", folder / "grouped epochs", 0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["one", "ddp", "fsdp2", pytest.param("zero3", marks=ZERO)])
def test_packing_changes_no_step(mode, nightly):
    folder = nightly(mode, zero="packed")
    one = nightly("one")
    assert_same_run(folder / "packed", one / "epochs", weights=1e-6, figures=1e-5)
    if mode != "zero3":
        assert_same_run(folder / "packed lora", one / "epochs lora", weights=1e-6, figures=1e-5)
        assert_same_run(folder / "packed resumed", folder / "packed", weights=0, figures=0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode, name", [("ddp", "lora"), ("fsdp2", "lora"), ("ddp", "4 bits")])
def test_beside_frozen_layers_a_run_ends_as_in_one_process_with_a_float32_gain(mode, name, nightly):
    folder = nightly(mode)
    one = nightly("one")
    assert seen(folder, name, 1)["type"] == KINDS[mode][0]
    assert_same_run(folder / name, one / name, *((1e-6, 1e-5) if name == "lora" else (5e-4, 5e-3)))
    assert_gain_moved(stored.weights(folder / name))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES[2:])
def test_deepspeed_in_bfloat16_trains_and_saves_float32(mode, room, nightly):
    for name in ("half", "half resumed"):
        folder = room.runs(mode, name)
        assert_same_run(folder / name, nightly("one") / "half", weights=5e-5, figures=1e-3)
        weights = stored.weights(folder / name)
        for part in ("weight", "bias"):
            values = weights[f"model.multi_modal_projector.norm.{part}"]
            assert values.std() > 1e-4  # it begins with one value in every place
            assert not torch.equal(values, values.bfloat16().float())
    assert_same_run(folder / "half resumed", folder / "half", weights=0, figures=0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_a_projector_in_float32_is_trained_beside_frozen_modules_in_bfloat16(mode, room):
    one = room.runs("one", "frozen")
    for names in ("frozen",), ("frozen resumed",):
        folder = room.runs(mode, *names)
    kept = torch.float32 if mode == "zero3" else torch.bfloat16  # ZeRO-3 divides all in one dtype
    assert_same_run(folder / "frozen", one / "frozen", 5e-4, 5e-3, check_dtype=mode != "zero3")
    assert_same_run(folder / "frozen resumed", folder / "frozen", weights=0, figures=0)
    weights = stored.weights(folder / "frozen")
    for name, weight in weights.items():
        assert weight.dtype == (torch.float32 if "projector" in name else kept), name
    assert_gain_moved(weights)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("name", ["half", "frozen"])
def test_in_bfloat16_the_gain_is_used_and_its_gradient_reduced_in_float32(mode, name, room):
    folder = room.runs(mode, name)
    ranks = [seen(folder, name, rank)["gain"] for rank in range(2)]
    assert {rank["dtype"] for rank in ranks} == {"torch.float32"}
    expected = sum(torch.tensor(rank["own"], dtype=torch.float64) for rank in ranks) / 2
    for rank in ranks:
        gradient = torch.tensor(rank["gradient"], dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    assert "The gain is trained in" not in (folder / "stderr").read_text()


def assert_gain_moved(weights: dict[str, torch.Tensor]) -> None:
    gain = next(weights[name] for name in weights if name.endswith("projector.norm.weight"))
    assert gain.dtype == torch.float32
    assert gain.std() > 1e-4  # it begins with one value in every place


@pytest.mark.nightly
def test_bad_rows_of_both_processes_are_skipped_and_listed_once(nightly):
    folder = nightly("ddp")  # four steps of four rows: the eight rows twice
    assert len(seen(folder, "skipped", 1)["batches"]) == 8
    dropped = DroppedRows(folder / "skipped" / "dropped_rows.jsonl").read()
    assert [row.row for row in dropped] == [103, 104]
    shown = (folder / "stdout").read_text()
    assert (shown.count("data.json, row 103: "), shown.count("(2 rows)")) == (1, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp2", pytest.param("zero3", marks=ZERO)])
def test_what_is_not_finite_on_one_process_stops_both(mode, nightly):
    folder = nightly(mode, zero="broken")
    said, other = (seen(folder, "broken", rank)["error"] for rank in range(2))
    assert said == other and said.startswith("Step 2 has values that are not finite, first in ")
    assert "the output of model.multi_modal_projector.norm. The last complete" in said
    broken = folder / "broken"
    assert f"checkpoint is {broken / 'checkpoint-1'}." in said
    assert not (broken / "checkpoint-2").exists() and not list(broken.glob("*.safetensors"))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_step_that_one_process_cannot_take_is_skipped_by_both(mode, nightly):
    found, expected = (stored.weights(at / "bad step") for at in (nightly(mode), nightly("one")))
    assert all(weight.isfinite().all() for weight in expected.values())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bfloat16", "autocast"])
def test_fsdp2_trains_a_checkpoint_in_bfloat16_with_its_float32_gain(name, nightly):
    folder = nightly("fsdp2")
    one = nightly("one")
    assert seen(folder, name, 1)["gain dtype"] == "torch.float32"
    assert_gain_moved(stored.weights(folder / name))
    logs = (seen(folder, name, 0)["logs"], seen(one, "bfloat16", 0)["logs"])
    losses, expected = ([step["loss"] for step in log if "loss" in step] for log in logs)
    assert losses == pytest.approx(expected, rel=1e-2)


@pytest.mark.nightly
def test_a_launched_run_says_once_what_is_wrong(room, tmp_path):
    streamed = dict(dataset_streaming="true", shuffle_buffer_size=1, max_steps=40)
    process = room.launch(tmp_path / "out", dataset_name=room.data["bad"], **streamed)
    errors = process.communicate()[1]
    lines = [line for line in errors.splitlines() if re.match("Error|Then", line)]
    assert process.returncode == 1 and "Traceback" not in errors and "elastic" not in errors, errors
    assert all(re.match("(Error|Then) in process [01]: ", line) for line in lines)
    assert re.search(r"bad/data.json, row 10[34]: ", lines[0]) and len(lines) <= 2, lines


@pytest.mark.nightly
@pytest.mark.parametrize("ended", ["process", "launcher"])
def test_a_killed_process_is_named_and_an_ended_launcher_ends_the_others(room, tmp_path, ended):
    with room.launch(tmp_path / "out", max_steps=10**6) as launcher:
        while "2/1000000 " not in (line := launcher.stdout.readline()):
            assert line, launcher.stderr.read()
        if ended == "process":
            started = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            os.kill(int(started[1]), signal.SIGKILL)
        else:
            launcher.terminate()
        said = launcher.communicate()[1]  # to the end of the last process that writes there
    if ended == "process":
        assert launcher.returncode == 1 and "elastic" not in said
        assert "Error: Process 1 was ended by SIGKILL." in said
    else:
        assert launcher.returncode == 143
        assert re.search(r"Stopped\. Step \d+ was done\. .* no complete checkpoint, so", said), said
        with only_run(tmp_path / "out"):
            assert not list((tmp_path / "out").glob("*.safetensors"))
