"""Checkpoints: from LLaVA, saved and loaded again, in every precision, with no silent losses."""

import json

import pytest
import tiny
import tiny_parts as parts
import torch
import training
import transformers
from safetensors.torch import load_file, save_file
from stored import weights
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignLlavaModel
from normalign_llava.assembly.build import build_checkpoint, retrofit_checkpoint
from normalign_llava.assembly.merge import merge_adapter


NORM = "model.multi_modal_projector.norm"


def dtypes_on_disk(folder):
    return {name: tensor.dtype for name, tensor in weights(folder).items()}


def assert_aligned(model):
    n_text = tiny.reference_n_text(model.get_input_embeddings().weight)
    gain = norm_of(model).weight
    expected = torch.full_like(gain, n_text / tiny.WIDTH**0.5)
    torch.testing.assert_close(gain, expected, rtol=1e-5, atol=0.0)
    assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-9)


@pytest.mark.parametrize("vision, original_names", [("clip", False), ("siglip", True)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llava_checkpoint_loads_with_every_tensor_equal(tmp_path, vision, tied, original_names):
    stock = tiny.llava(vision=vision, tied=tied)
    stock.save_pretrained(tmp_path, save_original_format=original_names)
    ours = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)
    state = ours.state_dict()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(state.pop(name), tensor), name
    assert set(state) == {f"{NORM}.weight", f"{NORM}.bias"}
    assert_aligned(ours)
    assert ours.config.model_type == "normalign_llava"
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == tied
    bare = NormAlignLlavaModel.from_pretrained(tmp_path)
    assert all(torch.equal(bare.state_dict()[n], t) for n, t in stock.model.state_dict().items())
    assert_aligned(bare)


@pytest.mark.parametrize("load", [AutoModelForImageTextToText, AutoModel])
def test_missing_tensors_are_an_error_that_lists_them(tmp_path, load):
    model = tiny.model(tied=False)
    sharded = load is not AutoModel
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "5GB")
    lost = ["model.language_model.norm.weight", "model.multi_modal_projector.linear_1.bias"]
    lost += ["lm_head.weight"] if load is not AutoModel else []  # an untied head
    for path in tmp_path.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(path).items() if name not in lost}
        save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        load.from_pretrained(tmp_path)
    assert f"lacks {len(lost)} tensors" in str(error.value)
    assert all(name.removeprefix("model.") in str(error.value) for name in lost)


def test_a_model_of_no_folder_begins_with_weights_of_its_own():
    """As transformers makes it of a configuration and tensors in memory."""
    given = {"model.language_model.norm.weight": torch.full((tiny.WIDTH,), 3.0)}
    how = dict(config=tiny.config(), state_dict=given)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(None, **how)
    assert torch.equal(model.model.language_model.norm.weight, *given.values())
    assert_aligned(model)


def test_lost_layers_of_the_language_model_start_as_in_the_language_model_by_itself():
    """GPT-2's last layers of a block start smaller than others."""
    text = tiny.text_config(cls=transformers.GPT2Config, n_layer=2)
    how = dict(config=tiny.config(text=text), state_dict={})
    ours = NormAlignLlavaForConditionalGeneration.from_pretrained(None, **how)
    alone = AutoModel.from_config(text).state_dict()
    for name, tensor in ours.model.language_model.state_dict().items():
        if name.endswith("c_proj.weight"):
            assert tensor.std().item() == pytest.approx(alone[name].std().item(), rel=0.3), name


def test_names_of_tensors_may_be_given(tmp_path):
    model = tiny.model()
    tensors = {name.replace("linear_1", "first"): t for name, t in model.state_dict().items()}
    del tensors["lm_head.weight"]
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    how = dict(key_mapping={"first": "linear_1"})
    loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, **how)
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())


def test_a_llava_is_loaded_without_its_weights(tmp_path):
    tiny.llava().save_pretrained(tmp_path)
    how = dict(device_map="meta")
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, **how)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_llava_is_saved_under_its_own_names_or_under_the_older_ones(tmp_path):
    tiny.llava().save_pretrained(tmp_path / "older", save_original_format=True)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "older")
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "again", save_original_format=True)
    older, new, again = (weights(tmp_path / name) for name in ("older", "new", "again"))
    norm = {name.removeprefix("model.") for name in new if NORM in name}
    assert again.keys() == older.keys() | norm
    assert new.keys() == model.state_dict().keys() - {"lm_head.weight"}


