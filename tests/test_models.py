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

from normalign_llava import NormAlignLlavaForConditionalGeneration, probe
from normalign_llava.checkpoint.precision import compute_dtype, four_bits
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.evaluation.engine import as_lm
from normalign_llava.models import resolve_model


def test_our_own_checkpoint_needs_no_remote_code_even_if_it_carries_it(checkpoint):
    assert "auto_map" in json.loads((checkpoint / "config.json").read_text())
    for trust in (False, True):
        handle = resolve_model(str(checkpoint), trust_remote_code=trust)
        assert handle.name == "model" and isinstance(handle.processor, LlavaProcessor)
        model = handle.load()
        assert type(model) is NormAlignLlavaForConditionalGeneration and not model.training
    asked = handle.load(dtype="bfloat16").model
    assert asked.language_model.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert asked.multi_modal_projector.norm.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        handle.load(dtype="float8")


def test_a_folder_is_found_from_anywhere_and_called_by_its_name(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    for path in (".", f"~/{checkpoint.name}"):
        handle = resolve_model(path)
        assert handle.name == checkpoint.name and not handle.checkpoint.trust_remote_code
    for options in ({"base": "there"}, {"base_quantization": "none"}):
        with pytest.raises(ValueError, match="is not an adapter"):
            resolve_model(".", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in vlm_processors.FOLDERS if name != "smolvlm"])
def test_images_go_through_the_processor_of_each_family(name, tmp_path):
    handle = resolve_model(vlm_processors.save(name, tmp_path))
    assert type(handle.processor).__name__ == vlm_processors.FOLDERS[name][0]
    images = [training.image(0, size) for size in ((32, 16), (16, 24), (16, 16))]
    samples = [Sample("one", "what is it?", {"bytes": image, "path": None}) for image in images]
    model = handle.load()
    inputs = list(batches(handle.processor, samples, 2))
    placeholders = sum(int((batch["input_ids"] == vlm_families.IMAGE).sum()) for batch in inputs)
    seen = probe(model, inputs, tokenizer=handle.processor.tokenizer).interface
    newlines = seen.newline.count if seen.newline else 0
    assert len(inputs) == 2 and seen.visual.count + newlines == placeholders >= 12


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_names_it_and_the_extra(tmp_path):
    folder = vlm_processors.save("smolvlm", tmp_path)
    with pytest.raises(ImportError, match=rf"of {folder} needs torchvision.*\[vision\]"):
        resolve_model(folder)


def layers_in_4_bits(model):
    """How the layers are quantized, and what their products are computed in."""
    kind = pytest.importorskip("bitsandbytes").nn.Linear4bit
    named = {name.replace(".base_layer", ""): layer for name, layer in model.named_modules()}
    return {
        name: (layer.weight.quant_type, layer.weight.quant_state.nested, layer.compute_dtype)
        for name, layer in named.items()
        if isinstance(layer, kind)
    }


def test_everything_runs_the_4_bits_that_are_trained(checkpoint, tmp_path):
    dtype = compute_dtype()  # as by default
    options = dict(use_cpu=not torch.cuda.is_available(), use_peft=True, load_in_4bit=True)
    options |= dict(bf16=dtype == torch.bfloat16, dtype=str(dtype).removeprefix("torch."))
    trained = training.trainer(tmp_path / "trained", checkpoint, **options).model.get_base_model()
    expected = layers_in_4_bits(trained)
    handle = resolve_model(str(checkpoint))
    decoder = handle.load().model.language_model
    linear = [name for name, layer in decoder.named_modules() if isinstance(layer, torch.nn.Linear)]
    assert expected == {f"model.language_model.{name}": ("nf4", True, dtype) for name in linear}
    evaluated = as_lm(handle, batch_size=1, load_in_4bit=True).model
    diagnosed = handle.load(load_in_4bit=True)
    assert layers_in_4_bits(evaluated) == layers_in_4_bits(diagnosed) == expected
    assert diagnosed.dtype == diagnosed.lm_head.weight.dtype == dtype
    for name in linear:  # also the values are those that were trained
        weight = trained.model.language_model.get_parameter(f"{name}.base_layer.weight")
        assert torch.equal(diagnosed.model.language_model.get_parameter(f"{name}.weight"), weight)
    asked = handle.load(load_in_4bit=True, dtype="float16")
    assert {how[2] for how in layers_in_4_bits(asked).values()} == {asked.dtype} == {torch.float16}


@pytest.mark.parametrize("name", vlm_families.FAMILIES)
def test_of_every_family_4_bits_are_for_the_decoder_alone(name):
    model, _ = vlm_families.make(name)
    left_out = four_bits(model, "float32").llm_int8_skip_modules
    inside = {id(module) for module in model.get_decoder().modules()}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert should_convert_module(path, left_out) == (id(module) in inside), path


def test_remote_code_is_run_only_if_it_is_trusted(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "remote"
    tiny.llava().save_pretrained(folder)
    (folder / "own.py").write_text(
        "from transformers import LlavaConfig, LlavaForConditionalGeneration\n"
        "class OwnConfig(LlavaConfig):\n    model_type = 'own'\n"
        "class Own(LlavaForConditionalGeneration):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    resolve_model(str(checkpoint)).processor.save_pretrained(folder)
    with pytest.raises(ValueError, match="'own' model. .* its own code. .*--trust-remote-code"):
        resolve_model(str(folder))
    handle = resolve_model(str(folder), trust_remote_code=True)
    assert handle.processor is not None and type(handle.load()).__name__ == "Own"


def test_a_language_model_with_code_of_its_own_has_no_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "words"
    LlamaForCausalLM(tiny.text_config()).save_pretrained(folder)
    (folder / "words.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class WordsConfig(LlamaConfig):\n    model_type = 'words'\n"
        "class Words(LlamaForCausalLM):\n    config_class = WordsConfig\n"
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "words"}
    config["auto_map"] = {"AutoConfig": "words.WordsConfig", "AutoModelForCausalLM": "words.Words"}
    (folder / "config.json").write_text(json.dumps(config))
    handle = resolve_model(str(folder), trust_remote_code=True)
    assert handle.processor is None and handle.checkpoint.trust_remote_code
    assert type(handle.load()).__name__ == "Words"
