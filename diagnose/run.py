# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A whole diagnosis: measure a model and its baseline on the same images, draw, conclude, write a folder."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.markup import escape
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from ..assembly.build import torch_dtype
from ..checkpoint.files import replaced_folder
from ..data.questions import Sample
from ..errors import Console, escaped
from .data import Samples, batches, image_batches, load_samples
from .figures.draw import draw
from .findings import findings
from .load import Found, find, load
from .measure.attention import attention_maps
from .measure.dynamics import read_dynamics, read_training_log
from .measure.embeddings import embedding_table_of, probe_language
from .measure.encoder import probe_encoder
from .measure.gain_table import gain_of
from .measure.positions import tokenizer_ids
from .measure.probe import probe
from .page.write import write_page
from .report import PAGE, REPORT, SCHEMA_VERSION, Attention, Report
from .verdict import verdict


FOLDER = "diagnostics"
"""The folder within a checkpoint that holds its report."""

QUESTIONS, QUESTIONS_DRAWN = 16, 4
"""Of how many samples, the first, attention is measured; and of how many it is drawn."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the folder that holds it."""

    report: Report
    against: Report | None
    verdict: list[str]
    folder: Path


def diagnose(
    model: str,
    *,
    against: str | None = None,
    data: str | None = None,
    image_folder: str | None = None,
    samples: int = 64,
    output: str | Path | None = None,
    batch_size: int = 8,
    seed: int = 0,
    dtype: str = "auto",
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    name: str | None = None,
    against_name: str | None = None,
) -> Diagnosis:
    """Measures `model`, and `against` on the same images, and writes `report.json`, `report.html` and the figures.

    A vision-language model is measured whole. Of a vision encoder alone, the norms it gives are measured; of a
    language model alone, its embedding matrix; the report says what was left out. `against` may be a language model:
    then the embedding matrices are compared, as of a base and its descendant (tables 6 to 8).

    Args:
        model: Folder or Hub id.
        against: Of the baseline.
        data: Where images and questions come from: see [`~normalign_llava.diagnose.data.load_samples`].
        image_folder: Folder that image paths in the data start from; by default that of the data.
        samples: How many.
        output: Folder to write; by default `diagnostics` in the folder of `model`, or for a Hub id
            `diagnostics/ID` here. What an earlier diagnosis wrote there is replaced when this one is complete.
        batch_size: How many images at a time.
        seed: Decides which samples are drawn.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize both to 4 bits with bitsandbytes.
        trust_remote_code: Run model code that comes with a checkpoint, where transformers has none for it.
        name: What to call the model in the report; by default the last part of its folder, or the Hub id.
        against_name: The same for the baseline.

    Raises:
        ValueError: Models, data or options cannot be used; before anything is measured, where it can be known by then.
        OSError: The folder cannot be written.
    """
    torch_dtype(dtype)  # for its error
    if batch_size < 1:
        raise ValueError(f"The batch size is {batch_size}; it must be at least 1.")
    found = [find(each, trust_remote_code=trust_remote_code) for each in (model, against) if each is not None]
    if load_in_4bit and find_spec("bitsandbytes") is None:
        raise ModuleNotFoundError("Quantizing to 4 bits takes bitsandbytes, which is not installed")
    if data is not None and all(each.kind == "language model" for each in found):
        raise ValueError(f"Of {found[0].name}, a language model alone, no images are shown. Leave {data!r} out.")
    if load_in_4bit and (alone := [each.name for each in found if each.kind == "vision encoder"]):
        raise ValueError(f"{', '.join(alone)} has no language model to quantize. Leave --load-in-4bit out.")
    folder = _folder(model, output)
    names = _names(found, name, against_name)
    with replaced_folder(folder, _written) as staging:
        seen = _Seen(staging, batch_size, seed, dtype, load_in_4bit)
        drawn = None
        if any(each.kind != "language model" for each in found):
            drawn = load_samples(data, samples, seed=seed, image_folder=image_folder)
        reports = [
            seen.report(each, called, drawn, prefix)
            for each, called, prefix in zip(found, names, ("", "baseline_"), strict=False)
        ]
        report, baseline = reports[0], reports[1] if against is not None else None
        drawings = draw(report, baseline, staging)
        provenance = seen.provenance(samples) | _revisions(found)
        if drawn is not None:
            provenance["first question"] = drawn.samples[0].question
        conclusion = verdict(report, baseline)
        content = {
            "schema_version": SCHEMA_VERSION,
            "verdict": conclusion,
            "findings": [asdict(each) for each in findings(report, baseline)],
            "report": report.to_dict(),
            "against": baseline and baseline.to_dict(),
            "figures": [asdict(drawing) for drawing in drawings],
            "provenance": provenance,
        }
        (staging / REPORT).write_text(_json(content), encoding="utf-8")
        write_page(report, baseline, drawings, staging, provenance=provenance)
    return Diagnosis(report, baseline, conclusion, folder)


