"""What a stranger's checkpoint may do to the person who opens it: nothing, and the person reads one sentence."""

import ast
import json
import re
import shutil
from pathlib import Path

import hostile_checkpoints as hostile
import pytest
import tiny_parts as parts
import train_data
import training
from paths import ROOT
from typer.testing import CliRunner

from normalign_llava.checkpoint.untrusted import check_files, check_weights
from normalign_llava.cli import app
from normalign_llava.data.row_checks import token_lengths
from normalign_llava.train.run import main as train


pytestmark = pytest.mark.slow


OPTIONS = ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_steps", "1", "--bf16", "false"]
OPTIONS += ["--report_to", "none", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint, data to train it on, images to measure it on, and an adapter of it."""
    root = tmp_path_factory.mktemp("good")
    training.checkpoint(root)
    colours = ("red", "green", "blue")
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", f"{colours[i % 3]}.png") for i in range(6)]
    (root / "data").mkdir()
    train_data.write_json(root / "data", rows)
    train_data.images(root / "images", "red.png")
    (root / "images" / "metadata.jsonl").write_text('{"file_name": "red.png", "question": "What is this?"}\n')
    words = ["--model_name_or_path", root / "model", "--dataset_name", root / "data" / "data.json", *OPTIONS]
    train([str(word) for word in (*words, "--output_dir", root / "adapter", "--use_peft", "true")])
    return root


class Person:
    """Runs commands on a copy of the good checkpoint, which a stranger spoils, and answers "y" to every question."""

    def __init__(self, good: Path, folder: Path):
        self.good, self.folder, self.marker = good, folder / "model", folder / "marker"
        shutil.copytree(good / "model", self.folder)

    def gets(self, kind: str) -> None:
        hostile.KINDS[kind](self.folder, self.marker)

    def runs(self, command: str, *more: str):
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

    def is_refused(self, command: str) -> str:
        """Runs a command, which must end with one sentence on standard error, having run nothing; gives that."""
        done = self.runs(command)
        assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception or done.output
        assert not self.marker.exists(), f"{command} ran the stranger's code"
        assert "Do you wish" not in done.output and "trust_remote_code=True" not in done.output
        assert "\x1b]" not in done.output
        return done.stderr[done.stderr.index("Error: ") :]


@pytest.fixture
def person(good, tmp_path):
    return Person(good, tmp_path)


# -------------------------------------------------------------------------------------------------------------- code
@pytest.mark.parametrize("command", ["train", "merge", "diagnose", "publish", "demo", "serve", "build"])
@pytest.mark.parametrize(
    "kind",
    [
        *("tokenizer's code", "tokenizer's code beside a class", "image processor's code", "configuration's code"),
        *("code behind an escaped key", "code of another configuration", "code for generation", "code of a kernel"),
        "code of a kernel, private key",
    ],
)
def test_no_command_runs_code_that_comes_with_a_checkpoint(person, command, kind):
    person.gets(kind)
    person.is_refused(command)


def test_every_auto_class_is_told_whether_to_run_code():
    root, calls = ROOT, []
    for file in root.rglob("*.py"):
        if {"tests", ".venv", "build"} & {*file.relative_to(root).parts}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
                keywords = {keyword.arg for keyword in node.keywords}
                calls.append((file.name, node.lineno, bool(keywords & {"trust_remote_code", None})))
    assert calls and all(told for *_, told in calls), calls


def test_code_is_refused_by_the_name_of_its_file(person):
    for kind, file in {
        "tokenizer's code beside a class": "tokenizer_config.json",
        "processor's code beside a class": "processor_config.json",
        "preprocessor's code": "preprocessor_config.json",
    }.items():
        person.gets(kind)
        assert f"auto_map in {file}" in person.is_refused("publish")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json"])
def test_an_adapter_that_brings_code_is_neither_merged_nor_published(good, tmp_path, file):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.foreign(file, "AutoProcessor")(adapter, tmp_path / "marker")
    for words in (
        ["merge", adapter, "--output", tmp_path / "out"],
        ["publish", adapter, "--repo-id", "me/x", "--dry-run"],
    ):
        done = CliRunner().invoke(app, [str(word) for word in words], input="y\n" * 9)
        assert done.exit_code == 1 and f"auto_map in {file}" in done.stderr, done.output
    assert not (tmp_path / "marker").exists()


def test_an_adapter_that_names_a_module_to_import_is_refused(good, tmp_path):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.edit(adapter / "adapter_config.json", megatron_config={}, megatron_core="antigravity")
    check_files(adapter)  # an empty one imports nothing
    hostile.edit(adapter / "adapter_config.json", megatron_config={"a": 1})
    with pytest.raises(ValueError, match="megatron_core in adapter_config.json"):
        check_files(adapter)


def test_a_language_model_that_needs_code_is_not_built_in(tmp_path):
    vision, language = parts.vision(tmp_path / "vision"), Path(parts.language(tmp_path / "language"))
    hostile.foreign("config.json", "AutoConfig", model_type="evil")(language, tmp_path / "marker")
    words = ["build", "--vision", vision, "--language", str(language), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words, input="y\n" * 9)
    assert "needs code that comes with it, which this command does not run" in done.stderr
    assert done.exit_code == 1 and not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


def test_an_encoder_whose_patches_have_no_pixels_is_not_built_in(tmp_path):
    vision, language = Path(parts.vision(tmp_path / "vision")), parts.language(tmp_path / "language")
    hostile.edit(vision / "config.json", patch_size=0)
    words = ["build", "--vision", str(vision), "--language", language, "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SystemExit) and f"The image processor of {vision}" in done.stderr


@pytest.mark.parametrize("command", ["build", "diagnose"])
def test_an_encoder_whose_images_fill_the_memory_is_refused(good, tmp_path, command):
    vision, language = Path(parts.vision(tmp_path / "vision")), parts.language(tmp_path / "language")
    hostile.edit(vision / "preprocessor_config.json", size={"shortest_edge": 30_000}, crop_size={"height": 30_000})
    words = ["--vision", str(vision), "--language", language]
    words = words if command == "build" else [str(vision), "--data", str(good / "images")]
    done = CliRunner().invoke(app, [command, *words, "--output", str(tmp_path / "out")])
    assert "makes images of up to 30,000 pixels a side" in done.stderr and done.exit_code == 1


@pytest.mark.parametrize("command", ["train", "gain", "merge", "diagnose", "demo", "serve"])
def test_pickled_weights_are_not_opened(person, command):
    person.gets("pickle")
    said = person.is_refused(command)
    assert "pickle" in said.lower() and "save it again" in said.lower()


# ------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("command", ["train", "gain", "merge", "diagnose", "publish", "serve"])
@pytest.mark.parametrize(
    "kind, words",
    [
        ("weights elsewhere, link", "model.safetensors is a link out of its folder|model.safetensors -> "),
        ("weights elsewhere, shard", "a link out of its folder|model-00001-of-00001.safetensors -> "),
        ("weights elsewhere, absolute", "private/model.safetensors', no file beside it"),
        ("weights elsewhere, relative", "'../model-private/model.safetensors', no file beside it"),
        ("weights elsewhere, transformers_weights", "transformers_weights names files|has no weights"),
    ],
)
def test_weights_outside_the_folder_are_not_read(person, command, kind, words):
    person.gets(kind)
    assert re.search(words, person.is_refused(command))


@pytest.mark.parametrize("command", ["train", "card", "merge", "diagnose", "publish", "serve"])
@pytest.mark.parametrize("kind", hostile.ELSEWHERE)
def test_nothing_outside_the_folder_is_read_or_copied(person, command, kind):
    person.gets(kind)
    said = person.is_refused(command)
    file = {"a pipe": "trainer_state.json", "tokenizer elsewhere": "tokenizer_config.json"}.get(kind, kind.split()[0])
    assert file in said and not (person.folder.parent / "output").exists()


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


# --------------------------------------------------------------------------------------------------- time and memory
@pytest.mark.parametrize(
    "command, kind",
    [
        *((command, "10^7 layers") for command in ("train", "merge", "diagnose", "publish", "demo", "serve")),
        *(("diagnose", "template, loops"), ("publish", "template, loops")),
    ],
)
def test_what_never_ends_loading_is_refused(person, command, kind):
    person.gets(kind)
    said = person.is_refused(command)
    assert "num_hidden_layers 10,000,000" in said or "takes more than 2 seconds" in said


def test_a_layer_too_many_for_the_weights_is_named(person):
    hostile.config("text_config", num_hidden_layers=82)(person.folder, person.marker)
    with pytest.raises(ValueError, match="num_hidden_layers 82, but its weights are 81 tensors"):
        check_weights(person.folder)


def test_a_template_that_loops_over_some_rows_alone_stops_at_the_first_of_them():
    trap = "{% if 'kite' in messages[0].content[0].text %}" + hostile.LOOPS + "{% endif %}" + hostile.GOOD
    processor = train_data.processor()
    processor.chat_template = trap

    def rows(question):
        turn = {"role": "user", "content": [{"type": "text", "text": question}]}
        return [{"messages": [turn, {**turn, "role": "assistant"}], "images": []}]

    assert isinstance(token_lengths(processor, rows("a bird?"))[0], int)
    with pytest.raises(ValueError, match="The chat template takes more than 2 seconds"):
        token_lengths(processor, rows("a kite?"))


# ------------------------------------------------------------------------------------------------------------- words
HARMLESS = ("text for auto_map", "tensor too many")
BROKEN = {kind: file for kind, file in {**hostile.ENDLESS, **hostile.BROKEN}.items() if kind not in HARMLESS}


@pytest.mark.parametrize("kind", BROKEN)
def test_training_from_a_broken_checkpoint_ends_in_a_sentence(person, kind):
    person.gets(kind)
    said = person.is_refused("train")
    assert str(person.folder) in said or "chat template" in said or "feature_layer" in said, said


@pytest.mark.parametrize("command", ["gain", "card", "merge", "diagnose", "demo", "serve", "publish"])
@pytest.mark.parametrize("kind", ["configuration, nested deeply", "list for text_config", "list for model_type"])
def test_other_commands_say_it_in_a_sentence_too(person, command, kind):
    person.gets(kind)
    said = person.is_refused(command)
    assert str(person.folder) in said


@pytest.mark.parametrize("kind", ["header, nested deeply", "header with a shape too large", "index that is a list"])
def test_gain_of_weights_that_are_not_what_they_say(person, kind):
    person.gets(kind)
    assert "model.safetensors" in person.is_refused("gain")


@pytest.mark.parametrize(
    "file, content",
    [
        ("training.json", '{"a": ' + hostile.DEEP + "}"),
        ("training.json", '{"options": [1], "data": {"x": 1}, "before": "a", "learning_rates": "x"}'),
        ("build.json", '{"a": ' + hostile.DEEP + "}"),
        ("diagnostics/report.json", hostile.DEEP),
        ("evaluation/task.json", hostile.DEEP),
    ],
)
def test_a_card_of_records_that_are_not_what_they_should_be(person, file, content):
    (person.folder / file).parent.mkdir(exist_ok=True)
    (person.folder / file).write_text(content)
    assert file in person.is_refused("card")
    assert isinstance(person.runs("publish").exception, SystemExit | None)


def test_training_goes_on_where_the_record_of_the_build_is_nested_deeply(person):
    (person.folder / "build.json").write_text(hostile.DEEP)
    done = person.runs("train")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target_modules": "(([a-z._0-9]*)*)*!"}, "takes more than 20 seconds"),
        ({"base_model_name_or_path": [1]}, "has no text for base_model_name_or_path"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
    ],
)
def test_an_adapter_whose_settings_are_hostile_is_not_merged(good, tmp_path, changes, words):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    hostile.edit(adapter / "adapter_config.json", **changes)
    done = CliRunner().invoke(app, ["merge", str(adapter), "--output", str(tmp_path / "out")])
    assert isinstance(done.exception, SystemExit) and words in done.stderr, done.exception or done.stderr


@pytest.mark.parametrize(
    "content, words",
    [
        (hostile.DEEP, "nested too deeply"),
        ('{"quantization": "nf4"}', "no settings"),
        ('{"quantization": null, "config_changes": [1]}', "config_changes in"),
        ('{"quantization": null, "config_changes": {"dtype": "x"}}', "config_changes in"),
    ],
)
def test_an_adapter_whose_record_is_hostile_is_not_merged(good, tmp_path, content, words):
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    (adapter / "training.json").write_text(content)
    done = CliRunner().invoke(app, ["merge", str(adapter), "--output", str(tmp_path / "out")])
    assert isinstance(done.exception, SystemExit) and words in done.stderr, done.exception or done.stderr
    assert "training.json" in done.stderr


@pytest.mark.parametrize("shape, offsets", [([2**40, 1], [0, 2**42]), ([0, 4], [0, 0]), ("x", [0, 4]), ([2, 2], None)])
def test_gain_of_an_embedding_whose_header_lies(tmp_path, shape, offsets):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    done = CliRunner().invoke(app, ["gain", str(file)])
    assert isinstance(done.exception, SystemExit) and "Error: " in done.stderr, done.exception


@pytest.mark.parametrize("command", ["train", "card", "diagnose", "publish"])
@pytest.mark.parametrize("kind", ["escapes in model_type", "escapes in a key"])
def test_escapes_in_a_configuration_are_shown(person, command, kind):
    person.gets(kind)
    assert "evil\\x1b]0;owned\\x07\\x1b[31m[" in person.is_refused(command)


def test_escapes_in_the_name_of_a_tensor_are_shown(person):
    person.gets("escapes in a tensor's name")
    assert "evil\\x1b]0;owned\\x07\\x1b[31m[/]" in person.is_refused("train")


@pytest.mark.parametrize("command", ["train", "gain", "card"])
def test_escapes_and_markup_in_the_name_of_a_folder_are_shown(good, tmp_path, command):
    person = Person(good, tmp_path / f"evil{hostile.ESCAPE}[bold red]x[]")
    done = person.runs(command)
    assert done.exit_code == 0 and "\x1b" not in done.output, done.output
    assert "evil\\x1b]0;owned\\x07\\x1b[31m[boldred]x[]" in re.sub(r"\s", "", done.output)


def test_escapes_and_markup_in_the_name_of_a_report_are_shown(person):
    person.folder = person.good / "vision"
    done = person.runs("diagnose", "--name", f"evil{hostile.ESCAPE}[bold red]x[]")
    assert done.exit_code == 0 and "\x1b" not in done.output, done.output
    assert "evil\\x1b]0;owned\\x07\\x1b[31m[boldred]x[]" in re.sub(r"\s", "", done.output)


def test_escapes_and_markup_in_data_are_shown(person):
    rows = [{"image": f"{hostile.ESCAPE}[/]", "conversations": []}]
    person.good = person.folder.parent
    (person.good / "data").mkdir()
    train_data.write_json(person.good / "data", rows)
    assert "\\x1b]0;owned\\x07\\x1b[31m[/]" in person.is_refused("train")
