# SPDX-License-Identifier: Apache-2.0
"""Markdown of a card: text of other people, escaped, links, and the tables made of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ...diagnose.report import number, with_error
from ...evaluation.results import Evaluation
from .facts import Facts, Part


DASH = "–"
_MARKUP = re.compile(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))")  # not "_" within a word
_HEADING_OR_LIST = re.compile(r"^(\d*)(?=[#=]|[+-](?:[\s-]|$)|(?<=\d)[.)](?:\s|$))")


def escape(value: Any) -> Markup:
    """Returns `value` on one line, with all characters escaped that Markdown or HTML would read."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    line = "".join(filter(str.isprintable, line))
    line = _MARKUP.sub(r"\\\1", line)
    return Markup(_HEADING_OR_LIST.sub(r"\1\\", line))


def link(name: str, address: str) -> Markup:
    """Returns a link whose text and address are escaped."""
    quoted_address = quote(address, safe="/:@#?&=%+")
    return Markup(f"[{escape(name)}]({quoted_address})")


def part_link(part: Part) -> Markup:
    """Returns a part's name, with a link if the Hub has it, and its commit if that is known."""
    if part.hub_id is None:
        return escape(part.name)
    address = f"https://huggingface.co/{part.hub_id}"
    if part.role == "data":
        address = f"https://huggingface.co/datasets/{part.hub_id}"
    text = link(part.name, address)
    if part.revision:
        commit = link(part.revision[:7], f"{address}/tree/{part.revision}")
        text += Markup(f" ({commit})")
    return text


def table(titles: Iterable[Any], table_rows: Iterable[Sequence[Any]]) -> Markup:
    """Returns a table of the rows that have a known cell after the first. Empty without such rows.

    A cell that is None or "" is not known, and a dash stands for it. Numbers are aligned right.
    """
    known_rows = []
    for row in table_rows:
        row_cells = [_cell(value) for value in row]
        if any(cell != DASH for cell in row_cells[1:]):
            known_rows.append(row_cells)
    if not known_rows:
        return Markup()
    alignment = []
    for column in zip(*known_rows, strict=True):
        is_numeric = all(re.match(r"[\d–−-]", cell) for cell in column)
        alignment.append("---:" if is_numeric else "---")
    lines: list[Iterable[str]] = [map(escape, titles), alignment, *known_rows]
    return Markup("".join(f"| {' | '.join(table_line)} |\n" for table_line in lines))


def _cell(value: Any) -> Markup:
    if value is None or value == "":
        return Markup(DASH)
    return escape(value).replace(" ± ", "\xa0±\xa0")


