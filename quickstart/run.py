# SPDX-License-Identifier: Apache-2.0
"""The quickstart, which resumes: a step is skipped if its result, written atomically, exists."""

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
from ..fetched.convert import convert_language, convert_vision
from ..fetched.easy_vqa import QUESTION_KINDS, SYSTEM, Question, held_out, load_image, prompt
from ..fetched.fetch import ARCHIVES, fetch
from ..hub_cards.card.write import write_card
from ..hub_cards.push.clean_process import ask_clean_process, difference, first_logits
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..train.keeping.checkpoints import only_run
from .results import ask_held_out, diagnose_once, draw_images, print_results, read_report
from .train import rows_of, stage, train_stage, write_data


JOURNAL = "journal.json"  # settings, precision and seconds of finished steps, to resume with
IMAGE_SIZE = 56  # pixels, 14 of which make one visual token


@dataclass(frozen=True)
class Settings:
    """Settings of a quickstart run; tests take smaller ones."""

    stage1: dict[str, Any]  # options of the two recipes
    stage2: dict[str, Any]
    seed: int = 0  # of the data and the projector; the recipes have seeds of their own
    asked: int | None = None  # held-out questions of each task; None for all, 300 and 48
    asked_before: int = 12  # of the untrained model
    shown_per_kind: int = 3  # questions in the image, asked after reloading
    diagnosed: int = 64  # held-out images

    @classmethod
    def seeded(cls, seed: int) -> "Settings":
        """The quickstart's settings with one seed for data, projector and both recipes."""
        return cls(stage("quickstart-align", seed=seed), stage("quickstart-tune", seed=seed), seed)


def run_quickstart(
    output: Path, settings: Settings, *, full_baseline: bool = False
) -> dict[str, Any]:
    """Builds, trains, evaluates and diagnoses a NormAlign-LLaVA from real parts, in `output`.

    The trained checkpoint is `output/model`. With `full_baseline`, or where an earlier run trained
    it, the same model without the norm is built, trained and evaluated as well, and both are
    compared, after stage 1 and finished. Returns what `output/results.json` holds.
    """
    names = {path.name for path in output.iterdir()} - {LOCK} if output.exists() else set()
    if names and "settings" not in (json_or_none(output / JOURNAL) or {}):
        raise ValueError(f"{output} holds {min(names)}, which no quickstart wrote. Choose another.")
    if torch.cuda.device_count() > 1:
        raise ValueError("The quickstart trains on one GPU: set CUDA_VISIBLE_DEVICES=0.")
    with only_run(output):
        return _run_quickstart(output, settings, full_baseline)


