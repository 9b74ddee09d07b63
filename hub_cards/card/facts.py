# SPDX-License-Identifier: Apache-2.0
"""The records of a checkpoint folder: the only source of its card."""

import json
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.files import ADAPTER_CONFIG, BUILD_RECORD, TRAINING_RECORD, is_hub_id
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT
from ...evaluation.results import WEIGHT_FILES, files_hash, read_evaluations
from ...modeling_normalign_llava import initial_gain
from ..push.source import DIAGNOSTICS, notices, public_report, read_config, read_json, read_norm


LLAVA = "LLaVA checkpoint"  # the role of one that had both parts
FIGURES = ("interface.png", "rotation.png")


@dataclass(frozen=True)
class Part:
    """A model or data set that the model was made from; `name` may be a folder's.

    `role` is "vision encoder", "language model", [`LLAVA`], "base model" or "data"; `licence` is as
    in the Hub's metadata: `license`, and `license_name` and `license_link` if that is "other".
    """

    role: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    licence: dict[str, str] = field(default_factory=dict)
    languages: tuple[str, ...] = ()

    @property
    def terms(self) -> str | None:
        """The name of its licence; None if that is not recorded."""
        return self.licence.get("license_name") or self.licence.get("license")


class Facts:
    """What a card is rendered from: a checkpoint's or adapter's records; None or empty if absent.

    `stages` has the `training.json` of each stage in order, `gain` is that of the norm, as in
    `report.json`; `moved`: whether the norm differs from a newly built one; `outdated`: tasks that
    were evaluated with other weights; `notices`: paths of the licences and notices of its parts.
    """

    def __init__(self, checkpoint: Path):
        self.name = checkpoint.resolve().name
        self.config: NormAlignLlavaConfig | None = read_config(checkpoint)[1]
        self.adapter = read_json(checkpoint / ADAPTER_CONFIG)
        self.build = read_json(checkpoint / BUILD_RECORD)
        self.has_processor = (checkpoint / "processor_config.json").is_file()
        self.notices = notices(checkpoint)
        self.stages: list[dict[str, Any]] = []
        record: dict[str, Any] | None = read_json(checkpoint / TRAINING_RECORD)
        while record:
            rates = record.get("learning_rates", {}).items()
            options = record.get("options", {}) | {f"{key}_learning_rate": lr for key, lr in rates}
            self.stages.insert(0, {"versions": {}, **record, "options": options})
            record = record.get("before")
        self.parts: list[Part] = []
        roles = {"vision": "vision encoder", "language": "language model"}
        for key, role in ({"vision": LLAVA} if self.build.get("from_llava") else roles).items():
            stated = (self.build.get("licenses") or {}).get(key) or {}
            licence = {term: value for term, value in stated.items() if value}
            if name := self.build.get(key):
                revision = self.build.get(f"{key}_revision")
                self.parts.append(Part(role, name, _hub_id(name), revision, licence))
        by_name = {}
        for source in chain.from_iterable(stage.get("data", ()) for stage in self.stages):
            if source.get("split") == "train":
                dataset = source.get("dataset") or {}
                licence = {"license": dataset["license"]} if dataset.get("license") else {}
                languages = tuple(dataset.get("language") or ())
                hub_id, revision = dataset.get("id"), dataset.get("revision")
                name = hub_id or source["source"]
                by_name[name] = Part("data", name, _hub_id(hub_id), revision, licence, languages)
        self.data = list(by_name.values())
        self.gain: dict[str, float | None] = {}
        self.moved: bool | None = None
        norm = {key.split(".")[-1]: value.double() for key, value in read_norm(checkpoint).items()}
        if (gain := norm.get("weight")) is not None:
            bias, start, n_text = norm.get("bias"), None, self.setting("text_embedding_norm")
            if self.config and (n_text is not None or self.config.projector_gain_init == "one"):
                start = initial_gain(self.config, n_text or math.nan)
                stayed = torch.allclose(gain, torch.full_like(gain, start), rtol=1e-6, atol=0.0)
                self.moved = not stayed or (bias is not None and bool(bias.any()))
            mean = {key: value.abs().mean().item() for key, value in norm.items()}
            self.gain = dict(start=start, mean_abs=mean["weight"], bias_mean_abs=mean.get("bias"))
        folder, self.diagnosis = checkpoint / DIAGNOSTICS, dict[str, Any]()
        if (folder / REPORT).is_file():
            self.diagnosis = json.loads(public_report((folder / REPORT).read_text("utf-8"))[0])
        shown = [drawn for drawn in self.diagnosis.get("figures", ()) if drawn["file"] in FIGURES]
        self.figures = [drawn for drawn in shown if (folder / drawn["file"]).is_file()]
        self.evaluations = read_evaluations(checkpoint)
        hashed = [result for result in self.evaluations if "@" not in (result.weights or "@")]
        now = files_hash(checkpoint, WEIGHT_FILES) if hashed else None
        self.outdated = [result.task for result in hashed if result.weights != now]

    def setting(self, name: str) -> Any:
        """A field of the configuration; of an adapter, the value that its training recorded."""
        if self.config is not None:
            return getattr(self.config, name)
        record = self.stages[-1] if self.stages else {}
        return record.get("config_changes", {}).get(name, record.get(name))

    @property
    def started_from(self) -> str | None:
        """Hub id of the checkpoint that the last stage started from; None for a folder."""
        options = self.stages[-1]["options"] if self.stages else {}
        return _hub_id(options.get("model_name_or_path"))

    @property
    def stale(self) -> bool:
        """Whether the diagnosis is of other weights: another norm, or a gain more than 1 % away."""
        report = self.diagnosis.get("report") or {}
        norm, then = self.setting("projector_norm"), (report.get("gain") or {}).get("mean_abs")
        if None not in (norm, report.get("norm")) and norm != report["norm"]:
            return True
        now = self.gain.get("mean_abs")
        return now is not None and then is not None and not math.isclose(now, then, rel_tol=0.01)


def _hub_id(name: str | None) -> str | None:
    return name if name and is_hub_id(name) else None  # records have a folder's last part
