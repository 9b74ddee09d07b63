# SPDX-License-Identifier: Apache-2.0
"""Merging: adapter plus base, whole, dequantized, in every form that PEFT saves; and what is refused."""

import json

import pytest
import tiny
import tiny_parts as parts
import torch
import training
from bitsandbytes.functional import dequantize_4bit
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import load_file, save_file
from stored import FILES, assert_merged, weights
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter


pytestmark = pytest.mark.slow


LINEARS = r".*\.language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
NORM = "model.multi_modal_projector.norm."
NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    vision = parts.vision(root / "vision", "siglip")
    made = {}
    for name, kwargs in {"tied": dict(tied=True), "untied": dict(tied=False), "wide": dict(head_dim=24)}.items():
        language = parts.language(root / f"{name}-language", hidden_size=64, intermediate_size=128, **kwargs)
        build_checkpoint(vision, language, root / name)
        made[name] = root / name
    build_checkpoint(vision, root / "tied-language", root / "bfloat16", dtype="bfloat16")
    return made | {"bfloat16": root / "bfloat16"}


def make_adapter(base, folder, quantization=None, **kwargs):
    """An adapter folder as PEFT saves it, with weights that matter, and the model with it, as trained."""
    settings = BitsAndBytesConfig(**quantization) if quantization else None
    dtype = settings.bnb_4bit_compute_dtype if settings else "auto"
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(base, dtype=dtype, quantization_config=settings)
    torch.manual_seed(5)
    lora = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "modules_to_save": ["multi_modal_projector"], **kwargs}
    )
    trained = get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    trained.save_pretrained(folder)
    record = {"quantization": settings and json.loads(settings.to_json_string())}
    (folder / "training.json").write_text(json.dumps(record))
    return trained


def logits(model, base):
    processor = AutoProcessor.from_pretrained(base)
    image = Image.radial_gradient("L").convert("RGB")
    text = ["one <image> here", "and <image> there, which is longer"]
    inputs = processor(images=[image, image.rotate(90)], text=text, padding=True, return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.no_grad():
        return model(**inputs).logits[inputs["attention_mask"].bool()].float()


def load(folder):
    model, report = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model


def norm_of(folder):
    """Gain and bias in an adapter's file or a checkpoint's."""
    return {name.rpartition(".")[2]: value for name, value in weights(folder).items() if NORM in name}


@pytest.mark.parametrize("kind, base", [("LoRA", "tied"), ("DoRA", "untied"), ("rsLoRA", "tied")])
def test_the_checkpoint_is_adapter_plus_base(bases, tmp_path, kind, base):
    kwargs = {"LoRA": {}, "DoRA": {"use_dora": True}, "rsLoRA": {"use_rslora": True}}[kind]
    trained = make_adapter(bases[base], tmp_path / "adapter", **kwargs)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged")
    expected = logits(trained, bases[base])
    # Largest differences seen: LoRA 3e-6, DoRA 1e-6, rsLoRA 3e-6, where logits reach 15; without the adapter, 8.
    torch.testing.assert_close(logits(merged, bases[base]), expected, rtol=0, atol=1e-5)
    assert (logits(load(bases[base]), bases[base]) - expected).abs().max() > 0.1
    assert (report.quantization, report.dtype) == (None, "float32") and report.difference < 1e-5

    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases[base])

    before, after = (weights(folder) for folder in (bases[base], tmp_path / "merged"))
    assert before.keys() == after.keys()  # tied embeddings are stored once, as they were
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("language_model.layers" in name or "multi_modal_projector" in name for name in changed)
    assert len([name for name in changed if "language_model" in name]) == 2 * 7
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == (base == "tied")
    stored, merged_norm = norm_of(tmp_path / "adapter"), norm_of(tmp_path / "merged")
    assert stored.keys() == merged_norm.keys() == {"weight", "bias"}
    for name, value in stored.items():
        assert merged_norm[name].dtype == torch.float32 and torch.equal(merged_norm[name], value)
    tower = "model-vision_tower-00001-of-00001.safetensors"
    assert (tmp_path / "merged" / tower).samefile(bases[base] / tower)


def test_a_trained_tower_is_the_adapter_s_and_one_in_another_dtype_is_no_link(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter", modules_to_save=["multi_modal_projector", "vision_tower"])
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["tied"])
    make_adapter(bases["tied"], tmp_path / "other")
    merge_adapter(tmp_path / "other", tmp_path / "half", dtype="float16")
    assert_merged(tmp_path / "half", tmp_path / "other", bases["tied"], dtype=torch.float16)


