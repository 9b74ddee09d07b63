"""Whether what would be sent may be sent, and whether the checkpoint is fit for it: every fault is made on disk."""

import json
import shutil

import pytest
import stored
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.hub_cards.push.checkpoint_checks import check_checkpoint
from normalign_llava.hub_cards.push.leaks import check_private
from normalign_llava.hub_cards.push.source import PublishSource, choose_files


GAIN, BIAS = (f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias"))
WIDTH = 32  # of the tiny language model
TOKEN = "my-token-0123456789"
SECRET = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"


def change(file, **values):
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def put(folder, **tensors):
    stored.store(folder, stored.weights(folder) | tensors)


def assert_faults(folder, *expected):
    """`expected`: words of each fault, in their order."""
    with pytest.raises(ValueError, match="cannot be published") as error:
        check_checkpoint(folder)
    faults = str(error.value).splitlines()[1:]
    assert len(faults) == len(expected), faults
    assert all(words in fault for fault, words in zip(faults, expected, strict=True)), faults


def test_every_fault_is_listed(folder):
    code = folder / "modeling_normalign_llava.py"
    code.write_text(code.read_text() + "# changed\n")
    (folder / "configuration_normalign_llava.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    auto_map = {name: value for name, value in config["auto_map"].items() if name != "AutoModel"}
    untied = {**config["text_config"], "tie_word_embeddings": False}
    change(folder / "config.json", auto_map=auto_map, text_config=untied)
    change(folder / "tokenizer_config.json", padding_side=None)
    put(folder, **{GAIN: torch.full((WIDTH,), torch.nan), BIAS: torch.zeros(WIDTH, dtype=torch.bfloat16)})
    assert_faults(
        folder,
        "configuration_normalign_llava.py is missing",
        "modeling_normalign_llava.py is not this package's",
        "auto_map",
        "pads on the right",
        "tie_word_embeddings is True, and in text_config False, but the weights have no head of their own",
        *sorted([f"{GAIN} has 32 values that are NaN", f"{BIAS} is torch.bfloat16"]),
    )


def test_the_configuration_agrees_with_the_tensors_on_whether_they_are_tied(folder):
    config = json.loads((folder / "config.json").read_text())
    put(folder, **{"lm_head.weight": torch.ones(config["text_config"]["vocab_size"], WIDTH)})
    assert_faults(folder, "weights have a head of their own")
    untied = {**config["text_config"], "tie_word_embeddings": False}
    change(folder / "config.json", text_config=untied, tie_word_embeddings=False)
    check_checkpoint(folder)


def test_the_processor_fits_the_model(folder):
    change(folder / "processor_config.json", num_additional_image_tokens=5)
    assert_faults(folder, "The number of image tokens differs: 8 in the prompt")
    change(folder / "config.json", model_type="llava")
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_checkpoint(folder)


@pytest.fixture
def adapter(built, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(built)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    settings = LoraConfig(r=2, target_modules=targets, modules_to_save=["multi_modal_projector"])
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_norm_of_an_adapter_is_whole_and_finite(adapter):
    check_checkpoint(adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file(tensors | {name: torch.full((WIDTH,), float("nan"))}, file)
    assert_faults(adapter, f"{name} has 32 values that are NaN or infinite")
    file.write_bytes(file.read_bytes()[:100])
    assert_faults(adapter, "adapter_model.safetensors cannot be read")


def private(source):
    with pytest.raises(ValueError, match="must not be published") as error:
        check_private(source, TOKEN)
    assert TOKEN not in str(error.value) and SECRET not in str(error.value)
    return str(error.value).splitlines()[1:]


def test_tokens_are_found_anywhere(folder):
    (folder / "README.md").write_text(f"# Model\n\nlogin with {TOKEN}\nand {SECRET}\nnot hf_{'x' * 34}\n")
    (folder / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    file = folder / "model-vision_tower-00001-of-00001.safetensors"
    save_file(load_file(file), file, {"format": "pt", "by": TOKEN})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOKEN] = 999
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    faults = private(choose_files(folder, {}))
    places = [fault[2:].split(":")[0] for fault in faults]
    assert sorted(places) == [
        *("README.md, line 3", "README.md, line 4", "chat_template.jinja, line 1"),
        *(f"{file.name}, line 1", "tokenizer.json, line 1"),
    ]
    assert "your token, my-t... (19 characters)" in faults[0]
    assert "a Hugging Face token, hf_A... (37 characters). Remove it, and revoke it" in faults[1]


def test_paths_of_this_machine_are_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    change(folder / "config.json", _name_or_path="/home/me/models/base")
    (folder / "vocab.txt").write_text(f"it was at {folder.parent}/x\n")
    faults = private(choose_files(folder, {}))
    assert "config.json, line" in faults[0] and "a local path, /home/me. " in faults[0]
    assert len(faults) == 2 and str(folder.parent) in faults[1]
    moved = shutil.copytree(folder, folder.parent / "Modèle ß", ignore=shutil.ignore_patterns("vocab.txt", "config*"))
    (moved / "vocab.json").write_text(json.dumps({"at": f"{moved}/x"}))  # which escapes letters beyond ASCII
    faults = private(choose_files(moved, {}))
    assert len(faults) == 1 and f"vocab.json, line 1: a local path, {json.dumps(str(moved))[1:-1]}. " in faults[0]


def test_disguised_files_and_figures_are_looked_into(tmp_path):
    text = PngInfo()
    text.add_text("Comment", f"drawn in {tmp_path}/plots")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=text)
    torch.save({"a": 1}, tmp_path / "tokenizer.model")
    (tmp_path / "b.png").write_bytes(b"\x80\x04pickle")
    for name in ("model.safetensors", "optimizer.pt", "training.json"):
        torch.save({"a": 1}, tmp_path / name)
    names = ("a.png", "b.png", "model.safetensors", "optimizer.pt", "tokenizer.model", "training.json")
    files = {name: (tmp_path / name).read_bytes() for name in names}
    faults = private(PublishSource(tmp_path, files | {names[2]: tmp_path / names[2]}, {}, {}, []))
    expected = (f"a local path, {tmp_path}. ", "a pickle", "not a safetensors file", *["a pickle"] * 3)
    assert len(faults) == len(names)
    for fault, name, what in zip(faults, names, expected, strict=True):
        assert fault.startswith(f"- {name}") and what in fault
