"""The quickstart's parts, each by itself: what is printed and drawn, and what is done only once."""

import json
import shlex
import shutil
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import stored
import torch
from datasets import Dataset, load_from_disk
from matplotlib.figure import Figure
from paths import DOCS
from PIL import Image
from rich.console import Console
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.files import LOCK
from normalign_llava.fetched.easy_vqa import OVERALL, QUESTION_KINDS, SYSTEM, Question
from normalign_llava.fetched.fetch import ARCHIVES
from normalign_llava.hub_cards.push.clean_process import first_logits
from normalign_llava.quickstart import (
    results as quickstart_results,
    run as quickstart_run,
    train as quickstart_train,
)
from normalign_llava.quickstart.results import (
    METRICS,
    diagnose_once,
    print_results,
    write_answers_image,
)
from normalign_llava.quickstart.run import Settings, command_to_ask, run_quickstart
from normalign_llava.quickstart.train import rows_of, stage, train_stage, words


def test_options_are_a_command_line():
    options = {
        "seed": 3,
        "target_modules": ["a", "b"],
        "bf16": False,
        "folder": Path("x/y"),
    }
    command_line = "--seed 3 --target_modules a b --bf16 False --folder x/y"
    assert words(options) == command_line.split()


def test_a_seed_is_used_for_the_data_the_projector_and_both_recipes():
    settings = Settings.seeded(7)
    assert settings.seed == 7
    assert settings.stage1["seed"] == 7
    assert settings.stage2["seed"] == 7
    assert settings.stage1 == stage("quickstart-align", seed=7)
    assert settings.stage2 == stage("quickstart-tune", seed=7)


def test_a_stage_needs_rows_for_all_its_steps():
    options = {
        "max_steps": 3,
        "global_batch_size": 5,
        "per_device_train_batch_size": 1,
    }
    assert rows_of(options) == 15


def test_the_stages_have_no_row_in_common_and_are_written_once(tmp_path, monkeypatch):
    def draw_rows(count, seed):
        return Dataset.from_dict({"row": [f"{number} of {seed}" for number in range(count)]})

    monkeypatch.setattr(quickstart_train, "training_data", draw_rows)
    data_folder = tmp_path / "data"
    quickstart_train.write_stage_data(data_folder, 3, 2, 7)
    quickstart_train.write_stage_data(data_folder, 9, 9, 8)

    stage1_rows = load_from_disk(data_folder / "stage1")["row"][:]
    stage2_rows = load_from_disk(data_folder / "stage2")["row"][:]
    assert stage1_rows == ["0 of 7", "1 of 7", "2 of 7"]
    assert stage2_rows == ["3 of 7", "4 of 7"]


def test_the_question_is_asked_with_the_system_turn_of_training():
    question = Question("shape", "what's it?", "circle", Path("a b.png"), None)
    command = command_to_ask(Path("my model"), question)
    assert shlex.split(command) == [
        "normalign",
        "ask",
        "my model",
        "a b.png",
        "what's it?",
        "--system",
        SYSTEM,
    ]


KINDS = list(METRICS)


def shares_from(first: float) -> dict[str, float]:
    """A different share for each kind."""
    return {kind: first + number / 100 for number, kind in enumerate(KINDS)}


@pytest.fixture
def print_to_text(tmp_path):
    """Prints results of a quickstart, and returns the text with the reports' pages."""

    def print_with(**changed):
        results = {
            "before": {"accuracy": shares_from(0.1), "blank": shares_from(0.9)},
            "after": {"accuracy": shares_from(0.2), "blank": shares_from(0.3)},
            "baseline": None,
            "majority": shares_from(0.5),
            "count": {kind: 100 + number for number, kind in enumerate(KINDS)},
            "seconds": {"fetch": 1000.0, "build": 1.4, "stage 1": 2.2},
            "reloaded_alike": True,
            "verdicts": {"model": ["First [red].", "Second."], "stage1": ["Third."]},
            **changed,
        }
        pages = [
            tmp_path / "model" / "report.html",
            tmp_path / "stage1" / "report.html",
        ]
        console = Console(file=StringIO(), width=160)
        print_results(console, results, tmp_path, pages)
        return console.file.getvalue(), pages

    return print_with


def table_cells(text) -> dict[str, list[str]]:
    """The cells of a printed table behind the first one of their line."""
    cells = {}
    for line in text.splitlines():
        line_cells = line.strip("┃│").replace("┃", "│").split("│")
        if len(line_cells) > 3:
            first, *others = [cell.strip() for cell in line_cells]
            cells[first] = others
    return cells


