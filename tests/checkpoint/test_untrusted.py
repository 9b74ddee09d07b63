"""Malicious and broken checkpoints: no code runs, nothing outside is read, and each command ends with one sentence."""

import ast
import re
import shutil
from pathlib import Path

import hostile_checkpoints as hostile
import pytest
import stored
import tiny_parts as parts
import train_data
import training
from paths import ROOT
from typer.testing import CliRunner

from normalign_llava.checkpoint.untrusted import check_files, check_weights
from normalign_llava.cli import app
from normalign_llava.train.run import main as train


pytestmark = pytest.mark.slow


OPTIONS = ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_steps", "1", "--bf16", "false"]
OPTIONS += ["--report_to", "none", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint, data to train it on, images to measure it on, and an adapter of it."""
    root = tmp_path_factory.mktemp("good")
    stored.in_one_file(training.checkpoint(root))
    colours = ("red", "green", "blue")
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", f"{colours[i % 3]}.png") for i in range(6)]
    (root / "data").mkdir()
    train_data.write_json(root / "data", rows)
    train_data.images(root / "images", "red.png")
    (root / "images" / "metadata.jsonl").write_text('{"file_name": "red.png", "question": "What is this?"}\n')
    words = ["--model_name_or_path", root / "model", "--dataset_name", root / "data" / "data.json", *OPTIONS]
    train([str(word) for word in (*words, "--output_dir", root / "adapter", "--use_peft", "true")])
    return root


class Commands:
    """Runs commands on a copy of the good checkpoint, which is spoiled, and answers "y" to every question."""

    def __init__(self, good: Path, folder: Path):
        self.good, self.folder, self.marker = good, folder / "model", folder / "marker"
        shutil.copytree(good / "model", self.folder)

    def spoil(self, kind: str) -> None:
        hostile.KINDS[kind](self.folder, self.marker)

    def run(self, command: str, *more: str):
        output = self.folder.parent / "output"
        data, base, model = self.good / "data" / "data.json", self.good / "adapter", self.folder
        words = {
            "train": ["--model_name_or_path", model, "--output_dir", output, "--dataset_name", data, *OPTIONS],
            "merge": [base, "--base", model, "--output", output],
            "diagnose": [model, "--data", self.good / "images", "--samples", 1, "--output", output],
            "publish": [model, "--repo-id", "me/model", "--dry-run"],
            "build": ["--from-llava", model, "--output", output],
        }
        arguments = [command, *words.get(command, [model]), *more]
        return CliRunner().invoke(app, [str(each) for each in arguments], input="y\n" * 50)

    def error(self, command: str) -> str:
        """Runs a command that must end with one sentence on standard error, having run no code; returns that."""
        done = self.run(command)
        assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception or done.output
        assert not self.marker.exists(), f"{command} ran foreign code"
        assert "Do you wish" not in done.output and "trust_remote_code=True" not in done.output
        return done.stderr[done.stderr.index("Error: ") :]


@pytest.fixture
def commands(good, tmp_path):
    return Commands(good, tmp_path)


def run(*words, answers="y\n" * 9):
    """Runs a command that must be refused; returns what it printed on standard error."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=answers)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception or done.output
    return done.stderr


# -------------------------------------------------------------------------------------------------------------- code
@pytest.mark.parametrize(
    "command, kind",
    [
        *((command, "tokenizer's code") for command in ("merge", "diagnose", "publish", "build")),
        *((command, "configuration's code") for command in ("merge", "diagnose", "publish", "build")),
        *(("train", kind) for kind in hostile.CODE),
    ],
)
def test_no_command_runs_code_that_comes_with_a_checkpoint(commands, command, kind):
    commands.spoil(kind)
    assert commands.error(command) and not commands.marker.exists()


def test_every_auto_class_is_told_whether_to_run_code():
    calls = []
    for file in ROOT.rglob("*.py"):
        if {"tests", ".venv", "build"} & {*file.relative_to(ROOT).parts}:
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if ".from_pretrained(" in text else ():
            if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
                keywords = {keyword.arg for keyword in node.keywords}
                calls.append((file.name, node.lineno, bool(keywords & {"trust_remote_code", None})))
    assert calls and all(told for *_, told in calls), calls


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json"])
def test_an_adapter_that_brings_code_is_neither_merged_nor_published(good, tmp_path, file):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.foreign(file, "AutoProcessor")(adapter, tmp_path / "marker")
    assert f"auto_map in {file}" in run("merge", adapter, "--output", tmp_path / "out")
    assert f"auto_map in {file}" in run("publish", adapter, "--repo-id", "me/x", "--dry-run")
    assert not (tmp_path / "marker").exists()


def test_an_adapter_that_names_a_module_or_a_kernel_is_refused(good, tmp_path):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.edit(adapter / "adapter_config.json", megatron_config={}, megatron_core="antigravity")
    check_files(adapter)  # an empty one imports nothing
    hostile.edit(adapter / "adapter_config.json", megatron_config={"a": 1}, rest=[{"attn_implementation": "evil/it"}])
    with pytest.raises(ValueError, match="megatron_core in adapter_config.json, attn_implementation evil/it in adap"):
        check_files(adapter)


@pytest.mark.parametrize("command", ["train", "merge", "diagnose", "publish", "build", "gain"])
def test_a_model_with_an_adapter_in_its_folder_is_refused(commands, command):
    shutil.copy(commands.good / "adapter" / "adapter_config.json", commands.folder)
    shutil.copy(commands.good / "adapter" / "adapter_model.safetensors", commands.folder)
    assert "has both config.json and adapter_config.json" in commands.error(command)


def test_a_part_that_needs_code_is_not_built_in(tmp_path):
    def build(vision, language):
        return run("build", "--vision", vision, "--language", language, "--output", tmp_path / "out")

    vision, language = Path(parts.vision(tmp_path / "vision")), Path(parts.language(tmp_path / "language"))
    foreign = shutil.copytree(language, tmp_path / "foreign")
    hostile.foreign("config.json", "AutoConfig", model_type="evil")(foreign, tmp_path / "marker")
    assert "needs code that comes with it, which this command does not run" in build(vision, foreign)
    assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "gain", "merge", "diagnose"])
