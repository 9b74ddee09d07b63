"""Loading what is to be diagnosed: what it is found to be, in which form it comes, and every error."""

import json
import shutil

import pytest
import tiny
import tiny_parts
import torch
import training
import vlm_batches
import vlm_processors
from transformers import (
    LlavaProcessor,
)
from transformers.utils import is_torchvision_available

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.data.rows.questions import Sample
from normalign_llava.diagnose import probe
from normalign_llava.diagnose.data import batches
from normalign_llava.diagnose.load import find, load


NEED_TORCHVISION = ("kimi_k25", "smolvlm")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return training.checkpoint(tmp_path_factory.mktemp("ours"))


def test_our_own_checkpoint_needs_no_remote_code_even_if_it_carries_it(checkpoint):
    assert "auto_map" in json.loads((checkpoint / "config.json").read_text())
    for trust in (False, True):
        found = find(str(checkpoint), trust_remote_code=trust)
        assert (found.kind, found.name) == ("vision-language model", "model")
        assert isinstance(found.processor, LlavaProcessor) and found.image_processor is None
        model = load(found)
        assert type(model) is NormAlignLlavaForConditionalGeneration
        assert not model.training and model.device.type == "cpu"
    weights = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs every checkpoint in its own precision")
def test_bfloat16_is_loaded_in_what_the_processor_is_fast_in(checkpoint, tmp_path, processor):
    model = load(find(str(checkpoint)), dtype="bfloat16")
    shutil.copytree(checkpoint, tmp_path / "half")
    model.save_pretrained(tmp_path / "half")
    for ratio, dtype in ((0.3, torch.bfloat16), (5.0, torch.float32)):
        processor(ratio)
        assert load(find(str(tmp_path / "half"))).dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in vlm_processors.FOLDERS if name not in NEED_TORCHVISION])
def test_images_go_through_the_processor_of_each_family(name, tmp_path):
    found = find(vlm_processors.save(name, tmp_path))
    assert type(found.processor).__name__ == vlm_processors.FOLDERS[name][0]
    samples = [
        Sample(str(seed), "what is it?", {"bytes": training.image(seed, size), "path": None})
        for seed, size in enumerate([(32, 16), (16, 24), (16, 16)])
    ]
    model, inputs = load(found), list(batches(found.processor, samples, 2))
    placeholders = sum(int((batch["input_ids"] == vlm_batches.IMAGE).sum()) for batch in inputs)
    seen = probe(model, inputs, tokenizer=found.processor.tokenizer).interface
    newlines = seen.newline.count if seen.newline else 0
    assert len(inputs) == 2 and seen.visual.count + newlines == placeholders >= 12


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is there")
@pytest.mark.parametrize("name", NEED_TORCHVISION)
def test_a_processor_that_needs_torchvision_names_it_and_the_extra(name, tmp_path):
    with pytest.raises(ImportError, match=rf"processor of {tmp_path} needs torchvision.*\[vision\]"):
        find(vlm_processors.save(name, tmp_path))


def test_dtype(checkpoint):
    asked = load(find(str(checkpoint)), dtype="bfloat16")
    assert asked.model.language_model.dtype == torch.bfloat16
    assert asked.model.multi_modal_projector.norm.weight.dtype == torch.float32
    assert load(find(str(checkpoint))).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        load(find(str(checkpoint)), dtype="float8")


def test_in_4_bits_the_decoder_alone_is_quantized(checkpoint):
    pytest.importorskip("bitsandbytes")
    model = load(find(str(checkpoint)), dtype="float32", load_in_4bit=True)
    quantized = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert quantized and all(".language_model.layers." in name for name in quantized)


def remote(folder, auto_class, **config):
    (folder / "own.py").write_text(
        "from transformers import LlavaConfig, LlavaForConditionalGeneration\n\n\n"
        "class OwnConfig(LlavaConfig):\n    model_type = 'own'\n\n\n"
        "class Own(LlavaForConditionalGeneration):\n    config_class = OwnConfig\n"
    )
    model = tiny.llava()
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", auto_class: "own.Own"}, **config}
    (folder / "config.json").write_text(json.dumps(stored))
    return model


@pytest.mark.parametrize("auto_class", ["AutoModelForImageTextToText", "AutoModelForCausalLM"])
def test_remote_code_is_run_only_if_it_is_trusted(auto_class, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / f"remote_{auto_class}"
    folder.mkdir()
    remote(folder, auto_class)
    find(str(checkpoint)).processor.save_pretrained(folder)
    with pytest.raises(ValueError, match="'own' model, .* code of its own. .*--trust-remote-code"):
        find(str(folder))
    found = find(str(folder), trust_remote_code=True)
    assert found.kind == "vision-language model" and type(load(found)).__name__ == "Own"


def test_what_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        find(str(tmp_path))


CLIENT = """
from normalign_llava.diagnose.load import find, load
found = find("user/tiny.clip")
print(found.kind, found.name, type(load(found)).__name__)
for name in ("user/tiny.adapter", "user/none"):
    try:
        find(name)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_models_of_the_hub(hub, prepared, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    tiny_parts.vision(tmp_path / "clip")
    for name in ("clip", "adapter"):
        hub.serve(f"user/tiny.{name}", tmp_path / name)
    client = prepared.run(["-c", CLIENT])
    assert client.returncode == 0, client.stderr
    assert client.stdout.startswith("vision encoder user/tiny.clip CLIPVisionModel\n")
    assert (
        "user/tiny.adapter is an adapter. Merge it first (`normalign merge user/tiny.adapter --output DIR`)"
        in client.stdout
    )
    assert "user/none is no file or folder here, and the Hub has no model of that name" in client.stdout


def test_a_vision_language_model_without_its_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    tiny.llava().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no processor that can be loaded.*save_pretrained"):
        find(str(tmp_path))
    folder = tmp_path / "remote_tokenizer"
    folder.mkdir()
    remote(folder, "AutoModelForImageTextToText")
    tiny_parts.tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="no processor for images. .*save_pretrained"):
        find(str(folder), trust_remote_code=True)
