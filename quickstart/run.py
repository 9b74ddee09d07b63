# SPDX-License-Identifier: Apache-2.0
"""The quickstart. It resumes: a step is skipped if its result exists, written atomically."""

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from rich.console import Console
from transformers import AutoProcessor
from transformers.utils import logging

from ..assembly.build import build_checkpoint
from ..assembly.merge import merge_adapter
from ..checkpoint.files import LOCK, json_or_none, write_json
from ..checkpoint.precision import half_precision_pays
from ..evaluation.answering import answers
from ..fetched.convert import convert_language, convert_vision
from ..fetched.easy_vqa import QUESTION_KINDS, SYSTEM, Question, held_out, load_image, prompt
from ..fetched.fetch import ARCHIVES, fetch
from ..hub_cards.card.write import write_card
from ..hub_cards.push.clean_process import ask_clean_process, difference, first_logits
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..train.keeping.checkpoints import only_run
from .results import ask_held_out, diagnose_once, print_results, read_report, write_answers_image
from .train import rows_of, stage, train_stage, write_stage_data


JOURNAL = "journal.json"  # settings, precision and seconds of finished steps, to resume with
IMAGE_SIZE = 56  # side in pixels; a visual token is 14 by 14


@dataclass(frozen=True)
class Settings:
    """Settings of a quickstart run. Tests take smaller ones."""

    stage1: dict[str, Any]  # options of the two recipes
    stage2: dict[str, Any]
    seed: int = 0  # of the data and the projector; the recipes have seeds of their own
    asked: int | None = None  # held-out questions of each task; None for all, 300 and 48
    asked_before: int = 12  # of each task, for the untrained model
    shown_per_kind: int = 3  # questions in the image, asked after reloading
    diagnosed: int = 64  # held-out images

    @classmethod
    def seeded(cls, seed: int) -> "Settings":
        """Returns the quickstart's settings, with one seed for data, projector and both recipes."""
        return cls(
            stage1=stage("quickstart-align", seed=seed),
            stage2=stage("quickstart-tune", seed=seed),
            seed=seed,
        )


