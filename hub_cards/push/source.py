# SPDX-License-Identifier: Apache-2.0
"""What is published of a checkpoint folder: the files on a list of names. All others stay."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...checkpoint.find import check_adapter
from ...checkpoint.names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    INDEX,
    PICKLES,
    TRAINING_RECORD,
    WEIGHTS,
)
from ...checkpoint.untrusted import check_files, check_weights, json_object
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...diagnose.report import REPORT, SCHEMA_VERSION, report_json
from ...evaluate.results import FOLDER as EVALUATION, SUMMARY


DIAGNOSTICS = "diagnostics"
PACKAGE = Path(__file__).resolve().parents[2]
CODE = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")

WRITTEN: dict[str, tuple[str, ...]] = {
    "": (
        *(WEIGHTS, INDEX, "model-*-of-*.safetensors", ADAPTER_WEIGHTS, ADAPTER_CONFIG),
        *("config.json", "generation_config.json", *CODE, BUILD_RECORD, TRAINING_RECORD, DYNAMICS),
        *("processor_config.json", "preprocessor_config.json", "tokenizer*.json", "tokenizer.model"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("spiece.model", "sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja"),
    ),
    "chat_templates": ("*.jinja",),
    EVALUATION: (SUMMARY,),
    DIAGNOSTICS: (REPORT, "*.png"),
}
"""Folder -> patterns of the files that this package and transformers write. Those in a repository are replaced as a
whole. Of weights those are sent that load, of figures those that `report.json` names."""

BY_PEOPLE = (CARD, "LICENSE*", "LICENCE*", "NOTICE*")
"""Sent too, but never removed from a repository."""

_FIGURE = r"(?!attention_|(baseline_)?image_)\w[\w.-]*\.png"  # of no sample, and with no folder in its name


@dataclass(frozen=True)
class PublishSource:
    """What is published of a folder.

    Attributes:
        files, sizes: Path in the repository -> content (of weights the file), and its bytes.
        excluded: Paths in the folder that are not sent. That of a whole folder ends in "/".
        stale: Files of the repository that are removed: written by this package or transformers, and no longer sent.
    """

    folder: Path
    files: dict[str, bytes | Path]
    sizes: dict[str, int]
    excluded: list[str]
    stale: list[str]


def choose_files(folder: Path, generated: Mapping[str, bytes], existing: Collection[str] = ()) -> PublishSource:
    """Chooses the files to send, and reads the small ones, so that what is checked is what is sent.

    The diagnosis is sent without samples of the data: see [`public_report`].

    Args:
        folder: The checkpoint or adapter.
        generated: Path -> content that is sent instead of the folder's.
        existing: Paths in the repository.
    """
    folder = folder.resolve()
    chosen = {path.name for path in weight_files(folder)}
    chosen |= set() if WEIGHTS in chosen else {INDEX}
    report = f"{DIAGNOSTICS}/{REPORT}"
    with suppress(OSError, ValueError):
        content, figures = public_report((folder / report).read_text("utf-8"))
        chosen |= {f"{DIAGNOSTICS}/{name}" for name in (REPORT, *figures)}
        generated = {**generated, report: content}
    files: dict[str, bytes | Path] = {}
    excluded = []
    for path in _listed(folder):
        relative = path.relative_to(folder).as_posix()
        if _is_sent(path, relative, chosen):
            files[relative] = path if path.suffix == ".safetensors" else path.read_bytes()
        else:
            excluded.append(relative + ("/" if path.is_dir() else ""))
    files = dict(sorted({**files, **generated}.items()))
    stale = sorted(path for path in existing if path not in files and _matches(path, WRITTEN))
    sizes = {
        path: len(content) if isinstance(content, bytes) else content.stat().st_size for path, content in files.items()
    }
    return PublishSource(folder, files, sizes, sorted(excluded), stale)


def public_report(text: str) -> tuple[bytes, list[str]]:
    """`report.json` without questions, images and attention maps, in the same schema; and the figures it still names.

    The attention of each question keeps its measures; `question` is empty, `image` null and `maps` an empty list.
    """
    try:
        content = json_object(text.encode(), "it")
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {version}, not {SCHEMA_VERSION}")
        for report in filter(None, (content["report"], content["against"])):
            report["attention"] = [
                {**question, "question": "", "image": None, "maps": []} for question in report["attention"]
            ]
        content["figures"] = [figure for figure in content["figures"] if re.fullmatch(_FIGURE, figure["file"])]
        content["provenance"].pop("first question", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{DIAGNOSTICS}/{REPORT} is not valid: {error}. Diagnose again, or remove it.") from error
    return report_json(content).encode(), [figure["file"] for figure in content["figures"]]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that would be loaded. Raises ValueError if there are none, or one is missing or broken."""
    if (folder / ADAPTER_CONFIG).is_file():
        check_adapter(folder)
        return [folder / ADAPTER_WEIGHTS]
    return check_weights(folder)


def read_config(folder: Path) -> tuple[dict[str, Any], NormAlignLlavaConfig | None]:
    """`config.json` as stored and as an object; empty and None for an adapter. Raises ValueError for other models."""
    stored = check_files(folder)
    if stored and (kind := stored.get("model_type")) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{folder} is a {kind!r} model. Cards and publishing are for NormAlign-LLaVA only.")
    return stored, NormAlignLlavaConfig.from_dict(stored) if stored else None


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, None if it does not exist. Raises ValueError if it holds anything else."""
    return json_object(file.read_bytes(), str(file)) if file.is_file() else None


def read_norm(files: Iterable[Path]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Gain and bias of the norm after the projector, by name, and the names of all tensors.

    Raises ValueError if a file is not whole.
    """
    norm, names = dict[str, torch.Tensor](), set[str]()
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                names |= {*file.keys()}
                of_norm = [name for name in file.keys() if "multi_modal_projector.norm." in name]  # noqa: SIM118
                norm |= {name: file.get_tensor(name) for name in of_norm}
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}. Was it cut short? Copy it again.") from error
    return norm, names


def _listed(folder: Path) -> list[Path]:
    """Everything in the folder, and in its subfolders that files are sent from."""
    listed = []
    for path in sorted(folder.iterdir()):
        listed += sorted(path.iterdir()) if path.name in WRITTEN and path.is_dir() else [path]
    return listed


def _matches(path: str, patterns: Mapping[str, tuple[str, ...]]) -> bool:
    parent, _, name = path.rpartition("/")
    return any(fnmatchcase(name, pattern) for pattern in patterns.get(parent, ()))


def _is_sent(path: Path, relative: str, chosen: Collection[str]) -> bool:
    listed = _matches(relative, WRITTEN) or _matches(relative, {"": BY_PEOPLE})
    by_choice = path.suffix in (".safetensors", ".png") or path.name in (INDEX, REPORT)
    return listed and path.is_file() and path.suffix not in PICKLES and (relative in chosen or not by_choice)
