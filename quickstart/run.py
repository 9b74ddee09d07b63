# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart from start to end: fetch, convert, build, ask, train twice, merge, ask again, reload, report.

Every step leaves a finished artefact that appears whole or not at all, and is skipped where its artefact lies already:
a run that was stopped goes on when it is started again.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoProcessor, set_seed

from ..build import build_checkpoint
from ..folders import finished_folder
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..train.merge import merge_adapter
from .convert import convert_language, convert_vision
from .data import Question, held_out, load_picture, png, prompt, training_data
from .evaluate import evaluate, write_json
from .fetch import cache_dir, fetch
from .parts import PARTS
from .reload import answer_each, answer_elsewhere
from .report import draw_pictures, peak_rss_gib, print_parts, print_results, versions
from .train import bfloat16_pays, rows_of, stage, train_stage


@dataclass(frozen=True)
class Settings:
    """What a quickstart run is made of.

    Attributes:
        image_size: Side of the pictures in pixels; 14 pixels make one visual token.
        feature_layer: Hidden state, or states, of the vision encoder that the projector reads.
        stage1: Options of training projector and norm alone.
        stage2: Options of training adapters on the language model, with projector and norm.
        emoji_count: Number of different emoji to name.
        emoji_share: Share of training rows about emoji.
        per_kind: Held-out easy-VQA questions of each kind; even.
        shown_per_kind: Questions of each kind in the picture, which are also those asked again after reloading.
        seed: Of everything drawn; the order of training rows is the recipes'.
    """

    image_size: int = 56
    feature_layer: int | tuple[int, ...] = -4
    stage1: dict[str, Any] = field(default_factory=lambda: stage("quickstart-align"))
    stage2: dict[str, Any] = field(default_factory=lambda: stage("quickstart-tune"))
    emoji_count: int = 40
    emoji_share: float = 0.25
    per_kind: int = 100
    shown_per_kind: int = 3
    seed: int = 0


