# SPDX-License-Identifier: Apache-2.0
"""The records of a checkpoint folder: the only source of its card, and what is read to send it."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUILD_RECORD,
    TRAINING_RECORD,
    check_adapter,
    is_hub_id,
)
from ...checkpoint.untrusted import (
    check_files,
    fetch_checked_weights,
    json_object,
    refuse_unreadable,
)
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT, SCHEMA_VERSION
from ...evaluation.results import WEIGHT_FILES, files_hash, read_evaluations
from ...modeling_normalign_llava import initial_gain


LLAVA = "LLaVA checkpoint"  # the role of one that had both parts
ROLES = {"vision": "vision encoder", "language": "language model"}
FIGURES = ("interface.png", "rotation.png")
DIAGNOSTICS = "diagnostics"
NOTICES = ("notices/vision", "notices/language")
"""Folders of the licences and notices that came with the parts."""
GGUF = "gguf"
"""Folder in a checkpoint that `normalign export` may write to."""
MODELFILE = "Modelfile"
"""The file that `ollama create` reads."""
_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, in no other folder


@dataclass(frozen=True)
class Part:
    """A model or data set that the model was made from.

    Attributes:
        role: "vision encoder", "language model", [`LLAVA`], "base model" or "data".
        name: Its Hub id, or the name of a folder.
        hub_id: Its Hub id, if it is known to be on the Hub.
        revision: Its commit or branch.
        licence: As in the Hub's metadata: `license`, and `license_name` and `license_link` if that
            is "other".
        languages: The languages of a data set.
    """

    role: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    licence: dict[str, str] = field(default_factory=dict)
    languages: tuple[str, ...] = ()

    @property
    def terms(self) -> str | None:
        """The name of its licence, or None if it is not recorded."""
        return self.licence.get("license_name") or self.licence.get("license")


class Facts:
    """What a card is rendered from: the records of a checkpoint or adapter.

    A record that does not exist is None or empty. The constructor reads the folder, and raises
    ValueError if a record in it is not valid.

    Args:
        checkpoint: The folder.

    Attributes:
        name: The folder's name.
        config: The configuration; None for an adapter.
        adapter: `adapter_config.json`.
        build: `build.json`.
        has_processor: Whether the folder has a processor.
        notices: The paths of the licences and notices of its parts.
        stages: The `training.json` of each stage in order, with learning rates among the options.
        last_stage: The last one, or empty.
        parts: The models that it was built from.
        data: The data sets that it was trained on, each once.
        gain: Mean magnitude of the norm's gain and bias, and the gain's start, as in `report.json`.
        norm_moved: Whether the norm differs from a newly built one; None if that is not known.
        diagnosis: `report.json` without samples.
        figures: What `report.json` says of the figures in the card.
        evaluations: The results on all tasks.
        outdated: The tasks that were evaluated with other weights.
        gguf: The bytes of each GGUF file, by its path in the folder.
        modelfile: The path of the file that makes a model for Ollama of them.
    """

    def __init__(self, checkpoint: Path):
        self.name = checkpoint.resolve().name
        self.config = read_config(checkpoint)[1]
        self.adapter = read_json(checkpoint / ADAPTER_CONFIG)
        self.build = read_json(checkpoint / BUILD_RECORD)
        self.has_processor = (checkpoint / "processor_config.json").is_file()
        self.notices = notices(checkpoint)
        self.stages: list[dict[str, Any]] = []
        record = read_json(checkpoint / TRAINING_RECORD)
        while record:
            options = {**record.get("options", {})}
            for module, learning_rate in record.get("learning_rates", {}).items():
                options[f"{module}_learning_rate"] = learning_rate
            self.stages.insert(0, {"versions": {}, **record, "options": options})
            record = record.get("before") or {}
        self.last_stage = self.stages[-1] if self.stages else {}
        self.parts = _parts(self.build)
        self.data = _training_data(self.stages)
        self.gain, self.norm_moved = _read_gain(checkpoint, self.config)
        self.diagnosis = read_public_report(checkpoint)
        self.figures = []
        for figure in self.diagnosis.get("figures", ()):
            figure_file = checkpoint / DIAGNOSTICS / figure["file"]
            if figure["file"] in FIGURES and figure_file.is_file():
                self.figures.append(figure)
        self.evaluations = read_evaluations(checkpoint)
        # Other weights are named by Hub id and commit, with an "@", and cannot be compared.
        hashed = [
            result for result in self.evaluations if result.weights and "@" not in result.weights
        ]
        current_hash = files_hash(checkpoint, WEIGHT_FILES) if hashed else None
        self.outdated = [result.task for result in hashed if result.weights != current_hash]
        self.gguf = {
            file.relative_to(checkpoint).as_posix(): file.stat().st_size
            for file in gguf_files(checkpoint)
        }
        self.modelfile = complete_modelfile(checkpoint)

    def setting(self, name: str) -> Any:
        """Returns a field of the configuration. For an adapter, it is the value in its training."""
        if self.config is not None:
            return getattr(self.config, name)
        changes = self.last_stage.get("config_changes", {})
        return changes.get(name, self.last_stage.get(name))

    @property
    def started_from(self) -> str | None:
        """Hub id of the checkpoint that the last stage started from. None if it was a folder."""
        return _hub_id(self.last_stage.get("options", {}).get("model_name_or_path"))

    @property
    def report_is_stale(self) -> bool:
        """Whether the diagnosis is of other weights: another norm, or a gain more than 1 % away."""
        report = self.diagnosis.get("report") or {}
        norm = self.setting("projector_norm")
        diagnosed_norm = report.get("norm")
        if None not in (norm, diagnosed_norm) and norm != diagnosed_norm:
            return True
        gain = self.gain.get("mean_abs")
        diagnosed_gain = (report.get("gain") or {}).get("mean_abs")
        if gain is None or diagnosed_gain is None:
            return False
        return not math.isclose(gain, diagnosed_gain, rel_tol=0.01)


def _read_gain(
    checkpoint: Path, config: NormAlignLlavaConfig | None
) -> tuple[dict[str, float | None], bool | None]:
    """Reads the norm, and returns [`Facts`]' `gain` and `norm_moved`."""
    norm = {
        tensor_name.rpartition(".")[2]: tensor.double()
        for tensor_name, tensor in read_norm(checkpoint).items()
    }
    if "weight" not in norm:
        return {}, None
    gain = norm["weight"]
    bias_magnitude = norm["bias"].abs().mean().item() if "bias" in norm else None
    start = None
    has_moved = None
    if config is not None and config.projector_gain_init == "one":
        start = 1.0
    elif config is not None and config.text_embedding_norm is not None:
        start = initial_gain(config, config.text_embedding_norm)
    if start is not None:
        is_at_start = torch.allclose(gain, torch.full_like(gain, start), rtol=1e-6, atol=0.0)
        has_moved = bool(bias_magnitude) or not is_at_start
    mean_magnitude = gain.abs().mean().item()
    return {"start": start, "mean_abs": mean_magnitude, "bias_mean_abs": bias_magnitude}, has_moved


