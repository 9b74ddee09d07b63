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
    options = {"seed": 3, "target_modules": ["a", "b"], "bf16": False, "folder": Path("x/y")}
    line = "--seed 3 --target_modules a b --bf16 False --folder x/y"
    assert words(options) == line.split()


def test_a_seed_is_that_of_the_data_the_projector_and_both_recipes():
    settings = Settings.seeded(7)
    assert settings.seed == settings.stage1["seed"] == settings.stage2["seed"] == 7
    assert settings.stage1 == stage("quickstart-align", seed=7)
    assert settings.stage2 == stage("quickstart-tune", seed=7)
    assert rows_of({"max_steps": 3, "global_batch_size": 5, "per_device_train_batch_size": 1}) == 15


def test_the_stages_have_no_row_in_common_and_are_written_once(tmp_path, monkeypatch):
    def drawn(rows, seed):
        return Dataset.from_dict({"row": [f"{number} of {seed}" for number in range(rows)]})

    monkeypatch.setattr(quickstart_train, "training_data", drawn)
    for first, second, seed in ((3, 2, 7), (9, 9, 8)):
        quickstart_train.write_stage_data(tmp_path / "data", first, second, seed)
    stages = [load_from_disk(tmp_path / "data" / name)["row"][:] for name in ("stage1", "stage2")]
    assert stages == [["0 of 7", "1 of 7", "2 of 7"], ["3 of 7", "4 of 7"]]


def test_the_question_is_asked_with_the_system_turn_of_training():
    question = Question("shape", "what's it?", "circle", Path("a b.png"), None)
    line = command_to_ask(Path("my model"), question)
    expected = ["normalign", "ask", "my model", "a b.png", "what's it?", "--system", SYSTEM]
    assert shlex.split(line) == expected


KINDS = list(METRICS)


def scored(first):
    """Other shares for each kind."""
    return {kind: first + number / 100 for number, kind in enumerate(KINDS)}


