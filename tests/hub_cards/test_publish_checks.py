"""What of a checkpoint folder is sent, and whether it may be: every fault is made on disk."""

import json
import shutil
from pathlib import Path

import pytest
import stored
import torch
from paths import ROOT
from peft import LoraConfig, get_peft_model
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.files import INDEX, WEIGHTS
from normalign_llava.diagnose.report import SCHEMA_VERSION
from normalign_llava.hub_cards import reading
from normalign_llava.hub_cards.push import source
from normalign_llava.hub_cards.push.checks import check_checkpoint, check_private
from normalign_llava.hub_cards.push.source import PublishSource, choose_files


REPORT = ROOT / "docs/quickstart/report.json"
SHARD = "model-vision_tower-00001-of-00001.safetensors"
BUILT = {
    *("build.json", "chat_template.jinja", "config.json", "configuration_normalign_llava.py"),
    *("generation_config.json", "modeling_normalign_llava.py", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", *stored.FILES),
}
GAIN, BIAS = (f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias"))
WIDTH = 32  # of the tiny language model
TOKEN = "my-token-0123456789"
SECRET = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"


def add(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("something\n")


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=2))


def test_of_a_folder_what_is_on_the_list_is_sent(folder):
    add(folder, "samples/1.json", "dropped_rows.jsonl", "pytorch_model.bin", "notes.txt", ".env")
    add(folder, ".cache/a", "evaluation/pope/a.jsonl", "tokenizer.pkl", "tf/config.json", "my.py")
    add(folder, "training_args.bin", "optimizer.pt", "trainer_state.json", "checkpoint-1/a.pt")
    sent = [
        "LICENSE",
        "LICENCE.txt",
        "NOTICE.md",
        "evaluation/summary.json",
        "chat_templates/a.jinja",
    ]
    add(folder, *sent, "dynamics.jsonl", "training.json")
    chosen = choose_files(folder, {"README.md": b"# Card"})
    assert chosen.files.keys() == BUILT | {*sent, "README.md", "dynamics.jsonl", "training.json"}
    assert chosen.excluded == [
        *(".cache/", ".env", "checkpoint-1/", "dropped_rows.jsonl", "evaluation/pope/", "my.py"),
        *("notes.txt", "optimizer.pt", "pytorch_model.bin", "samples/", "tf/", "tokenizer.pkl"),
        *("trainer_state.json", "training_args.bin"),
    ]
    assert chosen.files["config.json"] == (folder / "config.json").read_bytes()
    assert chosen.files[SHARD] == folder / SHARD and chosen.files["README.md"] == b"# Card"


def test_notices_of_the_parts_are_sent(folder):
    notices = ["notices/vision/LICENSE", "notices/language/NOTICE.txt"]
    add(folder, *notices, "notices/other/LICENSE", "notices/vision/deep/a", "notices/vision/.a")
    (folder / notices[0]).write_text("Copyright \u00a9 somebody\n", "utf-8")
    chosen = choose_files(folder, {})
    assert {path for path in chosen.files if path.startswith("notices")} == {*notices}
    assert chosen.files[notices[0]] == (folder / notices[0]).read_bytes()
    left = ["notices/other/", "notices/vision/.a", "notices/vision/deep/"]
    assert chosen.excluded == left
    assert reading.notices(folder) == sorted(notices)
    (folder / notices[1]).write_bytes(b"a" * 2**20)
    assert len(choose_files(folder, {}).files[notices[1]]) == 2**20


OURS = {
    *("model.safetensors", "model.safetensors.index.json", "model-1-of-2.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors", "config.json", "generation_config.json"),
    *("configuration_normalign_llava.py", "modeling_normalign_llava.py", "build.json"),
    *("training.json", "dynamics.jsonl", "processor_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json"),
    *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja"),
}
READ_WITH_IT = {
    *("pytorch_model.bin", "pytorch_model-1-of-2.bin", "pytorch_model.bin.index.json"),
    *("adapter_model.bin", "tf_model.h5", "flax_model.msgpack", "video_preprocessor_config.json"),
    *("chat_templates/a.txt", "custom_generate/generate.py"),
}
ELSEWHERE = {"evaluation/summary.json", "diagnostics/report.json", "diagnostics/a.png"}
OF_PEOPLE = {"README.md", "LICENSE", "notes.md", "a/config.json", "model.py", "my.safetensors"}


def test_what_is_written_and_what_is_read_beside_a_model():
    """What transformers would read, or run, must not be left there by somebody else."""
    names = OURS | READ_WITH_IT | ELSEWHERE | OF_PEOPLE | {"chat_templates/a.jinja"}
    written = {name for name in names if source.is_written_by_package(name)}
    assert written == OURS | ELSEWHERE | {"chat_templates/a.jinja"}
    read = {name for name in names if source.is_read_with_model(name)}
    assert read == OURS | READ_WITH_IT | {"chat_templates/a.jinja"}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\xff\xfe latin", "cannot be loaded"),
        (b"a\0b", "null character"),
        (b"a" * (2**20 + 1), "1,048,577 bytes"),
    ],
)
def test_a_notice_that_is_no_short_text_is_refused(folder, content, said):
    add(folder, "notices/vision/LICENSE")
    (folder / "notices/vision/LICENSE").write_bytes(content)
    with pytest.raises(ValueError, match=f"notices/vision/LICENSE.*{said}"):
        choose_files(folder, {})


