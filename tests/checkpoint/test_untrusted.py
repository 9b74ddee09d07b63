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
import tiny_parts
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


def edit_json(json_path: Path, **changes) -> None:
    """Sets keys of a JSON file; a mapping is laid over the one that is there."""
    settings = {}
    if json_path.exists():
        settings = json.loads(json_path.read_text())
    for key, new_value in changes.items():
        old_value = settings.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            settings[key] = {**old_value, **new_value}
        else:
            settings[key] = new_value
    json_path.write_text(json.dumps(settings))


def foreign(file_name: str, auto_class: str, **changes):
    """Names code in the `auto_map` of a file. It writes the marker as soon as it is imported."""
    reference = "evil.Evil"
    if auto_class == "AutoTokenizer":
        reference = [None, "evil.Evil"]

    def spoil(folder: Path) -> None:
        marker_path = str(folder.parent / "marker")
        code = f"open({marker_path!r}, 'a').write('run')\nclass Evil: pass\n"
        (folder / "evil.py").write_text(code)
        edit_json(folder / file_name, auto_map={auto_class: reference}, **changes)

    return spoil


def foreign_image_processor(folder: Path) -> None:
    foreign("processor_config.json", "AutoProcessor")(folder)
    image_processor = {
        "image_processor_type": "Evil",
        "auto_map": {"AutoImageProcessor": "evil.Evil"},
    }
    edit_json(folder / "processor_config.json", auto_map={}, image_processor=image_processor)


def custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("def generate(*args): pass\n")


def pickled(folder: Path) -> None:
    class Payload:
        def __reduce__(self):
            return open, (str(folder.parent / "marker"), "w")

    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))


def move_weights(folder: Path) -> Path:
    """Moves the weights into another folder, `private`."""
    private_path = folder.parent / "private"
    private_path.mkdir()
    (folder / WEIGHTS).rename(private_path / WEIGHTS)
    return private_path / WEIGHTS


def weights_by_link(folder: Path) -> None:
    (folder / WEIGHTS).symlink_to(move_weights(folder))


def weights_by_setting(folder: Path) -> None:
    move_weights(folder)
    edit_json(folder / "config.json", transformers_weights=f"../private/{WEIGHTS}")


def weights_by_index(folder: Path) -> None:
    tensor_names = load_file(move_weights(folder))
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(tensor_names, f"../private/{WEIGHTS}"),
    }
    (folder / INDEX).write_text(json.dumps(index))


def linked(file_name: str):
    """A link to a name elsewhere that is read or written."""

    def spoil(folder: Path) -> None:
        (folder / file_name).unlink(missing_ok=True)
        (folder / file_name).symlink_to(folder.parent / "new")

    return spoil


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "trainer_state.json")


def lacking(file_name: str):
    return lambda folder: (folder / file_name).unlink()


def settings(file_name: str, **changes):
    return lambda folder: edit_json(folder / file_name, **changes)


config = partial(settings, "config.json")
adapter_config = partial(settings, "adapter_config.json")