def test_the_folder_holds_what_a_checkpoint_holds_and_no_more(bases, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter)
    (adapter / "README.md").write_text("the adapter's card")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (adapter / name).write_text("a checkpoint-N of the Trainer has these besides")
    merge_adapter(adapter, tmp_path / "merged")
    names = {path.name for path in bases["tied"].iterdir()} | {"README.md", "training.json"}
    assert names > FILES
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names
    for name in ("config.json", "generation_config.json", "build.json", "modeling_normalign_llava.py"):
        assert (tmp_path / "merged" / name).read_bytes() == (bases["tied"] / name).read_bytes()
    for name in ("README.md", "training.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (adapter / name).read_bytes()

    (adapter / "dynamics.jsonl").write_text('{"step": 0, "visual": [0.5], "text": [0.25]}\n')
    merge_adapter(adapter, tmp_path / "with")
    assert (tmp_path / "with" / "dynamics.jsonl").read_bytes() == (adapter / "dynamics.jsonl").read_bytes()

    # The card that PEFT writes has the base's path, and is of no model.
    (adapter / "README.md").unlink()
    PeftModel.from_pretrained(load(bases["tied"]), adapter).create_or_update_model_card(str(adapter))
    assert str(bases["tied"]) in (adapter / "README.md").read_text()
    merge_adapter(adapter, tmp_path / "cardless")
    assert not (tmp_path / "cardless" / "README.md").exists()


def test_an_adapter_that_is_not_finite_is_not_merged(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    bias = next(tensor for name, tensor in tensors.items() if "linear_2.bias" in name)
    for value, dtype, kind in ((torch.nan, "auto", "float32"), (1e5, "float16", "float16")):
        save_file(tensors | {name: bias.fill_(value) for name in tensors if tensors[name] is bias}, file)
        with pytest.raises(ValueError, match=f"linear_2.bias would be NaN or infinite in torch.{kind}.*Nothing was"):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("base, adapter, double", [("bfloat16", {}, False), ("tied", {"use_dora": True}, True)])
def test_a_4_bit_base_is_dequantized_in_float32_and_merged(bases, tmp_path, base, adapter, double):
    quantization = {**NF4, "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "float32"}
    trained = make_adapter(bases[base], tmp_path / "adapter", quantization=quantization, **adapter)
    expected = logits(trained, bases["tied"])
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    merged = load(tmp_path / "merged")
    # Largest difference seen: 4e-6, from the adapter on the 4-bit base itself.
    torch.testing.assert_close(logits(merged, bases["tied"]), expected, rtol=0, atol=1e-5)
    assert report.quantization == "4-bit nf4" and report.difference < 1e-5
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases[base], settings, torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert torch.equal(norm_of(tmp_path / "merged")["weight"], norm_of(tmp_path / "adapter")["weight"])

    # Merged with the base as it was before quantization, it would be another model: seen 0.12 to 0.21.
    (tmp_path / "adapter" / "training.json").unlink()  # which TRL alone does not write
    with pytest.raises(ValueError, match="How the base of .* was quantized.*--base-quantization KIND"):
        merge_adapter(tmp_path / "adapter", tmp_path / "wrong")
    for name, kind in (("right", "nf4-double" if double else "nf4"), ("wrong", "none")):
        merge_adapter(tmp_path / "adapter", tmp_path / name, dtype="float32", base_quantization=kind)
    torch.testing.assert_close(logits(load(tmp_path / "right"), bases["tied"]), expected, rtol=0, atol=1e-5)
    assert (logits(load(tmp_path / "wrong"), bases["tied"]) - expected).abs().max() > 1e-2


def test_a_base_is_quantized_from_the_precision_that_training_loaded(checkpoint, tmp_path):
    """Here that of the file, float32, while steps and products are in bfloat16."""
    trainer = training.trainer(tmp_path / "adapter", checkpoint, use_peft=True, load_in_4bit=True, bf16=True)
    trainer.train()
    trainer.save_model()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "merged")
    for name, layer in trainer.model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            state = layer.base_layer.weight.quant_state
            state.dtype = torch.float32
            expected = dequantize_4bit(layer.base_layer.weight.data, state) + layer.get_delta_weight("default")
            torch.testing.assert_close(merged.get_submodule(name).weight, expected, rtol=0, atol=1e-6)


def test_an_8_bit_base_is_dequantized_and_merged(bases, tmp_path):
    trained = make_adapter(bases["tied"], tmp_path / "adapter", quantization={"load_in_8bit": True})
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    # On the dequantized base: seen 2e-6. Training also rounds what goes into the layers to 8 bits: seen 8e-3 of 15.
    assert report.quantization == "8-bit" and report.difference < 1e-5
    settings = BitsAndBytesConfig(load_in_8bit=True)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["tied"], settings)
    torch.testing.assert_close(
        logits(load(tmp_path / "merged"), bases["tied"]), logits(trained, bases["tied"]), rtol=0, atol=3e-2
    )


def test_written_in_the_base_s_dtype_or_another_but_the_norm(bases, tmp_path):
    make_adapter(bases["bfloat16"], tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "exact", dtype="float32")
    wide = weights(tmp_path / "exact")
    for dtype, written in (("auto", torch.bfloat16), ("float16", torch.float16)):
        report = merge_adapter(tmp_path / "adapter", tmp_path / dtype, dtype=dtype)
        assert_merged(tmp_path / dtype, tmp_path / "adapter", bases["bfloat16"], dtype=written)
        assert report.dtype == str(written).removeprefix("torch.")
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == report.dtype
        for name, tensor in weights(tmp_path / dtype).items():
            # Rounded once, from a product that was computed in float32.
            assert torch.equal(tensor, wide[name].to(torch.float32 if NORM in name else written)), name


def test_an_arm_that_training_changed_is_the_merged_checkpoint_s(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter", modules_to_save=None)
    changes = {"projector_gain_init": "one", "gradient_compensation": "none"}
    (tmp_path / "adapter" / "training.json").write_text(json.dumps({"config_changes": changes, "quantization": None}))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert {name: config[name] for name in changes} == changes
    assert torch.equal(norm_of(tmp_path / "merged")["weight"], torch.ones(64))
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["tied"], realigned="one")


def test_a_stock_llava_gets_the_norm_that_training_gave_it(tmp_path):
    for tied in (True, False):
        stock = parts.llava(tmp_path / f"llava-{tied}", tiny.llava(tied=tied))
        names = load_file(f"{stock}/model.safetensors").keys()
        assert any(name.startswith("language_model.model.") for name in names)  # the names of older versions
        for projector in (None, ["multi_modal_projector"]):
            adapter, output = tmp_path / f"adapter-{tied}-{projector}", tmp_path / f"merged-{tied}-{projector}"
            make_adapter(stock, adapter, modules_to_save=projector)
            merge_adapter(adapter, output, base=stock)
            assert_merged(output, adapter, stock)
            load(output)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_base_is_read_in_the_precision_of_training_and_from_any_division_of_files(bases, tmp_path, compute):
    quantization = {**NF4, "bnb_4bit_compute_dtype": compute}
    make_adapter(bases["untied"], tmp_path / "adapter", quantization=quantization)
    NormAlignLlavaForConditionalGeneration.from_pretrained(bases["untied"]).save_pretrained(
        tmp_path / "sharded", max_shard_size="50KB"
    )
    AutoProcessor.from_pretrained(bases["untied"]).save_pretrained(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "sharded"))
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["untied"], settings)


