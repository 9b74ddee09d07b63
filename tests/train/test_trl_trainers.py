"""TRL's own trainers and commands on our checkpoints, as docs/trl.md has them, and that page's code as printed."""

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
from datasets import Dataset
from paths import ROOT
from PIL import Image
from training import assert_equal, moved, weights
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.train.modules.model import module_of


pytestmark = pytest.mark.slow


PAGE = (ROOT / "docs" / "trl.md").read_text()
COLOURS = ("red", "green", "blue", "white")
SHORT = {**training.SHORT, "per_device_train_batch_size": 4}
ON_TINY = [f"--{name}={value}" for name, value in {**SHORT, "dtype": "float32", "save_strategy": "steps"}.items()]
ON_TINY += ["--gradient_accumulation_steps=1"]


def image(number: int) -> Image.Image:
    return Image.new("RGB", (20, 20), COLOURS[number % 4])


def turn(role: str, text: str, images=()) -> list[dict]:
    return [{"role": role, "content": [*images, {"type": "text", "text": text}]}]


def rows(*columns: str) -> Dataset:
    """Eight rows with images and these columns."""
    made = []
    for number in range(8):
        question = turn("user", f"what is {number}?", [{"type": "image"}])
        right, wrong = turn("assistant", COLOURS[number % 4]), turn("assistant", "no idea")
        values = {"images": [image(number)], "prompt": question, "messages": question + right, "completion": right}
        made.append({**values, "chosen": right, "rejected": wrong, "label": number % 2 == 0})
    return Dataset.from_list(made).select_columns(["images", *columns])


MESSAGES, PAIR = ["messages"], ["prompt", "chosen", "rejected"]


def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


SAMPLED = dict(num_generations=4, max_completion_length=8)
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, MESSAGES, dict(max_length=None, assistant_only_loss=True), {}),
    "dpo": (DPOTrainer, DPOConfig, PAIR, dict(max_length=None), {}),
    "kto": (KTOTrainer, KTOConfig, ["prompt", "completion", "label"], dict(max_length=None), {}),
    "grpo": (GRPOTrainer, GRPOConfig, ["prompt"], SAMPLED, dict(reward_funcs=length)),
    "rloo": (RLOOTrainer, RLOOConfig, ["prompt"], SAMPLED, dict(reward_funcs=length)),
}


def make(kind: str, model, folder, **others):
    """TRL's trainer of a kind on tiny data."""
    trainer, config, columns, options, more = TRAINERS[kind]
    args = config(str(folder), **SHORT, **options)
    return trainer(model, args=args, train_dataset=rows(*columns), **more, **others)


KINDS = ["sft", "dpo", "grpo", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("kto", "rloo"))]


@pytest.mark.parametrize("kind", KINDS)
def test_each_trainer_trains_every_module(tmp_path, checkpoint, kind):
    trainer = make(kind, str(checkpoint), tmp_path)
    before = weights(trainer.model)
    trainer.train()
    names = moved(before, trainer.model)
    assert {module_of(name) for name in names} == {"vision", "projector", "norm", "language"}
    assert {f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias")} <= names
    if kind == "dpo":
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_norm_each_trainer_ends_as_stock_llava(tmp_path, kind):
    folder = training.checkpoint(tmp_path, arm="none")
    ours, reference = (
        NormAlignLlavaForConditionalGeneration.from_pretrained(folder, dtype="float32") for _ in range(2)
    )
    config = {key: value for key, value in ours.config.to_dict().items() if key in LlavaConfig().to_dict()}
    stock = LlavaForConditionalGeneration(LlavaConfig(**{**config, "model_type": "llava"}))
    start = weights(ours)
    stock.load_state_dict(ours.state_dict())
    stock.generation_config = ours.generation_config
    others = {"ref_model": reference} if kind in ("dpo", "kto") else {}
    for model in (ours, stock):
        make(kind, model, tmp_path / "out", processing_class=AutoProcessor.from_pretrained(folder), **others).train()
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


def changed(folder, base) -> set[str]:
    """The modules that are not those of the base."""
    ours, theirs = (
        NormAlignLlavaForConditionalGeneration.from_pretrained(each).state_dict() for each in (folder, base)
    )
    return {module_of(name) for name, value in ours.items() if not torch.equal(value, theirs[name])}


def run(name: str, *options: str) -> None:
    """Runs the page's command with a name where nothing has imported the package, with an empty HF_HOME."""
    first, *words = next(block for block in blocks("bash") if name in block).split()
    program = ["-m", "trl.cli.main", *words] if first == "trl" else [str(ROOT / words[1]), *words[2:]]
    environment = {**os.environ, "HF_HOME": str(Path("home").absolute()), "CI": "1"}
    command = [sys.executable, *program, *ON_TINY, *options]
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
    vqa = [{"image": image(i), "question": f"what is {i}?", "answer": COLOURS[i % 4]} for i in range(8)]
    data = {"my-data": rows(*MESSAGES), "my-pairs": rows(*PAIR), "my-questions": Dataset.from_list(vqa)}
    for name, questions in data.items():
        Path(name).mkdir()
        questions.to_parquet(f"{name}/train.parquet")
    run("examples/dpo.yaml")
    assert first_log("my-model-dpo")["loss"] == pytest.approx(math.log(2), abs=1e-4)  # logged in 4 digits
    run("examples/grpo.py", "--num_generations=4", "--max_completion_length=8")
    logged = first_log("my-model-grpo")
    assert {"rewards/correct/mean", "rewards/short/mean"} <= logged.keys() and logged["reward_std"] > 0
    for name in ("my-model-dpo", "my-model-grpo"):
        merge_adapter(name, f"{name}-merged", base_quantization="none")
        assert changed(f"{name}-merged", checkpoint) == {"projector", "norm", "language"}, name
    run("trl sft", "--output_dir=sft")
    assert changed("sft", checkpoint) == {"vision", "projector", "norm", "language"}
    assert "normalign merge my-model-dpo --output my-model-merged --base-quantization none" in PAGE
    done = subprocess.run([sys.executable, "-c", blocks("python")[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