CODE = {
    "tokenizer": foreign("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
    "processor": foreign("processor_config.json", "AutoProcessor"),
    "image processor": foreign_image_processor,
    "configuration": foreign("config.json", "AutoConfig", model_type="evil"),
    "generation": custom_generate,
    "kernel": config(text_config={"_attn_implementation": "stranger/kernel"}),
    "pickle": pickled,
}
ELSEWHERE = {
    "weights, by link": weights_by_link,
    "weights, by index": weights_by_index,
    "weights, by setting": weights_by_setting,
    "training.json": linked("training.json"),
    "trainer_state.json": pipe,
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

NO_WEIGHTS = f"has no weights in safetensors: neither {WEIGHTS} nor {INDEX}"
MESSAGES = {
    "weights, by link": f"{WEIGHTS} is a link out of its folder",
    "weights, by index": f"{INDEX} is not an index of safetensors files in its folder",
    "weights, by setting": "transformers_weights names files to read in place of others",
    "pickle": f"{NO_WEIGHTS}. Pickles can run code",
    "no weights": NO_WEIGHTS,
}
"""What the error says, if not the kind's name."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint, data to train it on, images to measure it on, and an adapter of it."""
    root = tmp_path_factory.mktemp("good")
    stored.in_one_file(training.checkpoint(root))
    train_rows = []
    for number in range(6):
        question = f"<image>\nwhat is {number}?"
        train_rows.append(train_data.llava(question, f"it is {number}", "red.png"))
    train_data.write_json(root / "data", train_rows)
    training.recipe(root, root, max_steps=1)

    train_data.images(root / "images", "red.png")
    metadata = '{"file_name": "red.png", "question": "?"}\n'
    (root / "images" / "metadata.jsonl").write_text(metadata)

    training.adapter(root / "adapter", root / "model")
    return root


@pytest.fixture
def model_path(good, tmp_path):
    """A copy of the good checkpoint that a test may spoil."""
    return shutil.copytree(good / "model", tmp_path / "model")


def error_of(*words) -> str:
    """Runs a command that must be refused, with "y" for every question. Returns its error."""
    arguments = [str(word) for word in words]
    result = CliRunner().invoke(app, arguments, input="y\n" * 50)
    assert isinstance(result.exception, SystemExit), (result, result.output)
    assert result.exit_code == 1, (result, result.output)
    assert "Do you wish" not in result.output
    assert "trust_remote_code=True" not in result.output
    begin = result.stderr.index("Error: ")
    return result.stderr[begin:]


def in_one_line(error: str) -> str:
    return " ".join(error.split())


@pytest.fixture
def refused(good, model_path, tmp_path):
    """Runs a command on a spoiled copy of the checkpoint: it ends in a sentence, runs no code."""
    output_path = tmp_path / "output"
    options = {
        "train": [
            good / "recipe.yaml",
            "--model_name_or_path",
            model_path,
            "--output_dir",
            output_path,
        ],
        "merge": [
            good / "adapter",
            "--base",
            model_path,
            "--output",
            output_path,
        ],
        "diagnose": [
            model_path,
            "--data",
            good / "images",
            "--samples",
            1,
            "--output",
            output_path,
        ],
        "publish": [
            model_path,
            "--repo-id",
            "me/model",
            "--dry-run",
        ],
        "build": [
            "--from-llava",
            model_path,
            "--output",
            output_path,
        ],
        "card": [model_path],
        "gain": [model_path],
    }

    def run(command: str, spoil) -> str:
        spoil(model_path)
        error = error_of(command, *options[command])
        assert not (tmp_path / "marker").exists()
        assert not output_path.exists()
        return error

    return run


@pytest.mark.parametrize("kind", CODE)
def test_training_runs_no_code_that_comes_with_a_checkpoint(refused, kind):
    error = refused("train", CODE[kind])
    if kind == "pickle":
        assert MESSAGES["pickle"] in in_one_line(error)


@pytest.mark.parametrize("command", ["merge", "diagnose", "publish", "build"])
def test_no_command_runs_code_that_comes_with_a_checkpoint(refused, command):
    error = refused(command, CODE["tokenizer"])
    assert "tokenizer_config.json" in in_one_line(error)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            foreign("processor_config.json", "AutoProcessor"),
            "auto_map in processor_config.json",
            id="processor",
        ),
        pytest.param(
            adapter_config(megatron_config={"a": 1}),
            "megatron_core in adapter_config.json",
            id="megatron",
        ),
        pytest.param(
            adapter_config(rest=[{"attn_implementation": "evil/it"}]),
            "attn_implementation evil/it",
            id="kernel",
        ),
        pytest.param(
            adapter_config(init_lora_weights="pissa_niter_4"),
            "changes the base",
            id="start",
        ),
    ],
)
def test_an_adapter_that_brings_code_or_changed_its_base_is_not_merged(
    good, tmp_path, spoil, message
):
    adapter_path = shutil.copytree(good / "adapter", tmp_path / "adapter")
    spoil(adapter_path)
    assert message in error_of("merge", adapter_path, "--output", tmp_path / "out")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("command", ["train", "gain"])