class Journal:
    """The file of a run that it resumes from: its settings, its precision and its finished steps.

    Attributes:
        bf16: Whether matrices are multiplied in bfloat16.
        seconds: The time of each finished step.
        console: Where steps are announced.
    """

    def __init__(self, output: Path, settings: Settings):
        """Opens the journal of a run, or begins one.

        Raises:
            ValueError: The run in `output` has other settings.
        """
        self.file = output / JOURNAL
        self.console = Console()
        current_settings = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        state = json_or_none(self.file)
        if not state:
            state = {"settings": current_settings, "bf16": half_precision_pays(), "seconds": {}}
        kept_settings = state["settings"]
        changed = [
            name for name in current_settings if kept_settings.get(name) != current_settings[name]
        ]
        if changed:
            raise ValueError(
                f"{output} holds a run with other settings ({', '.join(changed)}): name another "
                "output folder, or remove this one"
            )
        self.bf16: bool = state["bf16"]
        self.seconds: dict[str, float] = state["seconds"]
        self.state = state
        write_json(self.file, state)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announces and times a step. A step that an earlier run has finished keeps its time."""
        step_title = f"[bold]{name}[/]"
        if name in self.seconds:
            step_title += ", finished before"
        self.console.rule(step_title, align="left")
        start_time = time.perf_counter()
        yield
        self.seconds.setdefault(name, round(time.perf_counter() - start_time, 1))
        write_json(self.file, self.state)


@dataclass(frozen=True)
class Materials:
    """Folders of the two parts that a model is built from, and of the data of both stages."""

    vision: str
    language: str
    data: Path


def run_quickstart(
    output: Path, settings: Settings, *, full_baseline: bool = False
) -> dict[str, Any]:
    """Builds, trains, evaluates and diagnoses a NormAlign-LLaVA from real parts.

    Args:
        output: Folder of the run. The trained checkpoint is in `model`.
        settings: The settings of the run. It is resumed only with the same ones.
        full_baseline: Also build, train and evaluate the same model without the norm, and compare
            both after stage 1 and at the end. A baseline that an earlier run has trained is always
            compared.

    Returns:
        The content of `results.json` in the folder.

    Raises:
        ValueError: The folder holds something else, or a run with other settings, or several GPUs
            are visible.
        FetchError: An archive cannot be fetched.
    """
    names = {path.name for path in output.glob("*")} - {LOCK}
    if names and "settings" not in (json_or_none(output / JOURNAL) or {}):
        raise ValueError(f"{output} holds {min(names)}, not from a quickstart. Choose another.")
    if torch.cuda.device_count() > 1:
        raise ValueError("The quickstart trains on one GPU: set CUDA_VISIBLE_DEVICES=0.")
    with only_run(output):
        return _run_quickstart(output, settings, full_baseline)


def _run_quickstart(output: Path, settings: Settings, full_baseline: bool) -> dict[str, Any]:
    """Runs the steps of [`run_quickstart`] that are not finished, and returns all results."""
    journal = Journal(output, settings)
    console = journal.console
    logging.disable_progress_bar()  # these parts load in a second
    disable_progress_bars()
    with journal.step("fetch"):
        for archive in ARCHIVES:
            console.print(f"{archive.name} {archive.version}, {archive.licence}: {archive.about}")
            fetch(archive)
    with journal.step("convert"):
        vision_folder = str(convert_vision(IMAGE_SIZE))
        materials = Materials(vision_folder, str(convert_language()), output / "data")
        write_stage_data(
            materials.data, rows_of(settings.stage1), rows_of(settings.stage2), settings.seed
        )
    trained_checkpoint = _train_model(output, "gwc", materials, settings, journal)
    with journal.step("evaluate before"):
        scores_before = ask_held_out(output / "untrained", settings.asked_before, journal.bf16)
    with journal.step("evaluate after"):
        scores_after = ask_held_out(trained_checkpoint, settings.asked, journal.bf16)
    with journal.step("reload"):
        shown_count = settings.shown_per_kind * (len(QUESTION_KINDS) + 1)  # emoji come last
        questions = held_out(settings.shown_per_kind)[:shown_count]
        shown_answers, deviation = reload(trained_checkpoint, questions)
        write_answers_image(list(zip(questions, shown_answers, strict=True)), output / "images.png")
    baseline_folder = output / "baseline"
    baseline_checkpoint = None
    baseline_scores = None
    if full_baseline or (baseline_folder / "model").exists():
        baseline_checkpoint = _train_model(baseline_folder, "none", materials, settings, journal)
        with journal.step("evaluate baseline"):
            scores = ask_held_out(baseline_checkpoint, settings.asked, journal.bf16)
        baseline_scores = _chosen(scores, "accuracy", "blank")
    with journal.step("diagnose"):
        samples = settings.diagnosed
        report_pages = [diagnose_once(trained_checkpoint, baseline_checkpoint, samples)]
        if baseline_checkpoint is not None:
            aligned = output / "stage1"
            aligned_baseline = baseline_folder / "stage1"
            report_pages.append(diagnose_once(aligned, aligned_baseline, samples, "-stage1"))
    verdicts = {}
    for report_page in report_pages:
        checkpoint = report_page.parent.parent
        verdicts[checkpoint.name] = read_report(checkpoint)["verdict"]
    results = {
        "before": _chosen(scores_before, "accuracy", "blank", "count"),
        "after": _chosen(scores_after, "accuracy", "blank"),
        "baseline": baseline_scores,
        "majority": scores_after["majority"],
        "count": scores_after["count"],
        "reloaded_alike": deviation is None,
        "verdicts": verdicts,
        "settings": asdict(settings),
        "bf16": journal.bf16,
        "seconds": journal.seconds,
    }
    write_card(trained_checkpoint)
    write_json(output / "results.json", results)
    print_results(console, results, output, report_pages)
    console.print(
        f"Ask it: {command_to_ask(trained_checkpoint, questions[0])}", markup=False, soft_wrap=True
    )
    return results


def _train_model(
    folder: Path, arm: str, materials: Materials, settings: Settings, journal: Journal
) -> Path:
    """Builds, trains and merges a model, and returns its folder.

    Args:
        folder: Where the model and what precedes it are written.
        arm: "gwc" for a model with the norm, "none" for the baseline without it.
        materials: What the model is made from.
        settings: The settings of the run.
        journal: The journal of the run, for the steps.
    """
    step_prefix = "baseline, " if arm == "none" else ""
    untrained_folder = folder / "untrained"
    stage1_folder = folder / "stage1"
    stage2_folder = folder / "stage2"
    model_folder = folder / "model"
    bf16 = journal.bf16
    with journal.step(f"{step_prefix}build"):
        if not untrained_folder.exists():
            build_checkpoint(
                materials.vision,
                materials.language,
                untrained_folder,
                arm=arm,
                feature_layer=-4,
                seed=settings.seed,
            )
    with journal.step(f"{step_prefix}stage 1"):
        train_stage(
            settings.stage1, untrained_folder, materials.data / "stage1", stage1_folder, bf16=bf16
        )
    with journal.step(f"{step_prefix}stage 2"):
        train_stage(
            settings.stage2, stage1_folder, materials.data / "stage2", stage2_folder, bf16=bf16
        )
    with journal.step(f"{step_prefix}merge"):
        if not model_folder.exists():
            merge_adapter(stage2_folder, model_folder, base=str(stage1_folder))
    return model_folder


def _chosen(scores: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: scores[name] for name in names}


def command_to_ask(model: Path, question: Question) -> str:
    """Returns the command that asks a question as in training."""
    words = ["normalign", "ask", str(model), str(question.image), question.text]
    return shlex.join([*words, "--system", SYSTEM])


def reload(checkpoint: Path, questions: list[Question]) -> tuple[list[str], str | None]:
    """Loads a checkpoint in this package, and again with its own code in a clean process.

    Returns:
        The answers of the first model, and how the logits of the second one differ, or None.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    question_answers = []
    with torch.inference_mode():
        for question in questions:
            messages = prompt(question.text, load_image(question.image))
            question_answers += answers(model, processor, [messages], max_new_tokens=16)
        logits = first_logits(model, processor)
    return question_answers, difference(logits, ask_clean_process(checkpoint))
