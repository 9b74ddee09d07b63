"""What of a checkpoint folder is sent, and what is left: folders that training and diagnosis wrote."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_parts as parts
import training
from paths import ROOT
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.diagnose.report import SCHEMA_VERSION
from normalign_llava.hub_cards.push.contents import INDEX, WEIGHTS, contents, public_report


REPORT = ROOT / "docs/quickstart/report.json"
BUILT = {
    "build.json": "record",
    "chat_template.jinja": "processor",
    "config.json": "configuration",
    "configuration_normalign_llava.py": "code",
    "generation_config.json": "configuration",
    "model.safetensors": "weights",
    "modeling_normalign_llava.py": "code",
    "processor_config.json": "processor",
    "tokenizer.json": "processor",
    "tokenizer_config.json": "processor",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("contents")
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language"), root / "built")
    return root / "built"


@pytest.fixture
def checkpoint(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def sharded(built, tmp_path_factory):
    folder = Path(shutil.copytree(built, tmp_path_factory.mktemp("sharded") / "model"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def kinds(found):
    return {content.path: content.kind for content in found.sent}


def add(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("something\n")


def test_a_built_checkpoint_is_sent_whole_and_in_order(checkpoint):
    found = contents(checkpoint)
    assert kinds(found) == BUILT and found.left == {}
    assert [content.path for content in found.sent] == sorted(BUILT)
    for content in found.sent:
        assert content.source == checkpoint / content.path and content.size == content.source.stat().st_size


def test_of_a_trainers_checkpoint_the_model_is_sent_alone(built, tmp_path):
    # Adapters, so that both kinds of weights have been through this.
    trainer = training.trainer(tmp_path / "run", built, use_peft=True, lora_r=2, max_steps=1, save_strategy="steps")
    trainer.train()
    trainer.save_model()
    found = contents(tmp_path / "run")
    assert {path for path, kind in kinds(found).items() if kind == "adapter"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert found.left["training_args.bin"] == "a pickle: the trainer's arguments"
    assert found.left["checkpoint-1/"] == "a checkpoint of training"
    assert not any(path.endswith((".bin", ".pt", ".pth")) for path in kinds(found))

    inside = contents(tmp_path / "run" / "checkpoint-1")
    assert inside.left["optimizer.pt"] == "optimizer state"
    assert inside.left["rng_state.pth"] == "random states of training"
    assert inside.left["trainer_state.json"] == "the trainer's own state"
    assert kinds(inside).keys() - {"README.md"} <= kinds(found).keys() | {"README.md"}


def test_everything_else_is_left_with_a_reason(checkpoint):
    add(checkpoint, "samples/step-1.json", "dropped_rows.jsonl", "pytorch_model.bin", "notes.txt", ".env", "my.py")
    add(checkpoint, ".cache/token", "evaluation/pope/samples.jsonl", "tokenizer.pkl", "LICENSE.pt", "tf/config.json")
    add(checkpoint, "LICENSE", "LICENSE-LLAMA.txt", "NOTICE", "evaluation/summary.json")
    add(checkpoint, "chat_templates/tools.jinja", "README.md", "dynamics.jsonl", "training.json")
    found = contents(checkpoint)
    assert found.left == {
        ".cache/": "hidden",
        ".env": "hidden",
        "LICENSE.pt": "a pickle",
        "dropped_rows.jsonl": "rows of the data",
        "evaluation/pope/": "not on the list of what is sent",
        "my.py": "not on the list of what is sent",
        "notes.txt": "not on the list of what is sent",
        "pytorch_model.bin": "a pickle",
        "samples/": "answers to samples of the data",
        "tf/": "not on the list of what is sent",
        "tokenizer.pkl": "a pickle",
    }
    assert kinds(found).items() - BUILT.items() == {
        ("LICENSE", "record"),
        ("LICENSE-LLAMA.txt", "record"),
        ("NOTICE", "record"),
        ("chat_templates/tools.jinja", "processor"),
        ("dynamics.jsonl", "record"),
        ("evaluation/summary.json", "evaluation"),
        ("README.md", "card"),
        ("training.json", "record"),
    }


def test_the_shards_that_the_index_names_are_sent(sharded, tmp_path):
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    stale = "model-00009-of-00009.safetensors"
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shutil.copyfile(folder / shards[0], folder / stale)
    found = contents(folder)
    assert sorted(path for path, kind in kinds(found).items() if kind == "weights") == [*shards, INDEX]
    assert found.left == {stale: "weights that this checkpoint does not load"}

    (folder / shards[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[1]} of the {len(shards)} shards"):
        contents(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_an_index_that_says_nothing_is_an_error(sharded, tmp_path, index):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    (folder / INDEX).write_text(index)
    with pytest.raises(ValueError, match=f"{INDEX} .*Save or fetch the checkpoint again"):
        contents(folder)


def test_weights_of_two_saves_and_none_are_errors(checkpoint, sharded, tmp_path):
    shutil.copyfile(sharded / INDEX, checkpoint / INDEX)
    with pytest.raises(ValueError, match=f"{WEIGHTS} and {INDEX}, weights of two saves"):
        contents(checkpoint)
    (checkpoint / INDEX).unlink()
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no weights.*pytorch_model.bin.*save it again"):
        contents(checkpoint)
    add(tmp_path, "run/checkpoint-7/config.json")
    with pytest.raises(ValueError, match="It has checkpoint-7: name one of them"):
        contents(tmp_path / "run")
    with pytest.raises(ValueError, match="is not a folder"):
        contents(tmp_path / "nowhere")


def test_links_out_of_the_folder_are_refused(checkpoint, tmp_path):
    (tmp_path / "private.md").write_text("# Mine\n")
    (tmp_path / "elsewhere").mkdir()
    add(tmp_path, "elsewhere/pope.json")
    (checkpoint / "notes.md").symlink_to(tmp_path / "private.md")
    (checkpoint / "LICENSE").symlink_to("build.json")
    found = contents(checkpoint)
    assert "notes.md" in found.left and kinds(found)["LICENSE"] == "record"

    (checkpoint / "README.md").symlink_to(tmp_path / "private.md")
    (checkpoint / "evaluation").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"2 files .* README.md -> .*private.md, evaluation/pope.json -> .*cp -rL"):
        contents(checkpoint)
    # A card that is generated takes the link's place.
    os.unlink(checkpoint / "evaluation")
    assert contents(checkpoint, {"README.md": b"# Card\n"}).sent


def test_a_folder_of_the_hubs_cache_can_be_sent(checkpoint, tmp_path):
    repository = tmp_path / "models--user--model"
    snapshot, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    checkpoint.rename(blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert kinds(contents(snapshot)) == BUILT
    (snapshot / "LICENSE").symlink_to(tmp_path / "private.md")
    with pytest.raises(ValueError, match="LICENSE -> .*private.md"):
        contents(snapshot)


def test_what_is_generated_wins(checkpoint):
    add(checkpoint, "README.md", "evaluation/old.json")
    card = {"README.md": b"# The card\n", "evaluation/new.json": b"{}\n"}
    found = {content.path: content for content in contents(checkpoint, card).sent}
    assert found["README.md"].source == b"# The card\n" and found["README.md"].size == 11
    assert found["evaluation/new.json"].kind == "evaluation" and "evaluation/old.json" in found
    with pytest.raises(ValueError, match="notes.txt is not on the list"):
        contents(checkpoint, {"notes.txt": b""})


@pytest.fixture
def diagnosed(checkpoint):
    """A checkpoint with the quickstart's report, and an image for every name in it."""
    folder = checkpoint / "diagnostics"
    folder.mkdir()
    shutil.copyfile(REPORT, folder / "report.json")
    content = json.loads(REPORT.read_text("utf-8"))
    shown = [each["image"] for report in (content["report"], content["against"]) for each in report["attention"][:4]]
    for name in {*(drawing["file"] for drawing in content["figures"]), *filter(None, shown), "image_9.png"}:
        Image.new("RGB", (4, 4)).save(folder / name)
    add(folder, "report.html", "stray.png")
    return checkpoint