def test_a_model_with_an_adapter_in_its_folder_is_refused(good, refused, command):
    def add_adapter(folder: Path) -> None:
        for file_name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(good / "adapter" / file_name, folder)

    error = refused(command, add_adapter)
    assert "has both config.json and adapter_config.json" in error


def test_a_part_that_needs_code_is_not_built_in(tmp_path):
    vision = tiny_parts.vision(tmp_path / "vision")
    language = tiny_parts.language(tmp_path / "language")
    output_path = tmp_path / "out"
    spoil = foreign("config.json", "AutoConfig", model_type="evil")
    spoil(Path(language))
    error = error_of("build", "--vision", vision, "--language", language, "--output", output_path)
    assert "needs code that comes with it. It is not run" in error
    assert not (tmp_path / "marker").exists()
    assert not output_path.exists()


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *product(["train"], ELSEWHERE),
        ("gain", "weights, by index"),
        *product(["card", "merge", "diagnose", "publish"], ["training.json"]),
    ],
)
def test_nothing_outside_the_folder_is_read_or_copied(refused, command, kind):
    error = refused(command, ELSEWHERE[kind])
    expected = MESSAGES.get(kind, kind)
    assert expected in in_one_line(error)


def test_links_within_a_folder_and_to_the_whole_folder_are_followed(model_path, tmp_path):
    (model_path / "inside").mkdir()
    (model_path / "here").symlink_to("inside")
    check_files(model_path)
    (tmp_path / "linked").symlink_to(model_path)
    check_files(tmp_path / "linked")
    fetch_checked_weights(tmp_path / "linked")


def test_a_folder_that_is_a_link_out_of_the_checkpoint_is_refused(model_path, tmp_path):
    (tmp_path / "outside").mkdir()
    (model_path / "inside").mkdir()
    (model_path / "inside" / "notices").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="notices is a link out of its folder, to .*outside"):
        check_files(model_path)


@pytest.fixture
def cached_model(good, tmp_path):
    """A repository in the Hub's cache with the snapshot `abc`, of links to its blobs."""
    repository = tmp_path / "models--me--x"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "abc").mkdir(parents=True)
    for file in (good / "model").iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        link_path = repository / "snapshots" / "abc" / file.name
        link_path.symlink_to(Path("../../blobs") / file.name)
    return repository


def test_the_hub_caches_own_links_are_followed(cached_model):
    check_files(cached_model / "snapshots" / "abc")
    fetch_checked_weights(cached_model / "snapshots" / "abc")


@pytest.mark.parametrize(
    ("file_name", "check"),
    [
        pytest.param("config.json", check_files, id="files"),
        pytest.param(WEIGHTS, fetch_checked_weights, id="weights"),
    ],
)
def test_links_of_a_folder_beside_snapshots_are_refused(cached_model, file_name, check):
    folder = cached_model / "copies" / "abc"
    folder.mkdir(parents=True)
    (folder / file_name).symlink_to(cached_model / "blobs" / file_name)
    with pytest.raises(ValueError, match=f"{file_name} is a link out of its folder"):
        check(folder)


@pytest.mark.parametrize(
    "other_folder",
    ["model", "blobs", "models--me--y/blobs", "models--me--x/blobs/blobs"],
)
def test_a_snapshot_s_links_to_other_folders_are_refused(
    cached_model, model_path, tmp_path, other_folder
):
    other_path = tmp_path / other_folder
    if other_path != model_path:
        other_path.mkdir(parents=True)
        shutil.copy(model_path / "config.json", other_path)
    link_path = cached_model / "snapshots" / "abc" / "config.json"
    link_path.unlink()
    link_path.symlink_to(other_path / "config.json")
    with pytest.raises(ValueError, match="config.json is a link out of its folder"):
        check_files(link_path.parent)