def table_of_columns(columns: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Returns a table of columns.

    Args:
        columns: Cells by title of the column, and then by name of the row. All columns must have
            the same rows.
    """
    row_names = next(iter(columns.values()), ())
    cells = [column_cells.values() for column_cells in columns.values()]
    return table(["", *columns], zip(row_names, *cells, strict=True))


def alignment_table(facts: Facts) -> Markup:
    """Returns the norms and rotation of this model, and of the baseline if one was measured."""
    model_report = facts.diagnosis.get("report") or {}
    n_text = facts.setting("text_embedding_norm")
    columns = {"this model": _alignment_cells(model_report, facts.gain, n_text)}
    baseline = facts.diagnosis.get("against")
    if baseline:
        baseline_gain = baseline.get("gain") or {}
        vocabulary = baseline["interface"].get("vocabulary") or {}
        columns[f"baseline: {baseline['model']}"] = _alignment_cells(
            baseline, baseline_gain, vocabulary.get("mean")
        )
    return table_of_columns(columns)


def _alignment_cells(
    report: dict[str, Any], gain: dict[str, float | None], n_text: float | None
) -> dict[str, str | None]:
    """Returns the cells of one model, by the name of the row.

    Args:
        report: The model's part of `report.json`.
        gain: The gain and bias of its norm, as in `report.json`.
        n_text: N_text, the mean norm of its text embeddings.
    """
    interface = report.get("interface") or {}
    depth = report.get("depth") or {}
    return {
        "Mean norm of text embeddings, N_text": number(n_text),
        "Gain at the start, every element": number(gain.get("start")),
        "Gain now, mean magnitude": number(gain.get("mean_abs")),
        "Bias now, mean magnitude (0 at the start)": number(gain.get("bias_mean_abs"), 2),
        "Norm of visual tokens as they enter": _norm(interface.get("visual")),
        "Norm of text tokens in the same data": _norm(interface.get("text")),
        "Norm, visual over N_text": number(interface.get("ratio"), 3),
        "Norm, visual over text in the same data": number(interface.get("ratio_data"), 3),
        "Rotation by layer, visual over text": with_error(
            depth.get("asymmetry"), depth.get("asymmetry_error"), 3
        ),
    }


def _norm(moments: dict[str, float] | None) -> str | None:
    if not moments:
        return None
    return f"{number(moments['mean'], 3)} (σ {number(moments['std'], 2)})"


def training_table(stages: Sequence[dict[str, Any]]) -> Markup:
    """Returns how the model was trained, one column for each `training.json`.

    Options are in the recipes below it.
    """
    columns = {}
    for stage_number, stage in enumerate(stages, start=1):
        stage_name = stage.get("stage")
        column_title = f"stage {stage_number}"
        if len(stages) == 1:
            column_title = stage_name or "training"
        elif stage_name:
            column_title += f" ({stage_name})"
        columns[column_title] = _training_cells(stage)
    return table_of_columns(columns)


def _training_cells(stage: dict[str, Any]) -> dict[str, str | None]:
    """Returns the cells of one stage, by the name of the row."""
    run_record = stage.get("run") or {}
    trained_modules = []
    frozen_modules = []
    for module in run_record.get("modules", ()):
        if module["trained"]:
            trained_modules.append(f"{module['module']} {module['learning_rate']:g}")
        else:
            frozen_modules.append(module["module"])
    sources = stage.get("data", ())
    training_data = [_describe_rows(data) for data in sources if data.get("split") == "train"]
    held_out_data = [_describe_rows(data) for data in sources if data.get("split") != "train"]
    rows_a_step = None
    batch = run_record.get("batch")
    if batch:
        rows_a_step = "{rows:,} ({per_device} × {processes} × {accumulation})".format_map(batch)
    duration = None
    if stage.get("seconds") is not None:
        duration = str(timedelta(seconds=round(stage["seconds"])))
    hardware = stage.get("hardware") or {}
    devices = [str(hardware.get("count") or ""), ", ".join(hardware.get("devices") or ())]
    machine = [" × ".join(filter(None, devices)), hardware.get("machine")]
    # The count is written once if all steps were done.
    steps = dict.fromkeys([stage.get("steps_done"), run_record.get("steps")])
    return {
        "Trained, at a peak learning rate": ", ".join(trained_modules),
        "Frozen": ", ".join(frozen_modules),
        "Steps": _joined(steps),
        "Rows a step: a device × processes × accumulated": rows_a_step,
        "Data": "; ".join(training_data),
        "Held-out data": "; ".join(held_out_data),
        "Hardware": ", ".join(filter(None, machine)),
        "Time": duration,
        "Software": ", ".join(
            f"{package} {version}" for package, version in stage["versions"].items()
        ),
        "Commit of the code": stage.get("commit"),
    }


def _joined(counts: Iterable[int | None]) -> str:
    """Returns the known counts, such as "90 of 100"."""
    return " of ".join(f"{count:,}" for count in counts if count is not None)


def _describe_rows(source: dict[str, Any]) -> str:
    """Returns the name of a data set, how many of its rows were used, and why others were not."""
    dataset = source.get("dataset") or {}
    description = dataset.get("id") or source["source"]
    if source.get("used") is not None:
        row_counts = [source["used"], source.get("found")]
        description += f", {_joined(row_counts)} rows"
    faults = [
        f"{source[fault]:,} {fault.replace('_', ' ')}"
        for fault in ("bad", "too_long")
        if source.get(fault)
    ]
    if faults:
        description += f" ({', '.join(faults)})"
    return description


def results_table(evaluation: Evaluation) -> Markup:
    """Returns the results of one task, each with its references beside it."""
    references = dict.fromkeys(name for metric in evaluation.metrics for name in metric.references)
    result_rows = []
    for metric in evaluation.metrics:
        result_rows.append(
            [
                metric.subset or "all",
                metric.name,
                with_error(metric.value, metric.stderr, 3),
                *(number(metric.references.get(reference), 3) for reference in references),
                "" if metric.samples is None else f"{metric.samples:,}",
            ]
        )
    return table(["", "metric", "this model", *references, "n"], result_rows)