def test_a_diagnosis_is_sent_without_samples(diagnosed):
    before = json.loads(REPORT.read_text("utf-8"))
    assert before["report"]["attention"][0]["question"] and before["against"]["attention"][0]["maps"]
    found = contents(diagnosed)
    sent = {content.path.removeprefix("diagnostics/"): content for content in found.sent if "/" in content.path}
    figures = {drawing["file"] for drawing in before["figures"]}
    samples = {name for name in figures if name.startswith("attention_") and name != "attention_depth.png"}
    assert samples and sent.keys() == figures - samples | {"report.json"}
    assert {content.kind for name, content in sent.items() if name.endswith(".png")} == {"figure"}
    assert found.left["diagnostics/report.html"] == "it shows images and questions of the data"
    assert found.left["diagnostics/image_9.png"] == "it shows a sample of the data"
    assert found.left["diagnostics/stray.png"] == "not on the list of what is sent"

    after = json.loads(sent["report.json"].source)
    assert {drawing["file"] for drawing in after["figures"]} == figures - samples
    assert "first question" in before["provenance"] and "first question" not in after["provenance"]
    for name in ("report", "against"):
        attention = after[name].pop("attention")
        for each, old in zip(attention, before[name].pop("attention"), strict=True):
            assert (each["question"], each["image"], each["maps"]) == ("", None, [])
            assert each["image_share"] == old["image_share"] and each.keys() == old.keys()
        assert after[name] == before[name]
    assert after["findings"] == before["findings"] and after["schema_version"] == SCHEMA_VERSION


def test_a_report_that_cannot_be_read_is_left_with_its_figures(diagnosed):
    content = json.loads(REPORT.read_text("utf-8")) | {"schema_version": SCHEMA_VERSION + 1}
    (diagnosed / "diagnostics/report.json").write_text(json.dumps(content))
    found = contents(diagnosed)
    assert not any(content.path.startswith("diagnostics") for content in found.sent)
    assert "diagnostics/report.json" in found.left
    with pytest.raises(ValueError, match="schema_version is 2, not 1"):
        public_report(json.dumps(content))
    with pytest.raises(ValueError, match="not a valid report"):
        public_report("[]")
