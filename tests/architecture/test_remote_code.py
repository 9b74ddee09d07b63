"""The two code files that travel with a checkpoint, in processes that cannot import the package."""

import ast
import json
import sys

import pytest
import tiny_parts as parts
import torch
from paths import ROOT
from PIL import Image
from remote_code import run_blocked
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote")
    folder = root / "my-model.v1.5"  # a dot, as in so many repository names
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language", tied=False), folder)
    return folder


MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]

STRANGER = """
import json, shutil, torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers import AutoProcessor, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module as get
folder, again, damaged = sys.argv[1:4]
messages = json.loads(sys.argv[4])
names = ["GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm", "mean_embedding_norm"]
found = [get("modeling_normalign_llava." + name, folder).__name__ for name in names]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
multimodal = AutoModelForMultimodalLM.from_pretrained(folder, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
image = Image.linear_gradient("L").convert("RGB")
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(images=[image], text=text, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
    hidden = base(**inputs).last_hidden_state
pipe = pipeline("image-text-to-text", model=folder, trust_remote_code=True)
said = pipe(images=[image], text=text, max_new_tokens=5, do_sample=False, return_full_text=False)
model.save_pretrained(again)
shutil.copytree(folder, damaged)
state = {k: v for k, v in load_file(again + "/model.safetensors").items() if k != "lm_head.weight"}
save_file(state, damaged + "/model.safetensors", metadata={"format": "pt"})
errors = []
for load in (
    lambda: AutoModelForImageTextToText.from_pretrained(damaged, trust_remote_code=True),
    lambda: pipeline("image-text-to-text", model=damaged, trust_remote_code=True),
):
    try:
        load()
    except Exception as error:
        errors.append(str(error))
print(json.dumps({
    "found": found,
    "errors": errors,
    "modules": [type(x).__module__.split(".")[0] for x in (config, base, model, multimodal)],
    "names": [type(x).__name__ for x in (config, base, model, multimodal, processor)],
    "logits": logits[0, -1].tolist(),
    "hidden": hidden[0, -1].tolist(),
    "ids": model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist(),
    "said": said[0]["generated_text"],
}))
"""


@pytest.fixture(scope="module")
def got(tmp_path_factory, checkpoint):
    """What a stranger found; `again/` beside the checkpoint is what he saved."""
    again, damaged = (checkpoint.with_name(name) for name in ("again", "damaged"))
    return run_blocked(tmp_path_factory.mktemp("stranger"), STRANGER, checkpoint, again, damaged, json.dumps(MESSAGES))


def test_a_stranger_gets_what_the_installed_package_gives(checkpoint, got):
    assert got["modules"] == ["transformers_modules"] * 4
    heads = ["NormAlignLlavaForConditionalGeneration"] * 2
    assert got["names"] == ["NormAlignLlavaConfig", "NormAlignLlavaModel", *heads, "LlavaProcessor"]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert type(model).__module__ == "normalign_llava.modeling_normalign_llava"
    processor = AutoProcessor.from_pretrained(checkpoint)
    image = Image.linear_gradient("L").convert("RGB")
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    inputs = processor(images=[image], text=text, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(got["logits"]), model(**inputs).logits[0, -1], rtol=0, atol=0)
        hidden = model.model(**inputs).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(got["hidden"]), hidden, rtol=0, atol=0)
    assert got["ids"] == model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist()
    said = pipeline("image-text-to-text", model=model, processor=processor)(
        images=[image], text=text, max_new_tokens=5, do_sample=False, return_full_text=False
    )
    assert got["said"] == said[0]["generated_text"]

    # What the stranger saves is again a complete checkpoint.
    again = checkpoint.with_name("again")
    assert {path.name for path in again.glob("*.py")} == {path.name for path in checkpoint.glob("*.py")}
    for name in ("configuration_normalign_llava.py", "modeling_normalign_llava.py"):
        assert (again / name).read_text() == (checkpoint / name).read_text()
    assert (again / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_names_and_refusals_are_a_stranger_s_too(got):
    names = ["GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm", "mean_embedding_norm"]
    assert got["found"] == names  # from the two files alone
    assert len(got["errors"]) == 2
    assert all("lacks 1 tensors" in error and "lm_head.weight" in error for error in got["errors"])


def test_the_code_imports_public_modules_alone():
    imported = set()
    for name in ("configuration", "modeling"):
        for node in ast.walk(ast.parse((ROOT / f"{name}_normalign_llava.py").read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert imported == {
        "torch", "torch.nn.functional", "transformers", "transformers.integrations",
        "transformers.models.auto.modeling_auto", "transformers.models.llava",
        "transformers.quantizers", "transformers.utils", "transformers.utils.quantization_config",
        "configuration_normalign_llava",
    }  # fmt: skip
