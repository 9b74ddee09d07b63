# SPDX-License-Identifier: Apache-2.0
"""`normalign evaluate`: runs tasks one after the other, and keeps the result of each."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from lm_eval.tasks import TaskManager
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..assembly.adapter import Adapter
from ..checkpoint.files import finished_folder, lock_folder
from ..console import Console, Printed
from ..errors import NotWritable, device_error
from ..keywords import takes_fields
from ..models import ModelHandle, ModelOptions, resolve_model
from .engine import SUITES, as_lm, chosen_tasks, run_task, task_version
from .own_data import OWN_TASK, own_task
from .results import (
    EVALUATION,
    SUMMARY,
    WEIGHT_FILES,
    Answer,
    Evaluation,
    files_hash,
    read_answers,
    read_evaluations,
)
from .tasks.offline import OfflineTask


EXAMPLES = 3  # answers that are printed of own data
WIDEST = 200  # characters of a question or an answer that are printed
FILES_BESIDE_WEIGHTS = ("*config.json", "*chat_template*", "*processor*.json", "*token*")
TASK_FILES = ("**/*yaml", "**/*.yml", "**/*.py")


@dataclass
class Evaluated(Printed):
    """The outcome of [`evaluate`].

    Attributes:
        file: The file that has the results.
        results: One for each finished task.
        failed: For each task that failed, by name, the reason.
    """

    file: Path
    results: list[Evaluation]
    failed: dict[str, str]

    def renderable(self) -> Group:
        """Returns the table of results and, for own data, the first answers with their truth."""
        return Group(self.table(), *self.read_examples())

    def read_examples(self) -> list[Table]:
        """Reads the first `EXAMPLES` questions and answers of each task of own data."""
        tables = []
        for result in self.results:
            # Other tasks store their answers in forms of their own.
            if result.task.startswith(OWN_TASK):
                answers = read_answers(self.file.parent / result.task)
                if answers:
                    tables.append(_answer_table(result.task, answers[:EXAMPLES]))
        return tables

    def table(self) -> Table:
        """Returns a table with a row for each metric of a whole task."""
        whole_metrics = []
        reference_names: dict[str, None] = {}
        for result in self.results:
            for metric in result.metrics:
                if metric.subset is None:
                    whole_metrics.append((result, metric))
                    reference_names |= dict.fromkeys(metric.references)
        table = Table("task", "metric", box=SIMPLE, padding=0, show_edge=False)
        if any(result.partial for result in self.results):
            table.caption = "partial"
        for column_name in ("value", "±", *reference_names, "n"):
            table.add_column(column_name, justify="right")
        for result, metric in whole_metrics:
            references = map(metric.references.get, reference_names)
            cells = map(_three_decimals, (metric.value, metric.stderr, *references))
            sample_count = result.samples if metric.samples is None else metric.samples
            table.add_row(result.task, metric.name, *cells, f"{sample_count:,}")
        return table


def _answer_table(task_name: str, answers: Sequence[Answer]) -> Table:
    table = Table("question", "answer", "true", box=SIMPLE, padding=0, show_edge=False)
    table.title = f"The first answers of {task_name}"
    table.title_justify = "left"
    for answer in answers:
        row = (answer.question, answer.text or "(nothing)", " or ".join(answer.true))
        shortened = [shorten(cell, WIDEST, placeholder=" ...") for cell in row]
        table.add_row(*map(Text, shortened))  # a str would be read as rich's markup
    return table


def _three_decimals(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


@dataclass(frozen=True)
class ResultKey:
    """What a result depends on, besides its task. A stored result with another key is not used.

    Attributes:
        weights: Hash of the weight files, or Hub id and commit.
        settings: JSON values: options, precision, and hashes of the model's and tasks' other files.
    """

    weights: str
    settings: dict[str, Any]

    def matches(self, result: Evaluation, task_version: str | None) -> bool:
        """Returns whether a new run with the installed packages would repeat a stored result."""
        versions = {package: version(package) for package in ("lm_eval", "normalign_llava")}
        if task_version:
            versions[result.task] = task_version
        return (
            result.weights == self.weights
            and result.settings == self.settings
            and versions.items() <= result.versions.items()
        )


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """The arguments of [`evaluate`]. Its docstring explains them."""

    model: str
    _: KW_ONLY
    suites: Sequence[str] = ()
    tasks: Sequence[str] = ()
    include_path: Path | None = None
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None
    limit: int | None = None
    output: Path | None = None
    batch_size: int = 1


@takes_fields(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Evaluated:
    """Evaluates a model with lm-evaluation-harness, and writes results to `evaluation/`.

    Each result is written when it is finished. The next time, its task is skipped if nothing has
    changed: files or commit of the model, settings, task files, and the versions of task, package
    and harness. If a task fails, the others still run.

    Args:
        model: Folder or Hub id of a vision-language or language model, or an adapter's folder.
        suites: Names of suites, see [`SUITES`].
        tasks: Names of further tasks of the harness.
        include_path: Folder with the user's own task files, as the harness reads them.
        data, image_folder, columns: The user's own questions and answers, see [`own_task`].
        limit: Use the first so many samples of each task. The result is marked as partial.
        output: Folder that gets `evaluation/`. By default, this is the model's folder or, for a Hub
            id, `evaluations/NAME`.
        batch_size: Questions that are answered together.
        dtype, load_in_4bit, trust_remote_code, base, base_quantization: How the model is opened and
            loaded, see [`ModelOptions`].

    Raises:
        ValueError: Model, task or data cannot be read, or a limit would replace whole results.
        TypeError: An option does not exist.
        OSError: The model cannot be fetched, or the results cannot be written.
        ImportError: The model needs a package that is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    task_names, manager = chosen_tasks(
        options.suites, options.tasks, options.include_path, options.limit
    )
    chosen: dict[str, str | OfflineTask] = {task_name: task_name for task_name in task_names}
    if options.data:
        task_of_data = own_task(
            options.data, image_folder=options.image_folder, columns=options.columns
        )
        chosen[task_of_data.config.task] = task_of_data
    if not chosen:
        raise ValueError(f"Name a suite ({', '.join(SUITES)}), tasks or data to evaluate on.")
    handle = resolve_model(
        options.model,
        trust_remote_code=options.trust_remote_code,
        base=options.base,
        base_quantization=options.base_quantization,
    )
    key = _require_result_key(handle, options)
    output = options.output
    if output is None:
        output = _model_folder(handle) or Path("evaluations", handle.name.replace("/", "--"))
    output = Path(os.path.expanduser(output))
    with lock_folder(output):
        (output / EVALUATION).mkdir(exist_ok=True)
    results = _read_reusable_results(output, chosen, manager, key)
    console = Console(stderr=True)
    for task_name in results:
        console.print(f"{task_name}: done before.")
    missing = [task_name for task_name in chosen if task_name not in results]
    language_model = None
    if missing:
        language_model = as_lm(
            handle,
            batch_size=options.batch_size,
            dtype=key.settings.get("dtype", options.dtype),
            load_in_4bit=options.load_in_4bit,
        )
    failed = {}
    for number, task_name in enumerate(missing, start=1):
        console.print(f"{task_name} ({number} of {len(missing)})")
        try:
            with finished_folder(output / EVALUATION / task_name, _harness_files) as folder:
                result = run_task(
                    language_model, chosen[task_name], manager, folder, key.weights, key.settings
                )
            result.write(output)
            results[task_name] = result
        except NotWritable:
            raise
        except Exception as error:  # whatever it is, the other tasks are run
            failed[task_name] = _failure(error)
            console.print(f"{task_name} could not be run: {failed[task_name]}", style="red")
    ordered = [results[task_name] for task_name in chosen if task_name in results]
    return Evaluated(output / EVALUATION / SUMMARY, ordered, failed)


