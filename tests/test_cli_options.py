"""Every option of a command reaches the function that the command is for, under its own name."""

import inspect
import json
import shlex
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.evaluation.ask import AskOptions
from normalign_llava.quickstart.run import Settings


def invoke(line, columns=200):
    return CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": str(columns)})


def find_function(place: str):
    """The module and the name of a function of the package."""
    module_name, _, function_name = f"normalign_llava.{place}".rpartition(".")
    return import_module(module_name), function_name


@pytest.fixture
def stopped_at(monkeypatch):
    """Lets commands go as far as a function of the package, which raises an error.

    Returns the arguments that it is called with, once it is.
    """

    def stop_at(place, error=None):
        module, function_name = find_function(place)
        signature = inspect.signature(getattr(module, function_name))
        received = {}

        def stop(*arguments, **keyword_arguments):
            call = signature.bind(*arguments, **keyword_arguments)
            received.update(call.arguments)
            raise error or ValueError("so far")

        monkeypatch.setattr(module, function_name, stop)
        return received

    return stop_at


LOADING = "--batch-size 3 --dtype float16 --load-in-4bit --trust-remote-code"
BASE = "--base there --base-quantization nf4-double"
ROWS = "--image-folder pictures --columns image=path"
LOADED = {
    "dtype": "float16",
    "load_in_4bit": True,
    "trust_remote_code": True,
}
BASED = {
    "base": "there",
    "base_quantization": "nf4-double",
}
READ = {
    "image_folder": "pictures",
    "columns": "image=path",
}
BUILT = {
    "vision": "v",
    "language": "l",
    "output": Path("o"),
}
CASES = {
    "build --vision v --language l --output o --arm unit --norm rms_norm --feature-layer -5 "
    "--select-strategy full --chat-template FILE --dtype bfloat16 --seed 7": (
        "assembly.build.build_checkpoint",
        {
            **BUILT,
            "arm": "unit",
            "norm": "rms_norm",
            "feature_layer": -5,
            "select_strategy": "full",
            "chat_template": "FILE",
            "dtype": "bfloat16",
            "seed": 7,
        },
    ),
    "build --vision v --language l --output o --feature-layer -2,-5,3": (
        "assembly.build.build_checkpoint",
        {**BUILT, "feature_layer": [-2, -5, 3]},
    ),
    "build --vision v --language l --output o --feature-layer 0": (
        "assembly.build.build_checkpoint",
        {**BUILT, "feature_layer": 0},
    ),
    "build --from-llava f --output o --arm none --norm rms_norm --dtype float32": (
        "assembly.build.retrofit_checkpoint",
        {
            "llava": "f",
            "output": Path("o"),
            "arm": "none",
            "norm": "rms_norm",
            "dtype": "float32",
        },
    ),
    f"data d --model m --check-images --examples 2 --row 4 --row 9 --filters a=b {ROWS}": (
        "train.data_check.check_data",
        {
            "source": DataSource("d", filters="a=b", **READ),
            "model": "m",
            "check_images": True,
            "examples": 2,
            "rows": [4, 9],
        },
    ),
    f"merge a --output o --dtype float16 {BASE}": (
        "assembly.merge.merge_adapter",
        {
            "adapter": "a",
            "output": Path("o"),
            "dtype": "float16",
            **BASED,
        },
    ),
    f"evaluate m --suite paper,text --suite vision --tasks a,,b --include-path FOLDER --data d "
    f"--limit 5 --output o {LOADING} {BASE} {ROWS}": (
        "evaluation.run.evaluate",
        {
            "model": "m",
            "suites": ["paper", "text", "vision"],
            "tasks": ["a", "b"],
            "include_path": "FOLDER",
            "data": "d",
            "limit": 5,
            "output": Path("o"),
            "batch_size": 3,
            **LOADED,
            **BASED,
            **READ,
        },
    ),
    f"ask m a.png 'what is it?' --system s --data d --output o.jsonl --max-new-tokens 5 {LOADING} "
    f"{BASE} {ROWS}": (
        "evaluation.ask.ask",
        {
            "model": "m",
            "words": ["a.png", "what is it?"],
            "options": AskOptions(
                system="s",
                max_new_tokens=5,
                batch_size=3,
                output=Path("o.jsonl"),
                data="d",
                **READ,
                **BASED,
                **LOADED,
            ),
        },
    ),
    f"diagnose m --against n --data d --samples 5 --output o --seed 9 {LOADING} {BASE} {ROWS}": (
        "diagnose.run.diagnose",
        {
            "model": "m",
            "against": "n",
            "data": "d",
            "samples": 5,
            "output": Path("o"),
            "seed": 9,
            "batch_size": 3,
            **LOADED,
            **BASED,
            **READ,
        },
    ),
    "quickstart --output o --full-baseline --seed 3": (
        "quickstart.run.run_quickstart",
        {
            "output": Path("o"),
            "settings": Settings.seeded(3),
            "full_baseline": True,
        },
    ),
    "card c --repo-id user/m --replace": (
        "hub_cards.card.write.write_card",
        {
            "checkpoint": Path("c"),
            "repo_id": "user/m",
            "replace": True,
        },
    ),
    f"publish c --repo-id user/m --private --revision trial --create-pr --space --adapter {BASE} "
    "--replace-card --replace-files --no-verify --dry-run": (
        "hub_cards.push.publish.publish",
        {
            "checkpoint": Path("c"),
            "repo_id": "user/m",
            "private": True,
            "revision": "trial",
            "create_pr": True,
            "space": True,
            "as_adapter": True,
            "dry_run": True,
            "replace_card": True,
            "replace_files": True,
            "check_loading": False,
            **BASED,
        },
    ),
    "publish c --repo-id user/m --public": (
        "hub_cards.push.publish.publish",
        {
            "checkpoint": Path("c"),
            "repo_id": "user/m",
            "private": False,
        },
    ),
    "demo c --host 0.0.0.0 --port 5": (
        "hub_cards.demo.run_demo",
        {
            "checkpoint": "c",
            "host": "0.0.0.0",
            "port": 5,
        },
    ),
    "train r.yaml --seed 3 --accelerate_config ddp --num_processes 2 --model_name_or_path m": (
        "train.command.launch",
        {
            "config": "ddp",
            "processes": 2,
            "arguments": ["r.yaml", "--seed", "3", "--model_name_or_path", "m"],
        },
    ),
    # As many processes as the file says.
    "train --accelerate_config a.yaml --model_name_or_path m": (
        "train.command.launch",
        {
            "config": "a.yaml",
            "processes": None,
            "arguments": ["--model_name_or_path", "m"],
        },
    ),
}
"""By command: the function of the package, and what it is to be called with."""

