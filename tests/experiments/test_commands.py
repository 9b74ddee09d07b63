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
from normalign_llava.train.parsing import parse


EXPERIMENTS = ROOT / "experiments"
PLANS = sorted(EXPERIMENTS.glob("*.yaml"))
TASKS = ROOT / "evaluation" / "tasks"


def parsed(command: list[str]):
    """What the command line makes of the words after `normalign`: its parameters, and the rest.

    Raises click's UsageError for an unknown option, a wrong value or a missing argument.
    """
    name, *rest = command
    context = get_command(app).commands[name].make_context(name, rest)
    return context.params, context.args


def check_train(command: list[str]) -> None:
    """Raises ValueError or click's UsageError unless `normalign train` takes the words."""
    options, rest = parsed(command)
    given, recipe = read_command(rest)
    check_command(given, recipe)
    data, _, _ = parse(given, recipe)
    assert data.sources
    if options["accelerate_config"]:
        assert recipe_file(options["accelerate_config"], CONFIGS).is_file()
        assert options["num_processes"] > 1


def check_evaluate(command: list[str]) -> None:
    options, _ = parsed(command)
    (tasks,) = options["tasks"]
    assert set(tasks.split(",")) <= {*SUITES["paper"], *SUITES["offline"]}


def check_diagnose(command: list[str]) -> None:
    """Raises ValueError if the data have no source: no folder here, nor a name of the Hub."""
    options, _ = parsed(command)
    if options["data"] is None:
        return
    source = DataSource.named(options["data"], columns=options["columns"])
    source.check_paths()
    if not Path(source.path).exists():
        check_hub_source(source)


def check_hub_source(source: DataSource) -> None:
    """That a task of this package reads the same data set, and the same split of it."""
    known = set()
    for file in TASKS.glob("*.yaml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        own = dict(line.split(": ", 1) for line in lines if line.startswith(("dataset", "test_s")))
        known.add((own.get("dataset_path"), own.get("dataset_name"), own.get("test_split")))
    assert (source.path, source.name, source.split) in known


def check_merge(command: list[str]) -> None:
    options, rest = parsed(command)
    assert options["adapter"] and options["base"] and not rest


def check_build(command: list[str]) -> None:
    options, rest = parsed(command)
    assert options["vision"] and options["language"] and not rest


CHECKS = {
    "build": check_build,
    "train": check_train,
    "merge": check_merge,
    "evaluate": check_evaluate,
    "diagnose": check_diagnose,
}


def commands_of(plan, gpus):
    """The words of every command of a plan by name and cell; none where it runs in one process."""
    if not plan.commands:
        return
    for run in plan.runs():
        made = steps(plan, run, "some/vision", "some/language", Path("work"), gpus)
        for name, step in made.items():
            yield f"{run.cell} {name}", step.words


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_every_command_of_every_plan_is_understood(file, gpus):
    seen = set()
    for name, command in commands_of(read_plan(file), gpus):
        CHECKS[command[0]](command)
        assert shlex.split(shlex.join(command)) == command, name
        seen.add(command[0])
    assert not seen or seen >= {"build", "train", "evaluate", "diagnose"}


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_options_of_every_run_are_those_of_train(file):
    """Also of plans whose runs call the trainer themselves."""
    plan = read_plan(file)
    alike = set()
    for run in plan.runs():
        for options in plan.options(run):
            given = words({"dataset_name": "some/data", **options})
            given += ["--model_name_or_path", "start", "--output_dir", "result"]
            without_seed = tuple(word for word in given if word != str(run.seed))
            if without_seed not in alike:
                alike.add(without_seed)
                check_train(["train", *given])


def changed(file, tmp_path, **changes):
    content = yaml.safe_load(file.read_text()) | changes
    (tmp_path / file.name).write_text(yaml.safe_dump(content))
    return read_plan(tmp_path / file.name)


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
def test_what_no_command_knows_is_noticed(tmp_path, changes):
    """The checks themselves: of a plan with one wrong word, a command is refused."""
    plan = changed(EXPERIMENTS / "table4.yaml", tmp_path, **changes)
    with pytest.raises(Exception) as refused:  # a parser's error or an assertion's
        for _, command in commands_of(plan, 8):
            CHECKS[command[0]](command)
    assert not isinstance(refused.value, (AttributeError, NameError, TypeError))


def test_the_last_command_that_is_printed_is_understood():
    spec = importlib.util.spec_from_file_location("experiments_main", EXPERIMENTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plan = read_plan(EXPERIMENTS / "table4.yaml")
    run = plan.runs()[0]
    folder, *given = module.stored_by(plan, run, EXPERIMENTS / "table4.yaml", Path("work"))
    options = module.command_parser().parse_args(given)
    assert Path(folder, "__main__.py").is_file() and options.only == [run.cell]
    assert plan.runs(options.only) == [run] and options.results == plan.results


def test_data_with_mmstar_s_columns_are_read_with_the_plan_s(tmp_path):
    """A small table of the same columns stands for the data set, which is on the Hub."""
    plan = read_plan(EXPERIMENTS / "table4.yaml")
    rows = []
    for number in range(4):
        rows.append(
            {
                "index": number,
                "question": f"How many are there?\nOptions: A: {number}, B: none",
                "image": {"bytes": training.image(number), "path": None},
                "answer": "A",
                "category": "logical reasoning",
                "l2_category": "numeric commonsense and calculation",
                "meta_info": {"source": "MMBench", "split": "val", "image_path": "x.jpg"},
            }
        )
    table = Dataset.from_list(rows).cast_column("image", Image())
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    folder = tmp_path / "MMStar"
    folder.mkdir()
    (folder / "val.parquet").write_bytes(buffer.getvalue())
    named = {"config_name": "val", "data_files": [{"split": "val", "path": "val.parquet"}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': [named]})}---\n")
    _, _, split = plan.diagnose["data"].partition(":")
    drawn = load_samples(f"{folder}:{split}", 4, columns=plan.diagnose["columns"])
    asked = {sample.question for sample in drawn.samples}
    assert asked == {row["question"] for row in rows} and len(drawn.samples) == 4