def test_pickled_weights_are_not_opened(commands, command):
    commands.spoil("pickle")
    error = commands.error(command)
    assert "pickle" in error.lower() and "save it again" in error.lower()


# ------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(
    "command, kind",
    [
        *(("train", kind) for kind in hostile.ELSEWHERE),
        *(("publish", kind) for kind in hostile.ELSEWHERE),
        *(("gain", kind) for kind in hostile.ELSEWHERE if kind.startswith("weights")),
        *((command, "weights elsewhere, link") for command in ("merge", "diagnose")),
        *((command, "training.json elsewhere") for command in ("card", "merge", "diagnose")),
        *(("card", kind) for kind in hostile.ELSEWHERE if kind.startswith((".", "evaluation"))),
    ],
)
def test_nothing_outside_the_folder_is_read_or_copied(commands, command, kind):
    commands.spoil(kind)
    error = commands.error(command)
    words = "safetensors|transformers_weights" if kind.startswith("weights") else re.escape(kind.split()[0])
    assert re.search(words, error) and not (commands.folder.parent / "output").exists()


def test_the_hub_caches_own_links_are_followed(good, tmp_path):
    blobs, snapshot = tmp_path / "models--me--x" / "blobs", tmp_path / "models--me--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (good / "model").iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    check_files(snapshot)
    check_weights(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(good / "model" / "config.json")
    with pytest.raises(ValueError, match="config.json is a link out of its folder"):
        check_files(snapshot)


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("kind", [*hostile.BROKEN])
def test_training_from_a_broken_checkpoint_ends_in_a_sentence(commands, kind):
    commands.spoil(kind)
    error = commands.error("train")
    assert str(commands.folder) in error or "feature_layer" in error, error


@pytest.mark.parametrize("command", ["gain", "card", "merge", "diagnose", "publish"])
def test_other_commands_say_it_in_a_sentence_too(commands, command):
    commands.spoil("list for text_config")
    assert str(commands.folder) in commands.error(command)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("adapter_config.json", {"alora_invocation_tokens": [1]}, "aLoRA"),
        ("adapter_config.json", {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base"),
        ("training.json", {"quantization": "nf4"}, "training.json may have settings as quantization"),
        ("training.json", {"quantization": None, "config_changes": {"dtype": "x"}}, "in config_changes"),
    ],
)
def test_an_adapter_with_broken_settings_is_not_merged(good, tmp_path, file, content, words):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.edit(adapter / file, **content)
    assert re.search(words, run("merge", adapter, "--output", tmp_path / "out"))
