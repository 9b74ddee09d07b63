# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart: fetch, convert, build, evaluate, train twice, merge, evaluate, reload, diagnose.

Every step writes its result atomically and is skipped if the result exists, so that a stopped run is resumed by
starting it again.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from rich.console import Console
from transformers import AutoProcessor
from transformers.utils import logging

from ..assembly.build import build_checkpoint
from ..assembly.merge import merge_adapter
from ..checkpoint.files import finished_folder, json_or_none, remove_unfinished, write_json
from ..checkpoint.lock import LOCK
from ..fetched.archives import ARCHIVES
from ..fetched.convert import convert_language, convert_vision
from ..fetched.easy_vqa import Question, held_out, load_image, prompt, training_data
from ..fetched.fetch import fetch
from ..hub_cards.card.write import write_card
from ..hub_cards.push.clean_process import ask_clean_process, difference, first_logits
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..train.keeping.checkpoints import only_run
from .display import draw_images, peak_rss_gib, print_results
from .evaluate import BASELINE, OURS, ask_held_out, diagnose_once, read_report
from .journal import JOURNAL, Journal
from .train import check_stage, rows_of, stage, train_stage


RECIPES = {"stage1": "quickstart-align", "stage2": "quickstart-tune"}


@dataclass(frozen=True)
class Settings:
    """Settings of a quickstart run.

    Attributes:
        image_size: Side of the images in pixels; 14 pixels make one visual token.
        feature_layer: Hidden state, or states, of the vision encoder that the projector reads.
        stage1, stage2: Options of the two recipes.
        emoji_share: Share of training rows that ask for the name of an emoji.
        asked: Held-out questions about easy-VQA's images, and about emoji; all, 300 and 12, without a limit.
        asked_before: Number of those that the untrained model is asked.
        shown_per_kind: Questions of each kind in the image, which are also those asked again after reloading.
        diagnosed: Held-out images for the diagnosis.
        seed: Seed of the data and the projector; the recipes have seeds of their own.
    """

    image_size: int = 56
    feature_layer: int | tuple[int, ...] = -4
    stage1: dict[str, Any] = field(default_factory=lambda: stage(RECIPES["stage1"]))
    stage2: dict[str, Any] = field(default_factory=lambda: stage(RECIPES["stage2"]))
    emoji_share: float = 0.30
    asked: int | None = None
    asked_before: int = 12
    shown_per_kind: int = 3
    diagnosed: int = 64
    seed: int = 0

    @classmethod
    def seeded(cls, seed: int) -> "Settings":
        """The quickstart's settings with one seed for everything: data, projector, and both recipes."""
        stages: dict[str, Any] = {name: stage(recipe, seed=seed) for name, recipe in RECIPES.items()}
        return cls(**stages, seed=seed)


def run_quickstart(
    output: Path,
    settings: Settings | None = None,
    *,
    full_baseline: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
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
    settings = settings or Settings()
    check_output(output)
    check_stage(settings.stage1)
    check_stage(settings.stage2)
    with only_run(output):
        return _run_quickstart(output, settings, full_baseline, console or Console())


def check_output(output: Path) -> None:
    """Raises ValueError if `output` holds anything but an earlier run."""
    names = {path.name for path in output.iterdir()} - {LOCK} if output.exists() else set()
    if names and "settings" not in (json_or_none(output / JOURNAL) or {}):
        raise ValueError(f"{output} holds {min(names)}, which no quickstart wrote there. Choose a new folder.")


def _run_quickstart(output: Path, settings: Settings, full_baseline: bool, console: Console) -> dict[str, Any]:
    journal = Journal(output, settings, console)
    logging.disable_progress_bar()  # these parts load in a second
    disable_progress_bars()
    untrained, model, data = output / "untrained", output / "model", output / "data"
    stage1, stage2, baseline = output / "stage1", output / "stage2", output / "baseline"
    for folder in (untrained, model, data, stage1, stage2):
        remove_unfinished(folder)
        remove_unfinished(baseline / folder.name)
    bf16 = journal.bf16
    full_baseline = full_baseline or (baseline / "model").exists()

    with journal.step("fetch"):
        for archive in ARCHIVES:
            console.print(f"{archive.name} {archive.version}, {archive.licence}: {archive.about}")
            fetch(archive)
    with journal.step("convert"):
        language = convert_language()
        vision = convert_vision(settings.image_size)
    with journal.step("build"):
        build(vision, language, untrained, settings, arm="gwc")

    with journal.step("evaluate before"):
        before = ask_held_out(untrained, limit=settings.asked_before, bf16=bf16)
    write_data(data, settings)
    with journal.step("stage 1"):
        train_stage(settings.stage1, untrained, data / "stage1", stage1, bf16=bf16)
    with journal.step("stage 2"):
        train_stage(settings.stage2, stage1, data / "stage2", stage2, bf16=bf16)
    with journal.step("merge"):
        if not model.exists():
            merge_adapter(stage2, model, base=str(stage1))
    with journal.step("evaluate after"):
        after = ask_held_out(model, limit=settings.asked, bf16=bf16)
    with journal.step("reload"):
        questions = held_out(100)
        kinds = dict.fromkeys(question.kind for question in questions)
        of_kinds = [[question for question in questions if question.kind == kind] for kind in kinds]
        shown = [question for of_kind in of_kinds for question in of_kind[: settings.shown_per_kind]]
        here, elsewhere_differs = reload(model, shown)
        draw_images(list(zip(shown, here, strict=True)), output / "images.png")

    of_baseline, plain = None, None
    if full_baseline:
        plain, untrained, plain_stage1 = (baseline / name for name in ("model", "untrained", "stage1"))
        build(vision, language, untrained, settings, arm="none")
        with journal.step("baseline, stage 1"):
            train_stage(settings.stage1, untrained, data / "stage1", plain_stage1, bf16=bf16)
        with journal.step("baseline, stage 2"):
            train_stage(settings.stage2, plain_stage1, data / "stage2", baseline / "stage2", bf16=bf16)
        if not plain.exists():
            merge_adapter(baseline / "stage2", plain, base=str(plain_stage1))
        with journal.step("evaluate baseline"):
            of_baseline = ask_held_out(plain, limit=settings.asked, bf16=bf16)
    with journal.step("diagnose"):
        pages = [diagnose_once(model, OURS, plain, BASELINE, settings.diagnosed)]
        if full_baseline:
            name, plain_name = f"{OURS}-stage1", f"{BASELINE}-stage1"
            pages.append(diagnose_once(stage1, name, plain_stage1, plain_name, settings.diagnosed))

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
        "peak_rss_gib": round(peak_rss_gib(), 2),
    }
    write_card(model)
    write_json(output / "results.json", results)
    print_results(console, results, output, pages)
    return results


def build(vision: Path, language: Path, output: Path, settings: Settings, *, arm: str) -> None:
    """Builds an untrained checkpoint: arm "gwc" has the norm and its gradient compensation, "none" no norm."""
    if output.exists():
        return
    layer, seed = settings.feature_layer, settings.seed
    build_checkpoint(str(vision), str(language), output, arm=arm, feature_layer=layer, seed=seed)


def write_data(output: Path, settings: Settings) -> None:
    """Writes the conversations of both stages, which have none in common."""
    if output.exists():
        return
    first, second = rows_of(settings.stage1), rows_of(settings.stage2)
    rows = training_data(first + second, settings.emoji_share, settings.seed)
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