def write_config_of_size(model_path: Path, parameters_per_byte: float) -> int:
    """Sets how many parameters the model has for each byte of weights. Returns these bytes."""
    save_file({"a": torch.zeros(2**23, dtype=torch.uint8)}, model_path / WEIGHTS)
    weight_bytes = (model_path / WEIGHTS).stat().st_size
    stored_config = json.loads((model_path / "config.json").read_text())
    width = stored_config["text_config"]["hidden_size"]
    # 2^24 parameters are allowed whatever the size.
    row_count = int((parameters_per_byte * weight_bytes + 2**24) / width) - 10_000
    text_config = {"vocab_size": row_count, "dtype": "bfloat16"}
    edit_json(model_path / "config.json", text_config=text_config)
    return weight_bytes


def test_a_model_of_more_than_four_parameters_for_each_byte_is_refused(model_path):
    weight_bytes = write_config_of_size(model_path, 5)
    message = f"config.json of .* parameters, its weights {weight_bytes:,} bytes"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model_path).load(dtype=torch.bfloat16)


def test_a_model_of_fewer_than_four_parameters_for_each_byte_is_made(model_path):
    write_config_of_size(model_path, 3.9)
    with pytest.raises(ValueError, match="lacks .* tensors"):
        open_checkpoint(model_path).load(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *product(["train"], BROKEN),
        *product(["gain", "merge", "diagnose"], ["text_config: list"]),
    ],
)
def test_a_broken_checkpoint_ends_in_a_sentence(refused, model_path, command, kind):
    error = refused(command, BROKEN[kind])
    assert str(model_path) in error or "feature_layer" in error, error
    if kind in MESSAGES:
        assert MESSAGES[kind] in in_one_line(error)


def write_files(folder: Path, **contents) -> Path:
    """Writes JSON files of these names and contents, and `config.json` of no model."""
    for file_stem, content in {"config": {}, **contents}.items():
        (folder / f"{file_stem}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "file_stem",
    [
        "config",
        "generation_config",
        "adapter_config",
        INDEX.removesuffix(".json"),
        "tokenizer_config",
        "tokenizer",
        "special_tokens_map",
        "added_tokens",
        "chat_template",
        "processor_config",
        "preprocessor_config",
        "video_preprocessor_config",
    ],
)
def test_every_file_that_is_read_is_checked(tmp_path, file_stem):
    with pytest.raises(ValueError, match=f"{file_stem}.json is not a JSON object"):
        check_files(write_files(tmp_path, **{file_stem: [1]}))


@pytest.mark.parametrize(
    ("file_stem", "content", "message"),
    [
        (
            "config",
            {"configuration_files": ["other.json"]},
            "configuration_files names files",
        ),
        (
            "tokenizer_config",
            {"fast_tokenizer_files": ["a.json"]},
            "fast_tokenizer_files names files",
        ),
        (
            "generation_config",
            {"attn_implementation": "a/b"},
            "attn_implementation a/b in gener",
        ),
        (
            "config",
            {"a": {"b": [{"_attn_implementation": "a/b@v1"}]}},
            "_attn_implementation a/b",
        ),
        (
            "config",
            [],
            "config.json is not a JSON object",
        ),
        (
            "preprocessor_config",
            "text",
            "preprocessor_config.json is not a JSON object",
        ),
        (
            "added_tokens",
            3,
            "added_tokens.json is not a JSON object",
        ),
    ],
)
def test_what_a_file_may_not_say(tmp_path, file_stem, content, message):
    with pytest.raises(ValueError, match=message):
        check_files(write_files(tmp_path, **{file_stem: content}))


@pytest.mark.parametrize(
    "file_stem",
    ["config", "tokenizer_config", "generation_config", "preprocessor_config", "added_tokens"],
)
def test_a_file_that_is_not_json_is_refused(tmp_path, file_stem):
    write_files(tmp_path)
    (tmp_path / f"{file_stem}.json").write_text("{'a': 1}")
    with pytest.raises(ValueError, match=f"{file_stem}.json is not valid JSON"):
        check_files(tmp_path)


