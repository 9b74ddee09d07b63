# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart: fetch, convert, build, train twice, merge, evaluate, reload, diagnose.

Every step writes its result atomically and is skipped if the result exists, so that a stopped run is resumed by
starting it again.
"""

import json
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
from ..checkpoint.files import finished_folder, json_or_none, write_json
from ..checkpoint.lock import LOCK
from ..checkpoint.precision import half_precision_pays
from ..fetched.convert import convert_language, convert_vision
from ..fetched.easy_vqa import KINDS, Question, held_out, load_image, prompt, training_data
from ..fetched.fetch import ARCHIVES, fetch
from ..hub_cards.card.write import write_card
from ..hub_cards.push.clean_process import ask_clean_process, difference, first_logits
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..train.keeping.checkpoints import only_run
from .display import draw_images, print_results
from .evaluate import BASELINE, EMOJI, OURS, ask_held_out, diagnose_once, read_report
from .train import check_stage, rows_of, stage, train_stage


JOURNAL = "journal.json"
IMAGE_SIZE = 56  # pixels, 14 of which make one visual token
FEATURE_LAYER = -4
"""Hidden state of the vision encoder that the projector reads."""


@dataclass(frozen=True)
class Settings:
    """Settings of a quickstart run.

    Attributes:
        stage1, stage2: Options of the two recipes.
        seed: Seed of the data and the projector; the recipes have seeds of their own.
        asked: Held-out questions about easy-VQA's images, and about emoji; all, 300 and 12, without a limit.
        asked_before: Number of those that the untrained model is asked.
        shown_per_kind: Questions of each kind in the image, which are also those asked again after reloading.
        diagnosed: Held-out images for the diagnosis.
    """

    stage1: dict[str, Any]
    stage2: dict[str, Any]
    seed: int = 0
    asked: int | None = None
    asked_before: int = 12
    shown_per_kind: int = 3
    diagnosed: int = 64

    @classmethod
    def seeded(cls, seed: int) -> "Settings":
        """The quickstart's settings with one seed for everything: data, projector, and both recipes."""
        return cls(stage("quickstart-align", seed=seed), stage("quickstart-tune", seed=seed), seed)


