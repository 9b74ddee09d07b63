"""`examples/ms_swift.py` in ms-swift, if `SWIFT_PYTHON` is a Python that has it."""

import json
import os
import subprocess

import pytest
import torch
import training
from paths import ROOT
from PIL import Image
from stored import weights
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava import merge_adapter
from normalign_llava.train.collator import ConversationCollator


pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif("SWIFT_PYTHON" not in os.environ, reason="SWIFT_PYTHON is not set"),
]

TRAIN = """
import json
import sys

import torch
from swift.pipelines import SwiftSft

run = SwiftSft(sys.argv[1:])
with open("data.jsonl") as file:
    rows = [run.template.encode(json.loads(line)) for line in file]
run.main()
names = ("input_ids", "labels", "pixel_values")
batch = run.template.data_collator(rows[:2])
tensors = {name: batch[name].to(run.model.device) for name in (*names, "attention_mask")}
with torch.no_grad():
    outputs = run.model.eval()(**tensors)
rows = [{name: row.get(name) for name in names} for row in rows]
torch.save({"rows": rows, "batch": tensors, "logits": outputs.logits}, "trained.pt")
"""
OPTIONS = {
    "full": ["--tuner_type", "full", "--freeze_aligner", "false"],
    "frozen": ["--tuner_type", "full"],
    "lora": ["--tuner_type", "lora", "--modules_to_save", "multi_modal_projector"],
}


def write_data(folder):
    """Rows with one, two and no images, a system's turn, several turns and an empty text."""
    Image.linear_gradient("L").convert("RGB").save(folder / "one.png")
    Image.new("RGB", (20, 30), "red").save(folder / "two.png")
    conversations = [
        (["one.png"], ["<image>what is it", "a kite"]),
        (["one.png", "two.png"], ["left <image> right <image> red", "right", "sure", "yes"]),
        ([], ["two and two", "four"]),
    ]
    lines = []
    for image_names, texts in conversations * 2:
        messages = [{"role": "system", "content": "be brief"}]
        for turn_number, text in enumerate(texts):
            role = ("user", "assistant")[turn_number % 2]
            messages.append({"role": role, "content": text})
        images = [str(folder / image_name) for image_name in image_names]
        lines.append(json.dumps({"messages": messages, "images": images}))
    (folder / "data.jsonl").write_text("\n".join(lines))


def train(folder, model_folder, options):
    """What ms-swift made of the rows, and logits of the trained model in memory."""
    words = [os.environ["SWIFT_PYTHON"], "-c", TRAIN, *options]
    words += ["--external_plugins", str(ROOT / "examples" / "ms_swift.py")]
    words += ["--model", str(model_folder), "--dataset", "data.jsonl"]
    settings = {
        "output_dir": "trained",
        "add_version": "false",
        "torch_dtype": "float32",
        "fp16": "false",
        "bf16": "false",
        "max_steps": "2",
        "per_device_train_batch_size": "2",
        "learning_rate": "1e-3",
        "split_dataset_ratio": "0",
        "dataset_num_proc": "1",
        "dataloader_num_workers": "0",
        "lora_dropout": "0",
        "report_to": "none",
    }
    for option_name, value in settings.items():
        words += [f"--{option_name}", value]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_CACHE": str(folder / "modelscope"),
        "USE_HF": "1",
    }
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-5000:]
    return torch.load(folder / "trained.pt")


def assert_rows_as_here(rows, folder, model_folder):
    """Tokens, labels and pixels are those of this package's collator."""
    collator = ConversationCollator(AutoProcessor.from_pretrained(model_folder))
    lines = (folder / "data.jsonl").read_text().splitlines()
    for line, row in zip(lines, rows, strict=True):
        example = json.loads(line)
        example["images"] = [Image.open(path) for path in example["images"]]
        expected = collator([example])
        assert row["input_ids"] == expected["input_ids"][0].tolist()
        assert row["labels"] == expected["labels"][0].tolist()
        if example["images"]:
            assert torch.equal(row["pixel_values"], expected["pixel_values"])
        else:
            assert row["pixel_values"] is None


def changed_modules(before, after):
    """The modules of which ms-swift changed tensors."""
    assert before.keys() == after.keys()
    changed = set()
    for tensor_name, tensor in after.items():
        if not torch.equal(tensor, before[tensor_name]):
            changed.add(tensor_name.removeprefix("model.").split(".")[0])
            if ".norm." in tensor_name and "projector" in tensor_name:
                changed.add("norm")
    return changed


@pytest.mark.parametrize(
    ("kind", "vision", "trained_modules"),
    [
        ("full", "registers", {"language_model", "multi_modal_projector", "norm"}),
        ("frozen", "siglip", {"language_model"}),
        ("lora", "siglip", {"language_model", "multi_modal_projector", "norm"}),
    ],
)
def test_ms_swift_trains_a_checkpoint_with_its_norm(tmp_path, kind, vision, trained_modules):
    model_folder = training.checkpoint(tmp_path / "parts", vision=vision)
    write_data(tmp_path)
    trained = train(tmp_path, model_folder, OPTIONS[kind])
    assert_rows_as_here(trained["rows"], tmp_path, model_folder)

    result = tmp_path / "trained" / "checkpoint-2"
    if kind == "lora":
        merge_adapter(result, tmp_path / "merged", base_quantization="none")
        result = tmp_path / "merged"
    stored = weights(result)
    norm = stored["model.multi_modal_projector.norm.weight"]
    assert norm.dtype == torch.float32
    assert changed_modules(weights(model_folder), stored) - {"lm_head"} == trained_modules

    model = AutoModelForImageTextToText.from_pretrained(result)
    with torch.no_grad():
        logits = model(**trained["batch"]).logits
    torch.testing.assert_close(logits, trained["logits"], rtol=1e-4, atol=1e-4)