REQUIRED = {
    "publish": "--repo-id user/m",
    "build": "--vision v --language l --output o",
    "merge": "--output o",
}


@pytest.mark.parametrize("line", CASES, ids=lambda line: line.split()[0])
def test_options_reach_the_function(stopped_at, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("learning_rate: 0.1\n")
    paths = {
        "FILE": tmp_path / "chat.jinja",
        "FOLDER": tmp_path / "tasks",
    }
    paths["FILE"].touch()
    paths["FOLDER"].mkdir()

    place, expected_arguments = CASES[line]
    for placeholder, path in paths.items():
        line = line.replace(placeholder, str(path))
    received = stopped_at(place)
    result = invoke(line)
    assert result.exit_code == 1, result.output
    assert result.stderr == "Error: so far\n", result.output
    for argument_name, expected in expected_arguments.items():
        if expected in ("FILE", "FOLDER"):
            expected = paths[expected]
        assert received[argument_name] == expected, argument_name


def function_of(command) -> str:
    """The first function of a command that the cases name."""
    for line, case in CASES.items():
        if line.split()[0] == command:
            return case[0]
    raise KeyError(command)


@pytest.mark.parametrize("command", ["build", "merge", "evaluate", "diagnose", "publish", "demo"])
def test_a_command_without_options_means_what_its_function_means(stopped_at, command):
    place = function_of(command)
    module, function_name = find_function(place)
    parameters = inspect.signature(getattr(module, function_name)).parameters

    received = stopped_at(place)
    argument = "c"
    if command == "build":
        argument = ""
    invoke(f"{command} {argument} {REQUIRED.get(command, '')}")
    assert received
    for argument_name, value in received.items():
        if argument_name == "notify":
            continue
        default = parameters[argument_name].default
        if default is inspect.Parameter.empty:
            continue
        if default == () and value == []:
            continue
        assert value == default, argument_name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "quickstart",
            {
                "output": Path("outputs/quickstart"),
                "settings": Settings.seeded(0),
                "full_baseline": False,
            },
        ),
        (
            "card c",
            {
                "checkpoint": Path("c"),
                "repo_id": None,
                "replace": False,
            },
        ),
        (
            "data d",
            {
                "source": DataSource("d"),
                "model": None,
                "check_images": False,
                "examples": None,
                "rows": (),
            },
        ),
    ],
)
def test_what_is_not_asked_for_is_not_done(stopped_at, line, expected):
    command = line.split()[0]
    received = stopped_at(function_of(command))
    assert invoke(line).stderr == "Error: so far\n"
    assert received == expected


