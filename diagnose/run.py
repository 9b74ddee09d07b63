# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: measures a model and its baseline on the same images, and writes a folder."""

import json
import math
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from PIL import Image
from rich.console import Group
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from ..checkpoint.files import DYNAMICS, finished_folder
from ..checkpoint.precision import ProductsInBfloat16, emulates_float16, torch_dtype
from ..console import Printed
from .data import Sample, Samples, batches, load_samples
from .figures import draw
from .findings import Finding, findings, verdict
from .load import ModelHandle, resolve_model
from .measure.attention import attention_maps
from .measure.families import tokenizer_ids
from .measure.interface import embedding_table_of, gain_of
from .measure.probe import probe
from .page import write_page
from .report import (
    PAGE,
    REPORT,
    SCHEMA_VERSION,
    Attention,
    Drawing,
    DynamicsStep,
    Report,
    report_json,
)


DIAGNOSTICS = "diagnostics"  # within a checkpoint
DRAWN = r"interface|norms|cosine|rotation|dynamics|(attention|image|baseline_image)_\d+"
WRITTEN = rf"report\.(json|html)|({DRAWN})\.png"
QUESTIONS = 16  # samples on which attention is measured
QUESTIONS_DRAWN = 4  # samples on which it is drawn
PACKAGES = ("normalign-llava", "torch", "transformers", "datasets", "pillow")


@dataclass(frozen=True)
class Diagnosis(Printed):
    """What a model and its baseline show, their reports, and the folder that was written."""

    verdict: list[str]
    findings: list[Finding] = field(repr=False)
    report: Report = field(repr=False)
    against: Report | None = field(repr=False)
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


class DiagnosisKeywords(TypedDict, total=False):
    """The options of [`diagnose`]; `DiagnosisOptions` has their defaults."""

    against: str | None
    data: str | None
    image_folder: str | None
    columns: str | None
    samples: int
    output: str | Path | None
    batch_size: int
    seed: int
    dtype: str
    load_in_4bit: bool
    trust_remote_code: bool
    name: str | None
    against_name: str | None
    base: str | None
    base_quantization: str | None


@dataclass(frozen=True)
class DiagnosisOptions:
    """What is diagnosed, on which data and how; [`diagnose`] explains each option."""

    model: str
    against: str | None = None
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None
    samples: int = 64
    output: str | Path | None = None
    batch_size: int = 8
    seed: int = 0
    dtype: str = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    name: str | None = None
    against_name: str | None = None
    base: str | None = None
    base_quantization: str | None = None

    @property
    def folder(self) -> Path:
        """The folder that the diagnosis is written to."""
        if self.output:
            folder = Path(self.output)
        elif Path(self.model).expanduser().exists():
            folder = Path(self.model, DIAGNOSTICS)
        else:
            folder = Path(DIAGNOSTICS, self.model)
        return folder.expanduser().resolve()