NAMED_CODE = {"auto_map": {"AutoTokenizer": ["a.A", None]}}
LLAMA_CONFIG = {"model_type": "llama", "_attn_implementation": "sdpa", **NAMED_CODE}
OUR_CONFIG = LLAMA_CONFIG | {"model_type": "normalign_llava"}


def test_files_of_other_models_may_name_code(tmp_path):
    """No code of theirs is run, whatever files name."""
    write_files(tmp_path, config=LLAMA_CONFIG, tokenizer_config=NAMED_CODE)
    assert check_files(tmp_path) == LLAMA_CONFIG


def test_our_own_configuration_may_name_code(tmp_path):
    """That code is not run either."""
    assert check_files(write_files(tmp_path, config=OUR_CONFIG)) == OUR_CONFIG


@pytest.mark.parametrize(
    ("file_stem", "content"),
    [
        (
            "tokenizer_config",
            NAMED_CODE,
        ),
        (
            "processor_config",
            {"image_processor": {"auto_map": {"AutoImageProcessor": "a.A"}}},
        ),
    ],
    ids=["tokenizer", "processor"],
)
def test_other_files_of_our_models_may_not_name_code(tmp_path, file_stem, content):
    write_files(tmp_path, config=OUR_CONFIG, **{file_stem: content})
    with pytest.raises(ValueError, match=f"custom code: auto_map in {file_stem}.json. None"):
        check_files(tmp_path)


def test_our_models_may_not_name_code_for_mlx(tmp_path):
    write_files(tmp_path, config={**OUR_CONFIG, "model_file": "mlx_model.py"})
    with pytest.raises(ValueError, match="custom code: model_file in config.json. None"):
        check_files(tmp_path)


def test_an_adapter_has_no_configuration_of_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert check_files(tmp_path) == {}


@pytest.mark.parametrize("hidden", [".git", ".cache"])
def test_links_in_hidden_folders_are_no_files_of_a_checkpoint(tmp_path, hidden):
    write_files(tmp_path)
    (tmp_path / hidden / "deep").mkdir(parents=True)
    (tmp_path / hidden / "deep" / "link").symlink_to("/etc/hostname")
    check_files(tmp_path)


def test_a_hidden_folder_that_is_a_link_is_refused(tmp_path):
    write_files(tmp_path)
    (tmp_path / ".venv").symlink_to("/etc")
    with pytest.raises(ValueError, match=r"\.venv is a link out of its folder, to /etc\. "):
        check_files(tmp_path)


def write_index(folder: Path, weight_map) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


FIRST_SHARD = "a-00001-of-00002.safetensors"
SECOND_SHARD = "a-00002-of-00002.safetensors"


@pytest.fixture
def shards(tmp_path):
    """A folder with two shards, their index, and a file that the index does not name."""
    for number, file_name in enumerate((FIRST_SHARD, SECOND_SHARD, "other.safetensors")):
        save_file({f"t{number}": torch.zeros(2)}, tmp_path / file_name)
    weight_map = {
        "t1": SECOND_SHARD,
        "t0": FIRST_SHARD,
        "more": SECOND_SHARD,
    }
    return write_index(tmp_path, weight_map)


def choose_second(tensor_names):
    return "t1"


def test_weights_are_those_of_the_index(shards):
    assert fetch_checked_weights(shards) == [shards / FIRST_SHARD, shards / SECOND_SHARD]


def test_the_file_of_one_tensor_is_chosen_among_all(shards):
    offered_names = []

    def choose_and_note(tensor_names):
        offered_names.extend(tensor_names)
        return choose_second(tensor_names)

    chosen = fetch_checked_weights(shards, choose_tensor=choose_and_note)
    assert chosen == [shards / SECOND_SHARD]
    assert sorted(offered_names) == ["more", "t0", "t1"]


