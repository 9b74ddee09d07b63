# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: measure a model and its baseline on the same images, draw, conclude, write a folder."""

import json
import math
import platform
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Group
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from ..assembly.build import torch_dtype
from ..checkpoint.files import finished_folder
from ..checkpoint.precision import ProductsInBfloat16, emulates_float16
from ..errors import Console, Printed, escaped
from .data import Sample, Samples, batches, load_samples
from .figures import draw
from .findings import Finding, findings, verdict
from .load import ModelHandle, resolve_model
from .measure.attention import attention_maps
from .measure.dynamics import read_dynamics
from .measure.embeddings import embedding_table_of, gain_of
from .measure.positions import tokenizer_ids
from .measure.probe import probe
from .page.write import write_page
from .report import PAGE, REPORT, SCHEMA_VERSION, Attention, Report, report_json


FOLDER = "diagnostics"
"""The folder within a checkpoint that holds its report."""

QUESTIONS, QUESTIONS_DRAWN = 16, 4
"""Attention is measured on the first so many samples, and drawn for the first so many."""


@dataclass(frozen=True)
class Diagnosis(Printed):
    """The reports of a model and its baseline, what they show, and the folder that was written."""

    report: Report = field(repr=False)
    against: Report | None = field(repr=False)
    verdict: list[str]
    findings: list[Finding] = field(repr=False)
    folder: Path

    def summary(self) -> list[str]:
        """The verdict, what was left out, and where the report is."""
        return [*self.verdict, *self.report.left_out, f"Report: {self.folder / PAGE}"]

    def renderable(self) -> Group:
        """The summary, and the paper's claims."""
        claims = Table("the paper", "here", "measured")
        for finding in self.findings:
            claims.add_row(finding.claim, finding.outcome, finding.sentence)
        return Group(*self.summary(), claims)


