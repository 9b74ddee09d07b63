# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: measures a model and its baseline on the same images, and writes a folder."""

import json
import math
import platform
import re
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
from ..keywords import takes_fields
from ..models import ModelHandle, ModelOptions, require_processor, resolve_model
from .data import Sample, Samples, batches, load_samples
from .figures import draw
from .findings import Finding, findings, verdict
from .measure.attention import attention_maps
from .measure.families import tokenizer_ids
from .measure.interface import embedding_table_of, gain_of
from .measure.probe import probe
from .page import write_page
from .report import PAGE, REPORT, SCHEMA_VERSION, Attention, DynamicsStep, Report, report_json


DIAGNOSTICS = "diagnostics"  # within a checkpoint
DRAWN = r"interface|norms|cosine|rotation|dynamics|(attention|image|baseline_image)_\d+"
WRITTEN = rf"report\.(json|html)|({DRAWN})\.png"
QUESTIONS = 16  # samples whose attention is measured
QUESTIONS_DRAWN = 4  # samples whose attention is drawn
PACKAGES = ("normalign-llava", "torch", "transformers", "datasets", "pillow")


@dataclass(frozen=True)
class Diagnosis(Printed):
    """The outcome of [`diagnose`].

    Attributes:
        verdict: The main numbers in words.
        findings: The paper's claims, and whether each holds here.
        report: The measurements of the model.
        against: The measurements of its baseline, if there is one.
        folder: The folder that has the report.
    """

    verdict: list[str]
    findings: list[Finding] = field(repr=False)
    report: Report = field(repr=False)
    against: Report | None = field(repr=False)
    folder: Path

    def summary(self) -> list[str]:
        """Returns the verdict, what was left out, and where the report is, a sentence each."""
        return [*self.verdict, *self.report.left_out, f"Report: {self.folder / PAGE}"]

    def renderable(self) -> Group:
        """Returns the summary, and a table of the paper's claims."""
        claims = Table("the paper", "here", "measured")
        for finding in self.findings:
            claims.add_row(finding.claim, finding.outcome, finding.sentence)
        return Group(*self.summary(), claims)


@dataclass(frozen=True)
class DiagnosisOptions(ModelOptions):
    """The arguments of [`diagnose`]. Its docstring explains them."""

    model: str
    _: KW_ONLY
    against: str | None = None
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None
    samples: int = 64
    output: str | Path | None = None
    batch_size: int = 8
    seed: int = 0
    name: str | None = None
    against_name: str | None = None

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


@takes_fields(DiagnosisOptions)
def diagnose(options: DiagnosisOptions) -> Diagnosis:
    """Measures `model`, and `against` on the same images, and writes report and figures.

    Args:
        model, against: Folders or Hub ids of two vision-language models: the model and, if it is to
            be compared, its baseline.
        data, samples, seed, image_folder, columns: See [`load_samples`]. By default, 64 samples.
        output: Folder to write. By default, `diagnostics` in the model's folder, or
            `diagnostics/ID` for a Hub id. Once the diagnosis is complete, it replaces an earlier
            one in this folder.
        batch_size: Number of images at a time.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize the layers of both decoders, see [`four_bits`].
        trust_remote_code: Run a checkpoint's code if transformers does not have its architecture.
        base, base_quantization: The base of `model` if it is an adapter, see [`open_adapter`].
        name, against_name: Names in the report. By default, the folders' names or the Hub ids.

    Raises:
        TypeError: An option does not exist.
        ValueError: Models, data or options cannot be used.
        OSError: A model cannot be fetched, or the folder cannot be written.
        ImportError: A model needs a package that is not installed.
    """
    torch_dtype(options.dtype)  # raises if no dtype has this name
    model = resolve_model(options.model, options)
    handles = [model]
    name = options.name or model.name
    if options.against is not None:
        baseline = resolve_model(
            options.against, replace(options, base=None, base_quantization=None)
        )
        handles.append(baseline)
        baseline_name = options.against_name or baseline.name
        if baseline_name == name:
            baseline_name = f"other {baseline_name}"
    for handle in handles:
        require_processor(handle)
    with finished_folder(options.folder, _written) as staging:
        drawn = load_samples(
            options.data,
            options.samples,
            seed=options.seed,
            image_folder=options.image_folder,
            columns=options.columns,
        )
        report = _measure(model, name, staging / "image", options, drawn)
        against = None
        if options.against is not None:
            against = _measure(baseline, baseline_name, staging / "baseline_image", options, drawn)
        drawings = draw(report, against, staging)
        provenance = _provenance(options, handles)
        provenance["first question"] = drawn.samples[0].question
        diagnosis = Diagnosis(
            verdict=verdict(report, against),
            findings=findings(report, against),
            report=report,
            against=against,
            folder=options.folder,
        )
        content = {
            "schema_version": SCHEMA_VERSION,
            **asdict(diagnosis),
            "figures": [asdict(drawing) for drawing in drawings],
            "provenance": provenance,
        }
        del content["folder"]
        (staging / REPORT).write_text(report_json(content), "utf-8")
        write_page(report, against, drawings, staging, provenance=provenance)
    return diagnosis


