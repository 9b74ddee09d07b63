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
from peft import AutoPeftModelForCausalLM
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
SHORT_COMMAND = {
    **SHORT,
    "dtype": "float32",
    "save_strategy": "steps",
    "gradient_accumulation_steps": 1,
}


def image(number: int) -> Image.Image:
    return Image.new("RGB", (20, 20), COLOURS[number % 4])


def turn(role: str, text: str, images=()) -> list[dict]:
    content = [*images, {"type": "text", "text": text}]
    return [{"role": role, "content": content}]


def train_rows(*columns: str) -> Dataset:
    """Eight rows with images and these columns."""
    dataset_rows = []
    for number in range(8):
        question = turn("user", f"what is {number}?", [{"type": "image"}])
        right_answer = turn("assistant", COLOURS[number % 4])
        dataset_rows.append(
            {
                "images": [image(number)],
                "prompt": question,
                "messages": question + right_answer,
                "completion": right_answer,
                "chosen": right_answer,
                "rejected": turn("assistant", "no idea"),
                "label": number % 2 == 0,
            }
        )
    return Dataset.from_list(dataset_rows).select_columns(["images", *columns])


def length_rewards(completions, **keywords):
    return [float(len(completion[0]["content"])) for completion in completions]


COLUMNS = {
    "SFT": MESSAGES,
    "DPO": PAIR,
    "KTO": ["prompt", "completion", "label"],
    "GRPO": ["prompt"],
    "RLOO": ["prompt"],
}
CONFIG_OPTIONS = {
    "SFT": {"max_length": None, "assistant_only_loss": True},
    "DPO": {"max_length": None},
    "KTO": {"max_length": None},
    "GRPO": {"num_generations": 4, "max_completion_length": 8},
    "RLOO": {"num_generations": 4, "max_completion_length": 8},
}
all_trainers = pytest.mark.parametrize(
    "kind",
    [
        "SFT",
        "DPO",
        "GRPO",
        pytest.param("KTO", marks=pytest.mark.nightly),
        pytest.param("RLOO", marks=pytest.mark.nightly),
    ],
)


def make_trainer(kind: str, model, folder, **arguments):
    """TRL's trainer of a kind on tiny data."""
    config_class = getattr(trl, f"{kind}Config")
    trainer_class = getattr(trl, f"{kind}Trainer")
    if kind in ("GRPO", "RLOO"):
        arguments["reward_funcs"] = length_rewards
    return trainer_class(
        model,
        args=config_class(str(folder), **SHORT, **CONFIG_OPTIONS[kind]),
        train_dataset=train_rows(*COLUMNS[kind]),
        **arguments,
    )


@all_trainers
def test_each_trainer_trains_every_module(tmp_path, checkpoint, kind):
    trainer = make_trainer(kind, str(checkpoint), tmp_path)
    before = weights(trainer.model)
    trainer.train()
    moved_names = moved(before, trainer.model)
    modules = {module_of(parameter_name) for parameter_name in moved_names}
    assert modules == {"vision", "projector", "norm", "language"}
    assert "model.multi_modal_projector.norm.weight" in moved_names
    assert "model.multi_modal_projector.norm.bias" in moved_names
    if kind == "DPO":
        first_loss = trainer.state.log_history[0]["loss"]
        assert first_loss == pytest.approx(math.log(2), abs=1e-6)


def load_model(folder, **options):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(folder, **options)


def stock_llava(model):
    """transformers' own LLaVA with the weights of a model."""
    values = model.config.to_dict()
    known_keys = LlavaConfig().to_dict().keys() - {"model_type"}
    known_values = {key: values[key] for key in known_keys}
    stock_model = LlavaForConditionalGeneration(LlavaConfig(**known_values))
    stock_model.load_state_dict(model.state_dict())
    stock_model.generation_config = model.generation_config
    return stock_model


@all_trainers
def test_without_the_norm_each_trainer_ends_as_stock_llava(tmp_path, kind):
    checkpoint = training.checkpoint(tmp_path, arm="none")
    model = load_model(checkpoint, dtype="float32")
    reference_model = load_model(checkpoint, dtype="float32")
    stock_model = stock_llava(model)
    before = weights(model)
    arguments = {"processing_class": AutoProcessor.from_pretrained(checkpoint)}
    if kind in ("DPO", "KTO"):
        arguments["ref_model"] = reference_model
    make_trainer(kind, model, tmp_path / "out", **arguments).train()
    make_trainer(kind, stock_model, tmp_path / "out", **arguments).train()
    assert moved(before, model)
    assert_equal(weights(model), weights(stock_model))


