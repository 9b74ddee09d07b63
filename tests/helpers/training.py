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


def checkpoint(folder: Path, **options) -> Path:
    """A copy of a checkpoint and its parts, made once in a process; `options` are of [`_made`]."""
    shutil.copytree(_made(**options).name, folder, dirs_exist_ok=True)
    return folder / "model"


@cache
def _made(arm="gwc", vision="clip", norm="layer_norm", **kwargs) -> TemporaryDirectory:
    """Its projector is of real scale: at these widths the norm's epsilon would show."""
    made = TemporaryDirectory()
    folder = Path(made.name)
    encoder = parts.vision(folder / "vision", vision)
    language = parts.language(folder / "language", **kwargs)
    torch.manual_seed(3)
    build_checkpoint(encoder, language, folder / "built", arm=arm, norm=norm)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder / "built")
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight *= 40.0
        model.model.multi_modal_projector.linear_2.weight *= 40.0
    save_model(model, folder / "model")
    AutoProcessor.from_pretrained(folder / "built").save_pretrained(folder / "model")
    (folder / "model" / "build.json").write_bytes((folder / "built" / "build.json").read_bytes())
    return made


TWO_STEPS = dict(per_device_train_batch_size=2, max_steps=2, learning_rate=1e-3, bf16=False)
TWO_STEPS |= dict(logging_steps=1, report_to="none", disable_tqdm=True)
SHORT = dict(**TWO_STEPS, use_cpu=True, gradient_checkpointing=False, save_strategy="no")
"""Options of a short float32 run on the CPU."""


def recipe(folder: Path, parts: Path, **options) -> str:
    """A short run from `parts / "model"` on `parts / "data/data.json"` to `folder / "out"`."""
    paths = dict(model_name_or_path=str(parts / "model"), output_dir=str(folder / "out"))
    data = dict(dataset_name=str(parts / "data" / "data.json"), stage="tune", global_batch_size=4)
    options = {**TWO_STEPS, "sample_count": 0, **paths, **data, **options}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(options))
    return str(file)


def image(seed: int, size=(16, 16)) -> bytes:
    """A PNG of random colours."""
    noise = random.Random(seed).randbytes(size[0] * size[1] * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", size, noise).save(buffer, format="PNG")
    return buffer.getvalue()


def row(number: int, images=1, turns=1) -> dict:
    """A conversation about `images` images, all in the first turn; answers differ between rows."""
    messages = []
    length = 4 * images
    for turn in range(turns):
        shown = [{"type": "image", "text": None}] * images if turn == 0 else []
        addend = number * 7 % 13
        question = f"what is {addend} plus {turn}?"
        answer = f"it is {addend + turn}"
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        length += len("user" + question + "assistant" + answer) + 8  # letters, marks, line breaks
    stored = [{"path": None, "bytes": image(1000 * number + i)} for i in range(images)]
    about = {"learned": [True] * turns, "source": "tiny", "row": number, "image_count": images}
    return {"images": stored, "messages": messages, "length": length, **about}


def rows(count=16, images=lambda number: 1, turns=lambda number: 1 + number % 2) -> Dataset:
    """Parsed rows; `images` and `turns` give how many of each a row has."""
    made = [row(number, images(number), turns(number)) for number in range(count)]
    return Dataset.from_list(made, features=FEATURES)


def arguments(folder: Path, **options) -> NormAlignConfig:
    """`SHORT` with changes; evaluation answers no rows, or shortly."""
    answers = {"sample_count": 0, "sample_max_new_tokens": 2}
    own = {"output_dir": str(folder), "seed": 0, **answers, **SHORT}
    return NormAlignConfig(**{**own, **options})


def settings(folder: Path, **options) -> RunConfig:
    """`arguments` with their values on this machine."""
    return complete(arguments(folder, **options))[0]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """Names of the parameters that are not what they were."""
    return {name for name, new in model.named_parameters() if not torch.equal(new, before[name])}


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
    names = options.keys() & ModelArguments.__dataclass_fields__
    of_model = {name: options.pop(name) for name in names}
    model_args = ModelArguments(model_name_or_path=str(checkpoint), **of_model)
    args = arguments(folder, **options)
    args.model_init_kwargs = {"dtype": model_args.dtype}
    return cls(
        model or str(checkpoint),
        args,
        train_dataset=rows() if dataset is None else dataset,
        eval_dataset=held_out,
        processing_class=AutoProcessor.from_pretrained(checkpoint),
        optimizer_cls_and_kwargs=optimizer,
        quantization_config=model_args.quantization,
        peft_config=get_peft_config(model_args),
    )