def run_quickstart(
    output: Path, settings: Settings | None = None, *, cache: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Builds, trains and evaluates a NormAlign-LLaVA from real parts, in `output`.

    Args:
        output: Folder for everything the run makes; the trained checkpoint is `output/model`.
        settings: The run's settings; the README's figures belong to the defaults.
        cache: Folder of archives and converted parts, `fetch.cache_dir()` by default.
        console: Where tables go.

    Returns:
        What `output/results.json` holds.

    Raises:
        FetchError: An archive could not be fetched.
        ValueError: `output` holds a run with other settings.
    """
    settings, cache, console = settings or Settings(), cache or cache_dir(), console or Console()
    journal = Journal(output, settings)
    for unfinished in output.glob(".*"):  # what a killed run was writing
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
    untrained, model, data = output / "untrained", output / "model", output / "data"
    stage1, stage2 = output / "stage1", output / "stage2"
    seed, bf16 = settings.seed, journal.bf16

    with journal.step("fetch"):
        for part in PARTS:
            fetch(part, cache)
    print_parts(console, PARTS)
    with journal.step("convert"):
        language = convert_language(cache)
        vision = convert_vision(settings.image_size, cache)
    with journal.step("build"):
        build(vision, language, untrained, settings)

    questions = held_out(settings.per_kind, settings.emoji_count, seed, cache)
    with journal.step("evaluate before"):
        before = evaluate_once(untrained, questions, output / "evaluation" / "before.json", bf16)
    write_data(data, settings, cache)
    with journal.step("stage 1"):
        train_stage(settings.stage1, untrained, data / "stage1", stage1, bf16=bf16)
    with journal.step("stage 2"):
        train_stage(settings.stage2, stage1, data / "stage2", stage2, bf16=bf16)
    with journal.step("merge"):
        if not model.exists():
            merge_adapter(stage2, model, base=str(stage1))
    with journal.step("evaluate after"):
        after = evaluate_once(model, questions, output / "evaluation" / "after.json", bf16)

    shown = first_of_each_kind(questions, settings.shown_per_kind)
    draw_pictures([(questions[i], after["answers"][i]) for i in shown], output / "pictures.png")
    with journal.step("reload"):
        here, elsewhere = reload_elsewhere(model, [questions[i] for i in shown], output / "evaluation")

    results = {
        "before": {key: before[key] for key in ("accuracy", "blank")},
        "after": {key: after[key] for key in ("accuracy", "blank")},
        "majority": after["majority"],
        "count": after["count"],
        "reloaded_answers": len(elsewhere),
        "reloaded_answers_identical": here == elsewhere,
        "settings": asdict(settings),
        "bf16": bf16,
        "steps": journal.steps,
        "peak_rss_gib": max(step["peak_rss_gib"] for step in journal.steps.values()),
        "versions": versions(),
    }
    write_json(output / "results.json", results)
    print_results(console, results, output)
    return results


class Journal:
    """What a run in one folder has done so far, kept in `journal.json`.

    Attributes:
        bf16: Whether this run multiplies in bfloat16; decided once, so that a resumed run does as it did before.
        steps: Seconds and peak memory of each finished step; seconds before an interruption do not count.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(self, output: Path, settings: Settings):
        self.path = output / "journal.json"
        wanted = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            changed = sorted(key for key, value in wanted.items() if content["settings"].get(key) != value)
            if changed:
                remedy = "name another output folder, or remove this one"
                raise ValueError(f"{output} holds a run with other settings ({', '.join(changed)}): {remedy}")
            self.bf16, self.steps = content["bf16"], content["steps"]
        else:
            self.bf16, self.steps = bfloat16_pays(), {}
        self.settings = wanted
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times a step. One that was finished by an earlier run keeps the time it took then."""
        start = time.perf_counter()
        yield
        self.steps.setdefault(
            name, {"seconds": round(time.perf_counter() - start, 1), "peak_rss_gib": round(peak_rss_gib(), 2)}
        )
        self.write()

    def write(self) -> None:
        """Writes the file, whole."""
        write_json(self.path, {"settings": self.settings, "bf16": self.bf16, "steps": self.steps})


def build(vision: Path, language: Path, output: Path, settings: Settings) -> None:
    """Assembles the untrained checkpoint, with the aligned norm and its gradient compensation."""
    if output.exists():
        return
    layer = settings.feature_layer if isinstance(settings.feature_layer, int) else list(settings.feature_layer)
    set_seed(settings.seed)  # of the projector's initial weights
    build_checkpoint(str(vision), str(language), output, arm="gwc", feature_layer=layer)


def write_data(output: Path, settings: Settings, cache: Path) -> None:
    """Writes the conversations of both stages, which share none."""
    if output.exists():
        return
    first, second = rows_of(settings.stage1), rows_of(settings.stage2)
    rows = training_data(first + second, settings.emoji_count, settings.emoji_share, settings.seed, cache)
    with finished_folder(output) as folder:
        rows.select(range(first)).save_to_disk(folder / "stage1")
        rows.select(range(first, first + second)).save_to_disk(folder / "stage2")


def evaluate_once(checkpoint: Path, questions: list[Question], output: Path, bf16: bool) -> dict[str, Any]:
    """The evaluation of `checkpoint`, read from `output` if it is there, else done and written."""
    if not output.exists():
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        write_json(output, evaluate(model, AutoProcessor.from_pretrained(checkpoint), questions, bf16=bf16))
    return json.loads(output.read_text(encoding="utf-8"))


def first_of_each_kind(questions: list[Question], count: int) -> list[int]:
    """Positions of the first `count` questions of each kind: none is picked for its answer."""
    kinds: dict[str, list[int]] = {}
    for position, question in enumerate(questions):
        kinds.setdefault(question.kind, []).append(position)
    return [position for positions in kinds.values() for position in positions[:count]]


def reload_elsewhere(checkpoint: Path, questions: list[Question], folder: Path) -> tuple[list[str], list[str]]:
    """Answers given by the installed package, and by the checkpoint's own code in a process without the package."""
    asked = []
    for number, question in enumerate(questions):
        picture = folder.resolve() / "pictures" / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(png(load_picture(question.picture)))
        asked.append(prompt(question.text, str(picture)))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    here = answer_each(model, AutoProcessor.from_pretrained(checkpoint), asked)
    del model
    return here, answer_elsewhere(checkpoint, asked)
