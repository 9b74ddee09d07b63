"""What of a checkpoint folder is sent, and what is not: folders that training and diagnosis wrote."""

import json
import shutil
from pathlib import Path

import pytest
import stored
from paths import ROOT
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.diagnose.report import SCHEMA_VERSION
from normalign_llava.hub_cards.push.source import INDEX, WEIGHTS, choose_files


REPORT = ROOT / "docs/quickstart/report.json"
SHARD = "model-vision_tower-00001-of-00001.safetensors"
BUILT = {
    *("build.json", "chat_template.jinja", "config.json", "configuration_normalign_llava.py"),
    *("generation_config.json", "modeling_normalign_llava.py", "processor_config.json", *stored.FILES),
    *("tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def sharded(built, tmp_path_factory):
    folder = Path(shutil.copytree(built, tmp_path_factory.mktemp("sharded") / "model"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def add(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("something\n")


def test_a_built_checkpoint_is_sent_whole(folder):
    chosen = choose_files(folder, {"README.md": b"# Card"})
    assert chosen.files.keys() == BUILT | {"README.md"} and chosen.excluded == []
    assert chosen.files["config.json"] == (folder / "config.json").read_bytes()
    assert chosen.files[SHARD] == folder / SHARD and chosen.files["README.md"] == b"# Card"


def test_everything_else_is_excluded(folder):
    add(folder, "samples/step-1.json", "dropped_rows.jsonl", "pytorch_model.bin", "notes.txt", ".env", "my.py")
    add(folder, ".cache/token", "evaluation/pope/samples.jsonl", "tokenizer.pkl", "LICENSE.pt", "tf/config.json")
    add(folder, "training_args.bin", "optimizer.pt", "trainer_state.json", "checkpoint-1/model.safetensors")
    sent = ["LICENSE", "LICENSE-LLAMA.txt", "NOTICE", "evaluation/summary.json", "chat_templates/tools.jinja"]
    add(folder, *sent, "README.md", "dynamics.jsonl", "training.json")
    chosen = choose_files(folder, {})
    assert chosen.files.keys() == BUILT | {*sent, "README.md", "dynamics.jsonl", "training.json"}
    assert chosen.excluded == [
        *(".cache/", ".env", "LICENSE.pt", "checkpoint-1/", "dropped_rows.jsonl", "evaluation/pope/", "my.py"),
        *("notes.txt", "optimizer.pt", "pytorch_model.bin", "samples/", "tf/", "tokenizer.pkl"),
        *("trainer_state.json", "training_args.bin"),
    ]


def test_the_shards_that_the_index_names_are_sent(sharded, tmp_path):
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    stale = "model-00009-of-00009.safetensors"
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shutil.copyfile(folder / shards[0], folder / stale)
    chosen = choose_files(folder, {}, existing=[stale, shards[0], "mine.safetensors"])
    assert {path for path in chosen.files if path.startswith("model.") or "-of-" in path} == {*shards, INDEX}
    assert chosen.excluded == chosen.stale == [stale]

    (folder / shards[1]).unlink()
    with pytest.raises(ValueError, match=f"names {shards[1]}, which"):
        choose_files(folder, {})


def test_of_two_saves_the_weights_that_are_loaded_are_sent(folder, sharded):
    stored.in_one_file(folder)
    shutil.copyfile(sharded / INDEX, folder / INDEX)
    chosen = choose_files(folder, {}, existing=[INDEX])
    assert WEIGHTS in chosen.files and chosen.excluded == chosen.stale == [INDEX]
    (folder / INDEX).unlink()
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights in safetensors"):
        choose_files(folder, {})


@pytest.fixture
def diagnosed(folder):
    """A checkpoint with the quickstart's report, and an image for every name in it."""
    diagnostics = folder / "diagnostics"
    diagnostics.mkdir()
    shutil.copyfile(REPORT, diagnostics / "report.json")
    content = json.loads(REPORT.read_text("utf-8"))
    asked = [*content["report"]["attention"][:4], *content["against"]["attention"][:4]]
    shown = [question["image"] for question in asked]
    for name in {*(drawing["file"] for drawing in content["figures"]), *filter(None, shown), "image_9.png"}:
        Image.new("RGB", (4, 4)).save(diagnostics / name)
    add(diagnostics, "report.html", "stray.png")
    return folder


def test_a_diagnosis_is_sent_without_samples(diagnosed):
    before = json.loads(REPORT.read_text("utf-8"))
    assert before["report"]["attention"][0]["question"] and before["against"]["attention"][0]["maps"]
    chosen = choose_files(diagnosed, {})
    sent = {path.removeprefix("diagnostics/") for path in chosen.files if "/" in path}
    figures = {drawing["file"] for drawing in before["figures"]}
    samples = {name for name in figures if name.startswith("attention_")}
    assert samples and sent == figures - samples | {"report.json"}
    assert {f"diagnostics/{name}" for name in ("report.html", "image_9.png", "stray.png")} <= set(chosen.excluded)

    after = json.loads(chosen.files["diagnostics/report.json"])
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
    chosen = choose_files(diagnosed, {})
    assert not any(path.startswith("diagnostics") for path in chosen.files)
    assert "diagnostics/report.json" in chosen.excluded
