# SPDX-License-Identifier: Apache-2.0
"""`normalign evaluate`: runs tasks one after the other, and keeps the result of each."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from lm_eval.tasks import TaskManager
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..checkpoint.files import finished_folder, lock_folder
from ..console import Console, Printed
from ..devices import device_error
from ..errors import NotWritable
from ..keywords import takes_fields
from ..models import ModelHandle, ModelOptions, resolve_model
from .engine import SUITES, as_lm, chosen_tasks, run_task, task_version
from .own_data import OWN_TASK, own_task
from .results import (
    EVALUATION,
    SUMMARY,
    WEIGHT_FILES,
    Evaluation,
    files_hash,
    read_evaluations,
    read_samples,
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
            if not result.task.startswith(OWN_TASK):
                continue  # other tasks store their answers in forms of their own
            table = Table("question", "answer", "true", box=SIMPLE, padding=0, show_edge=False)
            table.title = f"The first answers of {result.task}"
            table.title_justify = "left"
            samples = read_samples(self.file.parent / result.task)
            for _, sample in islice(samples, EXAMPLES):
                document = sample["doc"]
                answer = str(sample["filtered_resps"][0])  # the next is to a white image
                row = (document["prompt"], answer or "(nothing)", " or ".join(document["answers"]))
                shortened = [shorten(cell, WIDEST, placeholder=" ...") for cell in row]
                table.add_row(*map(Text, shortened))  # a str would be read as rich's markup
            if table.rows:
                tables.append(table)
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
            cells = []
            for number in (metric.value, metric.stderr, *references):
                cells.append("" if number is None else f"{number:.3f}")
            sample_count = result.samples if metric.samples is None else metric.samples
            table.add_row(result.task, metric.name, *cells, f"{sample_count:,}")
        return table


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
    handle = resolve_model(options.model, options)
    weights, settings = _require_weights_and_settings(handle, options)
    output = options.output
    if output is None:
        output = Path(handle.checkpoint.name)
        if not output.is_dir():  # a Hub id
            output = Path("evaluations", handle.name.replace("/", "--"))
    output = Path(os.path.expanduser(output))
    with lock_folder(output):
        (output / EVALUATION).mkdir(exist_ok=True)
    results = _read_reusable_results(output, chosen, manager, weights, settings)
    console = Console(stderr=True)
    for task_name in results:
        console.print(f"{task_name}: done before.")
    missing = [task_name for task_name in chosen if task_name not in results]
    language_model = None
    if missing:
        language_model = as_lm(handle, options.batch_size)
    failed = {}
    for number, task_name in enumerate(missing, start=1):
        console.print(f"{task_name} ({number} of {len(missing)})")
        try:
            with finished_folder(output / EVALUATION / task_name, _harness_files) as folder:
                result = run_task(
                    language_model, chosen[task_name], manager, folder, weights, settings
                )
            result.write(output)
            results[task_name] = result
        except NotWritable:
            raise
        except Exception as error:  # whatever it is, the other tasks are run
            on_device = device_error(error, "Lower batch_size, or use load_in_4bit.")
            message = " ".join(str(error).split())
            failed[task_name] = on_device or f"{type(error).__name__}: {message[:400]}"
            console.print(f"{task_name} could not be run: {failed[task_name]}", style="red")
    ordered = [results[task_name] for task_name in chosen if task_name in results]
    return Evaluated(output / EVALUATION / SUMMARY, ordered, failed)


def _require_weights_and_settings(
    handle: ModelHandle, options: EvaluateOptions
) -> tuple[str, dict[str, Any]]:
    """Reads what a result depends on, besides its task. Fetches weights from the Hub if need be.

    Returns:
        Hash of the weight files, or Hub id and commit. Then settings, as JSON values: options,
        precision, and hashes of the model's and tasks' other files.

    Raises:
        ValueError: `options.dtype` names no dtype, or the weights cannot be read.
        ImportError: Weights are quantized, but bitsandbytes is not installed.
    """
    weights = f"{handle.checkpoint.name}@{handle.checkpoint.revision}"
    model_files = None
    folder = Path(handle.checkpoint.name)
    if folder.is_dir():
        weights = files_hash(folder, WEIGHT_FILES)
        model_files = files_hash(folder, *FILES_BESIDE_WEIGHTS)
    task_files = None
    if options.include_path is not None:
        task_files = files_hash(options.include_path, *TASK_FILES)
    settings: dict[str, Any] = {
        "batch_size": options.batch_size,
        "limit": options.limit,
        "files": model_files,
        "tasks": task_files,
    }
    if handle.adapter:  # its base and quantization are as in training
        base = handle.adapter.base
        settings["base"] = base.revision or files_hash(Path(base.name), WEIGHT_FILES)
        settings["quantization"] = handle.adapter.quantization
        return weights, settings
    dtype, quantization = handle.fetched_precision
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings["load_in_4bit"] = options.load_in_4bit
    if quantization:
        # Defaults such as float32 are written too.
        settings["quantization"] = json.loads(quantization.to_json_string(use_diff=False))
    return weights, settings


def _read_reusable_results(
    output: Path,
    chosen: Mapping[str, str | OfflineTask],
    manager: TaskManager,
    weights: str,
    settings: Mapping[str, Any],
) -> dict[str, Evaluation]:
    """Reads the stored results that a run with the installed packages would repeat, by task.

    Raises ValueError if a partial result would replace the whole one of the same weights.
    """
    package_versions = {package: version(package) for package in ("lm_eval", "normalign_llava")}
    reusable = {}
    replaced = []
    for result in read_evaluations(output):
        if result.task not in chosen or result.weights != weights:
            continue
        versions = dict(package_versions)
        current_version = task_version(chosen[result.task], manager)
        if current_version:
            versions[result.task] = current_version
        if result.settings == settings and versions.items() <= result.versions.items():
            reusable[result.task] = result
        elif not result.partial:
            replaced.append(result.task)
    if settings["limit"] and replaced:
        raise ValueError(
            f"--limit would replace results of {', '.join(replaced)}. Name another --output."
        )
    return reusable


def _harness_files(folder: Path) -> set[str]:
    """Returns the names of the files in a task's folder that the harness wrote."""
    return {file.name for file in folder.glob("*s_*.json*")}
