"""Training with LLaMA-Factory as docs/serving.md says, if `LLAMA_FACTORY_PYTHON` has it."""

import json
import os
import re
import shutil
import subprocess

import pytest
import torch
import training
import yaml
from paths import DOCS
from PIL import Image
from remote_code import run_blocked
from stored import weights

from normalign_llava import NormAlignLlavaConfig


pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif("LLAMA_FACTORY_PYTHON" not in os.environ, reason="it is not set"),
]

PAGE = (DOCS / "serving.md").read_text()
SECTION = PAGE.partition("### LLaMA-Factory")[2].partition("\n## ")[0]
NORM = "multi_modal_projector.norm.weight"

DATASET_INFO = {
    "kites": {
        "file_name": "rows.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
}


def block(language: str) -> str:
    """The one block of the section in a language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    # The tiny tokenizer lacks SmolLM2's marks of turns, which would be added.
    return text.replace("smollm2", "llava")


def write_data(folder):
    folder.mkdir()
    Image.linear_gradient("L").convert("RGB").save(folder / "kite.png")
    question = {"role": "user", "content": "<image>what is it"}
    answer = {"role": "assistant", "content": "a kite"}
    row = {"messages": [question, answer], "images": ["kite.png"]}
    (folder / "rows.json").write_text(json.dumps([row] * 8))
    (folder / "dataset_info.json").write_text(json.dumps(DATASET_INFO))


@pytest.fixture
def trained(tmp_path):
    """Trains a tiny checkpoint with the page's settings and others, and returns the folder."""
    shutil.move(training.checkpoint(tmp_path / "parts"), tmp_path / "my-model")
    write_data(tmp_path / "my-data")
    (tmp_path / "train.py").write_text(block("python"))

    def train(**changes):
        settings = yaml.safe_load(block("yaml")) | changes
        settings |= {"use_cpu": True, "report_to": "none", "learning_rate": 1e-2}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
        environment = {
            **os.environ,
            "DISABLE_VERSION_CHECK": "1",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.run(
            [os.environ["LLAMA_FACTORY_PYTHON"], "train.py", "train.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        return tmp_path / settings["output_dir"]

    return train


LOAD = """
import json
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True)
gain = model.model.multi_modal_projector.norm.weight
print(json.dumps([type(model).__name__, str(gain.dtype), gain.tolist()]))
"""


def test_a_fully_trained_checkpoint_is_loaded_by_a_stranger(tmp_path, trained):
    folder = trained(finetuning_type="full", freeze_multi_modal_projector=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == NormAlignLlavaConfig.auto_map_entries

    before = weights(tmp_path / "my-model")
    after = weights(folder)
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert f"model.{NORM}" in moved
    assert not [name for name in moved if "vision_tower" in name]

    class_name, dtype, gain = run_blocked(tmp_path, LOAD, folder)
    assert class_name == "NormAlignLlavaForConditionalGeneration"
    assert dtype == "torch.float32"
    assert gain == after[f"model.{NORM}"].tolist()


def test_an_adapter_is_on_the_language_model_with_the_projector_in_full(tmp_path, trained):
    folder = trained()
    adapter = weights(folder)
    gain = adapter[f"base_model.model.model.{NORM}"]
    assert gain.dtype == torch.float32
    assert not torch.equal(gain, weights(tmp_path / "my-model")[f"model.{NORM}"])
    others = [name for name in adapter if "language_model" not in name]
    assert all("multi_modal_projector" in name and "lora" not in name for name in others)
