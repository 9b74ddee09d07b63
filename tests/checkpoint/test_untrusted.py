"""Malicious and broken checkpoints: no code runs, nothing outside is read, errors are sentences.

Code in them writes the file `marker` beside the folder when it runs.
"""

import json
import os
import pickle
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import stored
import tiny_parts as parts
import torch
import train_data
import training
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from normalign_llava.checkpoint.files import INDEX, WEIGHTS
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.checkpoint.untrusted import (
    check_files,
    fetch_checked_weights,
    json_object,
    refuse_unreadable,
)
from normalign_llava.cli import app


pytestmark = pytest.mark.slow


def edit(file: Path, **changes) -> None:
    """Sets keys of a JSON file; a mapping is laid over the one that is there."""
    content = json.loads(file.read_text()) if file.exists() else {}
    for name, value in changes.items():
        old = content.get(name)
        mappings = isinstance(old, dict) and isinstance(value, dict)
        content[name] = {**old, **value} if mappings else value
    file.write_text(json.dumps(content))


def foreign(file: str, auto: str, **changes):
    """Names code in the `auto_map` of a file, which writes the marker as soon as it is imported."""
    reference = [None, "evil.Evil"] if auto == "AutoTokenizer" else "evil.Evil"

    def spoil(folder: Path) -> None:
        code = f"open({str(folder.parent / 'marker')!r}, 'a').write('run')\nclass Evil: pass\n"
        (folder / "evil.py").write_text(code)
        edit(folder / file, auto_map={auto: reference}, **changes)

    return spoil


def image_processor(folder: Path) -> None:
    foreign("processor_config.json", "AutoProcessor")(folder)
    named = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    edit(folder / "processor_config.json", auto_map={}, image_processor=named)


def custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("def generate(*args): pass\n")


def pickled(folder: Path) -> None:
    class Payload:
        def __reduce__(self):
            return open, (str(folder.parent / "marker"), "w")

    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))


def weights_elsewhere(how: str):
    """The weights are another folder's: `how` they are named."""

    def spoil(folder: Path) -> None:
        other = folder.parent / "private"
        other.mkdir()
        (folder / WEIGHTS).rename(other / WEIGHTS)
        if how == "link":
            (folder / WEIGHTS).symlink_to(other / WEIGHTS)
        elif how == "setting":
            edit(folder / "config.json", transformers_weights=f"../private/{WEIGHTS}")
        else:
            names = dict.fromkeys(load_file(other / WEIGHTS), f"../private/{WEIGHTS}")
            index = {"metadata": {"total_size": 1}, "weight_map": names}
            (folder / INDEX).write_text(json.dumps(index))

    return spoil


