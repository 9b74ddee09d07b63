"""Every option of a command reaches the function that the command is for, under its own name."""

import inspect
import json
import shlex
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from normalign_llava.assembly.build import BuildOptions
from normalign_llava.cli import app
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.evaluation.ask import AskOptions
from normalign_llava.evaluation.options import EvaluateOptions, ModelOptions
from normalign_llava.hub_cards.push.options import PublishOptions
from normalign_llava.quickstart.run import Settings


def invoke(line, columns=200):
    return CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": str(columns)})


@pytest.fixture
def stopped_at(monkeypatch):
    """Lets commands go as far as a function of the package, which raises an error.

    Returns the arguments that it is called with, once it is.
    """

    def stopped_at(place, error=None):
        module, _, name = f"normalign_llava.{place}".rpartition(".")
        function = getattr(import_module(module), name)
        got = {}

        def stop(*args, **kwargs):
            call = inspect.signature(function).bind(*args, **kwargs)
            got.update(call.arguments)
            got.update(got.pop("keywords", {}))
            raise error or ValueError("so far")

        monkeypatch.setattr(import_module(module), name, stop)
        return got

    return stopped_at


LOADING = "--batch-size 3 --dtype float16 --load-in-4bit --trust-remote-code"
BASE = "--base there --base-quantization nf4-double"
ROWS = "--image-folder pictures --columns image=path"
LOADED = {"dtype": "float16", "load_in_4bit": True, "trust_remote_code": True}
BASED = {"base": "there", "base_quantization": "nf4-double"}
READ = {"image_folder": "pictures", "columns": "image=path"}
CASES = {
    "build --vision v --language l --output o --arm unit --norm rms_norm --feature-layer -5 "
    "--select-strategy full --chat-template FILE --dtype bfloat16 --seed 7": (
        "assembly.build.build_checkpoint",
        {
            **{"vision": "v", "language": "l", "output": Path("o"), "arm": "unit"},
            **{"norm": "rms_norm", "feature_layer": -5, "select_strategy": "full"},
            **{"chat_template": "FILE", "dtype": "bfloat16", "seed": 7},
        },
    ),
    "build --vision v --language l --output o --feature-layer -2,-5,3": (
        "assembly.build.build_checkpoint",
        {"vision": "v", "language": "l", "output": Path("o"), "feature_layer": [-2, -5, 3]},
    ),
    "build --vision v --language l --output o --feature-layer 0": (
        "assembly.build.build_checkpoint",
        {"vision": "v", "language": "l", "output": Path("o"), "feature_layer": 0},
    ),
    "build --from-llava f --output o --arm none --norm rms_norm --dtype float32": (
        "assembly.build.retrofit_checkpoint",
        {"llava": "f", "output": Path("o"), "arm": "none", "norm": "rms_norm", "dtype": "float32"},
    ),
    f"data d --model m --check-images --examples 2 --row 4 --row 9 --filters a=b {ROWS}": (
        "train.data_check.check_data",
        {
            **{"source": DataSource("d", filters="a=b", **READ), "model": "m"},
            **{"check_images": True, "examples": 2, "rows": [4, 9]},
        },
    ),
    f"merge a --output o --dtype float16 {BASE}": (
        "assembly.merge.merge_adapter",
        {"adapter": "a", "output": Path("o"), "dtype": "float16", **BASED},
    ),
    f"evaluate m --suite paper,text --suite vision --tasks a,,b --include-path FOLDER --data d "
    f"--limit 5 --output o {LOADING} {BASE} {ROWS}": (
        "evaluation.run.evaluate",
        {
            **{"model": "m", "suites": ["paper", "text", "vision"], "tasks": ["a", "b"]},
            **{"include_path": "FOLDER", "data": "d", "limit": 5, "output": Path("o")},
            **{"batch_size": 3, **LOADED, **BASED, **READ},
        },
    ),
    f"ask m a.png 'what is it?' --system s --data d --output o.jsonl --max-new-tokens 5 {LOADING} "
    f"{BASE} {ROWS}": (
        "evaluation.ask.ask",
        {
            **{"model": "m", "words": ["a.png", "what is it?"], "data": "d", **READ, **BASED},
            **{"options": AskOptions("s", 5, 3, Path("o.jsonl")), **LOADED},
        },
    ),
    f"diagnose m --against n --data d --samples 5 --output o --seed 9 {LOADING} {BASE} {ROWS}": (
        "diagnose.run.DiagnosisOptions",
        {
            **{"model": "m", "against": "n", "data": "d", "samples": 5, "output": Path("o")},
            **{"seed": 9, "batch_size": 3, **LOADED, **BASED, **READ},
        },
    ),
    "quickstart --output o --full-baseline --seed 3": (
        "quickstart.run.run_quickstart",
        {"output": Path("o"), "settings": Settings.seeded(3), "full_baseline": True},
    ),
    "card c --repo-id user/m --replace": (
        "hub_cards.card.write.write_card",
        {"checkpoint": Path("c"), "repo_id": "user/m", "replace": True},
    ),
    f"publish c --repo-id user/m --private --revision trial --create-pr --space --adapter {BASE} "
    "--replace-card --replace-files --no-verify --dry-run": (
        "hub_cards.push.publish.publish",
        {
            **{"checkpoint": Path("c"), "repo_id": "user/m", "private": True, "revision": "trial"},
            **{"create_pr": True, "space": True, "as_adapter": True, **BASED, "dry_run": True},
            **{"replace_card": True, "replace_files": True, "check_loading": False},
        },
    ),
    "publish c --repo-id user/m --public": (
        "hub_cards.push.publish.publish",
        {"checkpoint": Path("c"), "repo_id": "user/m", "private": False},
    ),
    "demo c --host 0.0.0.0 --port 5": (
        "hub_cards.demo.run_demo",
        {"checkpoint": "c", "host": "0.0.0.0", "port": 5},
    ),
    "train r.yaml --seed 3 --accelerate_config ddp --num_processes 2 --model_name_or_path m": (
        "train.command.launch",
        {
            **{"config": "ddp", "processes": 2},
            "arguments": ["r.yaml", "--seed", "3", "--model_name_or_path", "m"],
        },
    ),
    "train --accelerate_config a.yaml --model_name_or_path m": (  # as many as the file says
        "train.command.launch",
        {"config": "a.yaml", "processes": None, "arguments": ["--model_name_or_path", "m"]},
    ),
}
"""By command: the function of the package, and what it is to be called with."""
REQUIRED = {"publish": "--repo-id user/m", "build": "--vision v --language l --output o"}
REQUIRED |= {"merge": "--output o"}


