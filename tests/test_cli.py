"""The command line as a person meets it: help at once, tables, errors that say what to do."""

import json
import os
import re
import shlex
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
from normalign_llava.errors import exit_on_error, how_to_install
from normalign_llava.train.command import SHOWN
from normalign_llava.train.options import option_parser


def invoke(*arguments):
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def run_python(code, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        **options,
    )


LIGHT = """
import json
import os
import sys

from typer.testing import CliRunner

from normalign_llava.cli import app

results = []
for words in json.load(sys.stdin):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    results.append([result.exit_code, result.output])
print(json.dumps({
    "results": results,
    "heavy_modules": sorted({"torch", "transformers", "trl", "accelerate"} & set(sys.modules)),
    "shortest_interval": os.environ.get("TQDM_MININTERVAL"),
    "longest_interval": os.environ.get("TQDM_MAXINTERVAL"),
}))
"""


def run_in_one_process(commands, folder, **variables) -> list[list]:
    """Statuses and outputs of commands, run in one process, which imports no heavy module."""
    environment = {**os.environ, **variables, "TQDM_MAXINTERVAL": "5"}
    environment.pop("TQDM_MININTERVAL", None)
    process = run_python(
        LIGHT,
        input=json.dumps(commands),
        cwd=folder,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["heavy_modules"] == []
    # In a file a bar has few lines, unless the environment says how many.
    assert report["shortest_interval"] == "60"
    assert report["longest_interval"] == "5"
    return report["results"]


def app_commands():
    return typer.main.get_command(app).commands


def test_help_and_version_need_no_torch(tmp_path):
    helps = [[command, "--help"] for command in app_commands()]
    commands = [["--version"], ["--help"], ["train"], *helps]
    version, *help_results = run_in_one_process(commands, tmp_path)
    assert version == [0, f"normalign-llava {__version__}\n"]
    for status, output in help_results:
        assert status == 0
        assert "Usage" in output


@pytest.fixture
def shown_options():
    """The options that help of training shows."""
    options = []
    for group in SHOWN.values():
        options += group
    return options


def test_help_of_training_shows_options_that_exist(shown_options):
    known_options = set()
    for action in option_parser()._actions:
        known_options.update(action.option_strings)
    for parameter in app_commands()["train"].params:
        known_options.update(parameter.opts)
    assert len(shown_options) == len(set(shown_options))
    assert {f"--{option}" for option in shown_options} <= known_options


def test_help_of_training_shows_few_options(shown_options):
    output = invoke("train", "--help").output
    for option in shown_options:
        assert f"--{option} " in output
    assert "--adam_beta1" not in output
    assert invoke("train", "lora", "-h").output == output


def test_all_options_of_training_can_be_shown():
    assert "--adam_beta1" in invoke("train", "--help-all").output


def test_errors_that_are_known_at_once_need_no_torch(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    messages = {
        "nonsense": "No such command",
        "build --output x --from-llava a --vision b": "leave out --vision",
        "build --output x --feature-layer last": "value for '--feature-layer'",
        "train none": "The file none does not exist. The package has align-llama",
        "train --hub_token hf_x": "Everybody on this machine can read a command line",
        "train lora --model_name_or_path ''": "to train: --model_name_or_path FOLDER",
        "demo adapter": "adapter is an adapter. Merge it first",
    }
    results = run_in_one_process(
        [shlex.split(command) for command in messages],
        tmp_path,
        HF_ENDPOINT="http://127.0.0.1:9",  # nobody listens on the port of this Hub
        HF_HOME=str(tmp_path),
    )
    for command, result in zip(messages, results, strict=True):
        status, output = result
        assert status in (1, 2), command
        assert messages[command] in output, command
    assert not (tmp_path / "x").exists()


def test_a_package_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (tmp_path / "config.json").write_text("{}")  # which cannot be loaded
    result = invoke(
        "train",
        "--model_name_or_path",
        tmp_path,
        "--dataset_name",
        "no/data",
        "--load_in_4bit",
    )
    remedy = how_to_install("qlora")
    expected = f"load_in_4bit needs bitsandbytes, but it is not installed. {remedy}."
    assert result.exit_code == 1
    assert result.stderr == f"Error: {expected}\n"


def test_a_package_that_is_not_used_need_not_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    result = invoke("train", "--load_in_4bit", "false")
    assert result.stderr.startswith("Error: Give the checkp")


FAILS = """
import builtins
import sys

import typer

from normalign_llava.errors import exit_on_error

try:
    with exit_on_error():
        raise getattr(builtins, sys.argv[1])(sys.argv[2])
except typer.Exit:
    sys.exit(1)
"""


def error_of_rank(folder, rank, error_name, message) -> str:
    """What a process of four prints when it fails."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
    }
    process = run_python(FAILS, error_name, message, env={**os.environ, **variables})
    assert process.returncode == 1
    return process.stderr


def test_of_several_processes_the_first_that_fails_prints_its_error(tmp_path):
    full = "CUDA out of memory. Tried to allocate 2 GiB"
    first_error = error_of_rank(tmp_path, 2, "RuntimeError", full)
    later_error = error_of_rank(tmp_path, 0, "RuntimeError", "Connection closed by peer")
    expected = "Out of memory: Tried to allocate 2 GiB. Use a machine with more."
    assert first_error == f"Error in process 2: {expected}\n"
    assert later_error == ""


def test_a_mistake_of_ours_has_a_traceback_that_can_be_reported(tmp_path):
    error = error_of_rank(tmp_path, 1, "KeyError", "a mistake")
    assert error.startswith("Traceback")
    assert "KeyError: 'a mistake'" in error


@pytest.mark.slow
def test_a_launched_run_has_as_many_processes_as_are_asked_for(prepared, tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nmain_process_port: 0\n")
    command = "train --accelerate_config a.yaml --num_processes 2 --model_name_or_path absent"
    command += " --dataset_name absent --output_dir out --learning_rate nan"
    process = prepared.run(
        ["-m", "normalign_llava", *command.split()],
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )
    errors = [line for line in process.stderr.splitlines() if line.startswith("Error")]
    assert process.returncode == 1, process.stderr
    assert len(errors) in (1, 2), process.stderr
    for error in errors:
        assert re.match("Error in process [01]: learning_rate must", error), error


def running_children(parent: int) -> int:
    """How many processes of a launcher import torch: by then, it knows that it started them.

    Torch's launcher leaves processes behind if it is stopped while it starts them.
    """
    count = 0
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        memory_map = Path(f"/proc/{child}/maps").read_text()
        if "libtorch_cpu" in memory_map:
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
def test_a_launcher_that_is_stopped_ends_with_the_status_of_the_signal(
    prepared, tmp_path, signal_number, status
):
    command = "train --accelerate_config ddp --num_processes 2 --dataset_name none"
    launcher = prepared.start(
        ["-m", "normalign_llava", *command.split(), "--model_name_or_path", str(tmp_path)],
        CUDA_VISIBLE_DEVICES="",
    )
    while launcher.poll() is None and running_children(launcher.pid) < 2:
        time.sleep(0.05)
    os.kill(launcher.pid, signal_number)
    stopped = launcher.wait()
    assert stopped.returncode == status, stopped.stderr
    assert "Stopped." in stopped.stderr


def test_an_error_without_a_rank_is_printed():
    """As where WORLD_SIZE is set by hand, or by a launcher that names ranks otherwise."""
    environment = {**os.environ, "WORLD_SIZE": "2"}
    environment.pop("RANK", None)
    process = run_python(FAILS, "ValueError", "no such row", env=environment)
    assert process.returncode == 1
    assert process.stderr == "Error: no such row\n"


@pytest.fixture
def lines_of_error(prepared, tmp_path):
    """The lines that a command with an error of its user prints."""

    def run(**variables) -> list[str]:
        command = ["-m", "normalign_llava", "card", tmp_path / "absent"]
        process = prepared.run(command, **variables)
        assert process.returncode == 1
        return process.stderr.splitlines()

    return run


@pytest.mark.parametrize("variables", [{}, {"NORMALIGN_TRACEBACK": "0"}])
def test_a_user_s_error_has_no_traceback(lines_of_error, variables):
    (line,) = lines_of_error(**variables)
    assert line.startswith("Error: ")


def test_the_traceback_of_a_user_s_error_can_be_had(lines_of_error):
    *traceback, last_line = lines_of_error(NORMALIGN_TRACEBACK="1")
    assert last_line.startswith("Error: ")
    assert traceback[0] == "Traceback (most recent call last):"
    assert any("check_folder" in line for line in traceback)


def use_too_much_memory(folder):
    torch.empty(2**50)


def use_a_gpu(folder):
    torch.zeros(1, device="cuda")


def use_bad_quantization(folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf5")
    NormAlignLlavaForConditionalGeneration.from_pretrained(folder, quantization_config=quantization)


def fill_a_gpu(folder):
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has a total capacity of 23.65 GiB "
        "of which 1.12 GiB is free. This process has 22.50 GiB memory in use."
    )


def last_error_line(capsys) -> str:
    """The line behind a bar."""
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            use_too_much_memory,
            r"Out of memory in loading the model X: .* \d+ bytes",
        ),
        (
            fill_a_gpu,
            "Out of memory .* 2.31 GiB. GPU 0 .* 1.12 GiB is free. Less!",
        ),
        (
            use_a_gpu,
            "The GPU .*(CUDA|NVIDIA).*build of torch",
        ),
        (
            use_bad_quantization,
            r"bitsandbytes failed: .*nf5.*\. Does its version fit torch and this",
        ),
    ],
)
def test_a_gpu_s_error_is_not_reported_as_a_checkpoint_s(capsys, checkpoint, function, message):
    if function is use_a_gpu and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(typer.Exit), exit_on_error(full="Less!"), refuse_unreadable("The model X"):
        function(checkpoint)
    line = last_error_line(capsys)
    assert re.match(f"Error: {message}", line), line


def test_a_library_that_crashes_ends_a_command_in_a_sentence(capsys):
    # This pattern takes too many attempts.
    pattern = Regex(12 * "(" + "[a-z ]" + 12 * "+)" + "Z")
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = Split(pattern, "isolated")
    with pytest.raises(typer.Exit), exit_on_error():
        tokenizer.encode("what is it, what is it?")
    line = last_error_line(capsys)
    assert re.match("Error: A native library crashed: .*retry-limit.* Use another", line), line


@pytest.fixture
def full_trainer(checkpoint, tmp_path):
    """A trainer whose steps need more memory than there is."""
    trainer = training.trainer(tmp_path, checkpoint, per_device_train_batch_size=2)

    def use_memory(module, arguments):
        torch.empty(2**50)

    trainer.model.register_forward_pre_hook(use_memory)
    return trainer


def test_memory_that_a_step_lacks_is_a_sentence_with_its_size(capsys, full_trainer):
    with pytest.raises(typer.Exit), exit_on_error(full="Less!"):
        full_trainer.train()
    line = last_error_line(capsys)
    place = r"in a forward and backward pass of 2 x \d+ tokens"
    assert re.match(rf"Error: Out of memory {place}: .* bytes. Less!", line), line


def test_memory_may_be_full_in_a_step_of_embeddings(full_trainer):
    """A collator of one's own may give these."""
    batch = {"inputs_embeds": torch.zeros(1, 3, 32)}
    with pytest.raises(RuntimeError):
        full_trainer.training_step(full_trainer.model, batch)
