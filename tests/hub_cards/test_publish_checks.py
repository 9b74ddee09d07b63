"""Whether what would be sent may be sent, and whether the checkpoint is fit for it: every fault is made on disk."""

import json
import shutil

import pytest
import stored
import tiny_parts as parts
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.hub_cards.push.checkpoint_checks import check_checkpoint
from normalign_llava.hub_cards.push.leaks import check_private
from normalign_llava.hub_cards.push.source import PublishSource, choose_files


GAIN, BIAS = (f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias"))
WIDTH = 32  # of the tiny language model
TOKEN = "my-token-0123456789"
SECRET = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"


def build(root, name="built", **options):
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language"), root / name, **options)
    return root / name


def change(file, **values):
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def put(folder, **tensors):
    """Writes the weights again with these tensors; None takes one away."""
    tensors = stored.weights(folder) | tensors
    stored.store(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def gain_of(folder):
    return stored.weights(folder)[GAIN]


def trained(folder):
    (folder / "training.json").write_text("{}")


def faults(folder):
    with pytest.raises(ValueError, match="cannot be published") as error:
        check_checkpoint(folder)
    return str(error.value).splitlines()[1:]


def assert_only_fault(folder, *words):
    found = faults(folder)
    assert len(found) == 1 and all(word in found[0] for word in words), found


@pytest.mark.parametrize("arm", ["none", "unit", "gwc"])
def test_every_arm_is_fit_as_built(tmp_path, arm):
    check_checkpoint(build(tmp_path, arm=arm))


def test_auto_map_is_whole(folder):
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    auto_map.pop("AutoModel")
    change(folder / "config.json", auto_map=auto_map)
    assert_only_fault(folder, "auto_map", "NormAlignLlavaModel", "save it")
    change(folder / "config.json", model_type="llava")
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_checkpoint(folder)


def test_the_configuration_agrees_with_the_tensors_on_whether_they_are_tied(folder):
    config = json.loads((folder / "config.json").read_text())
    untied = {"text_config": {**config["text_config"], "tie_word_embeddings": False}}
    change(folder / "config.json", **untied)
    said = "tie_word_embeddings is True, and in text_config False, but the weights have no head of their own"
    assert_only_fault(folder, said)
    head = torch.ones_like(stored.weights(folder)["model.language_model.embed_tokens.weight"])
    put(folder, **{"lm_head.weight": head})
    assert_only_fault(folder, "weights have a head of their own", "save it")
    change(folder / "config.json", **untied, tie_word_embeddings=False)
    check_checkpoint(folder)


def test_code_files_are_this_packages(folder):
    code = folder / "modeling_normalign_llava.py"
    code.write_text(code.read_text() + "# changed\n")
    (folder / "configuration_normalign_llava.py").unlink()
    found = faults(folder)
    assert len(found) == 2
    assert "configuration_normalign_llava.py" in found[0] and "Copy /" in found[0]
    assert "modeling_normalign_llava.py is not this package's" in found[1]


def test_the_gain_is_aligned_or_trained(folder):
    gain = gain_of(folder)
    for value in (torch.ones_like(gain), torch.zeros_like(gain), gain * 1.01):
        put(folder, **{GAIN: value})
        said = ("not aligned", f"{float(gain[0]):.6g}", "all its elements are the same", "align_projector_norm")
        assert_only_fault(folder, *said)
    for value in (gain * 1.0005, gain + torch.arange(len(gain)) / 100):  # the second is trained
        put(folder, **{GAIN: value})
        check_checkpoint(folder)


def test_embeddings_may_be_trained_away_from_a_norm_that_is_not(folder):
    name = "model.language_model.embed_tokens.weight"
    put(folder, **{name: stored.weights(folder)[name] * 1.2})
    assert_only_fault(folder, "not aligned")
    trained(folder)
    check_checkpoint(folder)
    put(folder, **{GAIN: torch.ones(WIDTH)})
    assert_only_fault(folder, "not aligned", "all its elements are the same")


def test_gain_and_bias_are_finite_and_float32(folder):
    gain = gain_of(folder)
    put(folder, **{GAIN: torch.full_like(gain, float("nan")), BIAS: torch.zeros(WIDTH, dtype=torch.bfloat16)})
    trained(folder)
    found = faults(folder)
    assert len(found) == 2
    assert f"{GAIN} has 32 values that are NaN" in found[0] + found[1]
    assert f"{BIAS} is torch.bfloat16" in found[0] + found[1]


def test_the_processor_fits_the_model(folder):
    change(folder / "processor_config.json", num_additional_image_tokens=5)
    assert_only_fault(folder, "model and processor: ", "8 in the prompt", "4 in the model")


def test_batches_are_padded_on_the_left(folder):
    change(folder / "tokenizer_config.json", padding_side=None)
    assert_only_fault(folder, "tokenizer_config.json: ", "pads on the right", '"padding_side": "left"')


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
    assert_only_fault(adapter, "NaN or infinite", name)
    file.write_bytes(file.read_bytes()[:100])
    assert_only_fault(adapter, "adapter_model.safetensors cannot be read")


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
    found = private(choose_files(folder, {}))
    places = [fault[2:].split(":")[0] for fault in found]
    assert sorted(places) == [
        *("README.md, line 3", "README.md, line 4", "chat_template.jinja, line 1"),
        *(f"{file.name}, line 1", "tokenizer.json, line 1"),
    ]
    assert "your token, my-t... (19 characters)" in found[0]
    assert "a Hugging Face token, hf_A... (37 characters). Remove it, and revoke it" in found[1]


def test_the_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    change(folder / "config.json", _name_or_path="/home/me/models/base")
    found = private(choose_files(folder, {}))
    assert len(found) == 1 and "config.json, line" in found[0] and "a local path, /home/me. " in found[0]


def test_the_checkpoints_own_path_is_found_in_vocabularies_too(folder):
    for name in ("vocab.txt", "README.md"):
        (folder / name).write_text(f"it was at {folder.parent}/x\n")
    found = private(choose_files(folder, {}))
    assert len(found) == 2 and all(str(folder.parent) in fault for fault in found)
    moved = shutil.copytree(folder, folder.parent / "Modèle ß")
    for name in ("vocab.txt", "README.md"):
        (moved / name).unlink()
    (moved / "vocab.json").write_text(json.dumps({"at": f"{moved}/x"}))
    found = private(choose_files(moved, {}))
    assert len(found) == 1 and f"vocab.json, line 1: a local path, {json.dumps(str(moved))[1:-1]}. " in found[0]


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
    found = private(PublishSource(tmp_path, files | {names[2]: tmp_path / names[2]}, {}, {}, []))
    expected = (f"a local path, {tmp_path}. ", "a pickle", "not a safetensors file", *["a pickle"] * 3)
    assert len(found) == len(names)
    for fault, name, what in zip(found, names, expected, strict=True):
        assert fault.startswith(f"- {name}") and what in fault