@pytest.mark.parametrize(
    ("baseline", "columns"),
    [
        pytest.param(
            None,
            {
                "before": 0.1,
                "after": 0.2,
                "after, blank image": 0.3,
                "majority answer": 0.5,
            },
            id="without baseline",
        ),
        pytest.param(
            {"accuracy": shares_from(0.4), "blank": shares_from(0.9)},
            {
                "before": 0.1,
                "after": 0.2,
                "after, blank image": 0.3,
                "without the norm": 0.4,
                "majority answer": 0.5,
            },
            id="with baseline",
        ),
    ],
)
@pytest.mark.parametrize("reloaded_alike", [False, True])
def test_the_table_has_every_share_in_its_column(print_to_text, baseline, columns, reloaded_alike):
    text, _ = print_to_text(baseline=baseline, reloaded_alike=reloaded_alike)
    assert ("code: the same logits." in text) == reloaded_alike
    assert ("other logits" in text) != reloaded_alike

    cells = table_cells(text)
    assert cells.pop("kind") == ["questions", *columns]
    assert list(cells) == KINDS
    for number, kind in enumerate(KINDS):
        shares = [f"{first + number / 100:.2f}" for first in columns.values()]
        assert cells[kind] == [str(100 + number), *shares]


def test_kinds_of_questions_are_in_this_order():
    expected = [*QUESTION_KINDS, OVERALL, "emoji"]
    assert list(METRICS) == expected


def test_results_are_printed_with_their_time_verdicts_and_files(tmp_path, print_to_text):
    text, pages = print_to_text()
    assert "took 4 seconds" in text
    assert "Report on model: First [red]. Second.\n" in text
    assert "on stage1: Third.\n" in text

    named_paths = {}
    for line in text.splitlines():
        named_paths[line.split(":")[0]] = line.split(": ")[-1].strip()
    assert named_paths["Checkpoint"] == str(tmp_path / "model")
    assert named_paths["Model card"] == str(tmp_path / "model" / "README.md")
    assert named_paths["Images"] == str(tmp_path / "images.png")
    assert text.count("Report: ") == 2
    for page in pages:
        assert str(page) in text


def count_coloured(image_path, colour) -> int:
    """Pixels of about this colour."""
    pixels = np.asarray(Image.open(image_path).convert("RGB")).astype(int)
    distances = abs(pixels - colour).max(-1)
    return int((distances < 30).sum())


CRIMSON = [220, 20, 60]
GREEN = [0, 128, 0]


@pytest.fixture
def grey_image(tmp_path):
    image_path = tmp_path / "grey.png"
    Image.new("RGB", (8, 8), "grey").save(image_path)
    return image_path


@pytest.fixture
def right_image(tmp_path, grey_image):
    """A picture of two answers, of which both are right."""
    shape = Question("shape", "what shape is it?", "circle", grey_image, None)
    emoji = Question("emoji", "what is this?", "dog", grey_image, None)
    write_answers_image([(shape, "It is a circle."), (emoji, "dog")], tmp_path / "right.png")
    return tmp_path / "right.png"


@pytest.fixture
def wrong_image(tmp_path, grey_image):
    """A picture of five answers, of which none is right."""
    shape = Question("shape", "what shape is it?", "circle", grey_image, None)
    emoji = Question("emoji", "what is this?", "dog", grey_image, None)
    wrong_answers = [(shape, "a square, no circle but a triangle"), *[(emoji, "cat")] * 4]
    write_answers_image(wrong_answers, tmp_path / "wrong.png")
    return tmp_path / "wrong.png"


def test_right_answers_are_green(right_image):
    assert count_coloured(right_image, GREEN) > 20
    assert count_coloured(right_image, CRIMSON) <= 20


def test_wrong_answers_are_crimson(wrong_image):
    assert count_coloured(wrong_image, GREEN) <= 20
    assert count_coloured(wrong_image, CRIMSON) > 20


def test_a_fifth_answer_begins_a_row(right_image, wrong_image):
    height_of_one_row = Image.open(right_image).height
    height_of_two_rows = Image.open(wrong_image).height
    assert height_of_two_rows > 1.7 * height_of_one_row


@pytest.fixture
def drawn_axes(tmp_path, monkeypatch):
    """Draws answers, and returns the axes of the figure."""
    figures = []

    def keep_figure(figure, file, **options):
        figures.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", keep_figure)

    def draw(answered):
        write_answers_image(answered, tmp_path / "answers.png")
        return figures[-1].axes

    return draw