@pytest.mark.parametrize("kind", [NF4, {"load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_base_that_is_stored_quantized(bases, tmp_path, kind):
    settings, base = BitsAndBytesConfig(**kind), tmp_path / "base"
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases["tied"], quantization_config=settings)
    model.save_pretrained(base)
    AutoProcessor.from_pretrained(bases["tied"]).save_pretrained(base)
    make_adapter(base, tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert report.quantization == ("8-bit" if "load_in_8bit" in kind else f"4-bit {settings.bnb_4bit_quant_type}")
    assert_merged(tmp_path / "merged", tmp_path / "adapter", base, stored=True)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def damage(adapter, change):
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


Q_PROJ = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
REFUSED = {
    "a missing tensor": (lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"), "q_proj.lora_B.weight has shape none, on"),
    "another shape": (
        lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 7)}),
        r"q_proj.lora_A.weight has shape \[4, 7\], on the base \[4, 64\]",
    ),
    "no number": (lambda t: t[f"{Q_PROJ}.lora_A.weight"].fill_(float("nan")), "NaNs detected"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_does_not_fit_is_refused(bases, tmp_path, change, message):
    make_adapter(bases["tied"], tmp_path / "adapter")
    damage(tmp_path / "adapter", change)
    with pytest.raises(ValueError, match=message):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_a_base_that_does_not_fit_is_refused(bases, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter)
    with pytest.raises(ValueError, match="does not fit the base .* has shape .*; and .* more. Give the right --base"):
        merge_adapter(adapter, tmp_path / "merged", base=str(bases["wide"]))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": r".*\.c_attn"}))
    with pytest.raises(ValueError, match="No modules were targeted.*is not one of the base .*tied"):
        merge_adapter(adapter, tmp_path / "merged")
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not name its base"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_is_no_adapter_is_refused(bases, tmp_path):
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-5" / "adapter_config.json").touch()
    with pytest.raises(ValueError, match="no adapter_config.json, so it is no folder of.*It has checkpoint-5"):
        merge_adapter(tmp_path / "run", tmp_path / "merged")
    other = get_peft_model(tiny.model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    other.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match="IA3 adapter. Only LoRA"):
        merge_adapter(tmp_path / "ia3", tmp_path / "merged")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        merge_adapter(tmp_path / "ia3", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-5"]