@pytest.mark.parametrize("with_baseline", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_the_table_has_every_share_in_its_column(tmp_path, with_baseline, alike):
    results = {
        "before": {"accuracy": scored(0.1), "blank": scored(0.9)},
        "after": {"accuracy": scored(0.2), "blank": scored(0.3)},
        "baseline": {"accuracy": scored(0.4), "blank": scored(0.9)} if with_baseline else None,
        "majority": scored(0.5),
        "count": {kind: 100 + number for number, kind in enumerate(KINDS)},
        "seconds": {"fetch": 1000.0, "build": 1.4, "stage 1": 2.2},
        "reloaded_alike": alike,
        "verdicts": {"model": ["First [red].", "Second."], "stage1": ["Third."]},
    }
    console = Console(file=StringIO(), width=160)
    pages = [tmp_path / "model" / "report.html", tmp_path / "stage1" / "report.html"]
    print_results(console, results, tmp_path, pages)
    said = console.file.getvalue()
    table = [line.strip("┃│").replace("┃", "│").split("│") for line in said.splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table if len(row) > 3}
    titles = ["questions", "before", "after", "after, blank image", "majority answer"]
    firsts = [0.1, 0.2, 0.3, 0.5]
    if with_baseline:
        titles.insert(4, "without the norm")
        firsts.insert(3, 0.4)
    assert cells.pop("kind") == titles
    assert list(cells) == KINDS == [*QUESTION_KINDS, OVERALL, "emoji"]
    for number, kind in enumerate(KINDS):
        shares = [f"{first + number / 100:.2f}" for first in firsts]
        assert cells[kind] == [str(100 + number), *shares]
    assert "took 4 seconds" in said
    assert ("code: the same logits." in said) == alike and ("other logits" in said) != alike
    assert "Report on model: First [red]. Second.\n" in said and "on stage1: Third.\n" in said
    named = {line.split(":")[0]: line.split(": ")[-1].strip() for line in said.splitlines()}
    assert named["Checkpoint"] == str(tmp_path / "model")
    assert named["Model card"] == str(tmp_path / "model" / "README.md")
    assert named["Images"] == str(tmp_path / "images.png")
    assert said.count("Report: ") == 2 and all(str(page) in said for page in pages)


def coloured(file):
    """Pixels that are crimson, and that are green, in a picture."""
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
    crimson = (abs(pixels - [220, 20, 60]).max(-1) < 30).sum()
    green = (abs(pixels - [0, 128, 0]).max(-1) < 30).sum()
    return crimson, green


def test_answers_are_green_if_they_are_right_and_crimson_if_not(tmp_path):
    file = tmp_path / "grey.png"
    Image.new("RGB", (8, 8), "grey").save(file)
    shape = Question("shape", "what shape is it?", "circle", file, None)
    emoji = Question("emoji", "what is this?", "dog", file, None)
    wrong = [(shape, "a square, no circle but a triangle"), *[(emoji, "cat")] * 4]
    for name, answered, expected in (
        ("right.png", [(shape, "It is a circle."), (emoji, "dog")], (False, True)),
        ("wrong.png", wrong, (True, False)),
    ):
        write_answers_image(answered, tmp_path / name)
        crimson, green = coloured(tmp_path / name)
        assert (crimson > 20, green > 20) == expected, name
    heights = [Image.open(tmp_path / name).height for name in ("right.png", "wrong.png")]
    assert heights[1] > 1.7 * heights[0]  # a fifth one begins a row


def test_of_a_wrong_answer_the_truth_is_told_below_and_a_long_one_is_shortened(
    tmp_path, monkeypatch
):
    figures = []

    def keep(figure, file, **options):
        figures.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    file = tmp_path / "grey.png"
    Image.new("RGB", (8, 8), "grey").save(file)
    asked = [Question("emoji", "what is this?", answer, file, None) for answer in ("dog", "cat")]
    write_answers_image(
        list(zip(asked, ["It is a dog, " * 9, "dog"], strict=True)), tmp_path / "a.png"
    )
    first, second, *_ = figures[0].axes
    (said,) = (text.get_text() for text in first.texts)
    assert said.startswith("It is a dog") and said.endswith(" ...") and len(said) <= 40
    assert [text.get_text() for text in second.texts] == ["dog", "truth: cat"]
    write_answers_image([(asked[0], f"answer {number}") for number in range(5)], tmp_path / "b.png")
    drawn = [(len(axes.images), len(axes.texts)) for axes in figures[1].axes]
    assert drawn == [(1, 2)] * 5 + [(0, 0)] * 3


def test_a_diagnosis_is_made_once_and_again_for_a_baseline(tmp_path, monkeypatch):
    made = []

    def diagnose(model, **options):
        made.append({"model": model, **options})
        report = {"against": options["against"]}
        (tmp_path / "diagnostics" / "report.json").write_text(json.dumps(report))

    (tmp_path / "diagnostics").mkdir()  # as an earlier one left it that was stopped
    monkeypatch.setattr(quickstart_results, "diagnose", diagnose)
    page = tmp_path / "diagnostics" / "report.html"
    for baseline in (None, None, Path("plain"), Path("plain"), None):
        assert diagnose_once(tmp_path, baseline, 5, "-stage1") == page
    names = {"name": "quickstart-stage1", "against_name": "quickstart-no-norm-stage1"}
    shared = {"model": str(tmp_path), "samples": 5, **names}
    assert made == [{**shared, "against": None}, {**shared, "against": "plain"}]


def test_a_task_that_failed_ends_the_quickstart_with_its_reason(tmp_path, monkeypatch):
    asked = []

    class Suite:
        failed = {"offline_emoji": "no rows"}

    def evaluate(checkpoint, **options):
        asked.append((torch.is_autocast_enabled("cpu"), options["limit"], options["dtype"]))
        return Suite

    monkeypatch.setattr(quickstart_results, "evaluate", evaluate)
    for limit, bf16 in ((None, False), (5, True)):
        with pytest.raises(RuntimeError, match="offline_emoji could not be run: no rows"):
            quickstart_results.ask_held_out(tmp_path, limit, bf16)
    assert asked == [(False, None, "float32"), (True, 5, "float32")]


def test_a_stage_that_is_finished_is_not_trained_again(tmp_path):
    """What was left of a run beside its result is removed."""
    (tmp_path / "stage1").mkdir()
    (tmp_path / "stage1-trainer").mkdir()
    for _ in range(2):
        train_stage({}, tmp_path / "no checkpoint", tmp_path / "no data", tmp_path / "stage1")
        assert [path.name for path in tmp_path.iterdir()] == ["stage1"]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_stage_is_trained_by_its_options_and_leaves_its_files_alone(tmp_path, monkeypatch, bf16):
    got = []

    def train(data, args, model, callbacks):
        got.append((args.bf16, args.max_steps, model.model_name_or_path, callbacks))
        run = Path(args.output_dir)
        (run / "checkpoint-1").mkdir(parents=True)
        (run / "model.safetensors").write_text("")

    monkeypatch.setattr(quickstart_train, "train", train)
    options = stage("quickstart-align", max_steps=3)
    paths = tmp_path / "start", tmp_path / "data", tmp_path / "stage1"
    train_stage(options, *paths, bf16=bf16, callbacks=["callback"])
    assert got == [(bf16, 3, str(tmp_path / "start"), ["callback"])]
    assert [path.name for path in tmp_path.iterdir()] == ["stage1"]
    assert [path.name for path in (tmp_path / "stage1").iterdir()] == ["model.safetensors"]


def test_the_settings_are_those_of_the_results_in_the_docs():
    stored = json.loads((DOCS / "quickstart" / "results.json").read_text())["settings"]
    assert stored == json.loads(json.dumps(asdict(Settings.seeded(stored["seed"]))))


def test_a_folder_whose_lock_is_left_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart_run, "_run_quickstart", lambda *args: args)
    settings = Settings.seeded(0)
    (tmp_path / LOCK).write_text("")
    assert run_quickstart(tmp_path, settings) == (tmp_path, settings, False)


