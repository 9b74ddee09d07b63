# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: measure a model and its baseline on the same images, draw, conclude, write a folder."""

import json
import math
import platform
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
from ..checkpoint.files import replaced_folder
from ..data.rows.questions import Sample
from ..errors import Console, Printed, escaped
from .data import Samples, batches, image_batches, load_samples
from .figures import draw
from .findings import findings, verdict
from .load import ModelHandle, resolve_model
from .measure.attention import attention_maps
from .measure.dynamics import read_dynamics, read_training_log
from .measure.embeddings import embedding_table_of, gain_of, probe_language
from .measure.encoder import probe_encoder
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
    """The reports of a model and its baseline, the verdict, and the folder that was written."""

    report: Report = field(repr=False)
    against: Report | None = field(repr=False)
    verdict: list[str]
    folder: Path

    def renderable(self) -> Group:
        """The verdict, what was left out, and the paper's claims."""
        claims = Table("the paper", "here", "measured")
        for finding in findings(self.report, self.against):
            claims.add_row(finding.claim, finding.outcome, finding.sentence)
        sentences = [*self.verdict, *self.report.left_out, f"Report: {self.folder / PAGE}"]
        return Group(*sentences, claims)


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

    Of a vision encoder alone, the norms of its output are measured; of a language model alone, its embedding matrix;
    the report says what was left out. `against` may be a language model: then the embedding matrices are compared, as
    of a base and its descendant (tables 6 to 8).

    Args:
        model, against: Folders or Hub ids of the model and of the baseline.
        data, samples, seed, image_folder, columns: See [`~normalign_llava.diagnose.data.load_samples`].
        output: Folder to write; by default `diagnostics` in the folder of `model`, or `diagnostics/ID` in the working
            directory for a Hub id. An earlier diagnosis in it is replaced once this one is complete.
        batch_size: How many images at a time.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize the layers of both decoders: [`~normalign_llava.checkpoint.precision.four_bits`].
        trust_remote_code: Run code that comes with a checkpoint of an architecture that transformers does not have.
        name, against_name: Names in the report; by default the last part of the folder, or the Hub id.

    Raises:
        ValueError: Models, data or options cannot be used.
        OSError: The folder cannot be written.
    """
    torch_dtype(dtype)  # for its error
    sources = (model,) if against is None else (model, against)
    handles = [resolve_model(source, trust_remote_code=trust_remote_code) for source in sources]
    for handle in handles if load_in_4bit else ():
        if handle.kind != "language model" and handle.adapter is None:
            handle.precision(dtype, load_in_4bit)  # for its errors
    of_text = all(handle.kind == "language model" for handle in handles)
    if data is not None and of_text:
        raise ValueError(f"{handles[0].name} is a language model alone, which takes no images. Leave {data!r} out.")
    path = Path(model).expanduser()
    beneath = (path if path.is_dir() else path.parent) / FOLDER if path.exists() else Path(FOLDER, model)
    folder = (beneath if output is None else Path(output).expanduser()).resolve()
    with replaced_folder(folder, _written) as staging:
        drawn = None
        if not of_text:
            drawn = load_samples(data, samples, seed=seed, image_folder=image_folder, columns=columns)
        measure = partial(_measure, drawn=drawn, folder=staging, batch_size=batch_size)
        names, prefixes = _names(handles, name, against_name), ("", "baseline_")
        measured = [
            measure(handle, title, prefix=prefix, dtype=dtype, load_in_4bit=load_in_4bit)
            for handle, title, prefix in zip(handles, names, prefixes, strict=False)
        ]
        report, baseline = measured[0], measured[1] if against is not None else None
        drawings = draw(report, baseline, staging)
        provenance = {
            "samples asked for": str(samples),
            "precision asked for": "4-bit, the decoder's layers alone" if load_in_4bit else dtype,
            "seed of the sample": str(seed),
            "batch size": str(batch_size),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "Python": platform.python_version(),
            **{name: version(name) for name in ("normalign-llava", "torch", "transformers", "datasets", "pillow")},
        }
        for handle in handles:
            if commit := getattr(handle.config, "_commit_hash", None):
                provenance[f"revision of {handle.name}"] = commit
        if drawn is not None:
            provenance["first question"] = drawn.samples[0].question
        conclusion = verdict(report, baseline)
        content = {
            "schema_version": SCHEMA_VERSION,
            "verdict": conclusion,
            "findings": [asdict(finding) for finding in findings(report, baseline)],
            "report": asdict(report),
            "against": baseline and asdict(baseline),
            "figures": [asdict(drawing) for drawing in drawings],
            "provenance": provenance,
        }
        (staging / REPORT).write_text(report_json(content), encoding="utf-8")
        write_page(report, baseline, drawings, staging, provenance=provenance)
    return Diagnosis(report, baseline, conclusion, folder)


def _measure(
    handle: ModelHandle,
    name: str,
    *,
    drawn: Samples | None,
    folder: Path,
    prefix: str,
    batch_size: int,
    **loading: Any,
) -> Report:
    """The report of one model; the images that attention is drawn on are written into `folder`."""
    if handle.kind == "language model" or drawn is None:
        return probe_language(handle.source, name=name, config=handle.config, revision=handle.revision)
    checkpoint = Path(handle.source)
    dynamics, training = read_dynamics(checkpoint), read_training_log(checkpoint)  # both for their errors, too
    model = handle.load(**loading)
    total = math.ceil(len(drawn.samples) / batch_size)
    progress = partial(track, description=escape(escaped(name)), total=total, console=Console())
    if handle.image_processor is not None:
        inputs = image_batches(handle.image_processor, drawn.samples, batch_size)
        return probe_encoder(model, progress(inputs), name=name, data=drawn.name)
    processor = handle.processor
    assert processor is not None
    inputs = batches(processor, drawn.samples, batch_size)
    report = probe(model, progress(inputs), tokenizer=processor.tokenizer, name=name, data=drawn.name)
    table, gain = embedding_table_of(model, processor.tokenizer, name=name), gain_of(model)
    report = replace(report, embeddings=table, gain=gain, dynamics=dynamics, training=training)
    attention, left_out = _attention(model, processor, drawn.samples[:QUESTIONS], folder, prefix)
    return replace(report, attention=attention, left_out=[*report.left_out, *left_out])


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


def _names(handles: list[ModelHandle], *names: str | None) -> list[str]:
    """The given names, or those of the models; told apart by the folder above, or "(baseline)", if they are equal."""
    for name_of in (lambda handle: handle.name, _longer_name):
        titles = [name or name_of(handle) for handle, name in zip(handles, names, strict=False)]
        if len(set(titles)) == len(titles):
            return titles
    return [titles[0], f"{titles[1]} (baseline)"]


def _longer_name(handle: ModelHandle) -> str:
    """The name with the folder above, as baseline/model, unless that is the home folder, which names a person."""
    path = Path(handle.source).resolve()
    above = path.parent.name
    is_named = path.exists() and above and path.parent != Path.home().resolve()
    return f"{above}/{handle.name}" if is_named else handle.name