def diagnose(model: str, **keywords: Unpack[DiagnosisKeywords]) -> Diagnosis:
    """Measures `model`, and `against` on the same images, and writes report and figures.

    Args:
        model, against: Folders or Hub ids of the model and its baseline, vision-language models.
        data, samples, seed, image_folder, columns: See [`load_samples`].
        output: Folder to write. By default, `diagnostics` in the model's folder, or
            `diagnostics/ID` for a Hub id. Once the diagnosis is complete, it replaces an earlier
            one in this folder.
        batch_size: Number of images at a time.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize the layers of both decoders: [`four_bits`].
        trust_remote_code: Run a checkpoint's code if transformers does not have its architecture.
        base, base_quantization: For `model`, if it is an adapter; see [`resolve_model`].
        name, against_name: Names in the report. By default, the folders' names or the Hub ids.

    Returns:
        The verdict, the findings and the reports, and the folder that was written.

    Raises:
        ValueError: Models, data or options cannot be used.
        OSError: The folder cannot be written.
    """
    options = DiagnosisOptions(model, **keywords)
    torch_dtype(options.dtype)  # raises an error if no dtype has this name
    handles = _open_models(options)
    names = _names_in_report(options, handles)
    folder = options.folder
    with finished_folder(folder, _written) as staging:
        drawn = load_samples(
            options.data,
            options.samples,
            seed=options.seed,
            image_folder=options.image_folder,
            columns=options.columns,
        )
        measure = partial(
            _measure,
            drawn=drawn,
            batch_size=options.batch_size,
            dtype=options.dtype,
            load_in_4bit=options.load_in_4bit,
        )
        report = measure(handles[0], names[0], staging / "image")
        against = None
        if len(handles) == 2:
            against = measure(handles[1], names[1], staging / "baseline_image")
        drawings = draw(report, against, staging)
        provenance = _provenance(options, handles, drawn.samples[0].question)
        diagnosis = Diagnosis(
            verdict=verdict(report, against),
            findings=findings(report, against),
            report=report,
            against=against,
            folder=folder,
        )
        _write_report(diagnosis, drawings, provenance, staging / REPORT)
        write_page(report, against, drawings, staging, provenance=provenance)
    return diagnosis


def _open_models(options: DiagnosisOptions) -> list[ModelHandle]:
    """Opens the model and, if there is one, its baseline, without their weights.

    Raises ValueError if one of them is not a vision-language model.
    """
    model = resolve_model(
        options.model,
        trust_remote_code=options.trust_remote_code,
        base=options.base,
        base_quantization=options.base_quantization,
    )
    handles = [model]
    if options.against is not None:
        baseline = resolve_model(options.against, trust_remote_code=options.trust_remote_code)
        handles.append(baseline)
    for handle in handles:
        if handle.processor is None:
            raise ValueError(
                f"{handle.name} is a language model, which has no visual tokens. "
                f"`normalign gain {handle.checkpoint.name}` measures its embeddings."
            )
    return handles


def _names_in_report(options: DiagnosisOptions, handles: list[ModelHandle]) -> list[str]:
    """Returns a name for each model. Two models never have the same name."""
    names = [options.name or handles[0].name]
    if len(handles) == 2:
        baseline_name = options.against_name or handles[1].name
        if baseline_name == names[0]:
            baseline_name = f"other {baseline_name}"
        names.append(baseline_name)
    return names


def _provenance(
    options: DiagnosisOptions, handles: list[ModelHandle], first_question: str
) -> dict[str, str]:
    """Returns what the numbers depend on besides the models: options, machine and versions."""
    precision = options.dtype
    if options.load_in_4bit:
        precision = "4-bit, the decoder's layers alone"
    device = "CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    provenance = {
        "samples asked for": str(options.samples),
        "precision asked for": precision,
        "seed of the sample": str(options.seed),
        "batch size": str(options.batch_size),
        "device": device,
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        provenance[package] = version(package)
    for handle in handles:
        if handle.checkpoint.revision:
            provenance[f"revision of {handle.name}"] = handle.checkpoint.revision
    provenance["first question"] = first_question
    return provenance


def _write_report(
    diagnosis: Diagnosis, drawings: list[Drawing], provenance: dict[str, str], file: Path
) -> None:
    """Writes `report.json`; docs/report.md explains its keys."""
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(diagnosis)}
    del content["folder"]
    content["figures"] = [asdict(drawing) for drawing in drawings]
    content["provenance"] = provenance
    file.write_text(report_json(content), encoding="utf-8")


