# SPDX-License-Identifier: Apache-2.0
"""The tables of a card: measured alignment, training, and the results of a task."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from markupsafe import Markup

from ...diagnose.report import number, with_error
from ...evaluation.results import Evaluation
from .facts import Facts
from .markdown import table, table_of_columns


def alignment_table(facts: Facts) -> Markup:
    """Returns the norms and rotation of this model, and of the baseline if one was measured."""
    model_report = facts.diagnosis.get("report") or {}
    n_text = facts.setting("text_embedding_norm")
    columns = {"this model": _alignment_cells(model_report, facts.gain, n_text)}
    baseline = facts.diagnosis.get("against")
    if baseline:
        baseline_gain = baseline.get("gain") or {}
        vocabulary = baseline["interface"].get("vocabulary") or {}
        baseline_cells = _alignment_cells(baseline, baseline_gain, vocabulary.get("mean"))
        columns[f"baseline: {baseline['model']}"] = baseline_cells
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
    training_data = []
    held_out_data = []
    for source in stage.get("data", ()):
        if source.get("split") == "train":
            training_data.append(_describe_rows(source))
        else:
            held_out_data.append(_describe_rows(source))
    rows_a_step = None
    if run_record.get("batch"):
        template = "{rows:,} ({per_device} × {processes} × {accumulation})"
        rows_a_step = template.format(**run_record["batch"])
    duration = None
    if stage.get("seconds") is not None:
        duration = str(timedelta(seconds=round(stage["seconds"])))
    # The count is written once if all steps were done.
    steps = dict.fromkeys([stage.get("steps_done"), run_record.get("steps")])
    versions = stage["versions"].items()
    return {
        "Trained, at a peak learning rate": ", ".join(trained_modules),
        "Frozen": ", ".join(frozen_modules),
        "Steps": _joined(steps),
        "Rows a step: a device × processes × accumulated": rows_a_step,
        "Data": "; ".join(training_data),
        "Held-out data": "; ".join(held_out_data),
        "Hardware": _hardware(stage.get("hardware") or {}),
        "Time": duration,
        "Software": ", ".join(f"{package} {version}" for package, version in versions),
        "Commit of the code": stage.get("commit"),
    }


def _joined(counts: Iterable[int | None]) -> str:
    """Returns the known counts, such as "90 of 100"."""
    return " of ".join(f"{count:,}" for count in counts if count is not None)


def _hardware(hardware: dict[str, Any]) -> str:
    device_names = ", ".join(hardware.get("devices") or ())
    devices = [str(hardware.get("count") or ""), device_names]
    machine = [" × ".join(filter(None, devices)), hardware.get("machine")]
    return ", ".join(filter(None, machine))


def _describe_rows(source: dict[str, Any]) -> str:
    """Returns the name of a data set, how many of its rows were used, and why others were not."""
    dataset = source.get("dataset") or {}
    description = dataset.get("id") or source["source"]
    if source.get("used") is not None:
        row_counts = [source["used"], source.get("found")]
        description += f", {_joined(row_counts)} rows"
    faults = []
    for fault, count_key in {"bad": "bad", "too long": "too_long"}.items():
        if source.get(count_key):
            faults.append(f"{source[count_key]:,} {fault}")
    if faults:
        description += f" ({', '.join(faults)})"
    return description


def results_table(evaluation: Evaluation) -> Markup:
    """Returns the results of one task, each with its references beside it."""
    references: dict[str, None] = {}
    for metric in evaluation.metrics:
        references |= dict.fromkeys(metric.references)
    result_rows = []
    for metric in evaluation.metrics:
        result_row = [
            metric.subset or "all",
            metric.name,
            with_error(metric.value, metric.stderr, 3),
        ]
        for reference in references:
            result_row.append(number(metric.references.get(reference), 3))
        result_row.append("" if metric.samples is None else f"{metric.samples:,}")
        result_rows.append(result_row)
    return table(["", "metric", "this model", *references, "n"], result_rows)