def linked(name: str):
    """A link to a name elsewhere that is read or written."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "new")

    return spoil


def lacking(name: str):
    return lambda folder: (folder / name).unlink()


def settings(file: str, **changes):
    return lambda folder: edit(folder / file, **changes)


config = partial(settings, "config.json")
adapter_config = partial(settings, "adapter_config.json")
CODE = {
    "tokenizer": foreign("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
    "processor": foreign("processor_config.json", "AutoProcessor"),
    "image processor": image_processor,
    "configuration": foreign("config.json", "AutoConfig", model_type="evil"),
    "generation": custom_generate,
    "kernel": config(text_config={"_attn_implementation": "stranger/kernel"}),
    "pickle": pickled,
}
ELSEWHERE = {
    **{f"weights, by {how}": weights_elsewhere(how) for how in ("link", "index", "setting")},
    "training.json": linked("training.json"),
    "trainer_state.json": lambda folder: os.mkfifo(folder / "trainer_state.json"),  # a pipe
    ".README.md-1": linked(".README.md-1"),
}
BROKEN = {
    "hidden size 10^9": config(text_config={"hidden_size": 10**9}),
    "no weights": lacking(WEIGHTS),
    "text_config: list": config(text_config=[1, 2]),
    "feature layer that does not exist": config(vision_feature_layer=99),
    "no tokenizer": lacking("tokenizer.json"),
    "no processor": lacking("processor_config.json"),
}
SAID = {
    "weights, by link": f"{WEIGHTS} is a link out of its folder",
    "weights, by index": f"{INDEX} is not an index of safetensors files in its folder",
    "weights, by setting": "transformers_weights names files to read in place of others",
    "pickle": f"has no weights in safetensors: neither {WEIGHTS} nor {INDEX}. Pickles can run code",
    "no weights": f"has no weights in safetensors: neither {WEIGHTS} nor {INDEX}",
}
"""What the error says, if not the kind's name."""
KINDS = {**CODE, **ELSEWHERE, **BROKEN}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint, data to train it on, images to measure it on, and an adapter of it."""
    root = tmp_path_factory.mktemp("good")
    stored.in_one_file(training.checkpoint(root))
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", "red.png") for i in range(6)]
    train_data.write_json(root / "data", rows)
    training.recipe(root, root, max_steps=1)
    train_data.images(root / "images", "red.png")
    (root / "images" / "metadata.jsonl").write_text('{"file_name": "red.png", "question": "?"}\n')
    trainer = training.trainer(root / "adapter", root / "model", max_steps=1, use_peft=True)
    trainer.train()
    trainer.save_model()
    return root


@pytest.fixture
def refused(good, tmp_path):
    """Runs a command on a spoiled copy of the checkpoint: it ends in a sentence, runs no code."""
    model = shutil.copytree(good / "model", tmp_path / "model")
    output = tmp_path / "output"

    def run(command: str, spoil) -> str:
        spoil(model)
        words = {
            "train": [good / "recipe.yaml", "--model_name_or_path", model, "--output_dir", output],
            "merge": [good / "adapter", "--base", model, "--output", output],
            "diagnose": [model, "--data", good / "images", "--samples", 1, "--output", output],
            "publish": [model, "--repo-id", "me/model", "--dry-run"],
            "build": ["--from-llava", model, "--output", output],
        }.get(command, [model])
        error = stopped(command, *words)
        assert not (tmp_path / "marker").exists() and not output.exists()
        return error

    return run


def stopped(*words) -> str:
    """Runs a command that must be refused, with "y" for every question; its error as printed."""
    done = CliRunner().invoke(app, [str(word) for word in words], input="y\n" * 50)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, (done, done.output)
    assert "Do you wish" not in done.output and "trust_remote_code=True" not in done.output
    return done.stderr[done.stderr.index("Error: ") :]


@pytest.mark.parametrize(
    "command, kind",
    [*product(["train"], CODE), *product(["merge", "diagnose", "publish", "build"], ["tokenizer"])],
)
def test_no_command_runs_code_that_comes_with_a_checkpoint(refused, command, kind):
    error = refused(command, KINDS[kind])
    assert kind != "pickle" or SAID[kind] in " ".join(error.split())


@pytest.mark.parametrize(
    "spoil, said",
    [
        (foreign("processor_config.json", "AutoProcessor"), "auto_map in processor_config.json"),
        (adapter_config(megatron_config={"a": 1}), "megatron_core in adapter_config.json"),
        (adapter_config(rest=[{"attn_implementation": "evil/it"}]), "attn_implementation evil/it"),
        (adapter_config(init_lora_weights="pissa_niter_4"), "changes the base"),
    ],
)
def test_an_adapter_that_brings_code_or_changed_its_base_is_not_merged(good, tmp_path, spoil, said):
    spoil(adapter := shutil.copytree(good / "adapter", tmp_path / "adapter"))
    assert said in stopped("merge", adapter, "--output", tmp_path / "out")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("command", ["train", "gain"])
def test_a_model_with_an_adapter_in_its_folder_is_refused(good, refused, command):
    def spoil(folder: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(good / "adapter" / name, folder)

    assert "has both config.json and adapter_config.json" in refused(command, spoil)


def test_a_part_that_needs_code_is_not_built_in(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
    foreign("config.json", "AutoConfig", model_type="evil")(Path(language))
    words = ["--vision", vision, "--language", language, "--output", tmp_path / "out"]
    assert "needs code that comes with it. It is not run" in stopped("build", *words)
    assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command, kind",
    [
        *(("train", kind) for kind in ELSEWHERE),
        ("gain", "weights, by index"),
        *((command, "training.json") for command in ("card", "merge", "diagnose", "publish")),
    ],
)
def test_nothing_outside_the_folder_is_read_or_copied(refused, command, kind):
    error = refused(command, KINDS[kind])
    assert SAID.get(kind, kind) in " ".join(error.split())


def test_a_folder_that_is_a_link_out_of_the_checkpoint_is_refused(good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    (tmp_path / "outside").mkdir()
    (folder / "inside").mkdir()
    (folder / "here").symlink_to("inside")
    check_files(folder)
    (tmp_path / "linked").symlink_to(folder)  # as a whole
    check_files(tmp_path / "linked")
    fetch_checked_weights(tmp_path / "linked")
    (folder / "inside" / "notices").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="notices is a link out of its folder, to .*outside"):
        check_files(folder)


def test_the_hub_caches_own_links_are_followed(good, tmp_path):
    blobs = tmp_path / "models--me--x" / "blobs"
    snapshot = tmp_path / "models--me--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (good / "model").iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    check_files(snapshot)
    fetch_checked_weights(snapshot)
    copy = tmp_path / "models--me--x" / "copies" / "abc"
    copy.mkdir(parents=True)
    for name, check in (("config.json", check_files), (WEIGHTS, fetch_checked_weights)):
        (copy / name).symlink_to(blobs / name)
        with pytest.raises(ValueError, match=f"{name} is a link out of its folder"):
            check(copy)
    # Other folders have blobs too.
    others = [good / "model", tmp_path / "blobs", tmp_path / "models--me--y" / "blobs"]
    others.append(blobs / "blobs")
    for other in others:
        other.mkdir(parents=True, exist_ok=True)
        if other != good / "model":
            shutil.copy(good / "model" / "config.json", other)
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(other / "config.json")
        with pytest.raises(ValueError, match="config.json is a link out of its folder"):
            check_files(snapshot)


@pytest.mark.parametrize("per_byte, refused", [(3.9, False), (5, True)])
def test_a_model_has_at_most_four_parameters_for_each_byte(good, tmp_path, per_byte, refused):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    save_file({"a": torch.zeros(2**23, dtype=torch.uint8)}, folder / WEIGHTS)
    size = (folder / WEIGHTS).stat().st_size
    width = json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"]
    # 2^24 parameters are allowed whatever the size.
    rows = int((per_byte * size + 2**24) / width) - 10_000
    edit(folder / "config.json", text_config={"vocab_size": rows, "dtype": "bfloat16"})
    said = "lacks .* tensors"  # of the model, which was made
    if refused:
        said = f"config.json of .* parameters, its weights {size:,} bytes"
    with pytest.raises(ValueError, match=said):
        open_checkpoint(folder).load(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "command, kind",
    [*product(["train"], BROKEN), *product(["gain", "merge", "diagnose"], ["text_config: list"])],
)
def test_a_broken_checkpoint_ends_in_a_sentence(refused, tmp_path, command, kind):
    error = refused(command, KINDS[kind])
    assert str(tmp_path / "model") in error or "feature_layer" in error, error
    assert kind not in SAID or SAID[kind] in " ".join(error.split())


def small(folder: Path, **files) -> Path:
    """A folder with JSON files of these names and contents, and `config.json` of no model."""
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


READ = ["config", "generation_config", "adapter_config", INDEX.removesuffix(".json")]
READ += ["tokenizer_config", "tokenizer", "special_tokens_map", "added_tokens", "chat_template"]
READ += ["processor_config", "preprocessor_config", "video_preprocessor_config"]


@pytest.mark.parametrize("name", READ)
def test_every_file_that_is_read_is_checked(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}.json is not a JSON object"):
        check_files(small(tmp_path, **{name: [1]}))


NAMED = [
    ("config", {"configuration_files": ["other.json"]}, "configuration_files names files"),
    ("tokenizer_config", {"fast_tokenizer_files": ["a.json"]}, "fast_tokenizer_files names files"),
    ("generation_config", {"attn_implementation": "a/b"}, "attn_implementation a/b in gener"),
    ("config", {"a": {"b": [{"_attn_implementation": "a/b@v1"}]}}, "_attn_implementation a/b"),
    ("config", [], "config.json is not a JSON object"),
    ("preprocessor_config", "text", "preprocessor_config.json is not a JSON object"),
    ("added_tokens", 3, "added_tokens.json is not a JSON object"),
]


@pytest.mark.parametrize("name, content, said", NAMED)
def test_what_a_file_may_not_say(tmp_path, name, content, said):
    with pytest.raises(ValueError, match=said):
        check_files(small(tmp_path, **{name: content}))
    (tmp_path / f"{name}.json").write_text("{'a': 1}")
    with pytest.raises(ValueError, match=f"{name}.json is not valid JSON"):
        check_files(tmp_path)


def test_what_a_file_may_say(tmp_path):
    """Of other models than ours no code is run, whatever files name."""
    code = {"auto_map": {"AutoTokenizer": ["a.A", None]}}
    config = {"model_type": "llama", "_attn_implementation": "sdpa", **code}
    assert check_files(small(tmp_path, config=config, tokenizer_config=code)) == config
    ours = config | {"model_type": "normalign_llava"}  # whose own code is not run either
    with pytest.raises(ValueError, match="custom code: auto_map in tokenizer_config.json. None"):
        check_files(small(tmp_path, config=ours))
    (tmp_path / "tokenizer_config.json").unlink()
    assert check_files(tmp_path) == ours
    nested = {"image_processor": {"auto_map": {"AutoImageProcessor": "a.A"}}}
    with pytest.raises(ValueError, match="custom code: auto_map in processor_config.json. None"):
        check_files(small(tmp_path, config=ours, processor_config=nested))
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").unlink()
    assert check_files(tmp_path) == {}


def test_links_in_hidden_folders_are_no_files_of_a_checkpoint(tmp_path):
    folder = small(tmp_path)
    for hidden in (".git", ".cache"):
        (folder / hidden / "deep").mkdir(parents=True)
        (folder / hidden / "deep" / "link").symlink_to("/etc/hostname")
    check_files(folder)
    (folder / ".venv").symlink_to("/etc")
    with pytest.raises(ValueError, match=r"\.venv is a link out of its folder, to /etc\. "):
        check_files(folder)


def index(folder: Path, weight_map) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


ONE = "a-00001-of-00002.safetensors"
TWO = "a-00002-of-00002.safetensors"


def test_weights_are_those_of_the_index_unless_one_file_has_them(tmp_path):
    for number, name in enumerate((ONE, TWO, "other.safetensors")):
        save_file({f"t{number}": torch.zeros(2)}, tmp_path / name)
    index(tmp_path, {"t1": TWO, "t0": ONE, "more": TWO})
    assert fetch_checked_weights(tmp_path) == [tmp_path / ONE, tmp_path / TWO]
    asked = []

    def second(names):
        asked.extend(names)
        return "t1"

    assert fetch_checked_weights(tmp_path, choose_tensor=second) == [tmp_path / TWO]
    assert sorted(asked) == ["more", "t0", "t1"]
    (tmp_path / ONE).unlink()
    assert fetch_checked_weights(tmp_path, choose_tensor=second) == [tmp_path / TWO]
    with pytest.raises(ValueError, match=f"{INDEX} names missing files: {ONE}"):
        fetch_checked_weights(tmp_path)
    (tmp_path / TWO).write_bytes((tmp_path / TWO).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{TWO} cannot be loaded"):
        fetch_checked_weights(tmp_path, choose_tensor=second)
    save_file({"t": torch.zeros(2)}, tmp_path / WEIGHTS)
    assert fetch_checked_weights(tmp_path, choose_tensor=second) == [tmp_path / WEIGHTS]


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [ONE],
        {"t": "deep/a.safetensors"},
        {"t": "deep\\a.safetensors"},
        {"t": "a.bin"},
        {"t": "a.safetensors.bin"},
        {"t": 3},
        {"s": ONE, "t": "../a.safetensors"},
    ],
)
def test_an_index_of_other_files_is_refused(tmp_path, weight_map):
    (tmp_path / "deep").mkdir()
    for name in (ONE, "deep/a.safetensors", "deep\\a.safetensors"):
        save_file({"t": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=f"{INDEX} is not an index of safetensors files"):
        fetch_checked_weights(index(tmp_path, weight_map))


class Damaged(Exception):
    """An error of a library."""


def raised_by_a_library(error):
    """In a frame that is not the package's, as in a file that it reads."""
    raise error