def _measure(
    handle: ModelHandle,
    name: str,
    images: Path,
    *,
    drawn: Samples,
    batch_size: int,
    dtype: str,
    load_in_4bit: bool,
) -> Report:
    """Loads a model and returns its report.

    The images that attention is drawn on are written to files named `images`_1.png and so on.
    """
    processor = handle.processor
    assert processor is not None
    # Read before the weights are loaded, since it may raise an error.
    dynamics = read_dynamics(Path(handle.checkpoint.name, DYNAMICS))
    model = handle.load(dtype=dtype, load_in_4bit=load_in_4bit)
    tokenizer = processor.tokenizer
    batch_count = math.ceil(len(drawn.samples) / batch_size)
    inputs = batches(processor, drawn.samples, batch_size)
    tracked_inputs = track(inputs, "norms and rotation", batch_count)
    casts_products = dtype == "auto" and emulates_float16(model)
    precision: AbstractContextManager = nullcontext()
    if casts_products:
        precision = ProductsInBfloat16()
    with precision:
        report = probe(model, tracked_inputs, tokenizer=tokenizer, name=name, data=drawn.name)
        asked_samples = drawn.samples[:QUESTIONS]
        attention, left_out = _measure_attention(model, processor, asked_samples, images)
    dtype_in_report = report.dtype
    if casts_products:
        dtype_in_report = f"{report.dtype}, products in bfloat16"
    return replace(
        report,
        dtype=dtype_in_report,
        embeddings=embedding_table_of(model, tokenizer, name=name),
        gain=gain_of(model),
        dynamics=dynamics,
        attention=attention,
        left_out=report.left_out + left_out,
    )


def _measure_attention(
    model: PreTrainedModel, processor: ProcessorMixin, samples: list[Sample], images: Path
) -> tuple[list[Attention], list[str]]:
    """Returns attention for each sample until one fails, and a sentence about the failure."""
    special_ids = tokenizer_ids(processor.tokenizer)
    measured: list[Attention] = []
    for number, sample in enumerate(track(samples, "attention"), start=1):
        (inputs,) = batches(processor, [sample], 1)
        try:
            attention = attention_maps(
                model, inputs, question=sample.question, special_ids=special_ids
            )
        except (ValueError, RuntimeError) as error:  # no memory for heads * tokens^2
            reason = str(error).partition("\n")[0]
            return measured, [f"Attention, from question {number} on: {reason}"]
        if number <= QUESTIONS_DRAWN:
            file = images.with_name(f"{images.name}_{number}.png")
            shown_image(processor, inputs, sample.image).save(file)
            attention = replace(attention, image=file.name)
        else:
            attention = replace(attention, maps=[])  # maps are kept only to be drawn
        measured.append(attention)
    return measured, []


def read_dynamics(file: Path) -> list[DynamicsStep]:
    """Returns inter-layer cosines at the steps that training recorded (figure 5)."""
    if not file.is_file():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [DynamicsStep(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        reason = f"{file} is not as training writes it: {error}"
        raise ValueError(f"{reason}. Remove it, or copy it again.") from error


def shown_image(
    processor: ProcessorMixin, inputs: dict[str, Tensor], image: Image.Image
) -> Image.Image:
    """Returns the image as the model received it, cropped and resized.

    Returns `image` if the model inputs do not show this: for several images or tiles, patches
    without their places, or pixels that were not normalized.
    """
    pixels = inputs.get("pixel_values")
    settings = vars(processor.image_processor)
    is_normalized = settings.get("do_rescale") and settings.get("do_normalize")
    if pixels is None or pixels.dim() != 4 or len(pixels) != 1 or not is_normalized:
        return image
    mean = torch.tensor(settings["image_mean"]).view(3, 1, 1)
    std = torch.tensor(settings["image_std"]).view(3, 1, 1)
    colors = pixels[0].float() * std + mean
    levels = (colors * 255).round().clamp(0, 255).byte()
    rows = levels.permute(1, 2, 0)
    return Image.fromarray(rows.numpy())


def _written(folder: Path) -> set[str]:
    """Returns the names of the diagnosis' files in `folder`, none if it has no report."""
    if not (folder / REPORT).is_file():
        return set()
    return {path.name for path in folder.iterdir() if re.fullmatch(WRITTEN, path.name)}