def _model_folder(handle: ModelHandle) -> Path | None:
    """Returns the folder of a model's files, or None for a Hub id."""
    folder = Path(handle.checkpoint.name)
    return folder if folder.is_dir() else None


def _read_base_settings(adapter: Adapter) -> dict:
    """Returns the version of an adapter's base, and its quantization. Both are as in training.

    The version is the commit of a Hub id. In a folder, the weight files are read for their hash.
    """
    base_version = adapter.base.revision
    if not base_version:
        base_version = files_hash(Path(adapter.base.name), WEIGHT_FILES)
    return {"quantization": adapter.quantization, "base": base_version}


def _require_precision_settings(handle: ModelHandle, options: ModelOptions) -> dict:
    """Returns the settings that say in what precision the weights are used.

    Fetches weights from the Hub, as [`ModelHandle.fetch_precision`] does.

    Raises:
        ValueError: `options.dtype` names no dtype, or the weights cannot be read.
        ImportError: Weights are quantized, but bitsandbytes is not installed.
    """
    dtype, quantization = handle.fetch_precision(options.dtype, options.load_in_4bit)
    settings: dict = {
        "dtype": str(dtype).removeprefix("torch."),
        "load_in_4bit": options.load_in_4bit,
    }
    if quantization:
        # Defaults such as float32 are written too.
        settings["quantization"] = json.loads(quantization.to_json_string(use_diff=False))
    return settings


def _require_result_key(handle: ModelHandle, options: EvaluateOptions) -> ResultKey:
    """Reads the files that results depend on, and returns the key of a new result.

    Raises ValueError and ImportError as [`_require_precision_settings`] does.
    """
    folder = _model_folder(handle)
    if folder is None:
        weights = f"{handle.checkpoint.name}@{handle.checkpoint.revision}"
        model_files = None
    else:
        weights = files_hash(folder, WEIGHT_FILES)
        model_files = files_hash(folder, *FILES_BESIDE_WEIGHTS)
    task_files = None
    if options.include_path is not None:
        task_files = files_hash(options.include_path, *TASK_FILES)
    if handle.adapter:
        weight_settings = _read_base_settings(handle.adapter)
    else:
        weight_settings = _require_precision_settings(handle, options)
    settings = {
        "batch_size": options.batch_size,
        "limit": options.limit,
        "files": model_files,
        "tasks": task_files,
        **weight_settings,
    }
    return ResultKey(weights, settings)


def _read_reusable_results(
    output: Path,
    chosen: Mapping[str, str | OfflineTask],
    manager: TaskManager,
    key: ResultKey,
) -> dict[str, Evaluation]:
    """Reads the stored results that need no new run, by name of the task.

    Raises ValueError if a partial result would replace the whole one of the same weights.
    """
    reusable = {}
    replaced = []
    for result in read_evaluations(output):
        if result.task not in chosen:
            continue
        if key.matches(result, task_version(chosen[result.task], manager)):
            reusable[result.task] = result
        elif result.weights == key.weights and not result.partial:
            replaced.append(result.task)
    if key.settings["limit"] and replaced:
        task_names = ", ".join(replaced)
        raise ValueError(f"--limit would replace results of {task_names}. Name another --output.")
    return reusable


def _harness_files(folder: Path) -> set[str]:
    """Returns the names of the files in a task's folder that the harness wrote."""
    return {file.name for file in folder.glob("*s_*.json*")}


def _failure(error: Exception) -> str:
    """Returns in one line why a task could not be run."""
    on_device = device_error(error, "Lower batch_size, or use load_in_4bit.")
    if on_device:
        return on_device
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:400]}"