def diagnose(
    model: str,
    *,
    against: str | None = None,
    data: str | None = None,
    image_folder: str | None = None,
    columns: str | None = None,
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

    Args:
        model, against: Folders or Hub ids of the model and of the baseline, both vision-language models.
        data, samples, seed, image_folder, columns: See [`~normalign_llava.diagnose.data.load_samples`].
        output: Folder to write; by default `diagnostics` in the folder of `model`, or `diagnostics/ID` in the working
            directory for a Hub id. An earlier diagnosis in it is replaced once this one is complete.
        batch_size: Number of images at a time.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize the layers of both decoders: [`~normalign_llava.checkpoint.precision.four_bits`].
        trust_remote_code: Run code that comes with a checkpoint of an architecture that transformers does not have.
        name, against_name: Names in the report; by default the last part of the folder, or the Hub id.

    Raises:
        ValueError: Models, data or options cannot be used.
        OSError: The folder cannot be written.
    """
    torch_dtype(dtype)  # for its error
    handles = [
        resolve_model(source, trust_remote_code=trust_remote_code) for source in (model, against) if source is not None
    ]
    for handle in handles:
        if handle.processor is None:
            raise ValueError(
                f"{handle.name} is a language model, which has no visual tokens. "
                f"`normalign gain {handle.checkpoint.name}` measures its embeddings."
            )
        if load_in_4bit and handle.adapter is None:
            handle.precision(dtype, load_in_4bit)  # for its errors
    names = [name or handles[0].name]
    if against is not None:
        against_name = against_name or handles[1].name
        names.append(f"other {against_name}" if against_name == names[0] else against_name)
    path = Path(model).expanduser()
    beneath = (path if path.is_dir() else path.parent) / FOLDER if path.exists() else Path(FOLDER, model)
    folder = (beneath if output is None else Path(output).expanduser()).resolve()
    with finished_folder(folder, _written) as staging:
        drawn = load_samples(data, samples, seed=seed, image_folder=image_folder, columns=columns)
        measure = partial(
            _measure, drawn=drawn, folder=staging, batch_size=batch_size, dtype=dtype, load_in_4bit=load_in_4bit
        )
        report, *baselines = map(measure, handles, names, ("", "baseline_"))
        baseline = baselines[0] if baselines else None
        drawings = draw(report, baseline, staging)
        provenance = {
            "samples asked for": str(samples),
            "precision asked for": "4-bit, the decoder's layers alone" if load_in_4bit else dtype,
            "seed of the sample": str(seed),
            "batch size": str(batch_size),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "Python": platform.python_version(),
            **{name: version(name) for name in ("normalign-llava", "torch", "transformers", "datasets", "pillow")},
            **{
                f"revision of {handle.name}": handle.checkpoint.revision
                for handle in handles
                if handle.checkpoint.revision
            },
            "first question": drawn.samples[0].question,
        }
        diagnosis = Diagnosis(report, baseline, verdict(report, baseline), findings(report, baseline), folder)
        content = {
            "schema_version": SCHEMA_VERSION,
            "verdict": diagnosis.verdict,
            "findings": [asdict(finding) for finding in diagnosis.findings],
            "report": asdict(report),
            "against": baseline and asdict(baseline),
            "figures": [asdict(drawing) for drawing in drawings],
            "provenance": provenance,
        }
        (staging / REPORT).write_text(report_json(content), encoding="utf-8")
        write_page(report, baseline, drawings, staging, provenance=provenance)
    return diagnosis


def _measure(
    handle: ModelHandle, name: str, prefix: str, *, drawn: Samples, folder: Path, batch_size: int, **loading: Any
) -> Report:
    """The report of one model; the images that attention is drawn on are written into `folder`."""
    source, processor = Path(handle.checkpoint.name), handle.processor
    assert processor is not None
    dynamics = read_dynamics(source)  # before the model is loaded, for its errors
    model = handle.load(**loading)
    inputs = track(
        batches(processor, drawn.samples, batch_size),
        escape(escaped(name)),
        math.ceil(len(drawn.samples) / batch_size),
        console=Console(),
    )
    cast = loading["dtype"] == "auto" and emulates_float16(model)
    with ProductsInBfloat16() if cast else nullcontext():
        report = probe(model, inputs, tokenizer=processor.tokenizer, name=name, data=drawn.name)
        attention, left_out = _attention(model, processor, drawn.samples[:QUESTIONS], folder, prefix)
    return replace(
        report,
        dtype=f"{report.dtype}, products in bfloat16" if cast else report.dtype,
        embeddings=embedding_table_of(model, processor.tokenizer, name=name),
        gain=gain_of(model),
        dynamics=dynamics,
        attention=attention,
        left_out=[*report.left_out, *left_out],
    )


def _attention(
    model: PreTrainedModel, processor: ProcessorMixin, samples: list[Sample], folder: Path, prefix: str
) -> tuple[list[Attention], list[str]]:
    """Attention for each sample, and a sentence if it could not be measured for all."""
    measured: list[Attention] = []
    special = tokenizer_ids(processor.tokenizer)
    for number, sample in enumerate(track(samples, "attention", console=Console()), 1):
        (inputs,) = batches(processor, [sample], 1)
        try:
            answer = attention_maps(model, inputs, question=sample.question, special_ids=special)
        except (ValueError, RuntimeError) as error:  # such as out of memory: a map has heads * tokens^2 numbers
            return measured, [f"Attention, from question {number} on: {str(error).partition(chr(10))[0]}"]
        if number <= QUESTIONS_DRAWN:
            answer = replace(answer, image=f"{prefix}image_{number}.png")
            shown_image(processor, inputs, sample.image).save(folder / str(answer.image))
        measured.append(answer if answer.image else replace(answer, maps=[]))
    return measured, []


def shown_image(processor: ProcessorMixin, inputs: dict[str, Tensor], image: Image.Image) -> Image.Image:
    """The image as the model received it, cropped and resized; `image` itself if that cannot be told.

    It can be told from `pixel_values` of one image, `(1, 3, height, width)`, that the image processor has scaled to 0
    to 1 and normalised by a mean and deviation that it names.
    """
    pixels = inputs.get("pixel_values")
    names = ("image_mean", "image_std", "do_normalize", "do_rescale")
    mean, std, *is_scaled = (getattr(processor.image_processor, name, None) for name in names)
    if pixels is None or pixels.dim() != 4 or len(pixels) != 1 or mean is None or std is None or not all(is_scaled):
        return image
    shown = pixels[0].float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return Image.fromarray((shown * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def _written(folder: Path) -> set[str]:
    """Names of the files of the diagnosis in `folder`; empty if there is none."""
    try:
        content = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        reports = filter(None, (content["report"], content["against"]))
        images = {answer["image"] for report in reports for answer in report["attention"] if answer["image"]}
        return {REPORT, PAGE, *images, *(figure["file"] for figure in content["figures"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
