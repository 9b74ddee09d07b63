"""Loading what is to be diagnosed: what it is found to be, in which form it comes, and every error."""

import json

import pytest
import tiny
import torch
import training
import vlm_batches
import vlm_processors
from transformers import LlavaProcessor
from transformers.utils import is_torchvision_available

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.data.rows.questions import Sample
from normalign_llava.diagnose import probe
from normalign_llava.diagnose.data import batches
from normalign_llava.diagnose.load import find, load


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in vlm_processors.FOLDERS if name != "smolvlm"])
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
def test_a_processor_that_needs_torchvision_names_it_and_the_extra(tmp_path):
    with pytest.raises(ImportError, match=rf"processor of {tmp_path} needs torchvision.*\[vision\]"):
        find(vlm_processors.save("smolvlm", tmp_path))


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


def test_remote_code_is_run_only_if_it_is_trusted(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from transformers import LlavaConfig, LlavaForConditionalGeneration\n\n\n"
        "class OwnConfig(LlavaConfig):\n    model_type = 'own'\n\n\n"
        "class Own(LlavaForConditionalGeneration):\n    config_class = OwnConfig\n"
    )
    tiny.llava().save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps({**stored, "model_type": "own", "auto_map": auto_map}))
    find(str(checkpoint)).processor.save_pretrained(folder)
    with pytest.raises(ValueError, match="'own' model, .* code of its own. .*--trust-remote-code"):
        find(str(folder))
    found = find(str(folder), trust_remote_code=True)
    assert found.kind == "vision-language model" and type(load(found)).__name__ == "Own"
