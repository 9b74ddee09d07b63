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
from normalign_llava.checkpoint.opening import open_checkpoint


NORM = "model.multi_modal_projector.norm"


def norm_of(model):
    return model.base_model.multi_modal_projector.norm


def stored_dtypes(folder) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in weights(folder).items()}


def read_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_holds(model, expected_tensors):
    """The model has these tensors, bit for bit."""
    tensors = model.state_dict()
    for tensor_name, expected in expected_tensors.items():
        assert torch.equal(tensors[tensor_name], expected), tensor_name


def assert_gain(model, text_norm):
    gain = norm_of(model).weight
    expected = torch.full_like(gain, text_norm / tiny.WIDTH**0.5)
    torch.testing.assert_close(gain, expected, rtol=1e-5, atol=0.0)


def assert_aligned(model):
    text_norm = tiny.reference_n_text(model.get_input_embeddings().weight)
    assert_gain(model, text_norm)
    assert model.config.text_embedding_norm == pytest.approx(text_norm, rel=1e-9)


def assert_norm_in_float32(folder, dtype):
    """The norm is stored in float32, and everything else in `dtype`."""
    for tensor_name, stored_dtype in stored_dtypes(folder).items():
        if "projector.norm." in tensor_name:
            assert stored_dtype == torch.float32
        else:
            assert stored_dtype == dtype


def remove_tensors(folder, is_lost):
    """Leaves tensors out of the files of a checkpoint."""
    for checkpoint_file in folder.glob("*.safetensors"):
        kept_tensors = {}
        for tensor_name, tensor in load_file(checkpoint_file).items():
            if not is_lost(tensor_name):
                kept_tensors[tensor_name] = tensor
        save_file(kept_tensors, checkpoint_file, metadata={"format": "pt"})


def assert_same_spread(module, reference, name_end):
    """Weights whose names end so were drawn as in `reference`."""
    reference_tensors = reference.state_dict()
    for tensor_name, tensor in module.state_dict().items():
        if tensor_name.endswith(name_end):
            expected = reference_tensors[tensor_name].std().item()
            assert tensor.std().item() == pytest.approx(expected, rel=0.3), tensor_name


