"""A checkpoint folder with all that a card is made of: real weights and figures, records by hand.

And what a card of it says, as the Hub reads it.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import stored
import tiny_parts as parts
from diagnosed import diagnosed
from huggingface_hub import ModelCard
from json_files import read_json
from markdown_it import MarkdownIt
from PIL import Image

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.diagnose.findings import findings, verdict
from normalign_llava.diagnose.report import SCHEMA_VERSION, Drawing, Gain, Report
from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.hub_cards.card.write import render_card


SECRET = "Who is the person in the image?"
"""A question of the data, which no card may show."""
NO_NORM = diagnosed(model="no-norm")


def bare(root: Path, **kwargs) -> Path:
    """A built checkpoint and nothing more."""
    folder = root / "tiny-normalign"
    language = parts.language(root / "language", **kwargs)
    vision = parts.vision(root / "vision")
    build_checkpoint(vision, language, folder)
    return folder


def full(folder: Path) -> Path:
    """A bare one with licences, data, training, a diagnosis and an evaluation."""
    licensed(folder, "apache-2.0", "apache-2.0")
    dataset = {
        "id": "user/data",
        "revision": "b" * 40,
        "license": "apache-2.0",
        "language": ["en", "de"],
    }
    trained(folder, dataset)
    measured(folder)
    evaluated(folder)
    return folder


def edit(file: Path, **changes) -> None:
    """Sets fields of a JSON file, which may not be there yet."""
    content = {}
    if file.exists():
        content = read_json(file)
    file.write_text(json.dumps({**content, **changes}))


def _license_record(name: str | None) -> dict | None:
    if not name:
        return name
    return {"license": name}


def licensed(folder: Path, of_vision: str | None, of_language: str | None, **changes) -> None:
    """Names the parts as the Hub has them, and their licences."""
    records = {
        "vision": "google/encoder",
        "language": "Qwen/decoder",
        "vision_revision": "c" * 40,
        **changes,
    }
    licenses = {
        "vision": _license_record(of_vision),
        "language": _license_record(of_language),
    }
    edit(folder / "build.json", licenses=licenses, **records)


LEARNING_RATES = {
    "vision tower": 0.0,
    "projector": 1e-3,
    "norm": 2e-3,
    "language model": 0.0,
}


def _modules() -> list[dict]:
    modules = []
    for module_name, learning_rate in LEARNING_RATES.items():
        module = {
            "module": module_name,
            "trained": bool(learning_rate),
            "learning_rate": learning_rate,
        }
        modules.append(module)
    return modules


def trained(folder: Path, dataset: dict | None = None, **changes) -> None:
    """Two stages of training: `training.json` records the second, and in it the first."""
    run = {
        "modules": _modules(),
        "batch": {"rows": 16, "per_device": 4, "processes": 2, "accumulation": 2},
        "steps": 32,
    }
    align_record = {
        "stage": "align",
        "arm": "gwc",
        "config_changes": {"projector_norm": "layer_norm", "projector_gain_init": "text_norm"},
        "options": {"seed": 42, "weight_decay": 0.0, "model_name_or_path": "built"},
        "quantization": None,
        "text_embedding_norm": 3.2,
        "data": [_source("first", 500, 3, 2, dataset)],
        "versions": {"torch": "2.13.0", "normalign_llava": "0.1.0"},
        "run": run,
        "hardware": {"devices": ["NVIDIA H200"], "count": 2, "machine": "x86_64 Linux"},
        "seconds": 5400.0,
        "commit": "d" * 40,
    }
    tune_record = {
        **align_record,
        "stage": "tune",
        "data": [_source("second", 60, 0, 0, dataset)],
        "seconds": 42.0,
        "before": align_record,
        **changes,
    }
    edit(folder / "training.json", **tune_record)


def normed(folder: Path, gain: float, bias: float = 0.0) -> None:
    """Sets every element of the norm's gain, and of its bias."""
    weights = stored.weights(folder)
    weights["model.multi_modal_projector.norm.weight"].fill_(gain)
    weights["model.multi_modal_projector.norm.bias"].fill_(bias)
    stored.store(folder, weights)