def _parts(build: dict[str, Any]) -> list[Part]:
    """Returns the parts that `build.json` names, or the LLaVA checkpoint."""
    roles = {"vision": LLAVA} if build.get("from_llava") else ROLES
    licences = build.get("licenses") or {}
    parts = []
    for part_key, role in roles.items():
        part_name = build.get(part_key)
        if part_name:
            stated_licence = licences.get(part_key) or {}
            licence = {field: value for field, value in stated_licence.items() if value}
            parts.append(
                Part(
                    role, part_name, _hub_id(part_name), build.get(f"{part_key}_revision"), licence
                )
            )
    return parts


def _training_data(stages: list[dict[str, Any]]) -> list[Part]:
    part_by_name = {}
    for stage in stages:
        for source in stage.get("data", ()):
            if source.get("split") != "train":
                continue
            dataset = source.get("dataset") or {}
            dataset_id = dataset.get("id")
            name = dataset_id or source["source"]
            licence = dataset.get("license")
            part_by_name[name] = Part(
                role="data",
                name=name,
                hub_id=_hub_id(dataset_id),
                revision=dataset.get("revision"),
                licence={"license": licence} if licence else {},
                languages=tuple(dataset.get("language") or ()),
            )
    return list(part_by_name.values())


def _hub_id(name: str | None) -> str | None:
    """Returns a name if it is a Hub id. Folders are recorded only with the last part of a path."""
    if name and is_hub_id(name):
        return name
    return None


