# SPDX-License-Identifier: Apache-2.0
"""The records of a checkpoint folder: the only source of its card."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.find import is_hub_id
from ...checkpoint.names import ADAPTER_CONFIG, BUILD_RECORD, TRAINING_RECORD
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT
from ...evaluate.results import WEIGHT_FILES, Evaluation, files_hash, read_evaluations
from ...modeling_normalign_llava import initial_gain
from ..push.source import DIAGNOSTICS, public_report, read_config, read_json, read_norm


LLAVA = "LLaVA checkpoint"  # the role of one that had both parts
FIGURES = ("interface.png", "rotation.png")


@dataclass(frozen=True)
class Licence:
    """A licence as in the Hub's metadata: its id, and name and link if the id is "other"."""

    license: str
    license_name: str | None = None
    license_link: str | None = None

    def __str__(self) -> str:
        return self.license_name or self.license


@dataclass(frozen=True)
class Part:
    """A model or data set that the model was made from; `name` may be a folder's.

    `role` is "vision encoder", "language model", [`LLAVA`], "base model" or "data".
    """

    role: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    licence: Licence | None = None
    languages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a card is rendered from; None or empty if the folder does not record it.

    Attributes:
        config, adapter: Of a model; `adapter_config.json` of an adapter.
        stages: The `training.json` of each stage in order; options and versions may be empty.
        gain: Of the norm after the projector, as in `report.json`; "start" is None if not known.
        moved: Whether the norm differs from a newly built one; None if that is not known.
        outdated: Tasks that were evaluated with other weights.
    """

    name: str
    config: NormAlignLlavaConfig | None
    adapter: dict[str, Any]
    build: dict[str, Any]
    stages: list[dict[str, Any]]
    parts: list[Part]
    data: list[Part]
    gain: dict[str, float | None]
    moved: bool | None
    has_processor: bool
    diagnosis: dict[str, Any]
    figures: list[dict[str, str]]
    evaluations: list[Evaluation]
    outdated: list[str]

    def setting(self, name: str) -> Any:
        """A field of the configuration; of an adapter, the value that its training recorded."""
        if self.config is not None:
            return getattr(self.config, name)
        record = self.stages[-1] if self.stages else {}
        return record.get("config_changes", {}).get(name, record.get(name))

    @property
    def started_from(self) -> str | None:
        """Hub id of the checkpoint that the last stage started from; None for a folder."""
        return _hub_id(self.stages[-1]["options"].get("model_name_or_path")) if self.stages else None

    @property
    def stale(self) -> bool:
        """Whether the diagnosis was made of other weights: another norm, or a gain that differs by more than 1 %."""
        report = self.diagnosis.get("report") or {}
        norm, measured = self.setting("projector_norm"), (report.get("gain") or {}).get("mean_abs")
        if None not in (norm, report.get("norm")) and norm != report["norm"]:
            return True
        now = self.gain.get("mean_abs")
        return None not in (now, measured) and not math.isclose(now, measured, rel_tol=0.01)  # type: ignore[arg-type]


def read_facts(checkpoint: Path) -> Facts:
    """Reads a checkpoint folder, or an adapter's; of the weights only headers and norm."""
    config = read_config(checkpoint)[1]
    record: dict[str, Any] | None = read_json(checkpoint / TRAINING_RECORD)
    build, stages = read_json(checkpoint / BUILD_RECORD), list[dict[str, Any]]()
    while record:
        stages.insert(0, {"options": {}, "versions": {}, **record})
        record = record.get("before")

    parts, data = [], dict[str, Part]()
    roles = {"vision": "vision encoder", "language": "language model"}
    for key, role in ({"vision": LLAVA} if build.get("from_llava") else roles).items():
        stated = (build.get("licenses") or {}).get(key) or {}
        licence = Licence(**stated) if stated.get("license") else None
        if name := build.get(key):
            parts.append(Part(role, name, _hub_id(name), build.get(f"{key}_revision"), licence))
    for source in (source for stage in stages for source in stage.get("data", ()) if source.get("split") == "train"):
        dataset = source.get("dataset") or {}
        licence = Licence(dataset["license"]) if dataset.get("license") else None
        name = dataset.get("id") or source["source"]
        revision, languages = dataset.get("revision"), tuple(dataset.get("language") or ())
        data[name] = Part("data", name, _hub_id(dataset.get("id")), revision, licence, languages)

    gain, moved = _gain(read_norm(checkpoint), config)
    folder, diagnosis = checkpoint / DIAGNOSTICS, dict[str, Any]()
    if (folder / REPORT).is_file():
        diagnosis = json.loads(public_report((folder / REPORT).read_text("utf-8"))[0])
    shown = [figure for figure in diagnosis.get("figures", ()) if figure["file"] in FIGURES]
    evaluations = read_evaluations(checkpoint)
    evaluated = {result.task: result.weights for result in evaluations if result.weights and "@" not in result.weights}
    now = files_hash(checkpoint, WEIGHT_FILES) if evaluated else None
    return Facts(
        name=checkpoint.resolve().name,
        config=config,
        adapter=read_json(checkpoint / ADAPTER_CONFIG),
        build=build,
        stages=stages,
        parts=parts,
        data=list(data.values()),
        gain=gain,
        moved=moved,
        has_processor=(checkpoint / "processor_config.json").is_file(),
        diagnosis=diagnosis,
        figures=[figure for figure in shown if (folder / figure["file"]).is_file()],
        evaluations=evaluations,
        outdated=[task for task, weights in evaluated.items() if weights != now],
    )


def _gain(norm: dict[str, torch.Tensor], config: Any) -> tuple[dict[str, float | None], bool | None]:
    """The fields `gain` and `moved` of [`Facts`]."""
    by_kind = {name.rpartition(".")[2]: tensor.double() for name, tensor in norm.items()}
    gain, bias = by_kind.get("weight"), by_kind.get("bias")
    if gain is None:
        return {}, None
    start = moved = None
    if config is not None and (config.text_embedding_norm is not None or config.projector_gain_init == "one"):
        start = initial_gain(config, config.text_embedding_norm or math.nan)
        stayed = torch.allclose(gain, torch.full_like(gain, start), rtol=1e-6, atol=0.0)
        moved = not stayed or (bias is not None and bool(bias.any()))
    of_bias = None if bias is None else bias.abs().mean().item()
    return {"start": start, "mean_abs": gain.abs().mean().item(), "bias_mean_abs": of_bias}, moved


def _hub_id(name: str | None) -> str | None:
    return name if name and is_hub_id(name) else None  # of a folder, records keep the last part alone
