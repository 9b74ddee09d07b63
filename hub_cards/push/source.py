# SPDX-License-Identifier: Apache-2.0
"""What is published of a checkpoint folder: the files on a list of names. All others stay."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...checkpoint import files as names
from ...checkpoint.files import check_adapter
from ...checkpoint.untrusted import check_files, check_weights, json_object, loading
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT, SCHEMA_VERSION, report_json
from ...evaluate.results import FOLDER as EVALUATION, SUMMARY


DIAGNOSTICS = "diagnostics"
CODE = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")

WRITTEN: dict[str, tuple[str, ...]] = {
    "": (
        *(names.WEIGHTS, names.INDEX, "model-*-of-*.safetensors", names.ADAPTER_WEIGHTS, names.ADAPTER_CONFIG),
        *("config.json", "generation_config.json", *CODE, names.BUILD_RECORD, names.TRAINING_RECORD, names.DYNAMICS),
        *("processor_config.json", "preprocessor_config.json", "tokenizer*.json", "tokenizer.model"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("spiece.model", "sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja"),
    ),
    "chat_templates": ("*.jinja",),
    EVALUATION: (SUMMARY,),
    DIAGNOSTICS: (REPORT, "*.png"),
}
"""Patterns of the files that this package and transformers write, by folder: in a repository they are replaced as a
whole. Of weights those are sent that load, of figures those that `report.json` names."""

SENT = WRITTEN | {"": (*WRITTEN[""], names.CARD, "LICENSE*", "LICENCE*", "NOTICE*")}
"""Those and what people write, which is never removed from a repository."""

_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, and with no folder in its name


@dataclass(frozen=True)
class PublishSource:
    """What is published of a folder.

    `files` has the content of each path in the repository, of weights the file, and `sizes` its bytes;
    `excluded` has the paths that stay here, `stale` those in the repository that are removed.
    """

    folder: Path
    files: dict[str, bytes | Path]
    sizes: dict[str, int]
    excluded: list[str]
    stale: list[str]


def choose_files(folder: Path, generated: Mapping[str, bytes], existing: Collection[str] = ()) -> PublishSource:
    """Chooses the files to send, and reads the small ones, so that what is checked is what is sent.

    `generated` is sent instead of the folder's files; `existing` are paths in the repository.
    """
    folder, generated = folder.resolve(), dict(generated)
    chosen = {path.name for path in weight_files(folder)}
    chosen |= set() if names.WEIGHTS in chosen else {names.INDEX}
    if (folder / DIAGNOSTICS / REPORT).is_file():
        report, figures = public_report((folder / DIAGNOSTICS / REPORT).read_text("utf-8"))
        generated[f"{DIAGNOSTICS}/{REPORT}"] = report
        chosen |= {f"{DIAGNOSTICS}/{name}" for name in figures}
    files, excluded, paths = dict[str, bytes | Path](), list[str](), list[Path]()
    for path in folder.iterdir():
        paths += path.iterdir() if path.name in WRITTEN and path.is_dir() else [path]
    for path in paths:
        name = path.relative_to(folder).as_posix()
        loaded = name in chosen or not (path.suffix in (".safetensors", ".png") or name == names.INDEX)
        if path.is_file() and _matches(name, SENT) and loaded:
            files[name] = path if path.suffix == ".safetensors" else path.read_bytes()
        else:
            excluded.append(name + ("/" if path.is_dir() else ""))
    files = dict(sorted({**files, **generated}.items()))
    stale = sorted(path for path in existing if path not in files and _matches(path, WRITTEN))
    sizes = {path: file.stat().st_size if isinstance(file, Path) else len(file) for path, file in files.items()}
    return PublishSource(folder, files, sizes, sorted(excluded), stale)


def public_report(text: str) -> tuple[bytes, list[str]]:
    """`report.json` without questions, images and attention maps, in the same schema; and the figures it still names.

    The attention of each question keeps its measures; `question` is empty, `image` null and `maps` an empty list.
    """
    with loading(f"{DIAGNOSTICS}/{REPORT}", remedy="Diagnose again, or remove it."):
        content = json_object(text.encode(), f"{DIAGNOSTICS}/{REPORT}")
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"{REPORT} has schema_version {version}, not {SCHEMA_VERSION}. Diagnose again.")
        for report in filter(None, (content["report"], content["against"])):
            report["attention"] = [
                {**question, "question": "", "image": None, "maps": []} for question in report["attention"]
            ]
        content["figures"] = [figure for figure in content["figures"] if re.fullmatch(_FIGURE, figure["file"])]
        content["provenance"].pop("first question", None)
    return report_json(content).encode(), [figure["file"] for figure in content["figures"]]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that would be loaded. Raises ValueError if there are none, or one is missing or broken."""
    if (folder / names.ADAPTER_CONFIG).is_file():
        check_adapter(folder)
        return [folder / names.ADAPTER_WEIGHTS]
    return check_weights(folder)


def read_config(folder: Path) -> tuple[dict[str, Any], NormAlignLlavaConfig | None]:
    """`config.json` as stored and as an object; empty and None for an adapter. Raises ValueError for other models."""
    stored = check_files(folder)
    if stored and (kind := stored.get("model_type")) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{folder} is a {kind!r} model. Cards and publishing are for NormAlign-LLaVA only.")
    return stored, NormAlignLlavaConfig.from_dict(stored) if stored else None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, empty if it does not exist. Raises ValueError if it holds anything else."""
    return json_object(file.read_bytes(), str(file)) if file.is_file() else {}


def read_norm(folder: Path) -> dict[str, torch.Tensor]:
    """Gain and bias of the norm after the projector, by name. Raises ValueError if a file of weights is not whole."""
    norm = dict[str, torch.Tensor]()
    for path in weight_files(folder):
        with loading(str(path)), safe_open(path, "pt") as file:
            of_norm = [name for name in file.keys() if "multi_modal_projector.norm." in name]  # noqa: SIM118
            norm |= {name: file.get_tensor(name) for name in of_norm}
    return norm


def _matches(path: str, patterns: Mapping[str, tuple[str, ...]]) -> bool:
    parent, _, name = path.rpartition("/")
    return any(fnmatchcase(name, pattern) for pattern in patterns.get(parent, ()))