def _run_quickstart(output: Path, settings: Settings, full_baseline: bool) -> dict[str, Any]:
    console, file = Console(), output / JOURNAL
    wanted = json.loads(json.dumps(asdict(settings)))  # as it will be read back
    state = json_or_none(file) or {"settings": wanted, "bf16": half_precision_pays(), "seconds": {}}
    if keys := [key for key, value in wanted.items() if state["settings"].get(key) != value]:
        remedy = "name another output folder, or remove this one"
        raise ValueError(f"{output} holds a run with other settings ({', '.join(keys)}): {remedy}")
    write_json(file, state)
    logging.disable_progress_bar()  # these parts load in a second
    disable_progress_bars()
    bf16, data, baseline = state["bf16"], output / "data", output / "baseline"
    full_baseline = full_baseline or (baseline / "model").exists()

    @contextmanager
    def step(name: str) -> Iterator[None]:
        """Announces and times a step. One that an earlier run has finished keeps its time."""
        before = ", finished before" if name in state["seconds"] else ""
        console.rule(f"[bold]{name}[/]{before}", align="left")
        start = time.perf_counter()
        yield
        state["seconds"].setdefault(name, round(time.perf_counter() - start, 1))
        write_json(file, state)

    with step("fetch"):
        for archive in ARCHIVES:
            console.print(f"{archive.name} {archive.version}, {archive.licence}: {archive.about}")
            fetch(archive)
    with step("convert"):
        parts = str(convert_vision(IMAGE_SIZE)), str(convert_language())
        write_data(data, rows_of(settings.stage1), rows_of(settings.stage2), settings.seed)

    def trained(folder: Path, arm: str, prefix: str = "") -> Path:
        """Builds, trains and merges in a folder, with the norm (arm "gwc") or without ("none")."""
        untrained, model = folder / "untrained", folder / "model"
        stage1, stage2 = folder / "stage1", folder / "stage2"
        with step(f"{prefix}build"):
            if not untrained.exists():
                build_checkpoint(*parts, untrained, arm=arm, feature_layer=-4, seed=settings.seed)
        with step(f"{prefix}stage 1"):
            train_stage(settings.stage1, untrained, data / "stage1", stage1, bf16=bf16)
        with step(f"{prefix}stage 2"):
            train_stage(settings.stage2, stage1, data / "stage2", stage2, bf16=bf16)
        with step(f"{prefix}merge"):
            if not model.exists():
                merge_adapter(stage2, model, base=str(stage1))
        return model

    model = trained(output, "gwc")
    with step("evaluate before"):
        before = ask_held_out(output / "untrained", settings.asked_before, bf16)
    with step("evaluate after"):
        after = ask_held_out(model, settings.asked, bf16)
    with step("reload"):
        count, kinds = settings.shown_per_kind, len(QUESTION_KINDS) + 1  # and emoji, at the end
        questions = held_out(count)[: count * kinds]
        answers, elsewhere_differs = reload(model, questions)
        draw_images(list(zip(questions, answers, strict=True)), output / "images.png")
    plain, of_baseline = None, None
    if full_baseline:
        plain = trained(baseline, "none", "baseline, ")
        with step("evaluate baseline"):
            of_baseline = ask_held_out(plain, settings.asked, bf16)
    with step("diagnose"):
        samples = settings.diagnosed
        pages = [diagnose_once(model, plain, samples)]
        if full_baseline:
            pages.append(diagnose_once(output / "stage1", baseline / "stage1", samples, "-stage1"))
    folders = [page.parent.parent for page in pages]
    results = {
        "before": {key: before[key] for key in ("accuracy", "blank", "count")},
        "after": {key: after[key] for key in ("accuracy", "blank")},
        "baseline": of_baseline and {key: of_baseline[key] for key in ("accuracy", "blank")},
        "majority": after["majority"],
        "count": after["count"],
        "reloaded_alike": elsewhere_differs is None,
        "verdicts": {folder.name: read_report(folder)["verdict"] for folder in folders},
        "settings": asdict(settings),
        "bf16": bf16,
        "seconds": state["seconds"],
    }
    write_card(model)
    write_json(output / "results.json", results)
    print_results(console, results, output, pages)
    console.print(f"Ask it: {command_to_ask(model, questions[0])}", markup=False, soft_wrap=True)
    return results


def command_to_ask(model: Path, question: Question) -> str:
    """The command that asks a question of the quickstart as it was trained to be asked."""
    words = ["normalign", "ask", str(model), str(question.image), question.text]
    return shlex.join([*words, "--system", SYSTEM])


def reload(checkpoint: Path, questions: list[Question]) -> tuple[list[str], str | None]:
    """Answers by this package, and how a process that has the checkpoint's own code differs."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor, answers = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False), []
    chat = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        for question in questions:
            messages = prompt(question.text, load_image(question.image))
            inputs = processor.apply_chat_template(messages, **chat)
            tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0]
            tokens = tokens[inputs["input_ids"].shape[1] :]
            answers.append(processor.decode(tokens, skip_special_tokens=True).strip())
        logits = first_logits(model, processor)
    return answers, difference(logits, ask_clean_process(checkpoint))