@pytest.mark.parametrize(
    ("vision", "original_names"),
    [
        ("clip", False),
        ("siglip", True),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_llava_checkpoint_loads_with_every_tensor_equal(tmp_path, vision, tied, original_names):
    llava = tiny.llava(vision=vision, tied=tied)
    llava.save_pretrained(tmp_path, save_original_format=original_names)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)

    assert_holds(model, llava.state_dict())
    added_names = model.state_dict().keys() - llava.state_dict().keys()
    assert added_names == {f"{NORM}.weight", f"{NORM}.bias"}
    assert_aligned(model)
    assert model.config.model_type == "normalign_llava"
    head_is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert head_is_tied == tied

    model_without_head = NormAlignLlavaModel.from_pretrained(tmp_path)
    assert_holds(model_without_head, llava.model.state_dict())
    assert_aligned(model_without_head)


@pytest.mark.parametrize(
    ("auto_class", "max_shard_size", "has_head"),
    [
        (AutoModelForImageTextToText, "20KB", True),
        (AutoModel, "5GB", False),
    ],
)
def test_missing_tensors_are_an_error_that_lists_them(
    tmp_path, auto_class, max_shard_size, has_head
):
    tiny.model(tied=False).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    lost_names = [
        "model.language_model.norm.weight",
        "model.multi_modal_projector.linear_1.bias",
    ]
    if has_head:
        lost_names.append("lm_head.weight")
    remove_tensors(tmp_path, lambda tensor_name: tensor_name in lost_names)

    with pytest.raises(ValueError) as error:
        auto_class.from_pretrained(tmp_path)
    message = str(error.value)
    assert f"lacks {len(lost_names)} tensors" in message
    for lost_name in lost_names:
        assert lost_name.removeprefix("model.") in message


def save_with_other_names(folder, saved_version):
    """Saves a model with a DINOv2 as another version of transformers would name its tensors."""
    vision = parts.vision(folder / "vision", "dinov2")
    language = parts.language(folder / "language", tied=False)
    build_checkpoint(vision, language, folder / "model")
    for checkpoint_file in (folder / "model").glob("*.safetensors"):
        renamed_tensors = {}
        for tensor_name, tensor in load_file(checkpoint_file).items():
            other_name = tensor_name.replace(".attention.q_proj.", ".attention.to_q.")
            renamed_tensors[other_name] = tensor
        save_file(renamed_tensors, checkpoint_file, metadata={"format": "pt"})
    for index_file in (folder / "model").glob("*.index.json"):
        index = index_file.read_text()
        index_file.write_text(index.replace(".attention.q_proj.", ".attention.to_q."))
    config = read_config(folder / "model")
    config["transformers_version"] = saved_version
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def open_with_auto_class(folder):
    return AutoModelForImageTextToText.from_pretrained(folder)


def open_as_commands_do(folder):
    return open_checkpoint(str(folder)).load()


@pytest.mark.parametrize("open_model", [open_with_auto_class, open_as_commands_do])
def test_tensors_named_by_another_version_are_an_error_with_both_versions(tmp_path, open_model):
    folder = save_with_other_names(tmp_path, "5.99.0")
    with pytest.raises(ValueError) as error:
        open_model(folder)
    message = str(error.value)
    assert "lacks 6 tensors" in message  # weight and bias in three layers
    assert "vision_tower.encoder.layer.0.attention.q_proj.bias" in message
    assert (
        "transformers 5.99.0 saved it and may name tensors differently than "
        f"{transformers.__version__}, the installed version: "
        "run `pip install transformers==5.99.0`."
    ) in message


def test_only_other_names_in_another_version_are_laid_to_the_version(tmp_path):
    folder = save_with_other_names(tmp_path / "same_version", transformers.__version__)
    with pytest.raises(ValueError, match="Load a complete checkpoint"):
        open_with_auto_class(folder)

    folder = save_with_other_names(tmp_path / "lost", "5.99.0")
    remove_tensors(folder, lambda tensor_name: ".attention.to_q." in tensor_name)
    with pytest.raises(ValueError, match="Load a complete checkpoint"):
        open_with_auto_class(folder)


def test_a_model_of_no_folder_begins_with_weights_of_its_own():
    """As transformers makes it of a configuration and tensors in memory."""
    given = torch.full((tiny.WIDTH,), 3.0)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        None,
        config=tiny.config(),
        state_dict={"model.language_model.norm.weight": given},
    )
    assert torch.equal(model.model.language_model.norm.weight, given)
    assert_aligned(model)


def test_lost_layers_of_the_language_model_start_as_in_the_language_model_by_itself():
    """GPT-2's last layers of a block start smaller than others."""
    text_config = tiny.text_config(cls=transformers.GPT2Config, n_layer=2)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        None,
        config=tiny.config(text=text_config),
        state_dict={},
    )
    reference = AutoModel.from_config(text_config)
    assert_same_spread(model.model.language_model, reference, "c_proj.weight")


@pytest.mark.parametrize("vision", ["clip", "siglip"])
def test_lost_layers_of_the_tower_start_as_in_the_tower_by_itself(tmp_path, vision):
    saved_model = tiny.model(vision=vision)
    saved_model.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    remove_tensors(tmp_path, lambda tensor_name: ".q_proj." in tensor_name)

    model, _ = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        output_loading_info=True,
    )
    reference = AutoModel.from_config(saved_model.config.vision_config)
    assert_same_spread(model.model.vision_tower, reference, "q_proj.weight")


def test_names_of_tensors_may_be_given(tmp_path):
    model = tiny.model()
    tensors = {}
    for tensor_name, tensor in model.state_dict().items():
        tensors[tensor_name.replace("linear_1", "first")] = tensor
    del tensors["lm_head.weight"]
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        key_mapping={"first": "linear_1"},
    )
    assert_holds(loaded_model, model.state_dict())


def test_a_llava_is_loaded_without_its_weights(tmp_path):
    tiny.llava().save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map="meta")
    for parameter in model.parameters():
        assert parameter.is_meta


