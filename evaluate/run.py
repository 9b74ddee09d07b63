# SPDX-License-Identifier: Apache-2.0
"""`normalign evaluate`: tasks one after the other, each kept when it is finished."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from ..checkpoint.files import finished_folder, only_writer
from ..diagnose.load import resolve_model
from ..errors import Console, NotWritable, Printed, device_error
from .engine import SUITES, as_lm, chosen_tasks, run_task
from .own_data import own_task
from .results import FOLDER, SUMMARY, WEIGHT_FILES, Evaluation, files_hash, read_evaluations
from .tasks.offline import OfflineTask


@dataclass
class Evaluated(Printed):
    """The results of tasks, in `file` and, of whole tasks, as a table; and why others could not be run."""

    file: Path
    results: list[Evaluation]
    failed: dict[str, str]

    def renderable(self) -> Table:
        whole = [(result, metric) for result in self.results for metric in result.metrics if metric.subset is None]
        references = list(dict.fromkeys(name for _, metric in whole for name in metric.references))
        partial = any(result.partial for result in self.results)
        columns = ("task", "metric", "value", "±", *references, "n")
        table = Table(*columns, box=SIMPLE, padding=0, show_edge=False, caption="partial" if partial else None)
        for column in table.columns[2:]:
            column.justify = "right"
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
) -> Evaluated:
    """Evaluates a model with lm-evaluation-harness, and writes the results to `evaluation/` in its folder.

    A finished task is written at once, and skipped the next time if the model's files (or commit), the settings, one's
    own task files and the versions of this package and the harness are the same. If a task fails, the others are run.

    Args:
        model: Folder or Hub id of a vision-language model or a language model, or an adapter's folder.
        suites, tasks: What to evaluate on; see [`SUITES`].
        include_path: Folder with task files of one's own, as the harness reads them.
        data, image_folder, columns: Questions and answers of one's own; see [`own_task`].
        limit: Use the first so many samples of each task. The result is marked as partial.
        batch_size: Samples together.
        dtype, load_in_4bit, trust_remote_code: See [`ModelHandle.load`] and [`resolve_model`].
        output: Folder in which to write `evaluation/`, by default the model's; of a Hub id, `evaluations/NAME`.

    Raises ValueError if model, task or data cannot be read, or a limit would replace whole results of the model.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names, manager = chosen_tasks(suites, tasks, include_path, limit)
    chosen: dict[str, str | OfflineTask] = {name: name for name in names}
    if data:
        own = own_task(data, image_folder=image_folder, columns=columns)
        chosen[own.config.task] = own
    if not chosen:
        raise ValueError(f"Name a suite ({', '.join(SUITES)}), tasks or data to evaluate on.")
    handle = resolve_model(model, trust_remote_code=trust_remote_code)
    checkpoint = handle.checkpoint
    folder = Path(checkpoint.name) if Path(checkpoint.name).is_dir() else None
    output = output or folder or Path("evaluations", handle.name.replace("/", "--"))
    weights = files_hash(folder, WEIGHT_FILES) if folder else f"{checkpoint.name}@{checkpoint.revision}"
    beside_weights = ("*config.json", "*chat_template*", "*processor*.json", "*token*")
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "limit": limit,
        "files": files_hash(folder, *beside_weights) if folder else None,
        "tasks": files_hash(include_path, "**/*yaml", "**/*.yml", "**/*.py") if include_path else None,
    }
    if handle.adapter:  # which is put on its base as in training
        base = handle.adapter.base.revision or files_hash(Path(handle.adapter.base.name), WEIGHT_FILES)
        settings |= {"quantization": handle.adapter.quantization, "base": base}
    else:
        decided, quantization = handle.precision(dtype, load_in_4bit)
        dtype = str(decided).removeprefix("torch.")
        settings |= {"dtype": dtype, "load_in_4bit": load_in_4bit}
        if quantization:
            settings["quantization"] = json.loads(quantization.to_json_string(use_diff=False))  # float32 is a default
    with only_writer(output):
        (output / FOLDER).mkdir(exist_ok=True)
    earlier = [r for r in read_evaluations(output) if r.task in chosen and r.weights == weights]
    versions = {name: version(name) for name in ("lm_eval", "normalign_llava")}
    results = {
        result.task: result
        for result in earlier
        if result.settings == settings and versions.items() <= result.versions.items()
        if getattr(chosen[result.task], "VERSION", None) in (None, result.versions[result.task])  # data of one's own
    }
    whole = [result.task for result in earlier if not result.partial and result.task not in results]
    if limit and whole:
        raise ValueError(f"--limit would replace whole results of {', '.join(whole)}. Name another --output.")
    console = Console(stderr=True)
    for task in results:
        console.print(f"{task}: done before.")
    missing = [task for task in chosen if task not in results]
    lm = as_lm(handle, batch_size=batch_size, dtype=dtype, load_in_4bit=load_in_4bit) if missing else None
    failed = {}
    for number, task in enumerate(missing, 1):
        console.print(f"{task} ({number} of {len(missing)})")
        try:
            place = output / FOLDER / task
            with finished_folder(place, lambda folder: {file.name for file in folder.glob("*s_*.json*")}) as answers:
                result = run_task(lm, task, chosen[task], manager, answers, weights, settings)
            result.write(output)
        except NotWritable:
            raise
        except Exception as error:  # whatever it is, the other tasks are run
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            failed[task] = device_error(error, "Use a smaller batch_size, or load_in_4bit.") or reason
            console.print(f"{task} could not be run: {failed[task]}", style="red")
        else:
            results[task] = result
    return Evaluated(output / FOLDER / SUMMARY, [results[task] for task in chosen if task in results], failed)