def question(kind: str, number: int) -> Question:
    return Question(kind, f"{kind} {number}?", "A", Path(f"{number}.png"), None)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """What a quickstart in `tmp_path` calls; each step leaves its folder, empty."""
    calls = []

    def noted(name, result=None, made=None):
        def call(*args, **options):
            calls.append((name, *args, *sorted(options.items())))
            if made is not None:
                args[made].mkdir(parents=True)
            return result(*args) if callable(result) else result

        monkeypatch.setattr(quickstart_run, name, call)

    def scores(folder, limit, bf16):
        said = f"{folder.relative_to(tmp_path)}, {limit}"
        return {key: f"{key} of {said}" for key in ("accuracy", "blank", "majority", "count")}

    def train(options, start, data, output, bf16):
        calls.append(("train", options["name"], start, data, output, bf16))
        output.mkdir(exist_ok=True)

    noted("fetch")
    noted("convert_vision", "vision")
    noted("convert_language", Path("language"))
    noted("write_stage_data")
    noted("build_checkpoint", made=2)
    noted("merge_adapter", made=1)
    noted("ask_held_out", scores)
    noted("held_out", lambda count: [question("shape", number) for number in range(count * 3 + 12)])
    noted("reload", lambda model, asked: ([f"A{number}" for number in range(len(asked))], None))
    noted("write_answers_image")
    noted("diagnose_once", lambda model, *_: model / "diagnostics" / "report.html")
    noted("read_report", lambda folder: {"verdict": [f"verdict of {folder.name}"]})
    noted("write_card")
    noted("print_results")
    noted("half_precision_pays", True)
    monkeypatch.setattr(quickstart_run, "train_stage", train)
    return calls


STEPS = ["build", "stage 1", "stage 2", "merge"]