def test_a_llava_is_saved_under_its_own_names_or_under_the_older_ones(tmp_path):
    tiny.llava().save_pretrained(tmp_path / "older", save_original_format=True)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "older")
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "again", save_original_format=True)

    new_names = weights(tmp_path / "new").keys()
    assert new_names == model.state_dict().keys() - {"lm_head.weight"}
    norm_names = {name.removeprefix("model.") for name in new_names if NORM in name}
    expected_names = weights(tmp_path / "older").keys() | norm_names
    assert weights(tmp_path / "again").keys() == expected_names


@pytest.mark.parametrize(
    ("saved_norm", "loaded_norm", "is_kept"),
    [
        ("layer_norm", "layer_norm", True),
        ("none", "none", True),
        ("layer_norm", "none", False),
        ("none", "layer_norm", False),
    ],
)
def test_a_norm_that_is_not_the_folders_drops_its_name(
    tmp_path, caplog, saved_norm, loaded_norm, is_kept
):
    tiny.model(projector_norm=saved_norm).save_pretrained(tmp_path)
    config = tiny.config(projector_norm=loaded_norm)
    expected_name = ""
    if is_kept:
        expected_name = str(tmp_path)

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, config=config)
    assert str(model.name_or_path) == expected_name
    assert str(model.config.name_or_path) == expected_name
    is_warned = "norm was not loaded" in caplog.text
    assert is_warned != is_kept

    # A caller that asks for the report is not warned: the report says it.
    caplog.clear()
    model, _ = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        config=config,
        output_loading_info=True,
    )
    assert str(model.name_or_path) == expected_name
    assert "norm was not loaded" not in caplog.text


def test_a_gain_that_is_built_in_bfloat16_is_not_rounded(tmp_path):
    build_checkpoint(
        parts.vision(tmp_path / "vision"),
        parts.language(tmp_path / "language"),
        tmp_path / "built",
        dtype="bfloat16",
    )
    assert_norm_in_float32(tmp_path / "built", torch.bfloat16)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "built")
    assert_gain(model, model.config.text_embedding_norm)


@pytest.mark.parametrize(
    ("tied", "max_shard_size", "is_sharded"),
    [
        (True, "5GB", False),
        (False, "20KB", True),
    ],
)
def test_saving_is_stable(tmp_path, tied, max_shard_size, is_sharded):
    model = tiny.model(tied=tied)
    with torch.no_grad():
        model.model.multi_modal_projector.norm.weight.normal_()
    first_folder = tmp_path / "first"
    second_folder = tmp_path / "second"
    model.save_pretrained(first_folder, max_shard_size=max_shard_size)
    loaded_model = AutoModelForImageTextToText.from_pretrained(first_folder)
    loaded_model.save_pretrained(second_folder, max_shard_size=max_shard_size)
    assert type(loaded_model) is NormAlignLlavaForConditionalGeneration
    assert_holds(loaded_model, model.state_dict())

    expected_names = set(model.state_dict())
    if tied:
        expected_names.remove("lm_head.weight")
    first_dtypes = stored_dtypes(first_folder)
    assert set(first_dtypes) == expected_names
    assert first_dtypes == stored_dtypes(second_folder)

    first_config = read_config(first_folder)
    assert first_config == read_config(second_folder)
    assert first_config["auto_map"] == model.config.auto_map_entries

    shard_count = len(list(first_folder.glob("*.safetensors")))
    assert (shard_count > 1) == is_sharded


def test_auto_map_is_saved_whole_after_the_class_is_registered_anew(tmp_path, monkeypatch):
    # LLaMA-Factory registers the whole model's class as AutoModel before it saves.
    model_class = NormAlignLlavaForConditionalGeneration
    monkeypatch.setattr(model_class, "_auto_class", model_class._auto_class)
    model_class.register_for_auto_class()
    model = tiny.model()
    model.save_pretrained(tmp_path)
    assert read_config(tmp_path)["auto_map"] == model.config.auto_map_entries


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (AutoModelForImageTextToText, {"device_map": "cpu"}),
        (NormAlignLlavaModel, {}),
    ],
)
def test_gain_and_bias_are_loaded_and_saved_in_float32(tmp_path, model_class, options):
    model = tiny.model()
    with torch.no_grad():
        norm_of(model).weight.mul_(1.0001)
    model.save_pretrained(tmp_path / "float32")

    loaded_model = model_class.from_pretrained(
        tmp_path / "float32",
        dtype=torch.bfloat16,
        **options,
    )
    assert loaded_model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert norm_of(loaded_model).weight.dtype == torch.float32
    assert norm_of(loaded_model).bias.dtype == torch.float32
    assert torch.equal(norm_of(loaded_model).weight, norm_of(model).weight)

    loaded_model.to(torch.bfloat16).save_pretrained(tmp_path / "cast", max_shard_size="20KB")
    assert_norm_in_float32(tmp_path / "cast", torch.bfloat16)


