"""Opening and loading any model: what it is taken for, in which form it comes, and errors."""

import json
from importlib.util import find_spec

import pytest
import tiny
import torch
import training
import vlm_families
import vlm_processors
from transformers import LlamaForCausalLM, LlavaProcessor
from transformers.quantizers.quantizers_utils import should_convert_module

from normalign_llava import NormAlignLlavaForConditionalGeneration, models, probe
from normalign_llava.checkpoint.precision import compute_dtype, four_bits
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.evaluation.engine import as_lm
from normalign_llava.models import ModelOptions, resolve_model


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_our_own_checkpoint_needs_no_remote_code_even_if_it_carries_it(
    checkpoint, trust_remote_code
):
    assert "auto_map" in json.loads((checkpoint / "config.json").read_text())
    handle = resolve_model(str(checkpoint), ModelOptions(trust_remote_code=trust_remote_code))
    assert handle.name == "model"
    assert isinstance(handle.processor, LlavaProcessor)
    model = handle.load()
    assert type(model) is NormAlignLlavaForConditionalGeneration
    assert not model.training
    assert model.dtype == torch.float32


def test_a_model_is_loaded_in_a_precision_but_for_its_norm(checkpoint):
    inner_model = resolve_model(str(checkpoint), ModelOptions(dtype="bfloat16")).load().model
    assert inner_model.language_model.dtype == torch.bfloat16
    assert inner_model.multi_modal_projector.norm.weight.dtype == torch.float32


def test_a_model_is_loaded_in_the_precision_that_was_found_first(checkpoint, monkeypatch):
    """Free memory may have changed since."""
    dtypes = iter([torch.float32, torch.bfloat16])
    monkeypatch.setattr(models, "dtype_to_load", lambda *arguments: next(dtypes))
    handle = resolve_model(str(checkpoint))
    dtype, _ = handle.fetched_precision
    assert dtype == torch.float32
    assert handle.load().dtype == torch.float32


def test_an_unknown_precision_is_refused(checkpoint):
    handle = resolve_model(str(checkpoint), ModelOptions(dtype="float8"))
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        handle.load()


def test_a_folder_is_found_from_anywhere_and_called_by_its_name(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    for model_path in (".", f"~/{checkpoint.name}"):
        handle = resolve_model(model_path)
        assert handle.name == checkpoint.name
        assert not handle.checkpoint.trust_remote_code


@pytest.mark.parametrize("options", [{"base": "there"}, {"base_quantization": "none"}])
def test_options_of_an_adapter_are_refused_for_a_model(checkpoint, options):
    with pytest.raises(ValueError, match="is not an adapter"):
        resolve_model(str(checkpoint), ModelOptions(**options))


# The processor of SmolVLM needs torchvision.
FAMILIES_WITH_PROCESSORS = [family for family in vlm_processors.FOLDERS if family != "smolvlm"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_WITH_PROCESSORS)
def test_images_go_through_the_processor_of_each_family(family, tmp_path):
    handle = resolve_model(vlm_processors.save(family, tmp_path))
    expected_class = vlm_processors.FOLDERS[family][0]
    assert type(handle.processor).__name__ == expected_class

    samples = []
    for size in ((32, 16), (16, 24), (16, 16)):
        image = {"bytes": training.image(0, size), "path": None}
        samples.append(Sample("one", "what is it?", image))
    sample_batches = list(batches(handle.processor, samples, 2))
    placeholder_count = 0
    for batch in sample_batches:
        is_placeholder = batch["input_ids"] == vlm_families.IMAGE
        placeholder_count += int(is_placeholder.sum())

    report = probe(handle.load(), sample_batches, tokenizer=handle.processor.tokenizer)
    image_count = report.interface.visual.count
    if report.interface.newline:
        image_count += report.interface.newline.count
    assert len(sample_batches) == 2
    assert image_count == placeholder_count
    assert placeholder_count >= 12


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_names_it_and_the_extra(tmp_path):
    folder = vlm_processors.save("smolvlm", tmp_path)
    with pytest.raises(ImportError, match=rf"of {folder} needs torchvision.*\[vision\]"):
        resolve_model(folder)


def layers_in_4_bits(model):
    """How the layers are quantized, and what their products are computed in."""
    linear_class = pytest.importorskip("bitsandbytes").nn.Linear4bit
    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, linear_class):
            name_in_base = name.replace(".base_layer", "")
            weight = layer.weight
            layers[name_in_base] = (
                weight.quant_type,
                weight.quant_state.nested,
                layer.compute_dtype,
            )
    return layers


