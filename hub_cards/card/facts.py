# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a checkpoint folder says of itself: the only source of its card."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...checkpoint.find import check_folder, is_hub_id
from ...checkpoint.loading import loading
from ...checkpoint.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BUILD_RECORD, INDEX, TRAINING_RECORD, WEIGHTS
from ...checkpoint.untrusted import check_files, check_inside, shards
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT
from ..push.contents import DIAGNOSTICS, public_report
from .evaluation import Evaluation, read_evaluations
from .weights import Gain, read_weights


LLAVA = "LLaVA checkpoint"
"""The role of a checkpoint that had both parts."""


@dataclass(frozen=True)
class Licence:
    """A licence as the Hub's metadata has it: its id, and name and link where the id is "other"."""

    license: str
    license_name: str | None = None
    license_link: str | None = None

    def __str__(self) -> str:
        return self.license_name or self.license


@dataclass(frozen=True)
class Part:
    """What the model was put together from, or was trained on.

    Attributes:
        role: "vision encoder", "language model", [`LLAVA`], "base model" or "data".
        name: A Hub id, or a folder's name.
        hub_id, revision: Where the Hub has it, and the commit.
        licence: Where it is recorded.
    """

    role: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    licence: Licence | None = None


@dataclass(frozen=True)
class Facts:
    """All that a card is made from; what the folder does not say is None or empty.

    Attributes:
        name: The folder's.
        config: None in the folder of an adapter, which has none.
        adapter: `adapter_config.json`, of an adapter.
        build: `build.json`.
        stages: The `training.json` of each stage, the first first; options, learning rates and versions may be empty.
        parts: Vision encoder and language model, or the LLaVA checkpoint that had both.
        data: What was trained on, each once.
        gain: None without the norm.
        moved: Whether the projector was trained, as far as its weights show it; see [`Weights`].
        parameters, weight_bytes: Of the safetensors files; of quantized ones, which hold packed weights, 0 parameters.
        image_processor: Of `processor_config.json`.
        diagnosis: `diagnostics/report.json`.
        figures: Of the diagnosis, those whose files are there and that show no sample of the data.
        evaluations: The folder `evaluation`.
    """

    name: str
    config: NormAlignLlavaConfig | None
    adapter: dict[str, Any] | None
    build: dict[str, Any] | None
    stages: list[dict[str, Any]]
    parts: list[Part]
    data: list[Part]
    gain: Gain | None
    moved: bool | None
    parameters: int
    weight_bytes: int
    image_processor: dict[str, Any]
    has_processor: bool
    diagnosis: dict[str, Any] | None
    figures: list[dict[str, str]]
    evaluations: list[Evaluation]

    def setting(self, name: str) -> Any:
        """A field of the configuration; of an adapter, what its training recorded of it."""
        if self.config is not None:
            return getattr(self.config, name)
        record = self.stages[-1] if self.stages else {}
        return record.get("config_changes", {}).get(name, record.get(name))

    @property
    def started_from(self) -> str | None:
        """The Hub id of the checkpoint that the last stage started from; None for a folder's name."""
        # A local path is cut to its last part in training.json, so what has an owner is on the Hub.
        return hub_id(self.stages[-1].get("options", {}).get("model_name_or_path")) if self.stages else None


def read_facts(checkpoint: Path) -> Facts:
    """Reads a checkpoint folder, or an adapter's; of its weights the headers and the norm alone.

    Raises:
        ValueError: It is neither, or a file in it cannot be read; the message names the file.
    """
    check_folder(checkpoint)
    adapter, plain = read_json(checkpoint / ADAPTER_CONFIG), read_json(checkpoint / "config.json")
    if adapter is None and (kind := (plain or {}).get("model_type")) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{checkpoint} is a {kind!r} model. A card is made of NormAlign-LLaVA checkpoints only.")
    check_files(checkpoint)
    with loading(f"The configuration of {checkpoint}"):
        config = NormAlignLlavaConfig.from_pretrained(checkpoint) if adapter is None else None
    record, build = read_json(checkpoint / TRAINING_RECORD), read_json(checkpoint / BUILD_RECORD)
    stages: list[dict[str, Any]] = []
    while record:
        stages.insert(0, {"options": {}, "learning_rates": {}, "versions": {}, **record})
        record = record.get("before")
    diagnosis = _diagnosis(checkpoint / DIAGNOSTICS / REPORT)
    processor = read_json(checkpoint / "processor_config.json")
    weights = read_weights(_weight_files(checkpoint, config), config)
    parts = _parts(checkpoint / BUILD_RECORD, build or {}, config)
    llava = [part.role for part in parts] == [LLAVA]  # whose projector was trained before
    return Facts(
        name=checkpoint.resolve().name,
        config=config,
        adapter=adapter,
        build=build,
        stages=stages,
        parts=parts,
        data=_data(stages),
        gain=weights.gain,
        moved=None if llava and weights.gain is None else weights.moved,
        parameters=0 if getattr(config, "quantization_config", None) else weights.parameters,
        weight_bytes=weights.size,
        image_processor=(processor or {}).get("image_processor") or {},
        has_processor=processor is not None,
        diagnosis=diagnosis,
        figures=_figures(checkpoint / DIAGNOSTICS, diagnosis),
        evaluations=read_evaluations(checkpoint),
    )


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in `file`, None where there is no such file. Raises ValueError if it holds anything else."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Fix or remove it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no JSON object. Fix or remove it.")
    return content