def test_a_missing_shard_is_named_if_it_is_needed(shards):
    (shards / FIRST_SHARD).unlink()
    chosen = fetch_checked_weights(shards, choose_tensor=choose_second)
    assert chosen == [shards / SECOND_SHARD]
    with pytest.raises(ValueError, match=f"{INDEX} names missing files: {FIRST_SHARD}"):
        fetch_checked_weights(shards)


def test_a_shard_that_is_cut_off_is_refused(shards):
    content = (shards / SECOND_SHARD).read_bytes()
    (shards / SECOND_SHARD).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{SECOND_SHARD} cannot be loaded"):
        fetch_checked_weights(shards, choose_tensor=choose_second)


def test_one_file_of_weights_comes_before_an_index(shards):
    save_file({"t": torch.zeros(2)}, shards / WEIGHTS)
    assert fetch_checked_weights(shards, choose_tensor=choose_second) == [shards / WEIGHTS]


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [FIRST_SHARD],
        {"t": "deep/a.safetensors"},
        {"t": "deep\\a.safetensors"},
        {"t": "a.bin"},
        {"t": "a.safetensors.bin"},
        {"t": 3},
        {"s": FIRST_SHARD, "t": "../a.safetensors"},
    ],
)
def test_an_index_of_other_files_is_refused(tmp_path, weight_map):
    (tmp_path / "deep").mkdir()
    for file_name in (FIRST_SHARD, "deep/a.safetensors", "deep\\a.safetensors"):
        save_file({"t": torch.zeros(2)}, tmp_path / file_name)
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=f"{INDEX} is not an index of safetensors files"):
        fetch_checked_weights(tmp_path)


class DamagedError(Exception):
    """An error of a library."""


def raise_in_a_library(error):
    """In a frame that is not the package's, as in a file that it reads."""
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(
            DamagedError("no \n such\n layer."),
            "The model X cannot be loaded: DamagedError: no such layer. Do",
            id="another-class",
        ),
        pytest.param(
            ValueError("a" * 700),
            f"The model X cannot be loaded: {'a' * 600}. Do",
            id="long",
        ),
        pytest.param(
            KeyError("b"),
            "The model X cannot be loaded: KeyError: 'b'. Do",
            id="key",
        ),
        pytest.param(
            ValueError("set `trust_remote_code=True`"),
            "The model X needs code that comes with it",
            id="code",
        ),
    ],
)
def test_errors_of_reading_become_sentences_about_what_was_read(error, message):
    with pytest.raises(ValueError) as raised, refuse_unreadable("The model X", remedy="Do it."):
        raise_in_a_library(error)
    assert str(raised.value).startswith(message)
    assert raised.value.__cause__ is error


def test_an_error_of_decoding_becomes_a_sentence_though_the_package_decodes():
    package_module = {"__name__": "normalign_llava.reading"}
    exec("def decode(content): return content.decode()", package_module)
    message = "X cannot be loaded: .*utf-8.*Save or fetch"
    with pytest.raises(ValueError, match=message), refuse_unreadable("X"):
        package_module["decode"](b"\xff")


def test_the_panic_of_a_library_is_an_error_of_what_was_read():
    panic_class = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    message = "X cannot be loaded: PanicException: index"
    with pytest.raises(ValueError, match=message), refuse_unreadable("X"):
        raise_in_a_library(panic_class("index out of bounds"))


@pytest.mark.parametrize(
    "error_class",
    [OSError, FileNotFoundError, ImportError, KeyboardInterrupt],
)
def test_errors_that_say_themselves_what_is_wrong_stay(error_class):
    with pytest.raises(error_class) as raised, refuse_unreadable("The model X"):
        raise_in_a_library(error_class("said"))
    assert str(raised.value) == "said"


def test_a_sentence_of_the_package_itself_stays():
    message = "^config.json is not valid JSON"
    with pytest.raises(ValueError, match=message), refuse_unreadable("The model X"):
        json_object(b"{", "config.json")


def test_full_memory_is_no_fault_of_the_file():
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError) as raised, refuse_unreadable("The model X"):
        raise_in_a_library(error)
    assert raised.value is error
    assert error.__notes__ == ["loading the model X"]
