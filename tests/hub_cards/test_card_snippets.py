"""Every snippet of a card, exactly as printed, in a process that cannot import the package."""

import json
import re

import card_folder as made
import pytest
import training
from PIL import Image
from remote_code import run_blocked
from safetensors.torch import load_file
from transformers import AutoProcessor

from normalign_llava.hub_cards.card.facts import Part
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow
PUBLISHED = """
import json
from pathlib import Path
answers = []
for snippet in json.loads(Path(sys.argv[1]).read_text()):
    names = {}
    exec(snippet, names)
    answers.append(names["answer"][0])
    model = names["ask"].model if "ask" in names else names["model"]
    assert sys.argv[2] in type(model).__module__  # the code of this commit
print(json.dumps([answers[0].tolist(), answers[1]["generated_text"]]))
"""
RUN = """
import json
from pathlib import Path
import torch
shown = []
for card in json.loads(Path(sys.argv[1]).read_text()):
    names = {}
    for snippet in card:
        exec(snippet, names)
    model, inputs = names["model"], names["inputs"]
    model.generate(**inputs.to(model.device, model.dtype), max_new_tokens=3)
    assert len(names["answer"]) == 1
    kinds, named = {type(module) for module in model.modules()}, model.named_parameters()
    code = {kind.__module__ for kind in kinds if kind.__name__.startswith("NormAlign")}
    norm = [tensor for name, tensor in named if "projector" in name and ".norm." in name]
    settings = model.config.quantization_config.to_dict().items()
    shown.append({
        "kinds": sorted(kind.__name__ for kind in kinds),
        "quantization": {key: str(value) for key, value in settings if key.startswith("bnb_4bit")},
        "norm": sorted({str(tensor.dtype) for tensor in norm}),
        "gain": norm[-2].tolist(),
        "code": sorted({module.split(".")[0] for module in code}),
    })
print(json.dumps(shown))
"""
QLORA = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": "True"}
QLORA |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}


def snippets(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """A trained adapter on 4-bit layers."""
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    options = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "max_steps": 1}
    trainer = training.trainer(folder, checkpoint, **options)
    trainer.train()
    trainer.save_model()
    trainer.processing_class.save_pretrained(folder)
    settings = base_model(trainer.model).config.quantization_config
    settings = json.loads(settings.to_json_string())
    made.trained(folder, config_changes={"gradient_compensation": "global"}, quantization=settings)
    return folder


@pytest.mark.nightly
def test_the_snippets_of_a_published_card_load_the_commit_that_publish_names(
    hub, publish, folder, tmp_path
):
    status, shown = publish(folder, "--no-verify")
    (commit,) = re.findall(r'set revision = "(\w{40})" in the code of its card', shown)
    repository = hub.repository("ann/m")
    assert status == 0 and commit == repository.commit
    card = repository.read("README.md").decode()
    repository.change({"modeling_normalign_llava.py": b"raise SystemExit('a later commit')"})
    named = [snippet.replace('"main"', f'"{commit}"') for snippet in snippets(card)[:2]]
    Image.new("RGB", (20, 16), (200, 40, 0)).save(tmp_path / "image.jpg")
    (tmp_path / "snippets.json").write_text(json.dumps(named))
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    ids, text = run_blocked(tmp_path, PUBLISHED, tmp_path / "snippets.json", commit, **online)
    answer = AutoProcessor.from_pretrained(folder).decode(ids, skip_special_tokens=True)
    assert text and answer.endswith(text)  # both are greedy


def test_the_snippets_of_a_model_and_of_an_adapter(adapter, checkpoint, tmp_path):
    folder = made.bare(tmp_path, tied=False)
    base = Part("base model", str(checkpoint), str(checkpoint), "main")
    of_model = snippets(render_card(folder, repo_id=str(folder)).text)
    assert ["generate(" in snippet for snippet in of_model] == [True, False, False]
    of_adapter = snippets(render_card(adapter, repo_id=str(adapter), base=base).text)
    Image.new("RGB", (20, 16), (200, 40, 0)).save(tmp_path / "image.jpg")
    (tmp_path / "snippets.json").write_text(json.dumps([of_model, of_adapter]))
    shown = run_blocked(tmp_path, RUN, tmp_path / "snippets.json")
    for said in shown:  # the last snippet of a model loads it in 4 bits
        assert "Linear4bit" in said["kinds"] and said["quantization"] == QLORA
        assert said["code"] == ["transformers_modules"] and said["norm"] == ["torch.float32"]
    saved = load_file(adapter / "adapter_model.safetensors")
    (gain,) = (tensor for name, tensor in saved.items() if name.endswith("projector.norm.weight"))
    assert shown[1]["gain"] == gain.tolist()  # the trained one, not the base's