@pytest.mark.parametrize("line", CASES, ids=lambda line: line.split()[0])
def test_options_reach_the_function(stopped_at, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("learning_rate: 0.1\n")
    place, expected = CASES[line]
    template = tmp_path / "chat.jinja"
    folder = tmp_path / "tasks"
    template.touch()
    folder.mkdir()
    paths = {"FILE": template, "FOLDER": folder}
    for name, path in paths.items():
        line = line.replace(name, str(path))
    got = stopped_at(place)
    result = invoke(line)
    assert result.exit_code == 1 and result.stderr == "Error: so far\n", result.output
    for name, value in expected.items():
        wanted = paths.get(value, value) if isinstance(value, str) else value
        assert got[name] == wanted, name


@pytest.mark.parametrize("command", ["build", "merge", "evaluate", "diagnose", "publish", "demo"])
def test_a_command_without_options_means_what_its_function_means(stopped_at, command):
    (place,) = {at for line, (at, _) in CASES.items() if line.split()[0] == command} - {
        "assembly.build.retrofit_checkpoint"
    }
    module, _, name = f"normalign_llava.{place}".rpartition(".")
    parameters = dict(inspect.signature(getattr(import_module(module), name)).parameters)
    if command == "build":  # its keyword arguments are in a dataclass
        parameters |= inspect.signature(BuildOptions).parameters
    if command == "publish":  # its keyword arguments are in a dataclass
        parameters |= inspect.signature(PublishOptions).parameters
    got = stopped_at(place)
    argument = "" if command == "build" else "c"
    invoke(f"{command} {argument} {REQUIRED.get(command, '')}")
    assert got
    for name, value in got.items():
        default = getattr(EvaluateOptions(), name, None)  # of a keyword
        if name in parameters:
            default = parameters[name].default
        if default is not inspect.Parameter.empty and name != "notify":
            assert value == default or [value, default] == [[], ()], name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "quickstart",
            {
                **{"output": Path("outputs/quickstart"), "settings": Settings.seeded(0)},
                **{"full_baseline": False},
            },
        ),
        ("card c", {"checkpoint": Path("c"), "repo_id": None, "replace": False}),
        (
            "data d",
            {
                **{"source": DataSource("d"), "model": None, "check_images": False},
                **{"examples": None, "rows": ()},
            },
        ),
    ],
)
def test_what_is_not_asked_for_is_not_done(stopped_at, line, expected):
    got = stopped_at(place_of(line.split()[0]))
    assert invoke(line).stderr == "Error: so far\n"
    assert got == expected