@pytest.mark.parametrize(
    "line",
    [
        "gain m --top -1",
        "evaluate m --limit 0",
        "evaluate m --batch-size 0",
        "diagnose m --samples 0",
        "ask m --max-new-tokens 0",
        "data d --examples 0",
        "data d --row -1",
        "train --model_name_or_path m --num_processes 0",
        "build --output o --chat-template none",
        "evaluate m --include-path none",
    ],
)
def test_a_number_that_is_too_small_or_a_path_that_is_none_is_refused(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    option = line.split()[-2]
    result = invoke(line)
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_question_without_options_is_asked_as_the_function_would(stopped_at):
    received = stopped_at("evaluation.ask.ask")
    invoke("ask c")
    assert received["words"] == []
    assert received["options"] == AskOptions()


@pytest.fixture
def found_commit(monkeypatch):
    """A model is found at a commit `of` its revision."""

    def require_model(model, revision):
        return model, f"of {revision}"

    files = import_module("normalign_llava.checkpoint.files")
    monkeypatch.setattr(files, "require_model", require_model)


@pytest.mark.usefixtures("found_commit")
def test_the_gain_is_measured_at_the_commit_that_was_found(stopped_at):
    received = stopped_at("assembly.gain.embedding_statistics")
    result = invoke("gain some/model --revision trial --top 3")
    assert result.stderr == "Error: so far\n"
    assert received == {
        "model": "some/model",
        "top": 3,
        "revision": "of trial",
    }


@pytest.mark.usefixtures("found_commit")
def test_updates_are_measured_at_the_commit_if_they_are_asked_for(stopped_at, monkeypatch):
    listed_counts = []

    def embedding_statistics(model, top, revision):
        listed_counts.append(top)
        return SimpleNamespace(tables=list)

    gain = import_module("normalign_llava.assembly.gain")
    monkeypatch.setattr(gain, "embedding_statistics", embedding_statistics)
    received = stopped_at("diagnose.critical.measure_model_updates")
    assert invoke("gain some/model --revision trial").exit_code == 0
    assert received == {}

    result = invoke("gain some/model --revision trial --critical --trust-remote-code")
    assert result.stderr == "Error: so far\n"
    assert received == {
        "model": "some/model",
        "revision": "of trial",
        "trust_remote_code": True,
    }
    assert listed_counts == [10, 10]


LINES = {
    "merge": "merge a --output o",
    "evaluate": "evaluate m",
    "ask": "ask m",
    "diagnose": "diagnose m",
    "demo": "demo c",
    "publish": "publish c --repo-id user/m",
    "quickstart": "quickstart",
}


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("merge", "qlora"),
        ("evaluate", "evaluate"),
        ("ask", "qlora"),
        ("diagnose", "qlora"),
        ("demo", "demo"),
        ("quickstart", "quickstart"),
    ],
)
def test_the_extra_that_a_command_needs_is_named(stopped_at, command, extra):
    stopped_at(function_of(command), ModuleNotFoundError("No module named 'x'"))
    assert f"'normalign-llava[{extra}] @" in invoke(LINES[command]).stderr


def test_the_extra_that_a_comparison_needs_is_named(stopped_at):
    stopped_at("evaluation.compare.read_scores", ModuleNotFoundError("No module named 'x'"))
    assert "'normalign-llava[evaluate] @" in invoke("compare a b").stderr


@pytest.mark.parametrize("command", ["evaluate", "ask", "diagnose"])
def test_where_memory_is_full_a_smaller_batch_is_named(stopped_at, command):
    stopped_at(function_of(command), MemoryError())
    assert "--batch-size, or --load-in-4bit" in invoke(LINES[command]).stderr


def test_where_memory_of_training_is_full_a_dry_run_is_named(stopped_at):
    stopped_at("train.run.main", MemoryError())
    result = invoke("train --model_name_or_path m --dataset_name d")
    assert "--dry_run" in result.stderr and result.exit_code == 1


LAUNCHED = "train --model_name_or_path m --accelerate_config ddp"