def test_a_norm_that_is_not_the_folders_drops_its_name(tmp_path, caplog):
    tiny.model().save_pretrained(tmp_path / "with")
    tiny.model(projector_norm="none").save_pretrained(tmp_path / "without")
    for folder, loaded_as, kept in (
        ("with", "layer_norm", True),
        ("without", "none", True),
        ("with", "none", False),
        ("without", "layer_norm", False),
    ):
        config = tiny.config(projector_norm=loaded_as)
        path = tmp_path / folder
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(path, config=config)
        assert ("norm was not loaded" in caplog.text) != kept
        caplog.clear()
        names = {str(model.name_or_path), str(model.config.name_or_path)}
        assert names == {str(path) if kept else ""}, (folder, loaded_as)
        model, _ = NormAlignLlavaForConditionalGeneration.from_pretrained(
            path, config=config, output_loading_info=True
        )
        assert str(model.name_or_path) == (str(path) if kept else "")
        assert "norm was not loaded" not in caplog.text  # whoever asks is told by the report


def test_a_gain_that_is_built_in_bfloat16_is_not_rounded(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
    build_checkpoint(vision, language, tmp_path / "built", dtype="bfloat16")
    for name, dtype in dtypes_on_disk(tmp_path / "built").items():
        assert dtype == (torch.float32 if "projector.norm." in name else torch.bfloat16)
    built = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "built")
    gain = norm_of(built).weight
    expected = torch.full_like(gain, built.config.text_embedding_norm / tiny.WIDTH**0.5)
    torch.testing.assert_close(gain, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("vision", ["clip", "siglip"])
def test_lost_layers_of_the_tower_start_as_in_the_tower_by_itself(tmp_path, vision):
    model = tiny.model(vision=vision)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    kept = {name: tensor for name, tensor in load_file(file).items() if ".q_proj." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    how = dict(output_loading_info=True)
    ours, _ = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, **how)
    alone = AutoModel.from_config(model.config.vision_config).state_dict()
    for name, tensor in ours.model.vision_tower.state_dict().items():
        if name.endswith("q_proj.weight"):
            assert tensor.std().item() == pytest.approx(alone[name].std().item(), rel=0.3), name


@pytest.mark.parametrize("tied, shard", [(True, "5GB"), (False, "20KB")])
def test_saving_is_stable(tmp_path, tied, shard):
    model = tiny.model(tied=tied)
    with torch.no_grad():
        model.model.multi_modal_projector.norm.weight.normal_()
    first = tmp_path / "first"
    second = tmp_path / "second"
    model.save_pretrained(first, max_shard_size=shard)
    loaded = AutoModelForImageTextToText.from_pretrained(first)
    loaded.save_pretrained(second, max_shard_size=shard)
    assert type(loaded) is NormAlignLlavaForConditionalGeneration
    expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    stored = dtypes_on_disk(first)
    assert set(stored) == expected and stored == dtypes_on_disk(second)
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert configs[0] == configs[1]
    assert configs[0]["auto_map"] == model.config.auto_map_entries
    assert (len(list(first.glob("*.safetensors"))) > 1) == (shard == "20KB")


def norm_of(model):
    return model.base_model.multi_modal_projector.norm


def test_gain_and_bias_stay_float32(tmp_path):
    model = tiny.model()
    dtype = torch.bfloat16
    with torch.no_grad():
        norm_of(model).weight.mul_(1.0001)
    model.save_pretrained(tmp_path)
    for number, loaded in enumerate(
        (
            AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype, device_map="cpu"),
            NormAlignLlavaModel.from_pretrained(tmp_path, dtype=dtype),
        )
    ):
        assert loaded.get_input_embeddings().weight.dtype == dtype
        assert norm_of(loaded).weight.dtype == norm_of(loaded).bias.dtype == torch.float32
        assert torch.equal(norm_of(loaded).weight, norm_of(model).weight)
        loaded.to(dtype).save_pretrained(tmp_path / f"cast-{number}", max_shard_size="20KB")
        stored = dtypes_on_disk(tmp_path / f"cast-{number}")
        for name, kind in stored.items():
            assert kind == (torch.float32 if "projector.norm." in name else dtype)
    model.to(dtype).save_pretrained(tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    said = [config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]]
    assert said == ["bfloat16"] * 3
    half = torch.float16
    tiny.llava().to(half).save_pretrained(tmp_path / "llava")  # without a norm
    loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "llava", dtype=half)
    assert loaded.lm_head.weight.dtype == half and norm_of(loaded).weight.dtype == torch.float32
    assert_aligned(loaded)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_loading_leaves_projector_norm_tower_and_head_alone(tmp_path, bits):
    model = tiny.model(tied=False)
    model.save_pretrained(tmp_path / "ours")
    tiny.llava(tied=False).save_pretrained(tmp_path / "llava")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    for folder, settings in (("ours", quantization), ("llava", quantization.to_dict())):
        loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(
            tmp_path / folder, quantization_config=settings, dtype=torch.bfloat16
        )
        assert quantization.llm_int8_skip_modules is None  # the caller's stay as they are
        kind = "Linear4bit" if bits == 4 else "Linear8bitLt"
        modules = dict(loaded.named_modules())
        quantized = [name for name in modules if type(modules[name]).__name__ == kind]
        assert len(quantized) == 7 * 2
        assert all(name.startswith("model.language_model.layers.") for name in quantized)
        assert norm_of(loaded).weight.dtype == norm_of(loaded).bias.dtype == torch.float32
        for module in (loaded.lm_head, loaded.model.multi_modal_projector.linear_1):
            assert module.weight.dtype == loaded.dtype
        if folder == "llava":
            assert_aligned(loaded)
        else:
            assert torch.equal(norm_of(loaded).weight.cpu(), norm_of(model).weight)