@pytest.mark.parametrize(
    "line",
    [
        *("gain m --top -1", "evaluate m --limit 0", "evaluate m --batch-size 0"),
        *("diagnose m --samples 0", "ask m --max-new-tokens 0", "data d --examples 0"),
        *("data d --row -1", "train --model_name_or_path m --num_processes 0"),
        *("build --output o --chat-template none", "evaluate m --include-path none"),
    ],
)
def test_a_number_that_is_too_small_or_a_path_that_is_none_is_refused(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    result = invoke(line)
    assert result.exit_code == 2 and line.split()[-2] in result.stderr


def test_a_question_without_options_is_asked_as_the_function_would(stopped_at):
    got = stopped_at("evaluation.ask.ask")
    invoke("ask c")
    assert got["words"] == [] and got["options"] == AskOptions()
    assert {name: got[name] for name in vars(ModelOptions())} == vars(ModelOptions())


def test_the_gain_is_measured_at_the_commit_that_was_found(stopped_at, monkeypatch):
    module = import_module("normalign_llava.checkpoint.files")
    monkeypatch.setattr(module, "require_model", lambda model, revision: (model, f"of {revision}"))
    got = stopped_at("assembly.gain.embedding_statistics")
    assert invoke("gain some/model --revision trial --top 3").stderr == "Error: so far\n"
    assert got == {"model": "some/model", "top": 3, "revision": "of trial"}
    listed = []

    def statistics(model, top, revision):
        listed.append(top)
        return SimpleNamespace(tables=list)

    module = import_module("normalign_llava.assembly.gain")
    monkeypatch.setattr(module, "embedding_statistics", statistics)
    got = stopped_at("diagnose.critical.measure_model_updates")
    assert invoke("gain some/model --revision trial").exit_code == 0 and got == {}
    line = "gain some/model --revision trial --critical --trust-remote-code"
    assert invoke(line).stderr == "Error: so far\n"
    assert got == {"model": "some/model", "revision": "of trial", "trust_remote_code": True}
    assert listed == [10, 10]


LINES = {
    "merge": "merge a --output o",
    "evaluate": "evaluate m",
    "ask": "ask m",
    "diagnose": "diagnose m",
    "demo": "demo c",
    "publish": "publish c --repo-id user/m",
    "quickstart": "quickstart",
}


def place_of(command):
    return next(place for line, (place, _) in CASES.items() if line.split()[0] == command)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        *dict(merge="qlora", evaluate="evaluate", ask="qlora", diagnose="qlora").items(),
        *dict(demo="demo", quickstart="quickstart").items(),
    ],
)
def test_the_extra_that_a_command_needs_is_named(stopped_at, command, extra):
    stopped_at(place_of(command), ModuleNotFoundError("No module named 'x'"))
    assert f"'normalign-llava[{extra}] @" in invoke(LINES[command]).stderr


def test_the_extra_that_a_comparison_needs_is_named(stopped_at):
    stopped_at("evaluation.compare.read_scores", ModuleNotFoundError("No module named 'x'"))
    assert "'normalign-llava[evaluate] @" in invoke("compare a b").stderr


