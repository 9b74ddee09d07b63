# SPDX-License-Identifier: Apache-2.0
"""`normalign evaluate`: tasks one after the other, each kept when it is finished."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..checkpoint.files import finished_folder, only_writer
from ..diagnose.load import resolve_model
from ..errors import Console, NotWritable, Printed, device_error
from .engine import SUITES, as_lm, chosen_tasks, run_task, task_version
from .own_data import OWN_TASK, own_task
from .results import (
    EVALUATION,
    SUMMARY,
    WEIGHT_FILES,
    Evaluation,
    files_hash,
    read_answers,
    read_evaluations,
)
from .tasks.offline import OfflineTask


EXAMPLES = 3  # answers that are printed of own data
WIDEST = 200  # characters of a question or an answer that are printed


@dataclass
class Evaluated(Printed):
    """Results of tasks, in `file` and as a table of whole ones; and why others could not be run."""

    file: Path
    results: list[Evaluation]
    failed: dict[str, str]

    def renderable(self) -> Group:
        """The table of results and, of own data, the first answers with their truth."""
        return Group(self.table(), *self.examples())

    def examples(self) -> list[Table]:
        """For each task of own data the first `EXAMPLES` questions, answers and true answers."""
        tables = []
        for result in self.results:
            if not result.task.startswith(OWN_TASK):
                continue  # answers of other tasks are stored in forms of their own
            if not (answers := read_answers(self.file.parent / result.task)):
                continue
            title = f"The first answers of {result.task}"
            table = Table("question", "answer", "true", box=SIMPLE, padding=0, show_edge=False)
            table.title, table.title_justify = title, "left"
            for answer in answers[:EXAMPLES]:
                cells = [answer.question, answer.text or "(nothing)", " or ".join(answer.true)]
                table.add_row(*(Text(shorten(cell, WIDEST, placeholder=" ...")) for cell in cells))
            tables.append(table)
        return tables

    def table(self) -> Table:
        """A row for each metric of a whole task."""
        pairs = [(result, metric) for result in self.results for metric in result.metrics]
        whole = [(result, metric) for result, metric in pairs if metric.subset is None]
        references = list(dict.fromkeys(name for _, metric in whole for name in metric.references))
        table = Table("task", "metric", box=SIMPLE, padding=0, show_edge=False)
        table.caption = "partial" if any(result.partial for result in self.results) else None
        for name in ("value", "±", *references, "n"):
            table.add_column(name, justify="right")
        for result, metric in whole:
            numbers = (metric.value, metric.stderr, *map(metric.references.get, references))
            samples = result.samples if metric.samples is None else metric.samples
            cells = ["" if number is None else f"{number:.3f}" for number in numbers]
            table.add_row(result.task, metric.name, *cells, f"{samples:,}")
        return table


def evaluate(
    model: str,
    *,
    suites: Sequence[str] = (),
    tasks: Sequence[str] = (),
    include_path: Path | None = None,
    data: str | None = None,
    image_folder: str | None = None,
    columns: str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    output: Path | None = None,
    base: str | None = None,
    base_quantization: str | None = None,
) -> Evaluated:
    """Evaluates a model with lm-evaluation-harness, and writes results to `evaluation/`.

    A task is written at once, and skipped the next time if the model's files or commit, settings,
    task files, and the versions of task, package and harness are the same. If one fails, the others
    run.

    Args:
        model: Folder or Hub id of a vision-language or language model, or an adapter's folder.
        suites, tasks: What to evaluate on; see [`SUITES`].
        include_path: Folder with task files of one's own, as the harness reads them.
        data, image_folder, columns: Questions and answers of one's own; see [`own_task`].
        limit: Use the first so many samples of each task. The result is marked as partial.
        dtype, load_in_4bit, trust_remote_code: See [`ModelHandle.load`] and [`resolve_model`].
        base, base_quantization: Of an adapter; see [`resolve_model`].
        output: Folder of `evaluation/`, by default the model's; of a Hub id, `evaluations/NAME`.

    Raises ValueError if model, task or data cannot be read, or a limit would replace whole results.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names, manager = chosen_tasks(suites, tasks, include_path, limit)
    chosen: dict[str, str | OfflineTask] = {name: name for name in names}
    if data:
        task_of_data = own_task(data, image_folder=image_folder, columns=columns)
        chosen[task_of_data.config.task] = task_of_data
    if not chosen:
        raise ValueError(f"Name a suite ({', '.join(SUITES)}), tasks or data to evaluate on.")
    handle = resolve_model(
        model,
        trust_remote_code=trust_remote_code,
        base=base,
        base_quantization=base_quantization,
    )
    source = handle.checkpoint
    folder = Path(source.name) if Path(source.name).is_dir() else None
    output = output or folder or Path("evaluations", handle.name.replace("/", "--"))
    weights = files_hash(folder, WEIGHT_FILES) if folder else f"{source.name}@{source.revision}"
    beside_weights = ("*config.json", "*chat_template*", "*processor*.json", "*token*")
    settings: dict[str, Any] = {"batch_size": batch_size, "limit": limit}
    settings["files"] = files_hash(folder, *beside_weights) if folder else None
    settings["tasks"] = include_path and files_hash(include_path, "**/*yaml", "**/*.yml", "**/*.py")
    loading: dict[str, Any] = {"dtype": dtype, "load_in_4bit": load_in_4bit}
    if adapter := handle.adapter:  # which is put on its base as in training
        base = adapter.base.revision or files_hash(Path(adapter.base.name), WEIGHT_FILES)
        settings |= {"quantization": adapter.quantization, "base": base}
    else:
        decided, quantization = handle.precision(dtype, load_in_4bit)
        loading["dtype"] = str(decided).removeprefix("torch.")
        settings |= loading
        if quantization:  # with its defaults, such as float32
            settings["quantization"] = json.loads(quantization.to_json_string(use_diff=False))
    with only_writer(output):
        (output / EVALUATION).mkdir(exist_ok=True)
    earlier = [r for r in read_evaluations(output) if r.task in chosen and r.weights == weights]
    packages = {name: version(name) for name in ("lm_eval", "normalign_llava")}
    results = {}
    for result in earlier:
        versions = dict(packages)
        if of_task := task_version(chosen[result.task], manager):
            versions[result.task] = of_task
        if result.settings == settings and versions.items() <= result.versions.items():
            results[result.task] = result
    whole = [result.task for result in earlier if not result.partial and result.task not in results]
    if limit and whole:
        replaced = ", ".join(whole)
        raise ValueError(f"--limit would replace results of {replaced}. Name another --output.")
    console = Console(stderr=True)
    for task in results:
        console.print(f"{task}: done before.")
    missing = [task for task in chosen if task not in results]
    lm = as_lm(handle, batch_size=batch_size, **loading) if missing else None
    failed = {}
    for number, task in enumerate(missing, 1):
        console.print(f"{task} ({number} of {len(missing)})")
        try:
            place = output / EVALUATION / task
            with finished_folder(
                place, lambda folder: {file.name for file in folder.glob("*s_*.json*")}
            ) as answers:
                result = run_task(lm, chosen[task], manager, answers, weights, settings)
            result.write(output)
            results[task] = result
        except NotWritable:
            raise
        except Exception as error:  # whatever it is, the other tasks are run
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            failed[task] = device_error(error, "Lower batch_size, or use load_in_4bit.") or reason
            console.print(f"{task} could not be run: {failed[task]}", style="red")
    in_order = [results[task] for task in chosen if task in results]
    return Evaluated(output / EVALUATION / SUMMARY, in_order, failed)
