"""Whether what would be sent may be sent, and whether the checkpoint is fit for it: every fault is made on disk."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_parts as parts
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.hub_cards.push.checkpoint_checks import check_checkpoint, check_contents
from normalign_llava.hub_cards.push.contents import Content, Contents, contents


GAIN, BIAS = (f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias"))
WIDTH = 32  # of the tiny language model
TOKEN = "my-token-0123456789"
SECRET = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"


def build(root, name="built", **options):
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language"), root / name, **options)
    return root / name


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("checks"))


@pytest.fixture
def checkpoint(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "checkpoint"))


def change(file, **values):
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def put(folder, **tensors):
    """Writes the weights again with these tensors; None takes one away."""
    file = folder / "model.safetensors"
    stored = load_file(file) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file, {"format": "pt"})


def gain_of(folder):
    return load_file(folder / "model.safetensors")[GAIN]


def trained(folder, rate=1e-3, **record):
    (folder / "training.json").write_text(json.dumps({"learning_rates": {"norm": rate}, **record}))


def faults(checkpoint):
    with pytest.raises(ValueError, match="cannot be published") as error:
        check_checkpoint(checkpoint)
    return str(error.value).splitlines()[1:]


def assert_only_fault(checkpoint, *words):
    found = faults(checkpoint)
    assert len(found) == 1 and all(word in found[0] for word in words), found


@pytest.mark.parametrize("arm", ["none", "unit", "aligned", "gwc"])
def test_every_arm_is_fit_as_built(tmp_path, arm):
    check_checkpoint(build(tmp_path, arm=arm))


@pytest.mark.parametrize("encoder", ["siglip", "registers", "vit"])
def test_every_kind_of_encoder_and_norm_is_fit(tmp_path, encoder):
    build_checkpoint(
        parts.vision(tmp_path / "vision", encoder),
        parts.language(tmp_path / "language", tied=False),
        tmp_path / "built",
        norm="rms_norm",
        dtype="bfloat16",
    )
    check_checkpoint(tmp_path / "built")


def test_sharded_weights_are_fit_until_a_shard_is_gone(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="40KB")
    check_checkpoint(checkpoint)
    first = sorted(checkpoint.glob("model-*.safetensors"))[0]
    first.unlink()
    assert_only_fault(checkpoint, first.name)


def test_auto_map_and_architecture_are_whole(checkpoint):
    auto_map = json.loads((checkpoint / "config.json").read_text())["auto_map"]
    auto_map.pop("AutoModel")
    change(checkpoint / "config.json", auto_map=auto_map)
    assert_only_fault(checkpoint, "auto_map", "NormAlignLlavaModel", "save it")
    change(checkpoint / "config.json", auto_map=None, architectures=["LlavaForConditionalGeneration"])
    assert len(faults(checkpoint)) == 2
    change(checkpoint / "config.json", model_type="llava")
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_checkpoint(checkpoint)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ValueError, match="neither config.json nor weights.$"):
        check_checkpoint(tmp_path)
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(ValueError, match="It has checkpoint-20: name one of them"):
        check_checkpoint(tmp_path)


def test_a_configuration_that_makes_no_model(checkpoint):
    change(checkpoint / "config.json", projector_norm="batch_norm")
    assert_only_fault(checkpoint, "projector_norm", "batch_norm")
    (checkpoint / "config.json").write_text('{"model_type": ')
    assert_only_fault(checkpoint, "config.json", "JSON")


def test_code_files_are_this_packages(checkpoint):
    code = checkpoint / "modeling_normalign_llava.py"
    code.write_text(code.read_text() + "# changed\n")
    (checkpoint / "configuration_normalign_llava.py").unlink()
    found = faults(checkpoint)
    assert len(found) == 2
    assert "configuration_normalign_llava.py" in found[0] and "Copy /" in found[0]
    assert "modeling_normalign_llava.py is not this package's" in found[1]


def test_the_gain_is_aligned_or_trained(checkpoint):
    gain = gain_of(checkpoint)
    for value in (torch.ones_like(gain), torch.zeros_like(gain), gain * 1.01):
        put(checkpoint, **{GAIN: value})
        said = ("not aligned", f"{float(gain[0]):.6g}", "all its elements are the same", "align_projector_norm")
        assert_only_fault(checkpoint, *said)
    put(checkpoint, **{GAIN: gain * 1.0005})
    check_checkpoint(checkpoint)


def test_a_trained_gain_is_told_from_one_that_was_never_set(checkpoint):
    gain = gain_of(checkpoint)
    moved = gain + torch.arange(len(gain)) / 100
    put(checkpoint, **{GAIN: moved})
    check_checkpoint(checkpoint)  # by a trainer that leaves no record
    trained(checkpoint)
    check_checkpoint(checkpoint)
    trained(checkpoint, rate=0.0, before={"learning_rates": {"norm": 1e-3}, "before": None})
    check_checkpoint(checkpoint)
    (checkpoint / "training.json").write_text("{}")  # of a trainer that was given no record
    check_checkpoint(checkpoint)
    trained(checkpoint, rate=0.0, before=None)
    assert_only_fault(checkpoint, "not aligned", "its learning rate in training.json was 0")
    trained(checkpoint)
    put(checkpoint, **{GAIN: torch.ones_like(gain)})
    assert_only_fault(checkpoint, "not aligned", "all its elements are the same")


def test_embeddings_may_be_trained_away_from_a_norm_that_is_not(checkpoint):
    name = "model.language_model.embed_tokens.weight"
    put(checkpoint, **{name: load_file(checkpoint / "model.safetensors")[name] * 1.2})
    assert_only_fault(checkpoint, "not aligned")
    trained(checkpoint, rate=0.0)
    check_checkpoint(checkpoint)
    put(checkpoint, **{GAIN: torch.ones(WIDTH)})
    assert_only_fault(checkpoint, "not aligned", "its learning rate in training.json was 0")


def test_gain_one_belongs_to_its_arm(tmp_path):
    folder = build(tmp_path, arm="unit")
    put(folder, **{GAIN: torch.full((WIDTH,), 0.5)})
    assert_only_fault(folder, "is not aligned: 1.")


def test_gain_and_bias_are_finite_and_float32(checkpoint):
    gain = gain_of(checkpoint)
    put(checkpoint, **{GAIN: torch.full_like(gain, float("nan")), BIAS: torch.zeros(WIDTH, dtype=torch.bfloat16)})
    trained(checkpoint)
    found = faults(checkpoint)
    assert len(found) == 2
    assert f"{GAIN} has 32 values that are NaN" in found[0] + found[1]
    assert f"{BIAS} is torch.bfloat16" in found[0] + found[1]


def test_embeddings_that_are_not_finite(checkpoint):
    name = "model.language_model.embed_tokens.weight"
    embeddings = load_file(checkpoint / "model.safetensors")[name]
    embeddings[3] = float("inf")
    put(checkpoint, **{name: embeddings})
    assert_only_fault(checkpoint, "embeddings cannot be measured", "NaN or infinite")


def test_every_tensor_is_there_in_its_shape(checkpoint):
    lost = "model.multi_modal_projector.linear_1.weight"
    put(checkpoint, **{lost: None, BIAS: torch.zeros(8), "model.surplus": torch.zeros(1)})
    found = faults(checkpoint)
    assert len(found) == 3
    assert f"{lost} missing" in found[0] and "model.surplus would be dropped" in found[1]
    assert f"{BIAS} [8] instead of [32]" in found[2]
    size = (checkpoint / "model.safetensors").stat().st_size
    with (checkpoint / "model.safetensors").open("rb+") as file:
        file.truncate(size // 2)
    assert_only_fault(checkpoint, "weights: ")
    (checkpoint / "model.safetensors").unlink()
    assert_only_fault(checkpoint, "weights: ", "model.safetensors")


def test_the_processor_fits_the_model(checkpoint):
    change(checkpoint / "processor_config.json", num_additional_image_tokens=5)
    assert_only_fault(checkpoint, "processor_config.json", "8 in the prompt", "4 in the model")


def test_batches_are_padded_on_the_left(checkpoint):
    change(checkpoint / "tokenizer_config.json", padding_side=None)
    assert_only_fault(checkpoint, "tokenizer_config.json: ", "pads on the right", '"padding_side": "left"')


def test_the_image_token_is_the_models(checkpoint):
    change(checkpoint / "config.json", image_token_index=7)
    assert any("image token: config.json says 7" in fault for fault in faults(checkpoint))


def test_a_chat_template_takes_an_image(checkpoint):
    (checkpoint / "chat_template.jinja").write_text(parts.CHATML)
    assert_only_fault(checkpoint, "chat template")
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0]['role'] }}")
    assert_only_fault(checkpoint, "chat template: it writes 0 image tokens")
    (checkpoint / "chat_template.jinja").unlink()
    assert_only_fault(checkpoint, "chat template: missing")
    (checkpoint / "tokenizer.json").unlink()
    assert any("the processor does not load" in fault for fault in faults(checkpoint))


@pytest.fixture
def adapter(built, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(built)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    settings = LoraConfig(r=2, target_modules=targets, modules_to_save=["multi_modal_projector"])
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_adapters_are_whole_and_finite(adapter):
    check_checkpoint(adapter)
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if name.endswith("norm.weight"))
    save_file(stored | {name: torch.full((WIDTH,), float("nan"))}, file)
    assert_only_fault(adapter, "NaN or infinite", name)
    file.write_bytes(file.read_bytes()[:100])
    (adapter / "adapter_config.json").write_text("{}")
    assert len(faults(adapter)) == 1
    (adapter / "adapter_config.json").unlink()
    found = faults(adapter)
    assert len(found) == 2 and "adapter_config.json" in found[0] and "adapter_model.safetensors" in found[1]


def private(folder, *sent):
    with pytest.raises(ValueError, match="must not be published") as error:
        check_contents(Contents(list(sent)) if sent else contents(folder), TOKEN)
    assert TOKEN not in str(error.value) and SECRET not in str(error.value)
    return str(error.value).splitlines()[1:]


def test_what_was_built_may_be_sent(checkpoint):
    check_contents(contents(checkpoint), TOKEN)


def test_tokens_are_found_anywhere(checkpoint):
    (checkpoint / "README.md").write_text(f"# Model\n\nlogin with {TOKEN}\nand {SECRET}\nnot hf_{'x' * 34}\n")
    (checkpoint / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt", "by": TOKEN})
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOKEN] = 999
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = private(checkpoint)
    places = [fault[2:].split(":")[0] for fault in found]
    assert sorted(places) == [
        *("README.md, line 3", "README.md, line 4", "chat_template.jinja, line 1"),
        *("model.safetensors, line 1", "tokenizer.json, line 1"),
    ]
    assert "your token, my-t... (19 characters)" in found[0]
    assert "a Hugging Face token, hf_A... (37 characters). Remove it, and revoke it" in found[1]


def test_the_home_folder_is_found(checkpoint, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    change(checkpoint / "config.json", _name_or_path="/home/me/models/base")
    found = private(checkpoint)
    assert len(found) == 1 and "config.json, line" in found[0] and "a local path, /home/me. " in found[0]


def test_the_checkpoints_own_path_is_found_in_vocabularies_too(checkpoint):
    for name in ("vocab.txt", "README.md"):
        (checkpoint / name).write_text(f"it was at {checkpoint.parent}/x\n")
    found = private(checkpoint)
    assert len(found) == 2 and all(str(checkpoint.parent) in fault for fault in found)
    moved = shutil.copytree(checkpoint, checkpoint.parent / "Modèle ß")
    for name in ("vocab.txt", "README.md"):
        (moved / name).unlink()
    (moved / "vocab.json").write_text(json.dumps({"at": f"{moved}/x"}))
    found = private(moved)
    assert len(found) == 1 and f"vocab.json, line 1: a local path, {json.dumps(str(moved))[1:-1]}. " in found[0]


def test_paths_of_other_machines_are_nobodys_secret(checkpoint, monkeypatch):
    monkeypatch.setenv("HOME", "/root")  # of every container: no name of a person
    (checkpoint / "README.md").write_text("-v ~/.cache:/root/.cache -v /data/images:/images, hf_... sk-learn")
    (checkpoint / "vocab.txt").write_text("/home/user\n/tmp/foo\n/root/\nC:\\Users\\x\n")
    check_contents(contents(checkpoint), TOKEN)


def test_disguised_files_and_figures_are_looked_into(tmp_path):
    text = PngInfo()
    text.add_text("Comment", f"drawn in {tmp_path}/plots")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=text)
    torch.save({"a": 1}, tmp_path / "tokenizer.model")
    (tmp_path / "b.png").write_bytes(b"\x80\x04pickle")
    for name in ("model.safetensors", "optimizer.pt", "training.json"):
        torch.save({"a": 1}, tmp_path / name)
    names = ("a.png", "b.png", "model.safetensors", "optimizer.pt", "tokenizer.model", "training.json")
    found = private(tmp_path, *(Content(name, tmp_path / name, 1, "record") for name in names))
    expected = (f"a local path, {tmp_path}. ", "a pickle", "not a safetensors file", *["a pickle"] * 3)
    assert len(found) == len(names)
    for fault, name, what in zip(found, names, expected, strict=True):
        assert fault.startswith(f"- {name}") and what in fault
