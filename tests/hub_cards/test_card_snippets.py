"""Every snippet of a card, exactly as printed, in a process that cannot import the package."""

import json
import re

import card_folder
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

# Runs a snippet that generates and one that asks, of a commit whose name is in the code's module.
RUN_PUBLISHED = """
import json
from pathlib import Path

def run(snippet):
    names = {}
    exec(snippet, names)
    return names

generating, asking = map(run, json.loads(Path(sys.argv[1]).read_text()))
commit = sys.argv[2]
assert commit in type(generating["model"]).__module__
assert commit in type(asking["ask"].model).__module__
print(json.dumps([generating["answer"][0].tolist(), asking["answer"][0]["generated_text"]]))
"""
# Runs all snippets of each card, generates, and says what was loaded.
RUN_CARDS = """
import json
from pathlib import Path
import torch

def describe(model):
    classes = {type(module) for module in model.modules()}
    own_modules = {kind.__module__ for kind in classes if kind.__name__.startswith("NormAlign")}
    norm = [
        parameter
        for name, parameter in model.named_parameters()
        if "projector" in name and ".norm." in name
    ]
    quantization = {}
    for setting, value in model.config.quantization_config.to_dict().items():
        if setting.startswith("bnb_4bit"):
            quantization[setting] = str(value)
    return {
        "kinds": sorted(kind.__name__ for kind in classes),
        "quantization": quantization,
        "norm": sorted({str(parameter.dtype) for parameter in norm}),
        "gain": norm[-2].tolist(),
        "code": sorted({module.split(".")[0] for module in own_modules}),
    }

described = []
for snippets in json.loads(Path(sys.argv[1]).read_text()):
    names = {}
    for snippet in snippets:
        exec(snippet, names)
    model, inputs = names["model"], names["inputs"]
    model.generate(**inputs.to(model.device, model.dtype), max_new_tokens=3)
    assert len(names["answer"]) == 1
    described.append(describe(model))
print(json.dumps(described))
"""
QLORA = {
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": "True",
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
}


def python_snippets(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def snippets_path(tmp_path):
    """Where snippets are stored, beside the image that they show."""
    Image.new("RGB", (20, 16), (200, 40, 0)).save(tmp_path / "image.jpg")
    return tmp_path / "snippets.json"


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """A trained adapter on 4-bit layers."""
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    trainer = training.trainer(
        folder,
        checkpoint,
        use_peft=True,
        load_in_4bit=True,
        dtype="bfloat16",
        max_steps=1,
    )
    trainer.train()
    trainer.save_model()
    trainer.processing_class.save_pretrained(folder)
    quantization = base_model(trainer.model).config.quantization_config
    card_folder.trained(
        folder,
        config_changes={"gradient_compensation": "global"},
        quantization=json.loads(quantization.to_json_string()),
    )
    return folder


@pytest.mark.nightly
def test_the_snippets_of_a_published_card_load_the_commit_that_publish_names(
    hub, publish, folder, tmp_path, snippets_path
):
    status, shown = publish(folder, "--no-verify")
    assert status == 0
    repository = hub.repository("ann/m")
    commit = repository.commit
    named_commits = re.findall(r'set revision = "(\w{40})" in the code of its card', shown)
    assert named_commits == [commit]
    card = repository.read("README.md").decode()
    repository.change({"modeling_normalign_llava.py": b"raise SystemExit('a later commit')"})

    snippets = []
    for snippet in python_snippets(card)[:2]:
        snippets.append(snippet.replace('"main"', f'"{commit}"'))
    snippets_path.write_text(json.dumps(snippets))
    token_ids, text = run_blocked(
        tmp_path,
        RUN_PUBLISHED,
        snippets_path,
        commit,
        HF_ENDPOINT=hub.url,
        HF_HUB_OFFLINE="0",
        HF_HUB_DISABLE_XET="1",
    )
    generated = AutoProcessor.from_pretrained(folder).decode(token_ids, skip_special_tokens=True)
    assert text
    assert generated.endswith(text)  # both are greedy


def test_the_snippets_of_a_model_and_of_an_adapter(adapter, checkpoint, tmp_path, snippets_path):
    folder = card_folder.bare(tmp_path, tied=False)
    model_snippets = python_snippets(render_card(folder, repo_id=str(folder)).text)
    assert ["generate(" in snippet for snippet in model_snippets] == [True, False, False]
    base = Part("base model", str(checkpoint), str(checkpoint), "main")
    adapter_card = render_card(adapter, repo_id=str(adapter), base=base)
    adapter_snippets = python_snippets(adapter_card.text)

    snippets_path.write_text(json.dumps([model_snippets, adapter_snippets]))
    described = run_blocked(tmp_path, RUN_CARDS, snippets_path)
    assert len(described) == 2
    # The last snippet of a model loads it in 4 bits.
    for loaded in described:
        assert "Linear4bit" in loaded["kinds"]
        assert loaded["quantization"] == QLORA
        assert loaded["code"] == ["transformers_modules"]
        assert loaded["norm"] == ["torch.float32"]

    # The gain of the adapter is the trained one and not the base's.
    saved = load_file(adapter / "adapter_model.safetensors")
    (gain_name,) = [name for name in saved if name.endswith("projector.norm.weight")]
    assert described[1]["gain"] == saved[gain_name].tolist()