def test_modules_that_are_not_to_be_quantized_may_be_named(tmp_path):
    tiny.model(tied=False).save_pretrained(tmp_path)
    skipped = ["lm_head", "q_proj", "model.multi_modal_projector"]
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path, quantization_config=settings
    )
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear):
            in_4_bits = type(module).__name__ == "Linear4bit"
            assert in_4_bits != any(part in name for part in skipped), name


def test_a_quantized_checkpoint_keeps_the_norm_in_float32(tmp_path):
    tiny.model(tied=False).save_pretrained(tmp_path / "ours")
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", quantization_config=nf4)
    loaded.save_pretrained(tmp_path / "quantized")
    assert dtypes_on_disk(tmp_path / "quantized")[f"{NORM}.weight"] == torch.float32
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "quantized")
    assert torch.equal(norm_of(again).weight, norm_of(loaded).weight)
    layers = [module for module in again.modules() if type(module).__name__ == "Linear4bit"]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    batch = {name: tensor.to(loaded.device) for name, tensor in tiny.inputs().items()}
    torch.testing.assert_close(again(**batch).logits, loaded(**batch).logits)


def assert_reloads(folder, model, tied, caplog):
    """The configuration says twice whether head and embeddings are one; logits are `model`'s."""
    stored = weights(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is tied
    tables = [name for name in stored if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert len(tables) == (1 if tied else 2)
    caplog.clear()
    again, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert "NOT tie" not in caplog.text
    inputs = {"input_ids": torch.arange(5, 25)[None]}
    with torch.no_grad():
        expected, logits = (loaded.eval()(**inputs).logits for loaded in (model, again))
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied, top", [(True, True), (False, True), (False, False)])
def test_whatever_a_source_says_of_tied_embeddings_results_are_right(tmp_path, caplog, tied, top):
    def say(folder, **nested):
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {"tie_word_embeddings": top}
        for name in nested:
            content[name]["tie_word_embeddings"] = not tied
        file.write_text(json.dumps(content))

    source = training.checkpoint(tmp_path / "source", tied=tied)
    parts.llava(tmp_path / "llava", tiny.llava(tied=tied))
    for folder in (source, tmp_path / "llava"):
        say(folder, text_config=None)
    retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "retrofitted")
    assert_reloads(tmp_path / "retrofitted", tiny.llava(tied=tied), tied, caplog)
    if top or not tied:  # a language model without a head cannot be loaded
        say(tmp_path / "source" / "language")
        vision, language = (str(tmp_path / "source" / name) for name in ("vision", "language"))
        build_checkpoint(vision, language, tmp_path / "built")
        model = AutoModelForCausalLM.from_pretrained(language)
        assert_reloads(tmp_path / "built", model, tied, caplog)
    for name, options in (("trained", {}), ("adapter", {"use_peft": True, "lora_dropout": 0.0})):
        trainer = training.trainer(tmp_path / name, source, max_steps=1, **options)
        trainer.train()
        trainer.save_model()
        if options:
            merge_adapter(tmp_path / name, tmp_path / "merged")
        assert_reloads(tmp_path / ("merged" if options else name), trainer.model, tied, caplog)


def test_tied_embeddings_are_stored_once_where_each_was_gathered_by_itself(tmp_path, caplog):
    model = tiny.model()
    gathered = {name: value.clone() for name, value in model.state_dict().items()}  # as FSDP2 does
    names = [*gathered]
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert [*gathered] == names
    assert_reloads(tmp_path, model, True, caplog)