@pytest.mark.parametrize("command", ["evaluate", "ask", "diagnose"])
def test_where_memory_is_full_a_smaller_batch_is_named(stopped_at, command):
    stopped_at(place_of(command), MemoryError())
    assert "--batch-size, or --load-in-4bit" in invoke(LINES[command]).stderr


def test_where_memory_of_training_is_full_a_dry_run_is_named(stopped_at):
    stopped_at("train.run.main", MemoryError())
    result = invoke("train --model_name_or_path m --dataset_name d")
    assert "--dry_run" in result.stderr and result.exit_code == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("evaluate m", "Run the same command again"),
        ("ask m --output o", "Run the same command again"),
        ("ask m", None),
        ("diagnose m", "Nothing was written"),
        ("quickstart", "Run the same command again"),
        ("publish c --repo-id user/m", "Run it again"),
        ("train --model_name_or_path m --dataset_name d", "Nothing was trained"),
        ("train --model_name_or_path m --accelerate_config ddp", None),
    ],
)
def test_a_command_that_is_stopped_says_what_is_left(stopped_at, line, said):
    places = {"train": "train.command.launch" if "accelerate" in line else "train.run.main"}
    command = line.split()[0]
    stopped_at(places.get(command) or place_of(command), KeyboardInterrupt())
    result = invoke(line)
    assert result.exit_code == 130 and result.stderr.startswith("Stopped.")
    if said is None:
        assert result.stderr.split() == ["Stopped."]
    else:
        assert said in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        *("--vision v", "--language l", "--feature-layer -2", "--select-strategy full"),
        *("--seed 0", "--chat-template FILE"),
    ],
)
def test_the_parts_of_a_llava_checkpoint_are_not_named_besides(tmp_path, options):
    (tmp_path / "t.jinja").touch()
    options = options.replace("FILE", str(tmp_path / "t.jinja"))
    result = invoke(f"build --from-llava f --output {tmp_path}/o {options}")
    assert result.exit_code == 2 and options.split()[0] in result.stderr


@pytest.mark.parametrize("given", ["", "--vision v", "--language l"])
def test_a_checkpoint_is_built_of_two_parts(tmp_path, given):
    result = invoke(f"build --output {tmp_path}/o {given}")
    assert result.exit_code == 2 and "--from-llava" in result.stderr


def test_several_processes_need_a_configuration(stopped_at):
    got = stopped_at("train.run.main")
    named = "train --model_name_or_path m --dataset_name d --num_processes"
    assert "--num_processes needs --accelerate_config" in invoke(f"{named} 2").stderr
    assert got == {}
    assert invoke(f"{named} 1").stderr == "Error: so far\n" and got


@pytest.fixture
def returning(monkeypatch):
    """Puts what a function of the package returns in its place; keeps what it is called with."""

    def returning(place, value=None):
        module, _, name = f"normalign_llava.{place}".rpartition(".")
        calls = []

        def answer(*args, **kwargs):
            calls.append(args)
            return value

        monkeypatch.setattr(import_module(module), name, answer)
        return calls

    return returning


def test_every_command_hides_notices_of_libraries(returning):
    calls = returning("cli.hide_notices")
    for count, line in enumerate(("--version", "demo"), start=1):
        invoke(line)
        assert len(calls) == count


@pytest.mark.parametrize("marks", [True, False])
def test_what_comes_after_building_is_told_if_it_can_be_trained(returning, marks):
    returning("assembly.build.build_checkpoint", SimpleNamespace(generation_marks=marks))
    result = invoke("build --vision v --language l --output 'my model'", columns=12)
    assert result.exit_code == 0
    line = "Next: normalign train --stage align --model_name_or_path 'my model' "
    assert (line in result.stdout) == marks == ("Next" in result.stdout)


def test_a_merged_model_has_its_card_rendered_again(returning):
    returning("assembly.merge.merge_adapter", "the report")
    refreshed = returning("hub_cards.card.write.refresh_card")
    result = invoke("merge a --output 'my model'", columns=12)
    assert result.exit_code == 0 and refreshed == [(Path("my model"),)]
    assert result.stdout == "the report\nNext: normalign diagnose 'my model'\n"


