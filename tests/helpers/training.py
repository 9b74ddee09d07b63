"""A tiny checkpoint, tiny data and a trainer on them."""

import io
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tiny_parts as parts
import torch
import yaml
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor
from trl import get_peft_config

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.checkpoint.weights import save_model
from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.train.options import ModelArguments, NormAlignConfig
from normalign_llava.train.settings import RunConfig, complete
from normalign_llava.train.trainer import NormAlignTrainer


GRADIENT_PARTS = ("vision_tower", "projector", "gain", "bias", "language_model")
"""Parts whose gradients the trainer logs."""


def checkpoint(folder: Path, **options) -> Path:
    """A copy of a checkpoint and its parts, made once in a process; `options` are of [`_made`]."""
    shutil.copytree(_made(**options).name, folder, dirs_exist_ok=True)
    return folder / "model"


@cache
def _made(arm="gwc", vision="clip", norm="layer_norm", **kwargs) -> TemporaryDirectory:
    """Its projector is of real scale: at these widths the norm's epsilon would show."""
    temporary_folder = TemporaryDirectory()
    folder = Path(temporary_folder.name)
    encoder = parts.vision(folder / "vision", vision)
    language = parts.language(folder / "language", **kwargs)
    torch.manual_seed(3)
    build_checkpoint(encoder, language, folder / "built", arm=arm, norm=norm)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder / "built")
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        projector.linear_1.weight *= 40.0
        projector.linear_2.weight *= 40.0
    save_model(model, folder / "model")
    AutoProcessor.from_pretrained(folder / "built").save_pretrained(folder / "model")
    shutil.copyfile(folder / "built" / "build.json", folder / "model" / "build.json")
    return temporary_folder


TWO_STEPS = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "bf16": False,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
SHORT = {
    **TWO_STEPS,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}
"""Options of a short float32 run on the CPU."""


def recipe(folder: Path, parts: Path, **options) -> str:
    """A short run from `parts / "model"` on `parts / "data/data.json"` to `folder / "out"`."""
    settings = {
        **TWO_STEPS,
        "sample_count": 0,
        "model_name_or_path": str(parts / "model"),
        "output_dir": str(folder / "out"),
        "dataset_name": str(parts / "data" / "data.json"),
        "stage": "tune",
        "global_batch_size": 4,
        **options,
    }
    recipe_path = folder / "recipe.yaml"
    recipe_path.write_text(yaml.safe_dump(settings))
    return str(recipe_path)


def image(seed: int, size=(16, 16)) -> bytes:
    """A PNG of random colours."""
    noise = random.Random(seed).randbytes(size[0] * size[1] * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", size, noise).save(buffer, format="PNG")
    return buffer.getvalue()


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def row(number: int, images=1, turns=1) -> dict:
    """A conversation about `images` images, all in the first turn; answers differ between rows."""
    messages = []
    length = 4 * images
    addend = number * 7 % 13
    for turn in range(turns):
        shown_images = []
        if turn == 0:
            shown_images = [{"type": "image", "text": None}] * images
        question = f"what is {addend} plus {turn}?"
        answer = f"it is {addend + turn}"
        messages.append({"role": "user", "content": [*shown_images, _text(question)]})
        messages.append({"role": "assistant", "content": [_text(answer)]})
        # A token for each letter, and marks and line breaks.
        length += len("user" + question + "assistant" + answer) + 8

    stored_images = []
    for index in range(images):
        stored_images.append({"path": None, "bytes": image(1000 * number + index)})
    return {
        "images": stored_images,
        "messages": messages,
        "length": length,
        "learned": [True] * turns,
        "source": "tiny",
        "row": number,
        "image_count": images,
    }


def rows(count=16, images=lambda number: 1, turns=lambda number: 1 + number % 2) -> Dataset:
    """Parsed rows; `images` and `turns` give how many of each a row has."""
    parsed_rows = []
    for number in range(count):
        parsed_rows.append(row(number, images(number), turns(number)))
    return Dataset.from_list(parsed_rows, features=FEATURES)


def arguments(folder: Path, **options) -> NormAlignConfig:
    """`SHORT` with changes; evaluation answers no rows, or shortly."""
    defaults = {
        "output_dir": str(folder),
        "seed": 0,
        "sample_count": 0,
        "sample_max_new_tokens": 2,
        **SHORT,
    }
    return NormAlignConfig(**{**defaults, **options})


def settings(folder: Path, **options) -> RunConfig:
    """`arguments` with their values on this machine."""
    return complete(arguments(folder, **options))[0]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """Names of the parameters that are not what they were."""
    moved_names = set()
    for parameter_name, parameter in model.named_parameters():
        if not torch.equal(parameter, before[parameter_name]):
            moved_names.add(parameter_name)
    return moved_names


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same tensors, to the bit."""
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def trainer(
    folder,
    checkpoint,
    dataset=None,
    model=None,
    held_out=None,
    cls=NormAlignTrainer,
    optimizer=None,
    **options,
) -> NormAlignTrainer:
    """A trainer; `options` are of `ModelArguments` and `NormAlignConfig`."""
    model_options = {}
    train_options = {}
    for option_name, value in options.items():
        if option_name in ModelArguments.__dataclass_fields__:
            model_options[option_name] = value
        else:
            train_options[option_name] = value
    model_arguments = ModelArguments(model_name_or_path=str(checkpoint), **model_options)
    train_arguments = arguments(folder, **train_options)
    train_arguments.model_init_kwargs = {"dtype": model_arguments.dtype}
    if dataset is None:
        dataset = rows()
    return cls(
        model or str(checkpoint),
        train_arguments,
        train_dataset=dataset,
        eval_dataset=held_out,
        processing_class=AutoProcessor.from_pretrained(checkpoint),
        optimizer_cls_and_kwargs=optimizer,
        quantization_config=model_arguments.quantization,
        peft_config=get_peft_config(model_arguments),
    )


def adapter(folder: Path, checkpoint: Path) -> None:
    """Trains an adapter of a checkpoint for a step."""
    run = trainer(folder, checkpoint, max_steps=1, use_peft=True)
    run.train()
    run.save_model()