@dataclass(frozen=True)
class _Seen:
    """How both models are measured."""

    folder: Path
    batch_size: int
    seed: int
    dtype: str
    load_in_4bit: bool

    def report(self, found: Found, name: str, drawn: Samples | None, prefix: str) -> Report:
        if found.kind == "language model" or drawn is None:
            report = probe_language(found.source)
            return replace(report, model=name, embeddings=report.embeddings and replace(report.embeddings, model=name))
        trained = Path(found.source)
        dynamics, training = (read_dynamics(trained), read_training_log(trained)) if trained.is_dir() else ([], {})
        model = load(found, dtype=self.dtype, load_in_4bit=self.load_in_4bit)
        total = math.ceil(len(drawn.samples) / self.batch_size)
        if found.image_processor is not None:
            made = image_batches(found.image_processor, drawn.samples, self.batch_size)
            return probe_encoder(
                model, track(made, escape(escaped(name)), total=total, console=Console()), name=name, data=drawn.name
            )
        processor = found.processor
        assert processor is not None
        made = batches(processor, drawn.samples, self.batch_size)
        report = probe(
            model,
            track(made, escape(escaped(name)), total=total, console=Console()),
            tokenizer=processor.tokenizer,
            name=name,
            data=drawn.name,
        )
        attention, left_out = self._attention(model, processor, drawn.samples[:QUESTIONS], prefix)
        return replace(
            report,
            embeddings=embedding_table_of(model, processor.tokenizer, name=name),
            gain=gain_of(model),
            dynamics=dynamics,
            training=training,
            attention=attention,
            left_out=[*report.left_out, *left_out],
        )

    def _attention(
        self, model: PreTrainedModel, processor: ProcessorMixin, samples: list[Sample], prefix: str
    ) -> tuple[list[Attention], list[str]]:
        measured: list[Attention] = []
        special = tokenizer_ids(processor.tokenizer)
        for number, sample in enumerate(track(samples, "attention", console=Console()), 1):
            (inputs,) = batches(processor, [sample], 1)
            try:
                found = attention_maps(model, inputs, question=sample.question, special_ids=special)
            except (ValueError, RuntimeError) as error:  # out of memory, for one: maps take heads * tokens^2 numbers
                return measured, [f"Attention, from question {number} on: {str(error).partition(chr(10))[0]}"]
            if number > QUESTIONS_DRAWN:
                measured.append(replace(found, maps=[]))
                continue
            file = f"{prefix}image_{number}.png"
            shown_image(processor, inputs, sample.image).save(self.folder / file)
            measured.append(replace(found, image=file))
        return measured, []

    def provenance(self, samples: int) -> dict[str, str]:
        packages = ("normalign-llava", "torch", "transformers", "datasets", "pillow")
        return {
            "samples asked for": str(samples),
            "precision asked for": "4-bit" if self.load_in_4bit else self.dtype,
            "seed of the sample": str(self.seed),
            "batch size": str(self.batch_size),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "Python": platform.python_version(),
            **{package: version(package) for package in packages},
        }


def _revisions(found: list[Found]) -> dict[str, str]:
    """Commits of what came from the Hub."""
    commits = {each.name: getattr(each.config, "_commit_hash", None) for each in found}
    return {f"revision of {name}": commit for name, commit in commits.items() if commit}


def shown_image(processor: ProcessorMixin, inputs: dict[str, Tensor], image: Image.Image) -> Image.Image:
    """The image as the model was shown it, cropped and resized; `image` itself where that cannot be told.

    It can be where `pixel_values` are one image, `(1, 3, height, width)`, which the image processor has scaled to
    0 to 1 and normalised by a mean and deviation that it names.
    """
    pixels = inputs.get("pixel_values")
    names = ("image_mean", "image_std", "do_normalize", "do_rescale")
    mean, std, *done = (getattr(processor.image_processor, name, None) for name in names)
    if pixels is None or pixels.dim() != 4 or len(pixels) != 1 or mean is None or std is None or not all(done):
        return image
    shown = pixels[0].float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return Image.fromarray((shown * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def _folder(model: str, output: str | Path | None) -> Path:
    if output is not None:
        return Path(output).expanduser().resolve()
    path = Path(model).expanduser()
    if path.exists():
        return (path if path.is_dir() else path.parent).resolve() / FOLDER
    return Path(FOLDER).resolve() / model


def _written(folder: Path) -> set[str]:
    """Files of the diagnosis in `folder`; none if there is none."""
    try:
        content = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        asked = [each for report in (content["report"], content["against"]) if report for each in report["attention"]]
        return {
            REPORT,
            PAGE,
            *(each["image"] for each in asked if each["image"]),
            *(each["file"] for each in content["figures"]),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _names(found: list[Found], *given: str | None) -> list[str]:
    names = [name or each.name for each, name in zip(found, given, strict=False)]
    if len(set(names)) == len(names):
        return names
    longer = [name or _longer_name(each) for each, name in zip(found, given, strict=False)]
    return longer if len(set(longer)) == len(longer) else [names[0], f"{names[1]} (baseline)"]


def _longer_name(found: Found) -> str:
    """With the folder above, such as baseline/model; not with a home, which is called after a person."""
    path = Path(found.source).resolve()
    nameless = (Path(os.path.expanduser("~")).resolve(), Path(path.anchor))
    return f"{path.parent.name}/{found.name}" if path.exists() and path.parent not in nameless else found.name


def _json(content: dict[str, Any]) -> str:
    """A line for each key: attention maps, a number to a line, would fill thousands."""
    lines = (
        f"{json.dumps(key)}: {json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)}"
        for key, value in content.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