@pytest.mark.parametrize(
    ("failed", "results", "status", "file"),
    [({}, ["a"], 0, "x.json"), ({"b": "no"}, ["a"], 1, "x.json"), ({"b": "no"}, [], 1, "none")],
)
def test_a_task_that_failed_is_in_the_status(returning, failed, results, status, file):
    evaluated = SimpleNamespace(failed=failed, results=results, file=Path("x.json"))
    returning("evaluation.run.evaluate", evaluated)
    result = invoke("evaluate m", columns=12)
    assert result.exit_code == status and result.stdout.endswith(f"\nResults: {file}.\n")


LONG_ROW = "it is shown " * 9


@pytest.mark.parametrize("faults", [[], ["Row 3: no image.", f"Row 4: {'no ' * 30}answer."]])
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("model", ["", "--model m"])
def test_faults_of_data_are_in_the_status_if_training_would_stop(returning, faults, stops, model):
    told = {"table": lambda source: f"table of {source}", "rendered": lambda terminal: LONG_ROW}
    check = SimpleNamespace(**told, faults=faults, would_stop=stops, examples=[1] if model else [])
    returning("train.data_check.check_data", check)
    result = invoke(f"data d {model}", columns=80)
    assert result.exit_code == int(bool(faults) and stops)
    assert result.stderr.split("\n")[1:-1] == faults
    assert result.stdout.startswith("table of d\n")
    assert (
        (f"{LONG_ROW}\n" in result.stdout) == ("as the model sees" in result.stdout) == bool(model)
    )


def test_models_are_compared_in_their_order_and_the_result_is_stored(
    returning, monkeypatch, tmp_path
):
    compare = import_module("normalign_llava.evaluation.compare")
    monkeypatch.setattr(compare, "read_scores", lambda argument: f"arm {argument}")
    row = compare.Difference("pope", "b", "a", 9, 0.5, 0.25, (0.1, 0.2), None, None)
    told = SimpleNamespace(differences=[row], left_out=lambda: ["Left out: gqa."])
    calls = returning("evaluation.compare.compare_models", told)
    result = invoke(f"compare a b=c,d --output {tmp_path}/x", columns=12)
    assert calls == [(["arm a", "arm b=c,d"],)] and result.exit_code == 0
    assert result.stdout.endswith(f"\nLeft out: gqa.\nWritten to {tmp_path}/x.\n")
    (stored,) = json.loads((tmp_path / "x" / "comparison.json").read_text())
    assert (stored["task"], stored["score"], stored["over_questions"]) == ("pope", 0.5, [0.1, 0.2])
    monkeypatch.chdir(tmp_path)
    invoke("compare a b")
    assert (tmp_path / "comparison" / "comparison.json").is_file()


def test_the_steps_of_a_publication_are_told_and_then_what_came_of_it(monkeypatch):
    def send(checkpoint, repo_id, *, notify, **others):
        notify("Sending 12 files.")
        return repo_id

    module = import_module("normalign_llava.hub_cards.push.publish")
    monkeypatch.setattr(module, "publish", send)
    monkeypatch.setattr(module, "summary", lambda publication: f"All of {publication}.")
    said = "Sending 12 files.\nAll of user/m.\n"
    assert invoke("publish c --repo-id user/m", columns=12).stdout == said


def test_what_the_author_of_a_card_should_know_is_told(returning):
    returning("hub_cards.card.write.write_card", SimpleNamespace(warnings=["One.", "Two."]))
    lines = invoke("card c", columns=12).stdout.splitlines()
    assert lines == ["Warning: One.", "Warning: Two.", "Card: c/README.md"]


def test_a_diagnosis_is_summed_up(returning):
    returning("diagnose.run.diagnose", SimpleNamespace(summary=lambda: ["One and more.", "Two."]))
    result = invoke("diagnose m", columns=12)
    assert result.exit_code == 0 and result.stdout == "One and more.\nTwo.\n"
