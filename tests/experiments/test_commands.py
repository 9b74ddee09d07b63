"""Every command that a plan runs or prints, against the parsers that it will meet.

Nothing is trained or fetched: names of parts, data and folders stand for themselves.
"""

import importlib.util
import io
import shlex
from pathlib import Path

import pytest
import training
import yaml
from commands import steps
from datasets import Dataset, Image
from paths import ROOT
from plan import read_plan
from typer.main import get_command

from normalign_llava.cli import app
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.diagnose.data import load_samples
from normalign_llava.evaluation.engine import SUITES
from normalign_llava.quickstart.train import words
from normalign_llava.train.command import CONFIGS, check_command, read_command, recipe_file
from normalign_llava.train.options import parse


EXPERIMENTS = ROOT / "experiments"
TABLE4 = EXPERIMENTS / "table4.yaml"
TASKS = ROOT / "evaluation" / "tasks"


def parse_command(command: list[str]):
    """Returns the parameters of the words after `normalign`, and the words that are left.

    Raises click's UsageError for an unknown option, a wrong value or a missing argument.
    """
    command_name, *arguments = command
    click_command = get_command(app).commands[command_name]
    context = click_command.make_context(command_name, arguments)
    return context.params, context.args


def check_train(command: list[str]) -> None:
    """Raises ValueError or click's UsageError unless `normalign train` takes the words."""
    options, train_words = parse_command(command)
    given, recipe = read_command(train_words)
    check_command(given, recipe)
    data_options, _, _ = parse(given, recipe)
    assert data_options.sources
    if options["accelerate_config"]:
        assert recipe_file(options["accelerate_config"], CONFIGS).is_file()
        assert options["num_processes"] > 1


def check_evaluate(command: list[str]) -> None:
    options, _ = parse_command(command)
    (task_names,) = options["tasks"]
    known_tasks = {*SUITES["paper"], *SUITES["offline"]}
    assert set(task_names.split(",")) <= known_tasks


def check_diagnose(command: list[str]) -> None:
    """Raises ValueError if the data are neither a folder here nor a name of the Hub."""
    options, _ = parse_command(command)
    if options["data"] is None:
        return
    source = DataSource.named(options["data"], columns=options["columns"])
    source.check_paths()
    if not Path(source.path).exists():
        check_hub_source(source)


def check_hub_source(source: DataSource) -> None:
    """Asserts that a task of this package reads the same split of the same data set."""
    known_sources = set()
    for task_path in TASKS.glob("*.yaml"):
        settings = {}
        for line in task_path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("dataset", "test_s")):
                setting, value = line.split(": ", 1)
                settings[setting] = value
        known_source = (
            settings.get("dataset_path"),
            settings.get("dataset_name"),
            settings.get("test_split"),
        )
        known_sources.add(known_source)
    assert (source.path, source.name, source.split) in known_sources


def check_merge(command: list[str]) -> None:
    options, words_left = parse_command(command)
    assert options["adapter"]
    assert options["base"]
    assert not words_left


def check_build(command: list[str]) -> None:
    options, words_left = parse_command(command)
    assert options["vision"]
    assert options["language"]
    assert not words_left


CHECKS = {
    "build": check_build,
    "train": check_train,
    "merge": check_merge,
    "evaluate": check_evaluate,
    "diagnose": check_diagnose,
}


def commands_of(plan, gpus):
    """Yields the words of every command of a plan; none if its runs are in one process."""
    if not plan.commands:
        return
    for run in plan.runs():
        run_steps = steps(plan, run, "some/vision", "some/language", Path("work"), gpus)
        for step in run_steps.values():
            yield step.words


each_plan = pytest.mark.parametrize(
    "plan_path",
    sorted(EXPERIMENTS.glob("*.yaml")),
    ids=lambda plan_path: plan_path.stem,
)


