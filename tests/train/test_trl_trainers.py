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


def columns(*names: str):
    """A function that makes rows with these columns."""

    def row(number: int) -> dict:
        question, right = (
            turn("user", f"what is {number}?", [{"type": "image"}]),
            turn("assistant", COLOURS[number % 4]),
        )
        values = {"images": [image(number)], "prompt": question, "messages": question + right, "completion": right}
        values |= {"chosen": right, "rejected": turn("assistant", "no idea"), "label": number % 2 == 0}
        return {name: values[name] for name in ("images", *names)}

    return row


conversation, pair = columns("messages"), columns("prompt", "chosen", "rejected")


def rows(kind, count=8) -> Dataset:
    return Dataset.from_list([kind(number) for number in range(count)])


def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


SAMPLED = dict(num_generations=4, max_completion_length=8)
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, conversation, dict(max_length=None, assistant_only_loss=True), {}),
    "dpo": (DPOTrainer, DPOConfig, pair, dict(max_length=None), {}),
    "kto": (KTOTrainer, KTOConfig, columns("prompt", "completion", "label"), dict(max_length=None), {}),
    "grpo": (GRPOTrainer, GRPOConfig, columns("prompt"), SAMPLED, dict(reward_funcs=length)),
    "rloo": (RLOOTrainer, RLOOConfig, columns("prompt"), SAMPLED, dict(reward_funcs=length)),
}


def make(kind: str, model, folder, options=None, **given):
    """TRL's trainer of a kind on tiny data."""
    trainer, config, row, needed, more = TRAINERS[kind]
    args = config(str(folder), **{**SHORT, **needed, **(options or {})})
    return trainer(model, args=args, train_dataset=rows(row), **more, **given)


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
        assert losses(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)


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
    given = {"processing_class": AutoProcessor.from_pretrained(folder)}
    given |= {"ref_model": reference} if kind in ("dpo", "kto") else {}
    for model in (ours, stock):
        make(kind, model, tmp_path / "out", **given).train()
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


def command(name: str) -> list[str]:
    """A command of the page, in words."""
    text = next(block for block in blocks("bash") if name in block)
    return text.split()


def run(words: list[str], folder: Path) -> None:
    """Runs a command where nothing has imported the package, with an empty cache of remote code."""
    program = {"trl": [sys.executable, "-m", "trl.cli.main"], "accelerate": [sys.executable]}[words[0]]
    words = words[1:] if words[0] == "trl" else [str(ROOT / word) for word in words[2:3]] + words[3:]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "CI": "1"}
    done = subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def history(folder: Path) -> list[dict]:
    state = max(folder.glob("checkpoint-*/trainer_state.json"))
    return json.loads(state.read_text())["log_history"]


@pytest.mark.nightly
def test_dpo_and_grpo_by_their_recipes_and_sft_by_trl_s_command(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the adapters' bases are looked for
    (tmp_path / "my-model").symlink_to(checkpoint)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    vqa = [{"image": image(i), "question": f"what is {i}?", "answer": COLOURS[i % 4]} for i in range(8)]
    for name, data in (("my-data", rows(conversation)), ("my-pairs", rows(pair)), ("my-questions", vqa)):
        (tmp_path / name).mkdir()
        data = Dataset.from_list(data) if isinstance(data, list) else data
        data.to_parquet(str(tmp_path / name / "train.parquet"))
    run([*command("examples/dpo.yaml"), *ON_TINY], tmp_path)
    assert history(tmp_path / "my-model-dpo")[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # logged in 4 digits
    run([*command("examples/grpo.py"), *ON_TINY, "--num_generations=4", "--max_completion_length=8"], tmp_path)
    logged = history(tmp_path / "my-model-grpo")[0]
    assert {"rewards/correct/mean", "rewards/short/mean"} <= logged.keys() and logged["reward_std"] > 0
    for name in ("my-model-dpo", "my-model-grpo"):
        merge_adapter(tmp_path / name, tmp_path / f"{name}-merged", base_quantization="none")
        assert changed(tmp_path / f"{name}-merged", checkpoint) == {"projector", "norm", "language"}, name

    run([*command("trl sft"), *ON_TINY, f"--output_dir={tmp_path / 'sft'}"], tmp_path)
    assert changed(tmp_path / "sft", checkpoint) == {"vision", "projector", "norm", "language"}

    assert "normalign merge my-model-dpo --output my-model-merged --base-quantization none" in PAGE
    done = subprocess.run([sys.executable, "-c", blocks("python")[1]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