def test_errors_of_reading_become_sentences_about_what_was_read():
    for error, said in (
        (
            Damaged("no \n such\n layer."),
            "The model X cannot be loaded: Damaged: no such layer. Do",
        ),
        (ValueError("a" * 700), f"The model X cannot be loaded: {'a' * 600}. Do"),
        (KeyError("b"), "The model X cannot be loaded: KeyError: 'b'. Do"),
        (ValueError("set `trust_remote_code=True`"), "The model X needs code that comes with it"),
    ):
        with pytest.raises(ValueError) as raised, refuse_unreadable("The model X", remedy="Do it."):
            raised_by_a_library(error)
        assert str(raised.value).startswith(said) and raised.value.__cause__ is error
    package = {"__name__": "normalign_llava.reading"}  # a module of the package that decodes
    exec("def decode(content): return content.decode()", package)
    said = "X cannot be loaded: .*utf-8.*Save or fetch"
    with pytest.raises(ValueError, match=said), refuse_unreadable("X"):
        package["decode"](b"\xff")


def test_the_panic_of_a_library_is_an_error_of_what_was_read():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with (
        pytest.raises(ValueError, match="X cannot be loaded: PanicException: index"),
        refuse_unreadable("X"),
    ):
        raised_by_a_library(panic("index out of bounds"))


@pytest.mark.parametrize("kind", [OSError, FileNotFoundError, ImportError, KeyboardInterrupt])
def test_errors_that_say_themselves_what_is_wrong_stay(kind):
    with pytest.raises(kind) as raised, refuse_unreadable("The model X"):
        raised_by_a_library(kind("said"))
    assert str(raised.value) == "said"


def test_a_sentence_of_the_package_itself_stays():
    with (
        pytest.raises(ValueError, match="^config.json is not valid JSON"),
        refuse_unreadable("The model X"),
    ):
        json_object(b"{", "config.json")


def test_full_memory_is_no_fault_of_the_file():
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError) as raised, refuse_unreadable("The model X"):
        raised_by_a_library(error)
    assert raised.value is error and error.__notes__ == ["loading the model X"]
