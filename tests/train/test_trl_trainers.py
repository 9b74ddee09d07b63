"""TRL's own trainers and commands on our checkpoints, and the code of docs/trl.md as printed."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
import trl
from datasets import Dataset
from paths import ROOT
from PIL import Image
from training import assert_equal, moved, weights
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.train.modules.model import module_of


pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "trl.md").read_text()
COLOURS = ("red", "green", "blue", "white")
MESSAGES = ["messages"]
PAIR = ["prompt", "chosen", "rejected"]
SHORT = {**training.SHORT, "per_device_train_batch_size": 4}
ON_TINY = {**SHORT, "dtype": "float32", "save_strategy": "steps", "gradient_accumulation_steps": 1}


def image(number: int) -> Image.Image:
    return Image.new("RGB", (20, 20), COLOURS[number % 4])


def turn(role: str, text: str, images=()) -> list[dict]:
    return [{"role": role, "content": [*images, {"type": "text", "text": text}]}]


def rows(*columns: str) -> Dataset:
    """Eight rows with images and these columns."""
    made = []
    for number in range(8):
        question = turn("user", f"what is {number}?", [{"type": "image"}])
        right = turn("assistant", COLOURS[number % 4])
        wrong = turn("assistant", "no idea")
        row = {"images": [image(number)], "prompt": question, "messages": question + right}
        row |= {"completion": right, "chosen": right, "rejected": wrong, "label": number % 2 == 0}
        made.append(row)
    return Dataset.from_list(made).select_columns(["images", *columns])


def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


SAMPLED = dict(num_generations=4, max_completion_length=8)
TRAINERS = {
    "SFT": (MESSAGES, dict(max_length=None, assistant_only_loss=True), {}),
    "DPO": (PAIR, dict(max_length=None), {}),
    "KTO": (["prompt", "completion", "label"], dict(max_length=None), {}),
    "GRPO": (["prompt"], SAMPLED, dict(reward_funcs=length)),
    "RLOO": (["prompt"], SAMPLED, dict(reward_funcs=length)),
}
NIGHTLY = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("KTO", "RLOO")]


def make(kind: str, model, folder, **others):
    """TRL's trainer of a kind on tiny data."""
    columns, options, more = TRAINERS[kind]
    args = getattr(trl, f"{kind}Config")(str(folder), **SHORT, **options)
    data = rows(*columns)
    return getattr(trl, f"{kind}Trainer")(model, args=args, train_dataset=data, **more, **others)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO", *NIGHTLY])
def test_each_trainer_trains_every_module(tmp_path, checkpoint, kind):
    trainer = make(kind, str(checkpoint), tmp_path)
    before = weights(trainer.model)
    trainer.train()
    names = moved(before, trainer.model)
    assert {module_of(name) for name in names} == {"vision", "projector", "norm", "language"}
    assert {f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias")} <= names
    if kind == "DPO":
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO", *NIGHTLY])
def test_without_the_norm_each_trainer_ends_as_stock_llava(tmp_path, kind):
    folder = training.checkpoint(tmp_path, arm="none")
    load = NormAlignLlavaForConditionalGeneration.from_pretrained
    ours, reference = (load(folder, dtype="float32") for _ in range(2))
    config = ours.config.to_dict()
    known = LlavaConfig().to_dict().keys() - {"model_type"}
    stock = LlavaForConditionalGeneration(LlavaConfig(**{key: config[key] for key in known}))
    start = weights(ours)
    stock.load_state_dict(ours.state_dict())
    stock.generation_config = ours.generation_config
    others = {"ref_model": reference} if kind in ("DPO", "KTO") else {}
    others["processing_class"] = AutoProcessor.from_pretrained(folder)
    for model in (ours, stock):
        make(kind, model, tmp_path / "out", **others).train()
    assert moved(start, ours)
    assert_equal(weights(ours), weights(stock))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def test_the_page_s_first_example_runs_as_printed(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(checkpoint)
    image(0).save("kite.png")
    example = blocks("python")[0]
    assert len(example.splitlines()) <= 15
    exec(compile(example, "docs/trl.md", "exec"), {})
    merge_adapter("my-model-lora", "merged")
    assert changed("merged", checkpoint) == {"projector", "norm", "language"}
    assert "my-model" in (tmp_path / "my-model-lora" / "README.md").read_text()


def test_the_page_s_collator_makes_a_batch_as_printed(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(checkpoint)
    image(0).save("kite.png")
    (example,) = (block for block in blocks("python") if "ConversationCollator(" in block)
    names = {}
    exec(compile(example, "docs/trl.md", "exec"), names)
    batch = names["batch"]
    assert batch.keys() == {"input_ids", "attention_mask", "labels", "pixel_values"}
    labels = batch["labels"][1]
    assert names["processor"].decode(labels[labels >= 0]) == "A red kite.<|im_end|>"
    assert batch["pixel_values"].shape[0] == 2


def changed(folder, base) -> set[str]:
    """The modules that are not those of the base."""
    load = NormAlignLlavaForConditionalGeneration.from_pretrained
    ours = load(folder).state_dict()
    theirs = load(base).state_dict()
    return {module_of(name) for name, value in ours.items() if not torch.equal(value, theirs[name])}


def run(name: str, *options: str) -> None:
    """Runs the page's command with a name in a process of its own, with an empty HF_HOME."""
    first, *words = next(block for block in blocks("bash") if name in block).split()
    program = ["-m", "trl.cli.main"] if first == "trl" else [str(ROOT / words[1])]
    words = words if first == "trl" else words[2:]
    environment = {**os.environ, "HF_HOME": str(Path("home").absolute()), "CI": "1"}
    tiny = [f"--{option}={value}" for option, value in ON_TINY.items()]
    command = [sys.executable, *program, *words, *tiny, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def first_log(folder: str) -> dict:
    state = max(Path(folder).glob("checkpoint-*/trainer_state.json"))
    return json.loads(state.read_text())["log_history"][0]


@pytest.mark.nightly
def test_dpo_and_grpo_by_their_recipes_and_sft_by_trl_s_command(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the adapters' bases are looked for
    (tmp_path / "my-model").symlink_to(checkpoint)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    answers = {"question": [f"what is {i}?" for i in range(8)], "answer": [*COLOURS, *COLOURS]}
    vqa = Dataset.from_dict({"image": [image(i) for i in range(8)], **answers})
    data = {"my-data": rows(*MESSAGES), "my-pairs": rows(*PAIR), "my-questions": vqa}
    for name, questions in data.items():
        Path(name).mkdir()
        questions.to_parquet(f"{name}/train.parquet")
    run("examples/dpo.yaml")
    assert first_log("my-model-dpo")["loss"] == pytest.approx(math.log(2), abs=1e-4)  # 4 digits
    run("examples/grpo.py", "--num_generations=4", "--max_completion_length=8")
    logged = first_log("my-model-grpo")
    assert {"rewards/correct/mean", "rewards/short/mean"} <= logged.keys()
    assert logged["reward_std"] > 0
    for name in ("my-model-dpo", "my-model-grpo"):
        merge_adapter(name, f"{name}-merged", base_quantization="none")
        assert changed(f"{name}-merged", checkpoint) == {"projector", "norm", "language"}, name
    run("trl sft", "--output_dir=sft")
    assert changed("sft", checkpoint) == {"vision", "projector", "norm", "language"}
    assert "normalign merge my-model-dpo --output my-model-merged --base-quantization none" in PAGE
    command = [sys.executable, "-c", blocks("python")[2]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