def _provenance(options: DiagnosisOptions, handles: list[ModelHandle]) -> dict[str, str]:
    """Returns what the numbers depend on besides the models: options, machine and versions."""
    provenance = {
        "samples asked for": str(options.samples),
        "precision asked for": options.dtype,
        "seed of the sample": str(options.seed),
        "batch size": str(options.batch_size),
        "device": "CPU",
        "Python": platform.python_version(),
    }
    if options.load_in_4bit:
        provenance["precision asked for"] = "4-bit, only the decoder's layers"
    if torch.cuda.is_available():
        provenance["device"] = torch.cuda.get_device_name()
    for package in PACKAGES:
        provenance[package] = version(package)
    for handle in handles:
        if handle.checkpoint.revision:
            provenance[f"revision of {handle.name}"] = handle.checkpoint.revision
    return provenance


def _measure(
    handle: ModelHandle,
    name: str,
    images: Path,
    options: DiagnosisOptions,
    drawn: Samples,
) -> Report:
    """Loads a model, and returns its report.

    Writes the images that attention is drawn on to the files `images`_1.png, `images`_2.png, ...

    Raises ValueError if weights, records of training or samples cannot be used.
    """
    processor = require_processor(handle)
    # Before the weights are loaded, since it may raise.
    dynamics = read_dynamics(Path(handle.checkpoint.name, DYNAMICS))
    model = handle.load()
    tokenizer = processor.tokenizer
    batch_count = math.ceil(len(drawn.samples) / options.batch_size)
    inputs = batches(processor, drawn.samples, options.batch_size)
    tracked_inputs = track(inputs, "norms and rotation", batch_count)
    products_in_report = ""
    with ExitStack() as precision:
        if options.dtype == "auto" and emulates_float16(model):
            precision.enter_context(ProductsInBfloat16())
            products_in_report = ", products in bfloat16"
        report = probe(model, tracked_inputs, tokenizer=tokenizer, name=name, data=drawn.name)
        asked = drawn.samples[:QUESTIONS]
        attention, left_out = _measure_attention(model, processor, asked, images)
    return replace(
        report,
        dtype=report.dtype + products_in_report,
        embeddings=embedding_table_of(model, tokenizer, name=name),
        gain=gain_of(model),
        dynamics=dynamics,
        attention=attention,
        left_out=report.left_out + left_out,
    )


def _measure_attention(
    model: PreTrainedModel, processor: ProcessorMixin, samples: list[Sample], images: Path
) -> tuple[list[Attention], list[str]]:
    """Returns attention for each sample until one fails, and a sentence about the failure.

    Writes the images of the first `QUESTIONS_DRAWN` samples, see [`_measure`].
    """
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
    """Reads the inter-layer cosines that training recorded (figure 5), if there is such a file.

    Each line is an optimizer step, with a cosine for every layer and each modality.

    Raises ValueError if the file has anything else.
    """
    if not file.is_file():
        return []
    steps = []
    try:
        for line in file.read_text("utf-8").splitlines():
            recorded = DynamicsStep(**json.loads(line))
            cosines = (recorded.visual, recorded.text)
            if type(recorded.step) is not int or not all(map(_is_list_of_numbers, cosines)):
                raise TypeError(f"{line[:80]} is not a step with two lists of numbers")
            steps.append(recorded)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is not as training writes it: {error}. Remove it, or copy it again."
        ) from error
    return steps


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) in (int, float) for number in value)


def shown_image(
    processor: ProcessorMixin, inputs: dict[str, Tensor], image: Image.Image
) -> Image.Image:
    """Returns the image as the model received it, cropped and resized.

    Returns `image` itself if this cannot be seen in the model's inputs: they have several images or
    tiles, patches without their places, or pixels that were not normalized.
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
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def _written(folder: Path) -> set[str]:
    """Returns the names of the files of an earlier diagnosis in `folder`, if it has a report."""
    if not (folder / REPORT).is_file():
        return set()
    return {path.name for path in folder.iterdir() if re.fullmatch(WRITTEN, path.name)}