def test_the_configuration_of_a_model_that_was_cast_names_its_dtype(tmp_path):
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config["dtype"] == "bfloat16"
    assert config["text_config"]["dtype"] == "bfloat16"
    assert config["vision_config"]["dtype"] == "bfloat16"


def test_a_norm_that_a_llava_in_float16_does_not_have_is_float32(tmp_path):
    tiny.llava().to(torch.float16).save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert model.lm_head.weight.dtype == torch.float16
    assert norm_of(model).weight.dtype == torch.float32
    assert_aligned(model)


def layers_of_class(model, class_name) -> list[str]:
    """The names of modules of a class of bitsandbytes."""
    layer_names = []
    for module_name, module in model.named_modules():
        if type(module).__name__ == class_name:
            layer_names.append(module_name)
    return layer_names


def assert_only_decoder_layers_quantized(model, layer_class):
    layer_names = layers_of_class(model, layer_class)
    assert len(layer_names) == 7 * 2
    for layer_name in layer_names:
        assert layer_name.startswith("model.language_model.layers.")
    assert norm_of(model).weight.dtype == torch.float32
    assert norm_of(model).bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == model.dtype
    assert model.model.multi_modal_projector.linear_1.weight.dtype == model.dtype


in_4_and_8_bits = pytest.mark.parametrize(
    ("bits", "layer_class"),
    [
        (4, "Linear4bit"),
        (8, "Linear8bitLt"),
    ],
)


@in_4_and_8_bits
def test_quantized_loading_leaves_projector_norm_tower_and_head_alone(tmp_path, bits, layer_class):
    model = tiny.model(tied=False)
    model.save_pretrained(tmp_path)
    quantization = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    loaded_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        quantization_config=quantization,
        dtype=torch.bfloat16,
    )
    assert quantization.llm_int8_skip_modules is None  # The caller's object is not changed.
    assert_only_decoder_layers_quantized(loaded_model, layer_class)
    assert torch.equal(norm_of(loaded_model).weight.cpu(), norm_of(model).weight)


@in_4_and_8_bits
def test_a_llava_is_aligned_when_it_is_loaded_quantized(tmp_path, bits, layer_class):
    tiny.llava(tied=False).save_pretrained(tmp_path)
    quantization = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    loaded_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        quantization_config=quantization.to_dict(),
        dtype=torch.bfloat16,
    )
    assert_only_decoder_layers_quantized(loaded_model, layer_class)
    assert_aligned(loaded_model)


def test_modules_that_are_not_to_be_quantized_may_be_named(tmp_path):
    tiny.model(tied=False).save_pretrained(tmp_path)
    skipped = ["lm_head", "q_proj", "model.multi_modal_projector"]
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=skipped,
    )
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        quantization_config=quantization,
    )
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_quantized = type(module).__name__ == "Linear4bit"
            is_skipped = any(part in module_name for part in skipped)
            assert is_quantized != is_skipped, module_name


def test_a_quantized_checkpoint_keeps_the_norm_in_float32(tmp_path):
    tiny.model(tied=False).save_pretrained(tmp_path / "float32")
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "float32",
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
        ),
    )
    model.save_pretrained(tmp_path / "quantized")
    assert stored_dtypes(tmp_path / "quantized")[f"{NORM}.weight"] == torch.float32

    reloaded_model = AutoModelForImageTextToText.from_pretrained(tmp_path / "quantized")
    assert torch.equal(norm_of(reloaded_model).weight, norm_of(model).weight)
    layer_names = layers_of_class(reloaded_model, "Linear4bit")
    assert layer_names
    for layer_name in layer_names:
        assert not reloaded_model.get_submodule(layer_name).support_avx512bf16_for_cpu

    batch = {}
    for input_name, tensor in tiny.inputs().items():
        batch[input_name] = tensor.to(model.device)
    torch.testing.assert_close(reloaded_model(**batch).logits, model(**batch).logits)


