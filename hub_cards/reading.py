# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint folder for its card and for sending it."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter
from ..checkpoint.untrusted import (
    check_files,
    fetch_checked_weights,
    json_object,
    refuse_unreadable,
)
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..diagnose.report import REPORT, SCHEMA_VERSION


DIAGNOSTICS = "diagnostics"
NOTICES = ("notices/vision", "notices/language")
"""Folders of the licences and notices that came with the parts."""
GGUF = "gguf"
"""Folder in a checkpoint that `normalign export` may write to."""
MODELFILE = "Modelfile"
"""The file that `ollama create` reads."""
_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, in no other folder


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
