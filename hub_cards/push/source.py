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
from ...evaluation.results import EVALUATION, SUMMARY


DIAGNOSTICS = "diagnostics"
CODE = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")
WRITTEN: dict[str, tuple[str, ...]] = {
    "": (
        *(names.WEIGHTS, names.INDEX, "model-*-of-*.safetensors", "config.json", *CODE),
        *(names.ADAPTER_WEIGHTS, names.ADAPTER_CONFIG, "generation_config.json"),
        *(names.BUILD_RECORD, names.TRAINING_RECORD, names.DYNAMICS, "processor_config.json"),
        *("preprocessor_config.json", "tokenizer*.json", "tokenizer.model", "added_tokens.json"),
        *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
        *("sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja"),
    ),
    "chat_templates": ("*.jinja",),
    EVALUATION: (SUMMARY,),
    DIAGNOSTICS: (REPORT, "*.png"),
}
"""Patterns of the files that this package and transformers write, by folder: in a repository they
are replaced as a whole. Of weights those are sent that load, of figures those of `report.json`."""
SENT = WRITTEN | {"": (*WRITTEN[""], names.CARD, "LICENSE*", "LICENCE*", "NOTICE*")}
"""Those and what people write, which is never removed from a repository."""
_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, in no other folder


@dataclass(frozen=True)
class PublishSource:
    """What is published of a folder.

    `files` has the contents by path in the repository, of weights the file, and `sizes` their
    bytes; `excluded` has the paths that stay here, `stale` those that are removed there.
    """

    folder: Path
    files: dict[str, bytes | Path]
    sizes: dict[str, int]
    excluded: list[str]
    stale: list[str]


def choose_files(
    folder: Path, generated: Mapping[str, bytes], existing: Collection[str] = ()
) -> PublishSource:
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
        optional = path.suffix in (".safetensors", ".png") or name == names.INDEX
        if path.is_file() and _matches(name, SENT) and (name in chosen or not optional):
            files[name] = path if path.suffix == ".safetensors" else path.read_bytes()
        else:
            excluded.append(name + ("/" if path.is_dir() else ""))
    files = dict(sorted({**files, **generated}.items()))
    stale = sorted(path for path in existing if path not in files and _matches(path, WRITTEN))
    sizes = {}
    for name, content in files.items():
        sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
    return PublishSource(folder, files, sizes, sorted(excluded), stale)


def public_report(text: str) -> tuple[bytes, list[str]]:
    """`report.json` with questions, images and attention maps emptied, and the figures it names."""
    where = f"{DIAGNOSTICS}/{REPORT}"
    with loading(where, remedy="Diagnose again, or remove it."):
        content = json_object(text.encode(), where)
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"{where} has schema {version}, not {SCHEMA_VERSION}. Diagnose again.")
        for report in filter(None, (content["report"], content["against"])):
            for question in report["attention"]:
                question.update(question="", image=None, maps=[])
        figures = [drawn for drawn in content["figures"] if re.fullmatch(_FIGURE, drawn["file"])]
        content["figures"] = figures
        content["provenance"].pop("first question", None)
    return report_json(content).encode(), [figure["file"] for figure in figures]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that would be loaded. Raises ValueError if one is missing or broken."""
    if (folder / names.ADAPTER_CONFIG).is_file():
        check_adapter(folder)
        return [folder / names.ADAPTER_WEIGHTS]
    return check_weights(folder)


def read_config(folder: Path) -> tuple[dict[str, Any], NormAlignLlavaConfig | None]:
    """`config.json`, raw and as an object; empty and None for an adapter. Refuses other models."""
    stored = check_files(folder)
    if stored and (kind := stored.get("model_type")) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{folder} is a {kind!r} model. This command is for NormAlign-LLaVA only.")
    return stored, NormAlignLlavaConfig.from_dict(stored) if stored else None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, empty without one. Raises ValueError if it holds anything else."""
    return json_object(file.read_bytes(), str(file)) if file.is_file() else {}


def read_norm(folder: Path) -> dict[str, torch.Tensor]:
    """Gain and bias of the projector's norm, by name. Raises ValueError if weights are broken."""
    norm = dict[str, torch.Tensor]()
    for path in weight_files(folder):
        with loading(str(path)), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "multi_modal_projector.norm." in name:
                    norm[name] = file.get_tensor(name)
    return norm


def _matches(path: str, patterns: Mapping[str, tuple[str, ...]]) -> bool:
    parent, _, name = path.rpartition("/")
    return any(fnmatchcase(name, pattern) for pattern in patterns.get(parent, ()))