class Journal:
    """Settings and finished steps of a run, kept in its folder's `JOURNAL`, so that it resumes as it began.

    Attributes:
        bf16: Whether this run multiplies in bfloat16; decided once.
        seconds: Seconds of each finished step, without those before an interruption.
    """

    def __init__(self, output: Path, settings: Settings, console: Console):
        self.path, self.console = output / JOURNAL, console
        self.settings = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        earlier = json_or_none(self.path) or {"settings": self.settings}
        changed = [key for key, value in self.settings.items() if earlier["settings"].get(key) != value]
        if changed:
            remedy = "name another output folder, or remove this one"
            raise ValueError(f"{output} holds a run with other settings ({', '.join(changed)}): {remedy}")
        self.bf16 = earlier["bf16"] if "bf16" in earlier else half_precision_pays()
        self.seconds: dict[str, float] = earlier.get("seconds", {})
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announces and times a step. One that an earlier run has finished keeps its time."""
        self.console.rule(f"[bold]{name}[/]{', finished before' if name in self.seconds else ''}", align="left")
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, round(time.perf_counter() - start, 1))
        self.write()

    def write(self) -> None:
        write_json(self.path, {"settings": self.settings, "bf16": self.bf16, "seconds": self.seconds})


def run_quickstart(output: Path, settings: Settings, *, full_baseline: bool = False) -> dict[str, Any]:
    """Builds, trains, evaluates and diagnoses a NormAlign-LLaVA from real parts, in `output`.

    The trained checkpoint is `output/model`. With `full_baseline`, or where an earlier run trained it, the same model
    without the norm is built, trained and evaluated as well, and both are compared, after stage 1 and finished.

    Returns:
        What `output/results.json` holds.

    Raises:
        FetchError: An archive could not be fetched.
        ValueError: `output` holds a run with other settings or anything else, another run is writing there, or this
            process sees several GPUs.
    """
    names = {path.name for path in output.iterdir()} - {LOCK} if output.exists() else set()
    if names and "settings" not in (json_or_none(output / JOURNAL) or {}):
        raise ValueError(f"{output} holds {min(names)}, which no quickstart wrote there. Choose a new folder.")
    check_stage(settings.stage1)
    check_stage(settings.stage2)
    with only_run(output):
        return _run_quickstart(output, settings, full_baseline)


def _run_quickstart(output: Path, settings: Settings, full_baseline: bool) -> dict[str, Any]:
    console = Console()
    journal = Journal(output, settings, console)
    logging.disable_progress_bar()  # these parts load in a second
    disable_progress_bars()
    bf16, data, baseline = journal.bf16, output / "data", output / "baseline"
    full_baseline = full_baseline or (baseline / "model").exists()

    with journal.step("fetch"):
        for archive in ARCHIVES:
            console.print(f"{archive.name} {archive.version}, {archive.licence}: {archive.about}")
            fetch(archive)
    with journal.step("convert"):
        parts = str(convert_vision(IMAGE_SIZE)), str(convert_language())
        write_data(data, rows_of(settings.stage1), rows_of(settings.stage2), settings.seed)

    def trained(folder: Path, arm: str, prefix: str = "") -> Path:
        """Builds, trains and merges in a folder: arm "gwc" has the norm and its compensation, "none" no norm."""
        untrained, stage1, stage2, model = (folder / name for name in ("untrained", "stage1", "stage2", "model"))
        with journal.step(f"{prefix}build"):
            if not untrained.exists():
                build_checkpoint(*parts, untrained, arm=arm, feature_layer=FEATURE_LAYER, seed=settings.seed)
        with journal.step(f"{prefix}stage 1"):
            train_stage(settings.stage1, untrained, data / "stage1", stage1, bf16=bf16)
        with journal.step(f"{prefix}stage 2"):
            train_stage(settings.stage2, stage1, data / "stage2", stage2, bf16=bf16)
        with journal.step(f"{prefix}merge"):
            if not model.exists():
                merge_adapter(stage2, model, base=str(stage1))
        return model

    model = trained(output, "gwc")
    with journal.step("evaluate before"):
        before = ask_held_out(output / "untrained", limit=settings.asked_before, bf16=bf16)
    with journal.step("evaluate after"):
        after = ask_held_out(model, limit=settings.asked, bf16=bf16)
    with journal.step("reload"):
        questions = held_out(100)
        of_kinds = [[question for question in questions if question.kind == kind] for kind in (*KINDS, EMOJI)]
        shown = [question for of_kind in of_kinds for question in of_kind[: settings.shown_per_kind]]
        here, elsewhere_differs = reload(model, shown)
        draw_images(list(zip(shown, here, strict=True)), output / "images.png")
    plain, of_baseline = None, None
    if full_baseline:
        plain = trained(baseline, "none", "baseline, ")
        with journal.step("evaluate baseline"):
            of_baseline = ask_held_out(plain, limit=settings.asked, bf16=bf16)
    with journal.step("diagnose"):
        pages = [diagnose_once(model, OURS, plain, BASELINE, settings.diagnosed)]
        if full_baseline:
            stages, names = (output / "stage1", baseline / "stage1"), (f"{OURS}-stage1", f"{BASELINE}-stage1")
            pages.append(diagnose_once(stages[0], names[0], stages[1], names[1], settings.diagnosed))

    results = {
        "before": {key: before[key] for key in ("accuracy", "blank", "count")},
        "after": {key: after[key] for key in ("accuracy", "blank")},
        "baseline": of_baseline and {key: of_baseline[key] for key in ("accuracy", "blank")},
        "majority": after["majority"],
        "count": after["count"],
        "reloaded_alike": elsewhere_differs is None,
        "verdicts": {page.parent.parent.name: read_report(page.parent.parent)["verdict"] for page in pages},
        "settings": asdict(settings),
        "bf16": bf16,
        "seconds": journal.seconds,
    }
    write_card(model)
    write_json(output / "results.json", results)
    print_results(console, results, output, pages)
    return results


def write_data(output: Path, first: int, second: int, seed: int) -> None:
    """Writes so many conversations for each of both stages, which have none in common."""
    if output.exists():
        return
    rows = training_data(first + second, seed=seed)
    with finished_folder(output) as folder:
        rows.select(range(first)).save_to_disk(folder / "stage1")
        rows.select(range(first, first + second)).save_to_disk(folder / "stage2")


def reload(checkpoint: Path, questions: list[Question]) -> tuple[list[str], str | None]:
    """Answers by the installed package; and a sentence if the checkpoint's own code, in a process without the package,
    computes something else."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor, answers = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False), []
    with torch.inference_mode():
        for question in questions:
            inputs = processor.apply_chat_template(
                prompt(question.text, load_image(question.image)),
                add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            )  # fmt: skip
            tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            answers.append(processor.decode(tokens, skip_special_tokens=True).strip())
        logits = first_logits(model, processor)
    return answers, difference(logits, ask_clean_process(checkpoint))