@pytest.mark.parametrize("gpus", [1, 8])
@each_plan
def test_every_command_of_every_plan_is_understood(plan_path, gpus):
    plan = read_plan(plan_path)
    checked_names = set()
    for command in commands_of(plan, gpus):
        command_name = command[0]
        CHECKS[command_name](command)
        assert shlex.split(shlex.join(command)) == command
        checked_names.add(command_name)
    if plan.commands:
        assert checked_names >= {"build", "train", "evaluate", "diagnose"}


@each_plan
def test_options_of_every_run_are_those_of_train(plan_path):
    """Also of plans whose runs call the trainer themselves."""
    plan = read_plan(plan_path)
    checked_words = set()
    for run in plan.runs():
        for options in plan.options(run):
            train_words = words({"dataset_name": "some/data", **options})
            train_words += ["--model_name_or_path", "start"]
            train_words += ["--output_dir", "result"]
            without_seed = tuple(word for word in train_words if word != str(run.seed))
            if without_seed not in checked_words:
                checked_words.add(without_seed)
                check_train(["train", *train_words])


@pytest.mark.parametrize(
    "changes",
    [
        {"diagnose": {"data": "paper"}},
        {"diagnose": {"data": "some/where:val"}},
        {"diagnose": {"date": "some/where"}},
        {"diagnosed": "many"},
        {"evaluate": {"batch-sizes": 16}},
        {"tasks": ["gone"]},
        {"feature_layer": "last"},
        {"stage1": {"probe_step": [0]}},
        {"accelerate": {"stage1": "dpp"}},
    ],
    ids=str,
)
def test_the_checks_notice_what_no_command_knows(tmp_path, changes):
    content = yaml.safe_load(TABLE4.read_text()) | changes
    changed_path = tmp_path / "table4.yaml"
    changed_path.write_text(yaml.safe_dump(content))
    plan = read_plan(changed_path)
    with pytest.raises(Exception) as refused:  # a parser's error or an assertion's
        for command in commands_of(plan, 8):
            CHECKS[command[0]](command)
    assert not isinstance(refused.value, (AttributeError, NameError, TypeError))


def test_the_last_command_that_is_printed_is_understood():
    spec = importlib.util.spec_from_file_location("experiments_main", EXPERIMENTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plan = read_plan(TABLE4)
    first_run = plan.runs()[0]
    folder, *arguments = module.stored_by(plan, first_run, TABLE4, Path("work"))
    assert Path(folder, "__main__.py").is_file()
    options = module.command_parser().parse_args(arguments)
    assert options.only == [first_run.cell]
    assert plan.runs(options.only) == [first_run]
    assert options.results == plan.results


def mmstar_row(number):
    return {
        "index": number,
        "question": f"How many are there?\nOptions: A: {number}, B: none",
        "image": {"bytes": training.image(number), "path": None},
        "answer": "A",
        "category": "logical reasoning",
        "l2_category": "numeric commonsense and calculation",
        "meta_info": {"source": "MMBench", "split": "val", "image_path": "x.jpg"},
    }


def write_mmstar(folder, mmstar_rows):
    """Writes a data set with the configuration `val`, as the Hub's has."""
    table = Dataset.from_list(mmstar_rows).cast_column("image", Image())
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    folder.mkdir()
    (folder / "val.parquet").write_bytes(buffer.getvalue())
    configuration = {
        "config_name": "val",
        "data_files": [{"split": "val", "path": "val.parquet"}],
    }
    front_matter = yaml.safe_dump({"configs": [configuration]})
    (folder / "README.md").write_text(f"---\n{front_matter}---\n")


def test_data_with_mmstar_s_columns_are_read_with_the_plan_s(tmp_path):
    """A small table of the same columns stands for the data set, which is on the Hub."""
    plan = read_plan(TABLE4)
    mmstar_rows = [mmstar_row(number) for number in range(4)]
    folder = tmp_path / "MMStar"
    write_mmstar(folder, mmstar_rows)

    _, _, split = plan.diagnose["data"].partition(":")
    drawn = load_samples(f"{folder}:{split}", 4, columns=plan.diagnose["columns"])
    assert len(drawn.samples) == 4
    expected = {row["question"] for row in mmstar_rows}
    assert {sample.question for sample in drawn.samples} == expected