def notices(folder: Path) -> list[str]:
    """Returns the paths of the parts' licences and notices in a checkpoint folder."""
    notice_paths = []
    for notice_folder in NOTICES:
        for file in folder.glob(f"{notice_folder}/[!.]*"):
            if file.is_file():
                notice_paths.append(f"{notice_folder}/{file.name}")
    return sorted(notice_paths)


def gguf_files(folder: Path) -> list[Path]:
    """Returns the GGUF files in a checkpoint folder, and in its folder `gguf`."""
    return sorted([*folder.glob("*.gguf"), *folder.glob(f"{GGUF}/*.gguf")])


def models_of(modelfile: Path) -> list[str]:
    """Reads the files or models that a Modelfile names. Without a Modelfile there are none."""
    if not modelfile.is_file():
        return []
    lines = modelfile.read_text("utf-8", "replace").splitlines()
    return [line.removeprefix("FROM ").strip() for line in lines if line.startswith("FROM ")]


def complete_modelfile(folder: Path) -> str | None:
    """Returns the path of the Modelfile in a checkpoint folder, or in its folder `gguf`.

    None if there is none, or if a file that it names is missing. Ollama looks for such files beside
    the Modelfile.
    """
    for file in (folder / GGUF / MODELFILE, folder / MODELFILE):
        names = models_of(file)
        if names and all((file.parent / name).is_file() for name in names):
            return file.relative_to(folder).as_posix()
    return None


def read_public_report(folder: Path) -> dict[str, Any]:
    """Reads the report of a checkpoint's diagnosis, without what belongs to single samples.

    Questions, images, attention maps and drawings of samples are removed.

    Returns:
        The content of `report.json`. It is empty if there is none.

    Raises:
        ValueError: It is not valid, or has another schema.
    """
    report_path = f"{DIAGNOSTICS}/{REPORT}"
    report_file = folder / report_path
    if not report_file.is_file():
        return {}
    with refuse_unreadable(report_path, remedy="Diagnose again, or remove it."):
        content = json_object(report_file.read_bytes(), report_path)
        schema_version = content["schema_version"]
        if schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"{report_path} has schema {schema_version}, not {SCHEMA_VERSION}. Diagnose again."
            )
        for report in (content["report"], content["against"]):
            if report:
                for question in report["attention"]:
                    question.update(question="", image=None, maps=[])
        content["figures"] = [
            figure for figure in content["figures"] if re.fullmatch(_FIGURE, figure["file"])
        ]
        content["provenance"].pop("first question", None)
    return content


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that would be loaded.

    Raises:
        ValueError: One is missing or broken.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        check_adapter(folder)
        return [folder / ADAPTER_WEIGHTS]
    return fetch_checked_weights(folder)


def read_config(folder: Path) -> tuple[dict[str, Any], NormAlignLlavaConfig | None]:
    """Reads `config.json`: as it is stored, and as an object. For an adapter it is empty and None.

    Raises:
        ValueError: It is of another model, its values do not fit it, or a file of the checkpoint is
            not safe to read.
    """
    config_json = check_files(folder)
    if not config_json:
        return config_json, None
    model_type = config_json.get("model_type")
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{folder} is a {model_type!r} model. This command is for NormAlign-LLaVA only."
        )
    with refuse_unreadable(f"The configuration of {folder}"):
        # transformers decodes here what it wrote in a form of its own, such as infinite floats.
        return config_json, NormAlignLlavaConfig.from_pretrained(folder)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Returns an empty one if the file does not exist.

    Raises:
        ValueError: The file holds anything else.
    """
    if not file.is_file():
        return {}
    return json_object(file.read_bytes(), str(file))


def read_norm(folder: Path) -> dict[str, torch.Tensor]:
    """Reads gain and bias of the projector's norm, by name of the tensor.

    Raises:
        ValueError: The weights are broken.
    """
    norm_tensors = {}
    for weight_file in weight_files(folder):
        with refuse_unreadable(str(weight_file)), safe_open(weight_file, "pt") as tensors:
            for tensor_name in tensors.keys():  # noqa: SIM118
                if "multi_modal_projector.norm." in tensor_name:
                    norm_tensors[tensor_name] = tensors.get_tensor(tensor_name)
    return norm_tensors