def test_each_step_of_a_quickstart_goes_on_with_what_the_last_one_left(tmp_path, steps, capsys):
    stages = [{"name": "one", "max_steps": 3, "global_batch_size": 2}]
    stages += [{"name": "two", "max_steps": 1, "global_batch_size": 4}]
    settings = Settings(*stages, seed=5, asked=7, asked_before=2, shown_per_kind=2, diagnosed=9)

    def called(name):
        return [words for first, *words in steps if first == name]

    def run(**options):
        steps.clear()
        return run_quickstart(tmp_path, settings, **options)

    def trained(folder):
        stage1 = folder / "stage1"
        stage2 = folder / "stage2"
        return [
            ["one", folder / "untrained", tmp_path / "data" / "stage1", stage1, True],
            ["two", stage1, tmp_path / "data" / "stage2", stage2, True],
        ]

    def built(folder, arm):
        options = [("arm", arm), ("feature_layer", -4), ("seed", 5)]
        return ["vision", "language", folder / "untrained", *options]

    model = tmp_path / "model"
    baseline = tmp_path / "baseline"
    results = run()
    assert [archive for (archive,) in called("fetch")] == [*ARCHIVES]
    assert called("convert_vision") == [[56]]
    assert called("write_stage_data") == [[tmp_path / "data", 6, 4, 5]]
    assert called("build_checkpoint") == [built(tmp_path, "gwc")]
    assert called("train") == trained(tmp_path)
    merged = [tmp_path / "stage2", model, ("base", str(tmp_path / "stage1"))]
    assert called("merge_adapter") == [merged]
    asked = [[tmp_path / "untrained", 2, True], [model, 7, True]]
    assert called("ask_held_out") == asked
    shown = [question("shape", number) for number in range(8)]  # two of each kind, and of emoji
    assert called("reload") == [[model, shown]]
    answered = [(each, f"A{number}") for number, each in enumerate(shown)]
    assert called("write_answers_image") == [[answered, tmp_path / "images.png"]]
    assert called("diagnose_once") == [[model, None, 9]]
    assert called("write_card") == [[model]]
    (_, *printed) = called("print_results")[0]
    page = model / "diagnostics" / "report.html"
    assert printed == [results, tmp_path, [page]]
    of_model = "model, 7"
    assert results["before"] == {
        key: f"{key} of untrained, 2" for key in ("accuracy", "blank", "count")
    }
    assert results["after"] == {key: f"{key} of {of_model}" for key in ("accuracy", "blank")}
    assert results["majority"] == f"majority of {of_model}"
    assert results["count"] == f"count of {of_model}" and results["baseline"] is None
    assert results["reloaded_alike"] and results["bf16"]
    assert results["verdicts"] == {"model": ["verdict of model"]}
    assert results["settings"] == asdict(settings)
    names = ["fetch", "convert", *STEPS, "evaluate before", "evaluate after", "reload", "diagnose"]
    assert list(results["seconds"]) == names
    said = capsys.readouterr().out
    assert "finished before" not in said and command_to_ask(model, shown[0]) in said
    state = json.loads((tmp_path / "journal.json").read_text())
    assert {key: state[key] for key in ("settings", "bf16")} == {
        "settings": asdict(settings),
        "bf16": True,
    }
    assert state["seconds"] == results["seconds"]
    state["bf16"] = False
    state["seconds"]["reload"] = 1000.0
    (tmp_path / "journal.json").write_text(json.dumps(state))
    results = run(full_baseline=True)
    assert called("build_checkpoint") == [built(baseline, "none")]
    assert not called("half_precision_pays") and not results["bf16"]
    assert [words[:-1] for words in called("train")] == [
        words[:-1] for words in trained(tmp_path) + trained(baseline)
    ]
    assert not any(words[-1] for words in called("train"))
    assert called("merge_adapter") == [
        [baseline / "stage2", baseline / "model", ("base", str(baseline / "stage1"))]
    ]
    assert called("ask_held_out")[2:] == [[baseline / "model", 7, False]]
    pages = [[model, baseline / "model", 9]]
    pages += [[tmp_path / "stage1", baseline / "stage1", 9, "-stage1"]]
    assert called("diagnose_once") == pages
    expected = {key: f"{key} of baseline/model, 7" for key in ("accuracy", "blank")}
    assert results["baseline"] == expected
    assert list(results["verdicts"]) == ["model", "stage1"]
    more = [*(f"baseline, {name}" for name in STEPS), "evaluate baseline"]
    assert list(results["seconds"]) == [*names, *more]
    assert results["seconds"]["reload"] == 1000.0
    said = capsys.readouterr().out
    assert "reload, finished before" in said and "baseline, build, finished" not in said
    assert run()["baseline"] == expected  # which is there now
    assert not called("build_checkpoint") and not called("merge_adapter")
    state = json.loads((tmp_path / "journal.json").read_text())
    del state["settings"]["diagnosed"]  # as of a version without it
    (tmp_path / "journal.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"other settings \(diagnosed\)"):
        run()


def test_a_process_that_answers_otherwise_is_in_the_results(tmp_path, steps, monkeypatch):
    def reload(model, questions):
        return ["A"] * len(questions), "It answers differently"

    monkeypatch.setattr(quickstart_run, "reload", reload)
    stages = [{"name": name, "max_steps": 1, "global_batch_size": 1} for name in ("one", "two")]
    assert run_quickstart(tmp_path, Settings(*stages))["reloaded_alike"] is False


def test_a_reloaded_model_answers_what_it_finds_likeliest(checkpoint, tmp_path, monkeypatch):
    files = [tmp_path / f"{colour}.png" for colour in ("red", "blue")]
    for file in files:
        Image.new("RGB", (20, 20), file.stem).save(file)
    asked = [Question("shape", f"what is {file.stem}?", "A", file, None) for file in files]
    checkpoint = shutil.copytree(checkpoint, tmp_path / "model")
    weights = stored.weights(checkpoint)
    for name in weights:  # otherwise it would answer with line breaks
        is_matrix = "language_model.layers" in name and weights[name].ndim == 2
        weights[name] *= 10 if is_matrix else 1
    stored.store(checkpoint, weights)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    with torch.inference_mode():
        logits = first_logits(model, processor)
    elsewhere = {checkpoint: logits}
    monkeypatch.setattr(quickstart_run, "ask_clean_process", elsewhere.__getitem__)
    answers, differs = quickstart_run.reload(checkpoint, asked)
    assert differs is None
    lengths = []
    for each, answer in zip(asked, answers, strict=True):
        messages = [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": each.text}]},
        ]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        given = processor(text=text, images=Image.open(each.image), return_tensors="pt")
        said = []
        for _ in range(16):
            with torch.inference_mode():
                likeliest = model(**given).logits[0, -1].argmax()
            if likeliest == processor.tokenizer.eos_token_id:
                break
            said.append(int(likeliest))
            for name, value in (("input_ids", likeliest), ("attention_mask", likeliest * 0 + 1)):
                given[name] = torch.cat([given[name], value[None, None]], dim=1)
        assert answer == processor.tokenizer.decode(said, skip_special_tokens=True).strip()
        lengths.append(len(said))
    assert max(lengths) == 16 > min(lengths) > 0  # one is cut off, and the other ends by itself
    elsewhere[checkpoint] = [value + 1 for value in logits]
    assert "differ" in quickstart_run.reload(checkpoint, asked[:1])[1]