def function_to_stop(line) -> str:
    if line == LAUNCHED:
        return "train.command.launch"
    command = line.split()[0]
    if command == "train":
        return "train.run.main"
    return function_of(command)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("evaluate m", "Run the same command again"),
        ("ask m --output o", "Run the same command again"),
        ("diagnose m", "Nothing was written"),
        ("quickstart", "Run the same command again"),
        ("publish c --repo-id user/m", "Run it again"),
        ("train --model_name_or_path m --dataset_name d", "Nothing was trained"),
    ],
)
def test_a_command_that_is_stopped_says_what_is_left(stopped_at, line, expected):
    stopped_at(function_to_stop(line), KeyboardInterrupt())
    result = invoke(line)
    assert result.exit_code == 130
    assert result.stderr.startswith("Stopped.")
    assert expected in result.stderr


@pytest.mark.parametrize("line", ["ask m", LAUNCHED])
def test_a_command_that_leaves_nothing_only_says_that_it_is_stopped(stopped_at, line):
    stopped_at(function_to_stop(line), KeyboardInterrupt())
    result = invoke(line)
    assert result.exit_code == 130
    assert result.stderr.split() == ["Stopped."]


@pytest.mark.parametrize(
    "options",
    [
        "--vision v",
        "--language l",
        "--feature-layer -2",
        "--select-strategy full",
        "--seed 0",
        "--chat-template FILE",
    ],
)
def test_the_parts_of_a_llava_checkpoint_are_not_named_besides(tmp_path, options):
    template_path = tmp_path / "t.jinja"
    template_path.touch()
    options = options.replace("FILE", str(template_path))
    result = invoke(f"build --from-llava f --output {tmp_path}/o {options}")
    assert result.exit_code == 2
    assert options.split()[0] in result.stderr


@pytest.mark.parametrize("options", ["", "--vision v", "--language l"])
def test_a_checkpoint_is_built_of_two_parts(tmp_path, options):
    result = invoke(f"build --output {tmp_path}/o {options}")
    assert result.exit_code == 2
    assert "--from-llava" in result.stderr


def test_several_processes_need_a_configuration(stopped_at):
    received = stopped_at("train.run.main")
    line = "train --model_name_or_path m --dataset_name d --num_processes 2"
    assert "--num_processes needs --accelerate_config" in invoke(line).stderr
    assert received == {}


def test_one_process_needs_no_configuration(stopped_at):
    received = stopped_at("train.run.main")
    line = "train --model_name_or_path m --dataset_name d --num_processes 1"
    assert invoke(line).stderr == "Error: so far\n"
    assert received


@pytest.fixture
def returning(monkeypatch):
    """Makes a function of the package return a value; keeps what it is called with."""

    def return_at(place, value=None):
        module, function_name = find_function(place)
        calls = []

        def answer(*arguments, **keyword_arguments):
            calls.append(arguments)
            return value

        monkeypatch.setattr(module, function_name, answer)
        return calls

    return return_at


@pytest.mark.parametrize("line", ["--version", "demo"])
def test_every_command_hides_notices_of_libraries(returning, line):
    calls = returning("cli.hide_notices")
    invoke(line)
    assert len(calls) == 1


def build_with_report(returning, generation_marks):
    report = SimpleNamespace(generation_marks=generation_marks)
    returning("assembly.build.build_checkpoint", report)
    result = invoke("build --vision v --language l --output 'my model'", columns=12)
    assert result.exit_code == 0
    return result.stdout


def test_what_comes_after_building_is_printed_if_it_can_be_trained(returning):
    output = build_with_report(returning, generation_marks=True)
    assert "Next: normalign train --stage align --model_name_or_path 'my model' " in output


def test_nothing_comes_after_building_what_cannot_be_trained(returning):
    assert "Next" not in build_with_report(returning, generation_marks=False)


def test_a_merged_model_has_its_card_rendered_again(returning):
    returning("assembly.merge.merge_adapter", "the report")
    refreshed = returning("hub_cards.card.write.refresh_card")
    result = invoke("merge a --output 'my model'", columns=12)
    assert result.exit_code == 0
    assert refreshed == [(Path("my model"),)]
    assert result.stdout == "the report\nNext: normalign diagnose 'my model'\n"


