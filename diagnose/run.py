# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: measures a model and its baseline on the same images, and writes a folder."""

import json
import math
import platform
import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Group
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import ProcessorMixin

from ..assembly.build import torch_dtype
from ..checkpoint.files import DYNAMICS, finished_folder
from ..checkpoint.precision import ProductsInBfloat16, emulates_float16
from ..errors import Printed
from .data import Samples, batches, load_samples
from .figures import draw
from .findings import Finding, findings, verdict
from .load import ModelHandle, resolve_model
from .measure.attention import attention_maps
from .measure.families import tokenizer_ids
from .measure.interface import embedding_table_of, gain_of
from .measure.probe import probe
from .page import write_page
from .report import PAGE, REPORT, SCHEMA_VERSION, Attention, DynamicsStep, Report, report_json


DIAGNOSTICS = "diagnostics"  # within a checkpoint
DRAWN = r"interface|norms|cosine|rotation|dynamics|(attention|image|baseline_image)_\d+"
WRITTEN = rf"report\.(json|html)|({DRAWN})\.png"
QUESTIONS, QUESTIONS_DRAWN = 16, 4  # samples on which attention is measured, and is drawn


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
    base: str | None = None,
    base_quantization: str | None = None,
) -> Diagnosis:
    """Measures `model`, and `against` on the same images, and writes report and figures.

    Args:
        model, against: Folders or Hub ids of the model and its baseline, vision-language models.
        data, samples, seed, image_folder, columns: See [`load_samples`].
        output: Folder to write; by default `diagnostics` in the model's folder, or of a Hub id
            `diagnostics/ID`. An earlier diagnosis in it is replaced once this one is complete.
        batch_size: Number of images at a time.
        dtype: "float32", "bfloat16", "float16", or "auto", the checkpoint's own.
        load_in_4bit: Quantize the layers of both decoders: [`four_bits`].
        trust_remote_code: Run a checkpoint's code if transformers does not have its architecture.
        base, base_quantization: Of `model`, if it is an adapter; see [`resolve_model`].
        name, against_name: Names in the report; by default those of the folders, or the Hub ids.

    Raises:
        ValueError: Models, data or options cannot be used.
        OSError: The folder cannot be written.
    """
    torch_dtype(dtype)  # for its error
    resolve = partial(resolve_model, trust_remote_code=trust_remote_code)
    handles = [resolve(model, base=base, base_quantization=base_quantization)]
    if against is not None:
        handles.append(resolve(against))
    for handle in handles:
        if handle.processor is None:
            raise ValueError(
                f"{handle.name} is a language model, which has no visual tokens. "
                f"`normalign gain {handle.checkpoint.name}` measures its embeddings."
            )
    names = [own or handle.name for own, handle in zip((name, against_name), handles, strict=False)]
    if names[1:] == names[:1]:
        names[1] = f"other {names[1]}"
    path = Path(model).expanduser()
    default = path / DIAGNOSTICS if path.exists() else Path(DIAGNOSTICS, model)
    folder = Path(output or default).expanduser().resolve()
    with finished_folder(folder, _written) as staging:
        drawn = load_samples(data, samples, seed=seed, image_folder=image_folder, columns=columns)
        loading: dict[str, Any] = {"dtype": dtype, "load_in_4bit": load_in_4bit}
        measure = partial(_measure, drawn=drawn, batch_size=batch_size, **loading)
        images = staging / "image", staging / "baseline_image"
        report, *baselines = map(measure, handles, names, images)
        reports = report, next(iter(baselines), None)
        drawings = draw(*reports, staging)
        revisions = {f"revision of {handle.name}": handle.checkpoint.revision for handle in handles}
        packages = ("normalign-llava", "torch", "transformers", "datasets", "pillow")
        provenance = {
            "samples asked for": str(samples),
            "precision asked for": "4-bit, the decoder's layers alone" if load_in_4bit else dtype,
            "seed of the sample": str(seed),
            "batch size": str(batch_size),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "Python": platform.python_version(),
            **{name: version(name) for name in packages},
            **{key: revision for key, revision in revisions.items() if revision},
            "first question": drawn.samples[0].question,
        }
        diagnosis = Diagnosis(verdict(*reports), findings(*reports), *reports, folder)
        content = {"schema_version": SCHEMA_VERSION, **asdict(diagnosis)}
        content |= {"figures": list(map(asdict, drawings)), "provenance": provenance}
        del content["folder"]
        (staging / REPORT).write_text(report_json(content), encoding="utf-8")
        write_page(*reports, drawings, staging, provenance=provenance)
    return diagnosis


def _measure(
    handle: ModelHandle, name: str, images: Path, *, drawn: Samples, batch_size: int, **loading: Any
) -> Report:
    """The report of one model; `images`, with _1.png and so on, are files to draw attention on."""
    processor = handle.processor
    assert processor is not None
    dynamics = read_dynamics(Path(handle.checkpoint.name, DYNAMICS))  # first, for its errors
    model = handle.load(**loading)
    count = math.ceil(len(drawn.samples) / batch_size)
    inputs = track(batches(processor, drawn.samples, batch_size), "norms and rotation", count)
    cast = loading["dtype"] == "auto" and emulates_float16(model)
    attention: list[Attention] = []
    special = tokenizer_ids(processor.tokenizer)
    with ProductsInBfloat16() if cast else nullcontext():
        report = probe(model, inputs, tokenizer=processor.tokenizer, name=name, data=drawn.name)
        for number, sample in enumerate(track(drawn.samples[:QUESTIONS], "attention"), 1):
            (asked,) = batches(processor, [sample], 1)
            try:
                answer = attention_maps(model, asked, question=sample.question, special_ids=special)
            except (ValueError, RuntimeError) as error:  # no memory for heads * tokens^2
                reason = str(error).partition("\n")[0]
                report.left_out.append(f"Attention, from question {number} on: {reason}")
                break
            if number <= QUESTIONS_DRAWN:
                file = images.with_name(f"{images.name}_{number}.png")
                shown_image(processor, asked, sample.image).save(file)
                answer = replace(answer, image=file.name)
            attention.append(answer if answer.image else replace(answer, maps=[]))
    if cast:
        report = replace(report, dtype=f"{report.dtype}, products in bfloat16")
    rows, gain = embedding_table_of(model, processor.tokenizer, name=name), gain_of(model)
    return replace(report, embeddings=rows, gain=gain, dynamics=dynamics, attention=attention)


def read_dynamics(file: Path) -> list[DynamicsStep]:
    """Inter-layer cosines at the steps that training recorded (figure 5)."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [DynamicsStep(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        reason = f"{file} is not as training writes it: {error}"
        raise ValueError(f"{reason}. Remove it, or copy it again.") from error


def shown_image(
    processor: ProcessorMixin, inputs: dict[str, Tensor], image: Image.Image
) -> Image.Image:
    """The image as the model received it, cropped and resized; `image` if that cannot be told."""
    pixels, settings = inputs.get("pixel_values"), vars(processor.image_processor)
    is_scaled = settings.get("do_rescale") and settings.get("do_normalize")
    if pixels is None or pixels.dim() != 4 or len(pixels) != 1 or not is_scaled:
        return image
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    colors = pixels[0].float() * std + mean
    return Image.fromarray((colors * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def _written(folder: Path) -> set[str]:
    """Names of the files of the diagnosis in `folder`; empty if there is none."""
    paths = folder.iterdir() if (folder / REPORT).is_file() else ()
    return {path.name for path in paths if re.fullmatch(WRITTEN, path.name)}