def linear_names(decoder):
    names = []
    for name, layer in decoder.named_modules():
        if isinstance(layer, torch.nn.Linear):
            names.append(name)
    return names


def test_everything_runs_the_4_bits_that_are_trained(checkpoint, tmp_path):
    # As by default.
    dtype = compute_dtype()
    trainer = training.trainer(
        tmp_path / "trained",
        checkpoint,
        use_cpu=not torch.cuda.is_available(),
        use_peft=True,
        load_in_4bit=True,
        bf16=dtype == torch.bfloat16,
        dtype=str(dtype).removeprefix("torch."),
    )
    trained_model = trainer.model.get_base_model()
    trained_layers = layers_in_4_bits(trained_model)
    handle = resolve_model(str(checkpoint))
    names = linear_names(handle.load().model.language_model)
    expected = {f"model.language_model.{name}": ("nf4", True, dtype) for name in names}
    assert trained_layers == expected

    handle_in_4_bits = resolve_model(str(checkpoint), ModelOptions(load_in_4bit=True))
    evaluated_model = as_lm(handle_in_4_bits, batch_size=1).model
    diagnosed_model = handle_in_4_bits.load()
    assert layers_in_4_bits(evaluated_model) == expected
    assert layers_in_4_bits(diagnosed_model) == expected
    assert diagnosed_model.dtype == dtype
    assert diagnosed_model.lm_head.weight.dtype == dtype

    # Also the values are the ones that were trained.
    trained_decoder = trained_model.model.language_model
    diagnosed_decoder = diagnosed_model.model.language_model
    for name in names:
        trained_weight = trained_decoder.get_parameter(f"{name}.base_layer.weight")
        diagnosed_weight = diagnosed_decoder.get_parameter(f"{name}.weight")
        assert torch.equal(diagnosed_weight, trained_weight)


def test_products_of_4_bits_are_in_the_precision_that_is_asked_for(checkpoint):
    options = ModelOptions(load_in_4bit=True, dtype="float16")
    model = resolve_model(str(checkpoint), options).load()
    layers = layers_in_4_bits(model)
    assert {product_dtype for _, _, product_dtype in layers.values()} == {torch.float16}
    assert model.dtype == torch.float16


@pytest.mark.parametrize("family", vlm_families.FAMILIES)
def test_of_every_family_4_bits_are_only_for_the_decoder(family):
    model, _ = vlm_families.make(family)
    left_out = four_bits(model, "float32").llm_int8_skip_modules
    decoder_modules = {id(module) for module in model.get_decoder().modules()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_in_decoder = id(module) in decoder_modules
            assert should_convert_module(name, left_out) == is_in_decoder, name


def add_code(folder, file_name, code, **config_changes):
    """Writes code beside a checkpoint, and the changes to its configuration that name it."""
    (folder / file_name).write_text(code)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, **config_changes}))


OWN_CODE = """
from transformers import LlavaConfig, LlavaForConditionalGeneration
class OwnConfig(LlavaConfig):
    model_type = 'own'
class Own(LlavaForConditionalGeneration):
    config_class = OwnConfig
"""

WORDS_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class WordsConfig(LlamaConfig):
    model_type = 'words'
class Words(LlamaForCausalLM):
    config_class = WordsConfig
"""


@pytest.fixture
def remote_code_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "remote"


def test_remote_code_is_run_only_if_it_is_trusted(remote_code_folder, checkpoint):
    tiny.llava().save_pretrained(remote_code_folder)
    resolve_model(str(checkpoint)).processor.save_pretrained(remote_code_folder)
    add_code(
        remote_code_folder,
        "own.py",
        OWN_CODE,
        model_type="own",
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    )
    with pytest.raises(ValueError, match="'own' model. .* its own code. .*--trust-remote-code"):
        resolve_model(str(remote_code_folder))

    handle = resolve_model(str(remote_code_folder), ModelOptions(trust_remote_code=True))
    assert handle.processor is not None
    assert type(handle.load()).__name__ == "Own"


def test_a_language_model_with_code_of_its_own_has_no_processor(remote_code_folder):
    LlamaForCausalLM(tiny.text_config()).save_pretrained(remote_code_folder)
    add_code(
        remote_code_folder,
        "words.py",
        WORDS_CODE,
        model_type="words",
        auto_map={"AutoConfig": "words.WordsConfig", "AutoModelForCausalLM": "words.Words"},
    )
    handle = resolve_model(str(remote_code_folder), ModelOptions(trust_remote_code=True))
    assert handle.processor is None
    assert handle.checkpoint.trust_remote_code
    assert type(handle.load()).__name__ == "Words"