@pytest.mark.parametrize(
    ("failed", "results", "status", "result_file"),
    [
        ({}, ["a"], 0, "x.json"),
        ({"b": "no"}, ["a"], 1, "x.json"),
        ({"b": "no"}, [], 1, "none"),
    ],
)
def test_a_task_that_failed_is_in_the_status(returning, failed, results, status, result_file):
    suite = SimpleNamespace(failed=failed, results=results, file=Path("x.json"))
    returning("evaluation.run.evaluate", suite)
    result = invoke("evaluate m", columns=12)
    assert result.exit_code == status
    assert result.stdout.endswith(f"\nResults: {result_file}.\n")


LONG_ROW = "it is shown " * 9
FAULTS = ["Row 3: no image.", f"Row 4: {'no ' * 30}answer."]


class DataCheck:
    """What `check_data` returns."""

    def __init__(self, faults, stops, examples):
        self.faults = faults
        self.would_stop = stops
        self.examples = examples

    def table(self, source):
        return f"table of {source}"

    def rendered(self, terminal):
        return LONG_ROW


@pytest.mark.parametrize("model_option", ["", "--model m"])
@pytest.mark.parametrize(
    ("faults", "stops", "status"),
    [
        ([], True, 0),
        ([], False, 0),
        (FAULTS, True, 1),
        (FAULTS, False, 0),
    ],
)
def test_faults_of_data_are_in_the_status_if_training_would_stop(
    returning, faults, stops, status, model_option
):
    examples = []
    if model_option:
        examples = [1]
    returning("train.data_check.check_data", DataCheck(faults, stops, examples))
    result = invoke(f"data d {model_option}", columns=80)
    assert result.exit_code == status
    assert result.stderr.split("\n")[1:-1] == faults
    assert result.stdout.startswith("table of d\n")
    if model_option:
        assert f"{LONG_ROW}\n" in result.stdout
        assert "as the model sees" in result.stdout
    else:
        assert f"{LONG_ROW}\n" not in result.stdout
        assert "as the model sees" not in result.stdout


@pytest.fixture
def compared(returning, monkeypatch):
    """Replaces the comparison of models; returns the calls of it."""
    compare = import_module("normalign_llava.evaluation.compare")
    monkeypatch.setattr(compare, "read_scores", lambda argument: f"arm {argument}")
    difference = compare.Difference("pope", "b", "a", 9, 0.5, 0.25, (0.1, 0.2), None, None)
    comparison = SimpleNamespace(
        differences=[difference],
        left_out=lambda: ["Left out: gqa."],
    )
    return returning("evaluation.compare.compare_models", comparison)


def test_models_are_compared_in_their_order_and_the_result_is_stored(compared, tmp_path):
    result = invoke(f"compare a b=c,d --output {tmp_path}/x", columns=12)
    assert result.exit_code == 0
    assert compared == [(["arm a", "arm b=c,d"],)]
    assert result.stdout.endswith(f"\nLeft out: gqa.\nWritten to {tmp_path}/x.\n")

    (stored,) = json.loads((tmp_path / "x" / "comparison.json").read_text())
    assert stored["task"] == "pope"
    assert stored["score"] == 0.5
    assert stored["over_questions"] == [0.1, 0.2]


@pytest.mark.usefixtures("compared")
def test_a_comparison_is_stored_in_a_folder_of_this_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    invoke("compare a b")
    assert (tmp_path / "comparison" / "comparison.json").is_file()


def test_the_steps_of_a_publication_are_printed_and_then_what_came_of_it(monkeypatch):
    def send(checkpoint, repo_id, *, notify, **options):
        notify("Sending 12 files.")
        return repo_id

    publish = import_module("normalign_llava.hub_cards.push.publish")
    monkeypatch.setattr(publish, "publish", send)
    monkeypatch.setattr(publish, "summary", lambda publication: f"All of {publication}.")
    result = invoke("publish c --repo-id user/m", columns=12)
    assert result.stdout == "Sending 12 files.\nAll of user/m.\n"


def test_warnings_about_a_card_are_printed(returning):
    card = SimpleNamespace(warnings=["One.", "Two."])
    returning("hub_cards.card.write.write_card", card)
    result = invoke("card c", columns=12)
    assert result.stdout.splitlines() == [
        "Warning: One.",
        "Warning: Two.",
        "Card: c/README.md",
    ]


def test_a_diagnosis_is_summed_up(returning):
    diagnosis = SimpleNamespace(summary=lambda: ["One and more.", "Two."])
    returning("diagnose.run.diagnose", diagnosis)
    result = invoke("diagnose m", columns=12)
    assert result.exit_code == 0
    assert result.stdout == "One and more.\nTwo.\n"