def axes_texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_long_answer_is_shortened_and_the_truth_is_below_a_wrong_one(drawn_axes, grey_image):
    dog_question = Question("emoji", "what is this?", "dog", grey_image, None)
    cat_question = Question("emoji", "what is this?", "cat", grey_image, None)
    dog_axes, cat_axes, *_ = drawn_axes(
        [
            (dog_question, "It is a dog, " * 9),
            (cat_question, "dog"),
        ]
    )
    (shortened,) = axes_texts(dog_axes)
    assert shortened.startswith("It is a dog")
    assert shortened.endswith(" ...")
    assert len(shortened) <= 40
    assert axes_texts(cat_axes) == ["dog", "truth: cat"]


def test_places_without_an_answer_stay_empty(drawn_axes, grey_image):
    question = Question("emoji", "what is this?", "dog", grey_image, None)
    answered = [(question, f"answer {number}") for number in range(5)]
    counts = []
    for axes in drawn_axes(answered):
        counts.append((len(axes.images), len(axes.texts)))
    assert counts == [(1, 2)] * 5 + [(0, 0)] * 3


def test_a_diagnosis_is_made_once_and_again_for_a_baseline(tmp_path, monkeypatch):
    diagnosed = []

    def record_diagnosis(model, **options):
        diagnosed.append({"model": model, **options})
        report = {"against": options["against"]}
        (tmp_path / "diagnostics" / "report.json").write_text(json.dumps(report))

    monkeypatch.setattr(quickstart_results, "diagnose", record_diagnosis)
    (tmp_path / "diagnostics").mkdir()  # as an earlier one left it that was stopped
    page = tmp_path / "diagnostics" / "report.html"
    for baseline in (None, None, Path("plain"), Path("plain"), None):
        assert diagnose_once(tmp_path, baseline, 5, "-stage1") == page

    first, second = diagnosed
    assert first == {
        "model": str(tmp_path),
        "samples": 5,
        "name": "quickstart-stage1",
        "against_name": "quickstart-no-norm-stage1",
        "against": None,
    }
    assert second == {**first, "against": "plain"}


@pytest.mark.parametrize(
    ("limit", "bf16"),
    [
        (None, False),
        (5, True),
    ],
)
def test_a_task_that_failed_ends_the_quickstart_with_its_reason(tmp_path, monkeypatch, limit, bf16):
    calls = []

    class Suite:
        failed = {"offline_emoji": "no rows"}

    def evaluate(checkpoint, **options):
        calls.append(options)
        assert torch.is_autocast_enabled("cpu") == bf16
        return Suite

    monkeypatch.setattr(quickstart_results, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="offline_emoji could not be run: no rows"):
        quickstart_results.ask_held_out(tmp_path, limit, bf16)
    (options,) = calls
    assert options["limit"] == limit
    assert options["dtype"] == "float32"


def names_in(folder) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_stage_that_is_finished_is_not_trained_again(tmp_path):
    """What was left of a run beside its result is removed."""
    (tmp_path / "stage1").mkdir()
    (tmp_path / "stage1-trainer").mkdir()
    for _ in range(2):
        train_stage({}, tmp_path / "no checkpoint", tmp_path / "no data", tmp_path / "stage1")
        assert names_in(tmp_path) == ["stage1"]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_stage_is_trained_by_its_options_and_leaves_only_its_files(tmp_path, monkeypatch, bf16):
    calls = []

    def train(data, args, model, callbacks):
        calls.append((args, model, callbacks))
        run_folder = Path(args.output_dir)
        (run_folder / "checkpoint-1").mkdir(parents=True)
        (run_folder / "model.safetensors").write_text("")

    monkeypatch.setattr(quickstart_train, "train", train)
    train_stage(
        stage("quickstart-align", max_steps=3),
        tmp_path / "start",
        tmp_path / "data",
        tmp_path / "stage1",
        bf16=bf16,
        callbacks=["callback"],
    )
    ((train_options, model_options, callbacks),) = calls
    assert train_options.bf16 == bf16
    assert train_options.max_steps == 3
    assert model_options.model_name_or_path == str(tmp_path / "start")
    assert callbacks == ["callback"]
    assert names_in(tmp_path) == ["stage1"]
    assert names_in(tmp_path / "stage1") == ["model.safetensors"]