DRAWINGS = [
    Drawing("interface.png", "Interface", "A caption.", "interface"),
    Drawing("rotation.png", "Rotation", "A caption.", "depth"),
    Drawing("norms.png", "Norms", "A caption.", "depth"),
    Drawing("attention_1.png", "Attention_1", f"Of {SECRET}", "attention"),
    Drawing("gone.png", "Gone", "A caption.", "depth"),
]
"""Figures of a diagnosis. The last one's file is missing."""


def measured(folder: Path, baseline: Report | None = NO_NORM) -> None:
    """A diagnosis with a baseline, and its figures; one of them shows samples of the data."""
    weights = stored.weights(folder)
    gain_weight = weights["model.multi_modal_projector.norm.weight"]
    gain = Gain(2.2812, gain_weight.abs().mean().item(), 0.0152, 0.0197, 0.8765, 0.4321)
    report = diagnosed(1.02, "layer_norm", folder.name, gain=gain)
    baseline_report = baseline
    if baseline is not None:
        baseline_report = asdict(baseline)
    diagnosis_folder = folder / "diagnostics"
    diagnosis_folder.mkdir(exist_ok=True)
    edit(
        diagnosis_folder / "report.json",
        schema_version=SCHEMA_VERSION,
        verdict=verdict(report, baseline),
        findings=[asdict(finding) for finding in findings(report, baseline)],
        report=asdict(report),
        against=baseline_report,
        figures=[asdict(drawing) for drawing in DRAWINGS],
        provenance={"first question": SECRET},
    )
    for drawing in DRAWINGS:
        if drawing.file != "gone.png":
            Image.new("RGB", (4, 4)).save(diagnosis_folder / drawing.file)


def evaluated(folder: Path, **changes) -> None:
    """An evaluation with a subset."""
    all_questions = Metric(
        "accuracy",
        0.8125,
        0.0175,
        {"blank image": 0.5, "commonest answer": 0.51},
        None,
        500,
    )
    subset = Metric(
        "accuracy",
        0.7,
        0.03,
        {"blank image": 0.4},
        "adversarial",
        250,
    )
    fields = {
        "title": "POPE",
        "protocol": ["Greedy decoding.", "Exact match decides."],
        **changes,
    }
    evaluation = Evaluation(
        "pope",
        metrics=[all_questions, subset],
        samples=500,
        total=500,
        **fields,
    )
    evaluation.write(folder)


def _source(name: str, used: int, bad: int, too_long: int, dataset: dict | None) -> dict:
    source = {
        "source": name,
        "split": "train",
        "found": used + bad + too_long,
        "bad": bad,
        "too_long": too_long,
        "used": used,
    }
    if dataset:
        source["dataset"] = dataset
    return source


def data(card) -> dict:
    """The metadata of a card."""
    return ModelCard(card.text).data.to_dict()


def section(card, title: str) -> str:
    """What stands below a title, up to the next."""
    text_below = card.text.partition(f"## {title}\n")[2]
    return re.split(r"^## ", text_below, flags=re.MULTILINE)[0]


def tokens(text: str) -> list:
    """What the Hub makes of Markdown."""
    parser = MarkdownIt("commonmark", {"html": True})
    parser.enable(["table", "strikethrough"])
    return parser.parse(text)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of every row of the tables in `text`, by the first."""
    by_name = {}
    cells = []
    parsed = tokens(text)
    for before, token in zip(parsed, parsed[1:], strict=False):
        if before.type in ("th_open", "td_open"):
            cells.append(token.content)
        if token.type == "tr_close":
            by_name[cells[0]] = cells[1:]
            cells = []
    return by_name


def listed(text: str) -> list[str]:
    """The items of the lists in `text`."""
    return re.findall("^- (.*)", text, re.MULTILINE)


def metadata_of(folder: Path) -> dict:
    """The metadata of the card that a folder gets."""
    return data(render_card(folder))


def warnings_of(folder: Path) -> str:
    """The warnings about the card that a folder gets."""
    return " ".join(render_card(folder).warnings)


def table_of(folder: Path, title: str) -> dict[str, list[str]]:
    """The rows below a title of the card that a folder gets."""
    return rows(section(render_card(folder), title))


def read_report(folder: Path) -> dict:
    """The report of a folder's diagnosis."""
    return read_json(folder / "diagnostics" / "report.json")
