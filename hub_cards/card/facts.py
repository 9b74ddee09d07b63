# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The records of a checkpoint folder: the only source of its card."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...checkpoint.find import check_folder, is_hub_id
from ...checkpoint.names import ADAPTER_CONFIG, BUILD_RECORD, TRAINING_RECORD
from ...checkpoint.untrusted import check_files, json_object
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT
from ...evaluate.results import WEIGHT_FILES, Evaluation, files_hash, read_evaluations
from ...modeling_normalign_llava import initial_gain
from ..push.source import DIAGNOSTICS, public_report, weight_files


LLAVA = "LLaVA checkpoint"
"""The role of a checkpoint that had both parts."""


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
    """A model or data set that the model was made from.

    Attributes:
        role: "vision encoder", "language model", [`LLAVA`], "base model" or "data".
        hub_id, revision: Its Hub id and commit, if known; `name` may be a folder's.
    """

    role: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    licence: Licence | None = None


@dataclass(frozen=True)
class Weights:
    """Facts about safetensors files, whose `size` is in bytes.

    Attributes:
        gain: "start" (None if unknown), "mean_abs" and "bias_mean_abs" (None for an RMSNorm) of the norm after the
            projector, as in `report.json`; empty without the norm.
        moved: Whether the norm differs from a newly built one; None if unknown.
        parameters: Their count; 0 if quantized, as the weights are packed.
    """

    gain: dict[str, float | None]
    moved: bool | None
    parameters: int
    size: int


@dataclass(frozen=True)
class Facts:
    """Everything that a card is rendered from; None or empty if the folder does not record it.

    Attributes:
        config: None for an adapter.
        adapter: `adapter_config.json` of an adapter.
        stages: The `training.json` of each stage in order; options and versions may be empty.
        parts: Vision encoder and language model, or the LLaVA checkpoint that had both.
        data: The training data sets, each once.
        figures: Figures of the diagnosis whose files exist and that show no sample of the data.
        outdated: Tasks that were evaluated with other weights.
    """

    name: str
    config: NormAlignLlavaConfig | None
    adapter: dict[str, Any] | None
    build: dict[str, Any] | None
    stages: list[dict[str, Any]]
    parts: list[Part]
    data: list[Part]
    weights: Weights
    has_processor: bool
    diagnosis: dict[str, Any] | None
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
        # training.json keeps only the last part of a local path, so a name with an owner is on the Hub.
        return hub_id(self.stages[-1].get("options", {}).get("model_name_or_path")) if self.stages else None


def read_facts(checkpoint: Path) -> Facts:
    """Reads a checkpoint folder, or an adapter's; of the weights only headers and norm."""
    check_folder(checkpoint)
    stored = check_files(checkpoint)  # empty for an adapter
    if stored and (kind := stored.get("model_type")) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{checkpoint} is a {kind!r} model. Cards are written for NormAlign-LLaVA checkpoints only.")
    config = NormAlignLlavaConfig.from_dict(stored) if stored else None
    record, build = read_json(checkpoint / TRAINING_RECORD), read_json(checkpoint / BUILD_RECORD)
    stages: list[dict[str, Any]] = []
    while record:
        stages.insert(0, {"options": {}, "versions": {}, **record})
        record = record.get("before")
    diagnosis = _diagnosis(checkpoint / DIAGNOSTICS / REPORT)
    figures = diagnosis["figures"] if diagnosis else []
    return Facts(
        name=checkpoint.resolve().name,
        config=config,
        adapter=read_json(checkpoint / ADAPTER_CONFIG),
        build=build,
        stages=stages,
        parts=_parts(build or {}),
        data=_data(stages),
        weights=_weights(weight_files(checkpoint), config),
        has_processor=(checkpoint / "processor_config.json").is_file(),
        diagnosis=diagnosis,
        figures=[each for each in figures if (checkpoint / DIAGNOSTICS / each["file"]).is_file()],
        evaluations=(evaluations := read_evaluations(checkpoint)),
        outdated=_outdated(evaluations, checkpoint),
    )


def _outdated(evaluations: list[Evaluation], checkpoint: Path) -> list[str]:
    known = {each.task: each.weights for each in evaluations if each.weights and "@" not in each.weights}
    now = files_hash(checkpoint, WEIGHT_FILES) if known else None
    return [task for task, weights in known.items() if weights != now]


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, None if it does not exist. Raises ValueError if it holds anything else."""
    return json_object(file.read_bytes(), str(file)) if file.is_file() else None


def read_norm(files: Iterable[Path]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Gain and bias of the norm after the projector, by name, and how many parameters each tensor has.

    Raises ValueError if a file is not whole. Of other tensors only the headers are read.
    """
    norm, sizes = {}, {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    sizes[name] = math.prod(file.get_slice(name).get_shape())
                    if "multi_modal_projector.norm." in name:
                        norm[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}. Was it cut short? Copy it again.") from error
    return norm, sizes


def hub_id(name: str | None) -> str | None:
    """`name` if it has the form of a Hub id with an owner; None otherwise."""
    return name if name and is_hub_id(name) else None


def _parts(build: dict[str, Any]) -> list[Part]:
    found = []
    for key, role in (("vision", "vision encoder"), ("language", "language model")):
        stated = (build.get("licenses") or {}).get(key) or {}
        licence = Licence(**stated) if stated.get("license") else None
        if name := build.get(key):  # build.json keeps only a folder's name: one with an owner is on the Hub
            found.append(Part(role, name, hub_id(name), build.get(f"{key}_revision"), licence))
    return [replace(found[0], role=LLAVA)] if found and build.get("from_llava") else found


def _weights(files: list[Path], config: NormAlignLlavaConfig | None) -> Weights:
    norm, sizes = read_norm(files)
    parameters = 0 if getattr(config, "quantization_config", None) else sum(sizes.values())
    size = sum(path.stat().st_size for path in files)
    gain, bias = (next((norm[name] for name in norm if name.endswith(end)), None) for end in (".weight", ".bias"))
    if gain is None:
        return Weights({}, None, parameters, size)
    start = moved = None
    if config is not None and (config.text_embedding_norm is not None or config.projector_gain_init == "one"):
        start = initial_gain(config, config.text_embedding_norm or math.nan)
        moved = not torch.allclose(gain.double(), torch.full_like(gain, start).double(), rtol=1e-6, atol=0.0)
        moved = moved or (bias is not None and bool(bias.any()))
    means = {"mean_abs": gain, "bias_mean_abs": bias}
    found = {name: None if each is None else each.double().abs().mean().item() for name, each in means.items()}
    return Weights({"start": start, **found}, moved, parameters, size)


def _data(stages: list[dict[str, Any]]) -> list[Part]:
    found: dict[str, Part] = {}
    for source in (source for stage in stages for source in stage.get("data", ()) if source.get("split") == "train"):
        dataset = source.get("dataset") or {}
        licence = Licence(dataset["license"]) if dataset.get("license") else None
        name = dataset.get("id") or source["source"]
        found[name] = Part("data", name, hub_id(dataset.get("id")), dataset.get("revision"), licence)
    return list(found.values())


def _diagnosis(file: Path) -> dict[str, Any] | None:
    """The part of `report.json` that is published."""
    if not file.is_file():
        return None
    try:
        return json.loads(public_report(file.read_text("utf-8"))[0])
    except ValueError as error:
        raise ValueError(f"{file}: {error}. Diagnose again, or remove it.") from error