def blocks(language: str) -> list[str]:
    """The blocks of code in a language on the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def run_example(example: str) -> dict:
    """The names that an example of the page leaves."""
    names = {}
    exec(compile(example, "docs/trl.md", "exec"), names)
    return names


def changed_modules(checkpoint, base) -> set[str]:
    """The modules whose weights differ from the base's."""
    tensors = load_model(checkpoint).state_dict()
    base_tensors = load_model(base).state_dict()
    modules = set()
    for parameter_name, tensor in tensors.items():
        if not torch.equal(tensor, base_tensors[parameter_name]):
            modules.add(module_of(parameter_name))
    return modules


@pytest.fixture
def page_folder(tmp_path, checkpoint, monkeypatch):
    """A working directory with `my-model`, where the adapters' bases are looked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(checkpoint)
    image(0).save("kite.png")
    return tmp_path


def test_the_adapter_of_the_page_s_first_example_is_loaded_by_peft(page_folder):
    run_example(blocks("python")[0])
    model = AutoPeftModelForCausalLM.from_pretrained("my-model-lora", trust_remote_code=True)
    assert model.get_base_model().config.model_type == "normalign_llava"


def test_the_page_s_first_example_runs_as_printed(page_folder, checkpoint):
    example = blocks("python")[0]
    assert len(example.splitlines()) <= 15
    run_example(example)
    merge_adapter("my-model-lora", "merged")
    assert changed_modules("merged", checkpoint) == {"projector", "norm", "language"}
    card = (page_folder / "my-model-lora" / "README.md").read_text()
    assert "my-model" in card


@pytest.mark.usefixtures("page_folder")
def test_the_page_s_collator_makes_a_batch_as_printed():
    examples = [block for block in blocks("python") if "ConversationCollator(" in block]
    assert len(examples) == 1
    names = run_example(examples[0])
    batch = names["batch"]
    assert batch.keys() == {"input_ids", "attention_mask", "labels", "pixel_values"}
    labels = batch["labels"][1]
    learned_text = names["processor"].decode(labels[labels >= 0])
    assert learned_text == "A red kite.<|im_end|>"
    assert batch["pixel_values"].shape[0] == 2


def run_command(name: str, *options: str) -> None:
    """Runs the page's command with a name in a process of its own, with an empty HF_HOME."""
    commands = [block for block in blocks("bash") if name in block]
    first_word, *words = commands[0].split()
    if first_word == "trl":
        program = ["-m", "trl.cli.main"]
    else:
        program = [str(ROOT / words[1])]
        words = words[2:]
    short_options = [f"--{option}={value}" for option, value in SHORT_COMMAND.items()]
    done = subprocess.run(
        [sys.executable, *program, *words, *short_options, *options],
        env={**os.environ, "HF_HOME": str(Path("home").absolute()), "CI": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def first_log(folder: str) -> dict:
    state_path = max(Path(folder).glob("checkpoint-*/trainer_state.json"))
    return json.loads(state_path.read_text())["log_history"][0]


def write_page_data() -> None:
    """The data sets that the page names."""
    questions = Dataset.from_dict(
        {
            "image": [image(number) for number in range(8)],
            "question": [f"what is {number}?" for number in range(8)],
            "answer": [*COLOURS, *COLOURS],
        }
    )
    datasets = {
        "my-data": train_rows(*MESSAGES),
        "my-pairs": train_rows(*PAIR),
        "my-questions": questions,
    }
    for name, dataset in datasets.items():
        Path(name).mkdir()
        dataset.to_parquet(f"{name}/train.parquet")


@pytest.mark.nightly
def test_dpo_and_grpo_by_their_recipes_and_sft_by_trl_s_command(page_folder, checkpoint):
    (page_folder / "examples").symlink_to(ROOT / "examples")
    write_page_data()
    run_command("examples/dpo.yaml")
    first_loss = first_log("my-model-dpo")["loss"]
    assert first_loss == pytest.approx(math.log(2), abs=1e-4)  # 4 digits

    run_command("examples/grpo.py", "--num_generations=4", "--max_completion_length=8")
    first_values = first_log("my-model-grpo")
    assert "rewards/correct/mean" in first_values
    assert "rewards/short/mean" in first_values
    assert first_values["reward_std"] > 0

    for adapter in ("my-model-dpo", "my-model-grpo"):
        merged = f"{adapter}-merged"
        merge_adapter(adapter, merged, base_quantization="none")
        assert changed_modules(merged, checkpoint) == {"projector", "norm", "language"}, adapter

    run_command("trl sft", "--output_dir=sft")
    assert changed_modules("sft", checkpoint) == {"vision", "projector", "norm", "language"}

    assert "normalign merge my-model-dpo --output my-model-merged --base-quantization none" in PAGE
    command = [sys.executable, "-c", blocks("python")[2]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
