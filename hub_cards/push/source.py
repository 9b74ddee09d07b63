# SPDX-License-Identifier: Apache-2.0
"""What is published of a checkpoint folder: the files on a list of names. All others stay."""

import re
from collections.abc import Mapping
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
NOTICES = ("notices/vision", "notices/language")
"""Folders of the licences and notices that came with the parts."""
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
    **dict.fromkeys(NOTICES, ("[!.]*",)),
}
"""Patterns of the files that this package and transformers write, by folder. What a publication
wrote of them and the next one lacks is removed. Of weights those are sent that load, of figures
those of `report.json`."""
READ: dict[str, tuple[str, ...]] = {
    "": (
        *(*WRITTEN[""], "pytorch_model*", "adapter_model.bin", "tf_model*.h5", "flax_model*"),
        "video_preprocessor_config.json",
    ),
    "chat_templates": ("*",),
    "custom_generate": ("*",),  # code that `generate` would run
}
"""Patterns of the files that are read, or could be taken for the model, if they lie beside it."""
SENT = WRITTEN | {"": (*WRITTEN[""], names.CARD, "LICENSE*", "LICENCE*", "NOTICE*")}
"""Those and what people write, which is never removed from a repository."""
LARGEST_NOTICE = 2**20  # bytes
_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, in no other folder


@dataclass(frozen=True)
class PublishSource:
    """What is published of a folder.

    `files` has the contents by path in the repository, of weights the file, and `sizes` their
    bytes; `excluded` has the paths that stay here.
    """

    folder: Path
    files: dict[str, bytes | Path]
    sizes: dict[str, int]
    excluded: list[str]


def choose_files(folder: Path, generated: Mapping[str, bytes]) -> PublishSource:
    """Chooses the files to send, and reads the small ones, so that what is checked is what is sent.

    `generated` is sent instead of the folder's files.
    """
    folder, generated = folder.resolve(), dict(generated)
    chosen = {path.name for path in weight_files(folder)}
    chosen |= set() if names.WEIGHTS in chosen else {names.INDEX}
    if (folder / DIAGNOSTICS / REPORT).is_file():
        report, figures = public_report((folder / DIAGNOSTICS / REPORT).read_text("utf-8"))
        generated[f"{DIAGNOSTICS}/{REPORT}"] = report
        chosen |= {f"{DIAGNOSTICS}/{name}" for name in figures}
    files: dict[str, bytes | Path] = {}
    excluded: list[str] = []
    for path in _paths(folder):
        name = path.relative_to(folder).as_posix()
        is_notice = path.parent.relative_to(folder).as_posix() in NOTICES
        optional = path.suffix in (".safetensors", ".png") or name == names.INDEX
        if path.is_file() and is_notice and _matches(name, SENT):
            files[name] = read_notice(path)
        elif path.is_file() and _matches(name, SENT) and (name in chosen or not optional):
            files[name] = path if path.suffix == ".safetensors" else path.read_bytes()
        else:
            excluded.append(name + ("/" if path.is_dir() else ""))
    files = dict(sorted({**files, **generated}.items()))
    sizes = {}
    for name, content in files.items():
        sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
    return PublishSource(folder, files, sizes, sorted(excluded))


def _paths(folder: Path) -> list[Path]:
    """What is in a folder, in place of the folders of which files are sent what is in these."""
    opened = {*WRITTEN, *(Path(notices).parent.as_posix() for notices in NOTICES)}
    paths: list[Path] = []
    waiting = sorted(folder.iterdir())
    while waiting:
        path = waiting.pop()
        if path.is_dir() and path.relative_to(folder).as_posix() in opened:
            waiting += sorted(path.iterdir())
        else:
            paths.append(path)
    return paths


def notices(folder: Path) -> list[str]:
    """Paths of the licences and notices of the parts in a checkpoint folder, as they are sent."""
    found = (path.relative_to(folder).as_posix() for path in _paths(folder) if path.is_file())
    return sorted(name for name in found if name.startswith(NOTICES) and _matches(name, SENT))


def read_notice(file: Path) -> bytes:
    """A licence or notice. Raises ValueError unless it is a plain text of up to 1 MiB."""
    size = file.stat().st_size
    remedy = "Remove it, or replace it by the text of the licence."
    if size > LARGEST_NOTICE:
        raise ValueError(f"{file} has {size:,} bytes, and a notice {LARGEST_NOTICE:,}. {remedy}")
    content = file.read_bytes()
    with loading(str(file), remedy=remedy):
        text = content.decode("utf-8")
    if "\0" in text:
        raise ValueError(f"{file} is no plain text: it has a null character. {remedy}")
    return content


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


def is_written(path: str) -> bool:
    """Whether a path in a repository is one that this package or transformers writes."""
    return _matches(path, WRITTEN)


def is_read(path: str) -> bool:
    """Whether what lies in a repository at this path would be read with the model, or for it."""
    return _matches(path, READ)


def _matches(path: str, patterns: Mapping[str, tuple[str, ...]]) -> bool:
    parent, _, name = path.rpartition("/")
    return any(fnmatchcase(name, pattern) for pattern in patterns.get(parent, ()))
