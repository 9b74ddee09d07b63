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
from normalign_llava.checkpoint.untrusted import check_files, check_weights
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
    model, output = shutil.copytree(good / "model", tmp_path / "model"), tmp_path / "output"

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
    vision, language = parts.vision(tmp_path / "vision"), parts.language(tmp_path / "language")
    foreign("config.json", "AutoConfig", model_type="evil")(Path(language))
    words = ["--vision", vision, "--language", language, "--output", tmp_path / "out"]
    assert "needs code that comes with it, which is not run" in stopped("build", *words)
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
    check_weights(snapshot)
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
