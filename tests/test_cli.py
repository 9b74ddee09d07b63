"""The command line as a person meets it: help at once, tables, errors that say what to do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import training
import typer
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import BitsAndBytesConfig
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration, __version__
from normalign_llava.checkpoint.untrusted import refuse_unreadable
from normalign_llava.cli import app
from normalign_llava.errors import exit_on_error
from normalign_llava.extras import how_to_install
from normalign_llava.train.command import SHOWN
from normalign_llava.train.parsing import option_parser


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


CAPTURED = {"capture_output": True, "text": True}
LIGHT = """
import json, os, sys
from typer.testing import CliRunner
from normalign_llava.cli import app
for words in json.load(sys.stdin):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    heavy = {"torch", "transformers", "trl", "accelerate"} & set(sys.modules)
    print(json.dumps([result.exit_code, result.output, sorted(heavy)]))
print(json.dumps([os.environ.get(f"TQDM_{name}INTERVAL") for name in ("MIN", "MAX")]))
"""


def in_one_process(lines, folder, **environment):
    """Statuses and outputs of commands, run in one process, which imports no heavy module."""
    environment = os.environ | environment | {"TQDM_MAXINTERVAL": "5"}
    environment.pop("TQDM_MININTERVAL", None)
    words = json.dumps([[*line] for line in lines])
    command = [sys.executable, "-c", LIGHT]
    process = subprocess.run(command, input=words, cwd=folder, env=environment, **CAPTURED)
    assert process.returncode == 0, process.stderr
    *outputs, bars = [json.loads(line) for line in process.stdout.splitlines()]
    assert bars == [
        "60",
        "5",
    ]  # in a file a bar has few lines, unless the environment says how many
    assert not any(heavy for _, _, heavy in outputs), outputs
    return [(status, said) for status, said, _ in outputs]


def app_commands():
    return typer.main.get_command(app).commands


def test_help_and_version_need_no_torch(tmp_path):
    lines = [["--version"], ["--help"], ["train"]] + [[name, "--help"] for name in app_commands()]
    version, *helps = in_one_process(lines, tmp_path)
    assert version == (0, f"normalign-llava {__version__}\n")
    assert all(status == 0 and "Usage" in said for status, said in helps)


def test_help_of_training_shows_options_that_exist():
    named = [name for names in SHOWN.values() for name in names]
    known = {option for action in option_parser()._actions for option in action.option_strings}
    known |= {option for parameter in app_commands()["train"].params for option in parameter.opts}
    assert len(named) == len(set(named)) and {f"--{name}" for name in named} <= known
    shown = invoke("train", "--help").output
    assert all(f"--{name} " in shown for name in named) and "--adam_beta1" not in shown
    assert invoke("train", "lora", "-h").output == shown
    assert "--adam_beta1" in invoke("train", "--help-all").output


def test_errors_that_are_known_at_once_need_no_torch(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    cases = {
        ("nonsense",): "No such command",
        ("build", "--output", "x", "--from-llava", "a", "--vision", "b"): "leave out --vision",
        ("build", "--output", "x", "--feature-layer", "last"): "value for '--feature-layer'",
        ("train", "none"): "The file none does not exist. The package has align-llama",
        ("train", "--hub_token", "hf_x"): "Everybody on this machine can read a command line",
        ("train", "lora", "--model_name_or_path", ""): "to train: --model_name_or_path FOLDER",
        ("demo", "adapter"): "adapter is an adapter. Merge it first",
    }
    # Nobody listens on the port of this Hub.
    ended = in_one_process(cases, tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    for (words, expected), (status, said) in zip(cases.items(), ended, strict=True):
        assert status in (1, 2) and expected in said, (words, said)
    assert not (tmp_path / "x").exists()


def test_a_package_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (tmp_path / "config.json").write_text("{}")  # which cannot be loaded
    named = ("--model_name_or_path", tmp_path, "--dataset_name", "no/data")
    result = invoke("train", *named, "--load_in_4bit")
    needed = f"load_in_4bit needs bitsandbytes, but it is not installed. {how_to_install('qlora')}."
    assert result.exit_code == 1 and result.stderr == f"Error: {needed}\n"
    assert invoke("train", "--load_in_4bit", "false").stderr.startswith("Error: Give the checkp")


FAILS = """
import builtins, sys, typer
from normalign_llava.errors import exit_on_error

try:
    with exit_on_error():
        raise getattr(builtins, sys.argv[1])(sys.argv[2])
except typer.Exit:
    sys.exit(1)