def as_stored(settings) -> dict:
    """Settings as a JSON file has them."""
    return json.loads(json.dumps(asdict(settings)))


def test_the_settings_are_those_of_the_results_in_the_docs():
    results = json.loads((DOCS / "quickstart" / "results.json").read_text())
    seed = results["settings"]["seed"]
    assert results["settings"] == as_stored(Settings.seeded(seed))


def test_a_folder_whose_lock_is_left_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart_run, "_run_quickstart", lambda *arguments: arguments)
    settings = Settings.seeded(0)
    (tmp_path / LOCK).write_text("")
    assert run_quickstart(tmp_path, settings) == (tmp_path, settings, False)


def shape_questions(count: int) -> list[Question]:
    questions = []
    for number in range(count):
        questions.append(
            Question("shape", f"shape {number}?", "A", Path(f"{number}.png"), None),
        )
    return questions


class RecordedSteps:
    """What a quickstart calls. Each step leaves its folder, empty."""

    def __init__(self, folder):
        self.folder = folder
        self.calls = []

    def of(self, step_name) -> list[tuple]:
        """The arguments with which a step was called, each time."""
        return [arguments for called_name, arguments in self.calls if called_name == step_name]

    def replace(self, monkeypatch, step_name, step):
        def call(*arguments, **options):
            self.calls.append((step_name, (*arguments, *options.values())))
            return step(*arguments, **options)

        monkeypatch.setattr(quickstart_run, step_name, call)

    def build_checkpoint(self, vision, language, output, **options):
        output.mkdir(parents=True)

    def train_stage(self, options, start, data, output, bf16):
        output.mkdir(exist_ok=True)

    def merge_adapter(self, adapter, output, base):
        output.mkdir(parents=True)

    def ask_held_out(self, checkpoint, limit, bf16):
        place = checkpoint.relative_to(self.folder)
        scores = {}
        for score_name in ("accuracy", "blank", "majority", "count"):
            scores[score_name] = f"{score_name} of {place}, {limit}"
        return scores

    def reload(self, model, questions):
        return [f"A{number}" for number in range(len(questions))], None


@pytest.fixture
def steps(tmp_path, monkeypatch):
    recorded = RecordedSteps(tmp_path)
    replacements = {
        "fetch": lambda archive: None,
        "half_precision_pays": lambda: True,
        "convert_vision": lambda size: "vision",
        "convert_language": lambda: Path("language"),
        "write_stage_data": lambda *arguments: None,
        "build_checkpoint": recorded.build_checkpoint,
        "train_stage": recorded.train_stage,
        "merge_adapter": recorded.merge_adapter,
        "ask_held_out": recorded.ask_held_out,
        "held_out": lambda count: shape_questions(count * 3 + 12),
        "reload": recorded.reload,
        "write_answers_image": lambda answered, output: None,
        "diagnose_once": lambda model, *_: model / "diagnostics" / "report.html",
        "read_report": lambda folder: {"verdict": [f"verdict of {folder.name}"]},
        "write_card": lambda model: None,
        "print_results": lambda *arguments: None,
    }
    for step_name, replacement in replacements.items():
        recorded.replace(monkeypatch, step_name, replacement)
    return recorded


STAGE1 = {
    "name": "one",
    "max_steps": 3,
    "global_batch_size": 2,
}
STAGE2 = {
    "name": "two",
    "max_steps": 1,
    "global_batch_size": 4,
}
SETTINGS = Settings(
    STAGE1,
    STAGE2,
    seed=5,
    asked=7,
    asked_before=2,
    shown_per_kind=2,
    diagnosed=9,
)
TRAINING_STEPS = ["build", "stage 1", "stage 2", "merge"]
ALL_STEPS = [
    "fetch",
    "convert",
    *TRAINING_STEPS,
    "evaluate before",
    "evaluate after",
    "reload",
    "diagnose",
]


@pytest.fixture
def run(tmp_path, steps):
    """Runs or resumes a quickstart in `tmp_path`; `steps` are then those of this run."""

    def run_in_folder(**options):
        steps.calls.clear()
        return run_quickstart(tmp_path, SETTINGS, **options)

    return run_in_folder


@pytest.fixture
def journal_path(tmp_path):
    return tmp_path / "journal.json"


def trainings(folder, data_folder, bf16) -> list[tuple]:
    """The two stages of a model in a folder."""
    stage1_folder = folder / "stage1"
    stage2_folder = folder / "stage2"
    return [
        (STAGE1, folder / "untrained", data_folder / "stage1", stage1_folder, bf16),
        (STAGE2, stage1_folder, data_folder / "stage2", stage2_folder, bf16),
    ]