def test_the_weights_that_are_loaded_are_sent(folder, tmp_path):
    sharded = Path(shutil.copytree(folder, tmp_path / "sharded"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(sharded, max_shard_size="40KB")
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    stale = "model-00009-of-00009.safetensors"
    shutil.copyfile(sharded / shards[0], sharded / stale)
    chosen = choose_files(sharded, {})
    assert {path for path in chosen.files if "safetensors" in path} == {*shards, INDEX}
    assert chosen.excluded == [stale]
    # Of two saves, the one that is loaded.
    stored.in_one_file(folder)
    shutil.copyfile(sharded / INDEX, folder / INDEX)
    chosen = choose_files(folder, {})
    assert WEIGHTS in chosen.files and chosen.excluded == [INDEX]


def test_a_diagnosis_is_sent_without_samples(folder):
    diagnostics = folder / "diagnostics"
    before = json.loads(REPORT.read_text("utf-8"))
    add(diagnostics, "report.html", "stray.png")
    shutil.copyfile(REPORT, diagnostics / "report.json")
    asked = [*before["report"]["attention"][:4], *before["against"]["attention"][:4]]
    figures = {drawing["file"] for drawing in before["figures"]}
    for name in {*figures, *filter(None, (question["image"] for question in asked)), "image_9.png"}:
        Image.new("RGB", (4, 4)).save(diagnostics / name)
    assert asked[0]["question"] and asked[-1]["maps"]
    chosen = choose_files(folder, {})
    sent = {path.removeprefix("diagnostics/") for path in chosen.files if "/" in path}
    samples = {name for name in figures if name.startswith("attention_")}
    assert samples and sent == figures - samples | {"report.json"}
    for name in ("report.html", "image_9.png", "stray.png"):
        assert f"diagnostics/{name}" in chosen.excluded
    after = json.loads(chosen.files["diagnostics/report.json"])
    assert {drawing["file"] for drawing in after["figures"]} == figures - samples
    assert "first question" in before["provenance"] and "first question" not in after["provenance"]
    for name in ("report", "against"):
        attention = after[name].pop("attention")
        for question, old in zip(attention, before[name].pop("attention"), strict=True):
            assert (question["question"], question["image"], question["maps"]) == ("", None, [])
            assert question["image_share"] == old["image_share"] and question.keys() == old.keys()
        assert after[name] == before[name]
    assert after["findings"] == before["findings"] and after["schema_version"] == SCHEMA_VERSION


def assert_faults(folder, *expected):
    """`expected`: words of each fault, in their order."""
    with pytest.raises(ValueError, match="cannot be published") as error:
        check_checkpoint(folder)
    for fault, words in zip(str(error.value).splitlines()[1:], expected, strict=True):
        assert words in fault


def test_every_fault_is_listed(folder):
    check_checkpoint(folder)
    code = folder / "modeling_normalign_llava.py"
    code.write_text(code.read_text() + "# changed\n")
    (folder / "configuration_normalign_llava.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    auto_map = {name: value for name, value in config["auto_map"].items() if name != "AutoModel"}
    untied = {**config["text_config"], "tie_word_embeddings": False}
    change(folder / "config.json", auto_map=auto_map, text_config=untied)
    change(folder / "tokenizer_config.json", padding_side=None)
    norm = {GAIN: torch.full((WIDTH,), torch.nan), BIAS: torch.zeros(WIDTH, dtype=torch.bfloat16)}
    stored.store(folder, stored.weights(folder) | norm)
    names = ("configuration_normalign_llava.py", code.name, "auto_map in config.json")
    expected = [f"{name} is not this version's" for name in names]
    expected += ["pads on the right", "ties embeddings otherwise"]
    expected += sorted([f"{GAIN} has 32 NaN", f"{BIAS} is torch.bfloat16"])
    assert_faults(folder, *expected)
    change(folder / "config.json", model_type="llava")
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_checkpoint(folder)


def test_what_a_configuration_does_not_say_is_a_fault(folder):
    for name, key in (("tokenizer_config", "padding_side"), ("config", "auto_map")):
        content = json.loads((folder / f"{name}.json").read_text())
        del content[key]
        content.pop("tie_word_embeddings", None)
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert_faults(folder, "auto_map in config.json", "pads on the right", "ties embeddings other")
    weights = stored.weights(folder)
    weights[GAIN][3] = torch.inf
    stored.store(folder, weights)
    with pytest.raises(ValueError, match=f"{GAIN} has 1 NaN or infinite"):
        check_checkpoint(folder)


def test_the_norm_of_an_adapter_is_whole_and_finite(built, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(built)
    settings = LoraConfig(target_modules=["v_proj"], modules_to_save=["multi_modal_projector"])
    get_peft_model(model, settings).save_pretrained(adapter := tmp_path / "adapter")
    check_checkpoint(adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file(tensors | {name: torch.full((WIDTH,), float("nan"))}, file)
    assert_faults(adapter, f"{name} has 32 NaN or infinite values")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be loaded"):
        check_checkpoint(adapter)


def private(chosen):
    with pytest.raises(ValueError, match="must not be published") as error:
        check_private(chosen, TOKEN)
    assert TOKEN not in str(error.value) and SECRET not in str(error.value)
    return str(error.value).splitlines()[1:]


def test_tokens_are_found_anywhere(folder):
    (folder / "README.md").write_text(f"# Model\n\n{TOKEN}\nand {SECRET}\nnot hf_{'x' * 34}\n")
    (folder / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    file = folder / SHARD
    save_file(load_file(file), file, {"format": "pt", "by": TOKEN})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOKEN] = 999
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    faults = private(choose_files(folder, {}))
    assert sorted(fault[2:].split(":")[0] for fault in faults) == [
        *("README.md, line 3", "README.md, line 4", "chat_template.jinja, line 1"),
        *(f"{file.name}, line 1", "tokenizer.json, line 1"),
    ]
    assert "your token, my-t..." in faults[0] and "a Hugging Face token, hf_A..." in faults[1]


def test_paths_of_this_machine_are_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    change(folder / "config.json", _name_or_path="/home/me/models/base")
    (folder / "vocab.txt").write_text(f"it was at {folder.parent}/x\n")
    faults = private(choose_files(folder, {}))
    assert "config.json, line" in faults[0] and "a local path, /home/me. " in faults[0]
    assert len(faults) == 2 and str(folder.parent) in faults[1]
    ignored = shutil.ignore_patterns("vocab.txt", "config*")
    moved = shutil.copytree(folder, folder.parent / "Modèle ß", ignore=ignored)
    escaped = json.dumps(str(moved))[1:-1]  # letters beyond ASCII are
    (moved / "vocab.json").write_text(f'{{"at": "{escaped}/x"}}')
    faults = private(choose_files(moved, {}))
    assert len(faults) == 1 and f"vocab.json, line 1: a local path, {escaped}. " in faults[0]


def texts(folder, *contents):
    """Files of these texts, as they would be sent from a folder."""
    files = {f"{number}.txt": content.encode() for number, content in enumerate(contents)}
    return PublishSource(folder, files, {}, [])


def test_the_longest_path_is_named_also_that_of_a_home_that_is_a_link(tmp_path, monkeypatch):
    real = tmp_path / "real"
    folder = tmp_path / "models" / "m"
    real.mkdir()
    (tmp_path / "home").symlink_to(real)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    places = [real, tmp_path / "home", folder, folder.parent]
    faults = private(texts(folder, *(f"at {place}/x" for place in places)))
    for place, fault in zip(places, faults, strict=True):
        assert f"a local path, {place}. " in fault


def test_a_home_as_common_as_root_and_a_missing_token_are_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/root")
    common = texts(tmp_path / "m", "/root/x and /home", "nothing")
    for token in (TOKEN, ""):
        check_private(common, token)
    (fault,) = private(texts(tmp_path / "m", f"api_org_{'AbCdEfGhIj' * 3}KlMn"))
    assert "a Hugging Face token, api_..." in fault


def test_disguised_files_and_figures_are_looked_into(tmp_path):
    text = PngInfo()
    text.add_text("Comment", f"drawn in {tmp_path}/plots")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=text)
    (tmp_path / "b.png").write_bytes(b"\x80\x04pickle")
    torch.save({"a": 1}, tmp_path / "tokenizer.model")
    expected = {"a.png": f"path, {tmp_path}. ", "b.png": "a pickle", "tokenizer.model": "a pickle"}
    files = {name: (tmp_path / name).read_bytes() for name in expected}
    faults = private(PublishSource(tmp_path, files, {}, []))
    for fault, (name, what) in zip(faults, expected.items(), strict=True):
        assert fault.startswith(f"- {name}") and what in fault