def text_logits(model) -> torch.Tensor:
    input_ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        return model.eval()(input_ids=input_ids).logits


def assert_reloads(folder, model, tied, caplog):
    """The configuration says twice whether head and embeddings are one; logits are `model`'s."""
    config = read_config(folder)
    assert config["tie_word_embeddings"] is tied
    assert config["text_config"]["tie_word_embeddings"] is tied
    stored_tables = []
    for tensor_name in weights(folder):
        if tensor_name.endswith(("embed_tokens.weight", "lm_head.weight")):
            stored_tables.append(tensor_name)
    expected_count = 1 if tied else 2
    assert len(stored_tables) == expected_count

    caplog.clear()
    reloaded_model, report = AutoModelForImageTextToText.from_pretrained(
        folder,
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert "NOT tie" not in caplog.text

    expected = text_logits(model)
    logits = text_logits(reloaded_model)[..., : expected.shape[-1]]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def declare_tied(folder, top_level, nested=None):
    """Writes into a configuration, and into its `text_config`, whether embeddings are tied."""
    config = read_config(folder)
    config["tie_word_embeddings"] = top_level
    if nested is not None:
        config["text_config"]["tie_word_embeddings"] = nested
    (folder / "config.json").write_text(json.dumps(config))


every_declaration = pytest.mark.parametrize(
    ("tied", "declared"),
    [
        (True, True),
        (False, True),
        (False, False),
    ],
)


@every_declaration
def test_a_retrofitted_llava_is_tied_as_its_weights_are(tmp_path, caplog, tied, declared):
    parts.llava(tmp_path / "llava", tiny.llava(tied=tied))
    declare_tied(tmp_path / "llava", declared, nested=not tied)
    retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "retrofitted")
    assert_reloads(tmp_path / "retrofitted", tiny.llava(tied=tied), tied, caplog)


@every_declaration
def test_a_checkpoint_is_built_tied_as_the_language_model_s_weights_are(
    tmp_path, caplog, tied, declared
):
    # The case (True, False) is missing: a language model without a head cannot be loaded.
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language", tied=tied)
    declare_tied(tmp_path / "language", declared)
    build_checkpoint(vision, language, tmp_path / "built")
    model = AutoModelForCausalLM.from_pretrained(language)
    assert_reloads(tmp_path / "built", model, tied, caplog)


@pytest.fixture
def train_one_step(tmp_path):
    """Trains a checkpoint whose configuration is wrong about its embeddings."""

    def train(folder, tied, declared, **options):
        checkpoint = training.checkpoint(tmp_path / "source", tied=tied)
        declare_tied(checkpoint, declared, nested=not tied)
        trainer = training.trainer(folder, checkpoint, max_steps=1, **options)
        trainer.train()
        trainer.save_model()
        return trainer.model

    return train


@every_declaration
def test_a_trained_model_is_tied_as_its_weights_are(
    tmp_path, caplog, train_one_step, tied, declared
):
    model = train_one_step(tmp_path / "trained", tied, declared)
    assert_reloads(tmp_path / "trained", model, tied, caplog)


@every_declaration
def test_a_merged_adapter_is_tied_as_its_weights_are(
    tmp_path, caplog, train_one_step, tied, declared
):
    adapter_folder = tmp_path / "adapter"
    model = train_one_step(
        adapter_folder,
        tied,
        declared,
        use_peft=True,
        lora_dropout=0.0,
    )
    merge_adapter(adapter_folder, tmp_path / "merged")
    assert_reloads(tmp_path / "merged", model, tied, caplog)


def test_tied_embeddings_are_stored_once_where_each_was_gathered_by_itself(tmp_path, caplog):
    model = tiny.model()
    # FSDP2 gathers each tensor into memory of its own.
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gathered_names = list(gathered)
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert list(gathered) == gathered_names
    assert_reloads(tmp_path, model, True, caplog)