def test_the_parts_are_fetched_converted_and_built(tmp_path, run, steps):
    run()
    assert steps.of("fetch") == [(archive,) for archive in ARCHIVES]
    assert steps.of("convert_vision") == [(56,)]
    assert steps.of("write_stage_data") == [(tmp_path / "data", 6, 4, 5)]
    assert steps.of("build_checkpoint") == [
        ("vision", "language", tmp_path / "untrained", "gwc", -4, 5),
    ]


def test_each_stage_goes_on_with_what_the_last_one_left(tmp_path, run, steps):
    run()
    assert steps.of("train_stage") == trainings(tmp_path, tmp_path / "data", bf16=True)
    assert steps.of("merge_adapter") == [
        (tmp_path / "stage2", tmp_path / "model", str(tmp_path / "stage1")),
    ]


def test_the_model_is_evaluated_shown_and_diagnosed(tmp_path, run, steps, capsys):
    results = run()
    model = tmp_path / "model"
    assert steps.of("ask_held_out") == [
        (tmp_path / "untrained", 2, True),
        (model, 7, True),
    ]

    # Two of each kind, and of emoji.
    shown = shape_questions(8)
    assert steps.of("reload") == [(model, shown)]
    answered = [(question, f"A{number}") for number, question in enumerate(shown)]
    assert steps.of("write_answers_image") == [(answered, tmp_path / "images.png")]
    assert command_to_ask(model, shown[0]) in capsys.readouterr().out

    assert steps.of("diagnose_once") == [(model, None, 9)]
    assert steps.of("write_card") == [(model,)]
    ((_, *printed),) = steps.of("print_results")
    assert printed == [results, tmp_path, [model / "diagnostics" / "report.html"]]


def test_the_results_have_all_scores(run):
    results = run()
    assert results["before"] == {
        "accuracy": "accuracy of untrained, 2",
        "blank": "blank of untrained, 2",
        "count": "count of untrained, 2",
    }
    assert results["after"] == {
        "accuracy": "accuracy of model, 7",
        "blank": "blank of model, 7",
    }
    assert results["majority"] == "majority of model, 7"
    assert results["count"] == "count of model, 7"
    assert results["baseline"] is None
    assert results["reloaded_alike"]
    assert results["bf16"]
    assert results["verdicts"] == {"model": ["verdict of model"]}
    assert results["settings"] == asdict(SETTINGS)
    assert list(results["seconds"]) == ALL_STEPS


def test_the_journal_has_settings_precision_and_times(run, journal_path, capsys):
    results = run()
    assert "finished before" not in capsys.readouterr().out
    journal = json.loads(journal_path.read_text())
    assert journal["settings"] == asdict(SETTINGS)
    assert journal["bf16"] is True
    assert journal["seconds"] == results["seconds"]


def test_a_resumed_run_keeps_precision_and_times_of_its_journal(run, steps, journal_path, capsys):
    run()
    journal = json.loads(journal_path.read_text())
    journal["bf16"] = False
    journal["seconds"]["reload"] = 1000.0
    journal_path.write_text(json.dumps(journal))

    results = run(full_baseline=True)
    assert not steps.of("half_precision_pays")
    assert not results["bf16"]
    for *_, bf16 in steps.of("train_stage"):
        assert not bf16
    assert results["seconds"]["reload"] == 1000.0
    output = capsys.readouterr().out
    assert "reload, finished before" in output
    assert "baseline, build, finished" not in output


def test_a_baseline_is_trained_and_compared(tmp_path, run, steps):
    run()
    results = run(full_baseline=True)
    model = tmp_path / "model"
    baseline = tmp_path / "baseline"
    assert steps.of("build_checkpoint") == [
        ("vision", "language", baseline / "untrained", "none", -4, 5),
    ]
    data_folder = tmp_path / "data"
    of_model = trainings(tmp_path, data_folder, bf16=True)
    of_baseline = trainings(baseline, data_folder, bf16=True)
    assert steps.of("train_stage") == of_model + of_baseline
    assert steps.of("merge_adapter") == [
        (baseline / "stage2", baseline / "model", str(baseline / "stage1")),
    ]
    assert steps.of("ask_held_out")[2:] == [(baseline / "model", 7, True)]
    assert steps.of("diagnose_once") == [
        (model, baseline / "model", 9),
        (tmp_path / "stage1", baseline / "stage1", 9, "-stage1"),
    ]

    assert results["baseline"] == {
        "accuracy": "accuracy of baseline/model, 7",
        "blank": "blank of baseline/model, 7",
    }
    assert list(results["verdicts"]) == ["model", "stage1"]
    baseline_steps = [f"baseline, {step_name}" for step_name in TRAINING_STEPS]
    expected_steps = [*ALL_STEPS, *baseline_steps, "evaluate baseline"]
    assert list(results["seconds"]) == expected_steps


