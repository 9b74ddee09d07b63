"""Every snippet of a card, exactly as printed, in a process that cannot import the package."""

import json
import re

import card_folder as made
import pytest
import training
from PIL import Image
from remote_code import run_blocked
from safetensors.torch import load_file

from normalign_llava.hub_cards.card.write import AdapterBase, render_card
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


RUN = """
import json
from pathlib import Path
import torch
torch.manual_seed(0)
names = {}
for snippet in json.loads(Path(sys.argv[1]).read_text()):
    exec(snippet, names)
model = names["model"]
kinds = {type(module).__name__ for module in model.modules()}
inputs = names["inputs"].to(model.device, model.dtype)
again = model.generate(**inputs, max_new_tokens=3, do_sample=False)
found = [type(module).__module__ for module in model.modules() if type(module).__name__.startswith("NormAlign")]
norm = [tensor for name, tensor in model.named_parameters() if "projector" in name and ".norm." in name]
print(json.dumps({
    "kinds": sorted(kinds),
    "shape": list(again.shape),
    "answers": len(names["answer"]),
    "norm": sorted({str(tensor.dtype) for tensor in norm}),
    "gain": norm[-2].tolist(),
    "code": sorted({module.split(".")[0] for module in found}),
    "adapter": [name for name, _ in model.named_parameters() if "lora_" in name][:1],
}))
"""


def snippets(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def execute(tmp_path, found):
    Image.new("RGB", (20, 16), (200, 40, 0)).save(tmp_path / "image.jpg")
    (tmp_path / "snippets.json").write_text(json.dumps(found))
    return run_blocked(tmp_path, RUN, tmp_path / "snippets.json")


def test_the_snippets_of_a_model(tmp_path):
    folder = made.bare(tmp_path, tied=False)
    found = snippets(render_card(folder, repo_id=str(folder)).text)
    assert len(found) == 3 and ["generate(" in each for each in found] == [True, False, False]
    said = execute(tmp_path, found)
    # The last loads it in 4 bits, and what the first asked is asked again.
    assert "Linear4bit" in said["kinds"] and said["shape"][0] == 1
    assert said["code"] == ["transformers_modules"] and said["norm"] == ["torch.float32"]


def test_the_snippet_of_an_adapter(tmp_path):
    base = training.checkpoint(tmp_path / "checkpoint")
    options = dict(use_peft=True, load_in_4bit=True, dtype="bfloat16", max_steps=1)
    trainer = training.trainer(tmp_path / "adapter", base, **options)
    trainer.train()
    trainer.save_model()
    trainer.processing_class.save_pretrained(tmp_path / "adapter")
    quantization = base_model(trainer.model).config.quantization_config
    made.trained(
        tmp_path / "adapter",
        config_changes={"gradient_compensation": "global"},
        quantization=json.loads(quantization.to_json_string()),
    )
    card = render_card(tmp_path / "adapter", repo_id=str(tmp_path / "adapter"), adapter=AdapterBase(str(base), "main"))
    (snippet,) = snippets(card.text)
    said = execute(tmp_path, [snippet])
    assert said["adapter"] and said["answers"] == 1 and "Linear4bit" in said["kinds"]
    assert said["code"] == ["transformers_modules"] and said["norm"] == ["torch.float32"]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (gain,) = (tensor for name, tensor in saved.items() if name.endswith("multi_modal_projector.norm.weight"))
    assert said["gain"] == gain.tolist()  # the trained one, not the base's