"""


def failing(folder, *ranks) -> list[str]:
    """What processes of a run print that fail in turn, by rank, kind of error and text."""
    said = []
    for rank, *words in ranks:
        file = str(folder / f"{rank}" / "error.json")
        environment = {"RANK": str(rank), "WORLD_SIZE": "4", "TORCHELASTIC_ERROR_FILE": file}
        command = [sys.executable, "-c", FAILS, *words]
        process = subprocess.run(command, env=os.environ | environment, **CAPTURED)
        assert process.returncode == 1
        said.append(process.stderr)
    return said


def test_of_several_processes_the_first_that_fails_prints_its_error(tmp_path):
    full = "CUDA out of memory. Tried to allocate 2 GiB"
    closed = "Connection closed by peer"
    first, *others = failing(tmp_path, (2, "RuntimeError", full), (0, "RuntimeError", closed))
    needed = "Tried to allocate 2 GiB. Use a machine with more."
    assert (first, others) == (f"Error in process 2: Out of memory: {needed}\n", [""])
    (mistake,) = failing(tmp_path / "gone", (1, "KeyError", "a mistake"))  # of ours, to be reported
    assert mistake.startswith("Traceback") and "KeyError: 'a mistake'" in mistake


@pytest.mark.slow
def test_a_launched_run_has_as_many_processes_as_are_asked_for(prepared, tmp_path):
    named = {"model_name_or_path": "absent", "dataset_name": "absent", "output_dir": "out"}
    options = {"accelerate_config": "a.yaml", "num_processes": "2", **named, "learning_rate": "nan"}
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nmain_process_port: 0\n")
    command = ["-m", "normalign_llava", "train"]
    for name, value in options.items():
        command += [f"--{name}", value]
    process = prepared.run(command, tmp_path, CUDA_VISIBLE_DEVICES="")
    said = [line for line in process.stderr.splitlines() if line.startswith("Error")]
    assert process.returncode == 1 and len(said) in (1, 2), process.stderr
    assert all(re.match("Error in process [01]: learning_rate must", line) for line in said)


def running_children(parent: int) -> int:
    """How many processes of a launcher import torch: by then, it knows that it started them.

    Torch's launcher leaves processes behind if it is stopped while it starts them.
    """
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    maps = [Path(f"/proc/{child}/maps").read_text() for child in children]
    return sum("libtorch_cpu" in text for text in maps)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launcher_that_is_stopped_ends_with_the_status_of_the_signal(
    prepared, tmp_path, number, status
):
    words = ["--accelerate_config", "ddp", "--num_processes", "2", "--dataset_name", "none"]
    words += ["--model_name_or_path", str(tmp_path)]
    command = ["-m", "normalign_llava", "train", *words]
    launcher = prepared.start(command, CUDA_VISIBLE_DEVICES="")
    while launcher.poll() is None and running_children(launcher.pid) < 2:
        time.sleep(0.05)
    os.kill(launcher.pid, number)
    ended = launcher.wait()
    assert ended.returncode == status and "Stopped." in ended.stderr, ended.stderr


def test_an_error_without_a_rank_is_told(tmp_path):
    """As where WORLD_SIZE is set by hand, or by a launcher that names ranks otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-c", FAILS, "ValueError", "no such row"]
    process = subprocess.run(command, env=environment | {"WORLD_SIZE": "2"}, **CAPTURED)
    assert process.returncode == 1 and process.stderr == "Error: no such row\n"


@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_the_traceback_of_a_user_s_error_can_be_had(prepared, tmp_path, switch):
    environment = {"NORMALIGN_TRACEBACK": switch} if switch else {}
    command = ["-m", "normalign_llava", "card", tmp_path / "absent"]
    process = prepared.run(command, **environment)
    *before, last = process.stderr.splitlines()
    assert process.returncode == 1 and last.startswith("Error: ")
    assert (before[:1] == ["Traceback (most recent call last):"]) == (switch == "1")
    assert any("check_folder" in line for line in before) == (switch == "1")
    assert before == [] or switch == "1"


def bad_quantization(folder):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf5")
    NormAlignLlavaForConditionalGeneration.from_pretrained(folder, quantization_config=settings)


def out_of_memory(folder):
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has a total capacity of 23.65 GiB "
        "of which 1.12 GiB is free. This process has 22.50 GiB memory in use."
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda folder: torch.empty(2**50), r"Out of memory in loading the model X: .* \d+ bytes"),
        (out_of_memory, "Out of memory .* 2.31 GiB. GPU 0 .* 1.12 GiB is free. Less!"),
        (lambda folder: torch.zeros(1, device="cuda"), "The GPU .*(CUDA|NVIDIA).*build of torch"),
        (bad_quantization, r"bitsandbytes failed: .*nf5.*\. Does its version fit torch and this"),
    ],
)
def test_a_gpu_s_error_is_told_as_such_not_as_a_checkpoint_s(capsys, checkpoint, function, words):
    if "CUDA" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(typer.Exit), exit_on_error(full="Less!"), refuse_unreadable("The model X"):
        function(checkpoint)
    line = capsys.readouterr().err.splitlines()[-1]  # after a bar
    assert re.match(f"Error: {words}", line), line


def test_a_library_that_crashes_ends_a_command_in_a_sentence(capsys):
    pattern = Regex(12 * "(" + "[a-z ]" + 12 * "+)" + "Z")  # takes too many attempts
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = Split(pattern, "isolated")
    with pytest.raises(typer.Exit), exit_on_error():
        tokenizer.encode("what is it, what is it?")
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match("Error: A native library crashed: .*retry-limit.* Use another", line), line


def test_memory_that_a_step_lacks_is_a_sentence_with_its_size(capsys, checkpoint, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, per_device_train_batch_size=2)
    trainer.model.register_forward_pre_hook(lambda *_: torch.empty(2**50) and None)
    with pytest.raises(typer.Exit), exit_on_error(full="Less!"):
        trainer.train()
    line = capsys.readouterr().err.splitlines()[-1]
    place = r"in a forward and backward pass of 2 x \d+ tokens"
    assert re.match(rf"Error: Out of memory {place}: .* bytes. Less!", line), line
    inputs = {"inputs_embeds": torch.zeros(1, 3, 32)}  # of a collator of one's own
    with pytest.raises(RuntimeError):
        trainer.training_step(trainer.model, inputs)