def test_a_baseline_that_is_there_is_always_compared(run, steps):
    run()
    expected = run(full_baseline=True)["baseline"]
    assert run()["baseline"] == expected
    assert not steps.of("build_checkpoint")
    assert not steps.of("merge_adapter")


def test_a_run_is_not_resumed_with_other_settings(run, journal_path):
    run()
    journal = json.loads(journal_path.read_text())
    del journal["settings"]["diagnosed"]  # as of a version without it
    journal_path.write_text(json.dumps(journal))
    with pytest.raises(ValueError, match=r"other settings \(diagnosed\)"):
        run()


def test_a_process_that_answers_otherwise_is_in_the_results(run, monkeypatch):
    def reload_differently(model, questions):
        return ["A"] * len(questions), "It answers differently"

    monkeypatch.setattr(quickstart_run, "reload", reload_differently)
    assert run()["reloaded_alike"] is False


@pytest.fixture
def talkative_checkpoint(checkpoint, tmp_path):
    """A checkpoint that does not answer only with line breaks."""
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    weights = stored.weights(copy)
    for tensor_name, tensor in weights.items():
        if "language_model.layers" in tensor_name and tensor.ndim == 2:
            tensor *= 10
    stored.store(copy, weights)
    return copy


@pytest.fixture
def colour_questions(tmp_path):
    questions = []
    for colour in ("red", "blue"):
        image_path = tmp_path / f"{colour}.png"
        Image.new("RGB", (20, 20), colour).save(image_path)
        questions.append(Question("shape", f"what is {colour}?", "A", image_path, None))
    return questions


def likeliest_answer(model, processor, question) -> list[int]:
    """The ids of at most 16 tokens, each the likeliest after all before it."""
    user_content = [{"type": "image"}, {"type": "text", "text": question.text}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        {"role": "user", "content": user_content},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=text, images=Image.open(question.image), return_tensors="pt")
    answer_ids = []
    for _ in range(16):
        with torch.inference_mode():
            likeliest = model(**inputs).logits[0, -1].argmax()
        if likeliest == processor.tokenizer.eos_token_id:
            break
        answer_ids.append(int(likeliest))
        next_token = likeliest[None, None]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], next_token], dim=1)
        attended = torch.ones_like(next_token)
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], attended], dim=1)
    return answer_ids


@pytest.fixture
def model(talkative_checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(talkative_checkpoint)


@pytest.fixture
def model_processor(talkative_checkpoint):
    return AutoProcessor.from_pretrained(talkative_checkpoint)


@pytest.fixture
def logits(model, model_processor):
    with torch.inference_mode():
        return first_logits(model, model_processor)


def test_a_reloaded_model_answers_what_it_finds_likeliest(
    talkative_checkpoint, model, model_processor, logits, colour_questions, monkeypatch
):
    monkeypatch.setattr(quickstart_run, "ask_clean_process", {talkative_checkpoint: logits}.get)
    answers, deviation = quickstart_run.reload(talkative_checkpoint, colour_questions)
    assert deviation is None

    lengths = []
    for question, answer in zip(colour_questions, answers, strict=True):
        answer_ids = likeliest_answer(model, model_processor, question)
        expected = model_processor.tokenizer.decode(answer_ids, skip_special_tokens=True)
        assert answer == expected.strip()
        lengths.append(len(answer_ids))
    # One is cut off, and the other ends by itself.
    assert max(lengths) == 16
    assert 0 < min(lengths) < 16


def test_other_logits_in_a_clean_process_are_a_deviation(
    talkative_checkpoint, logits, colour_questions, monkeypatch
):
    other_logits = [value + 1 for value in logits]
    answers_of_process = {talkative_checkpoint: other_logits}
    monkeypatch.setattr(quickstart_run, "ask_clean_process", answers_of_process.get)
    _, deviation = quickstart_run.reload(talkative_checkpoint, colour_questions[:1])
    assert "differ" in deviation