def hub_id(name: str | None) -> str | None:
    """`name` if it has the form of a Hub id with an owner; None otherwise."""
    return name if name and is_hub_id(name) else None


def _parts(file: Path, build: dict[str, Any], config: NormAlignLlavaConfig | None) -> list[Part]:
    found = []
    licences = build.get("licenses") or {}
    if not isinstance(licences, dict):
        raise ValueError(f"{file}: its licenses are {licences!r}, no object. Fix or remove it.")
    settings = {"vision": config and config.vision_config, "language": config and config.text_config}
    for key, role in (("vision", "vision encoder"), ("language", "language model")):
        licence = _licence(licences.get(key), file)
        if name := build.get(key):  # a build cuts a folder's path to its name: what has an owner is on the Hub
            found.append(Part(role, name, hub_id(name), build.get(f"{key}_revision"), licence))
        elif name := getattr(settings[key], "_name_or_path", ""):
            # In the configuration "a/b" may be a folder as well, so nothing is linked; no local path is published.
            name = name if hub_id(name) and not Path(name).exists() else Path(name).name
            found.append(Part(role, name, licence=licence))
    return [replace(found[0], role=LLAVA)] if _is_retrofit(build, found) else found


def _is_retrofit(build: dict[str, Any], parts: list[Part]) -> bool:
    """Whether the norm was added to a model that had both parts."""
    if not parts or "from_llava" in build:
        return bool(parts and build["from_llava"])
    # Earlier builds did not say so. Two folders of one name are two parts, one Hub repository is one.
    first, *others = (replace(part, role="") for part in parts)
    return first.hub_id is not None and others == [first]


def _licence(recorded: Any, file: Path) -> Licence | None:
    recorded = {"license": recorded} if isinstance(recorded, str) or recorded is None else recorded
    known: dict[str, Any] = {}
    if isinstance(recorded, dict):
        known = {each.name: recorded.get(each.name) for each in fields(Licence)}
    if not known or not all(value is None or isinstance(value, str) for value in known.values()):
        raise ValueError(f"{file}: {recorded!r} is no licence, which has its id as `license`. Fix it.")
    return Licence(**known) if known["license"] else None


def _weight_files(checkpoint: Path, config: NormAlignLlavaConfig | None) -> list[Path]:
    index = read_json(checkpoint / INDEX) if config is not None else None
    single = ADAPTER_WEIGHTS if config is None else WEIGHTS
    files = [checkpoint / name for name in (shards(index, str(checkpoint / INDEX)) if index else [single])]
    for file in files:
        check_inside(file)
    return files


def _data(stages: list[dict[str, Any]]) -> list[Part]:
    found: dict[str, Part] = {}
    for source in (source for stage in stages for source in stage.get("data", ()) if source.get("split") == "train"):
        dataset = source.get("dataset") or {}
        licence = dataset.get("license")
        licence = ", ".join(licence) if isinstance(licence, list) else licence
        licence = Licence(licence) if licence else None
        name = dataset.get("id") or source["source"]
        found[name] = Part("data", name, hub_id(dataset.get("id")), dataset.get("revision"), licence)
    return list(found.values())


def _diagnosis(file: Path) -> dict[str, Any] | None:
    """What is published of `report.json`, so that the card speaks of nothing else."""
    if not file.is_file():
        return None
    try:
        return json.loads(public_report(file.read_text("utf-8"))[0])
    except ValueError as error:
        raise ValueError(f"{file}: {error}. Diagnose anew, or remove it.") from error


def _figures(folder: Path, diagnosis: dict[str, Any] | None) -> list[dict[str, str]]:
    """Those that are there; a name with a folder in it is none of ours."""
    return [
        figure
        for figure in (diagnosis or {}).get("figures", [])
        if re.fullmatch(r"\w[\w.-]*\.png", figure["file"]) and (folder / figure["file"]).is_file()
    ]
