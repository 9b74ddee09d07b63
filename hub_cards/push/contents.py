# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The files of a checkpoint folder that are published: those on a list of names. All others stay, with a reason."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ...checkpoint.names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    INDEX,
    PICKLES,
    STATE,
    TRAINING_RECORD,
    WEIGHTS,
)
from ...checkpoint.untrusted import is_inside, json_object, shards
from ...diagnose.report import PAGE, REPORT, SCHEMA_VERSION
from ...evaluate.results import FOLDER as EVALUATION


DIAGNOSTICS, TEMPLATES = "diagnostics", "chat_templates"
CODE = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")

ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "": {
        "adapter": (ADAPTER_WEIGHTS, ADAPTER_CONFIG),
        "configuration": ("config.json", "generation_config.json"),
        "code": CODE,
        "processor": (
            *("processor_config.json", "preprocessor_config.json", "tokenizer*.json", "tokenizer.model"),
            *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
            *("spiece.model", "sentencepiece.bpe.model", "chat_template.json", "chat_template.jinja"),
        ),
        "card": (CARD,),
        "record": (BUILD_RECORD, TRAINING_RECORD, DYNAMICS, "LICENSE*", "LICENCE*", "NOTICE*"),
    },
    TEMPLATES: {"processor": ("*.jinja",)},
    EVALUATION: {"evaluation": ("*.json",)},
    DIAGNOSTICS: {"record": (REPORT,)},
}
"""Folder -> kind -> patterns of names. Weights are those that load, figures those that `report.json` names."""

_LEFT = {
    "optimizer*": "optimizer state",
    "scheduler.pt": "the scheduler's state",
    "rng_state*.pth": "random states of training",
    "training_args.bin": "a pickle: the trainer's arguments",
    STATE: "the trainer's own state",
    "checkpoint-*": "a checkpoint of training",
    "samples": "answers to samples of the data",
    "dropped_rows.jsonl": "rows of the data",
    PAGE: "it shows images and questions of the data",
    "*.safetensors": "weights that this checkpoint does not load",
}
_SHOWS_A_SAMPLE = r"(attention|(baseline_)?image)_\d+\.png"


@dataclass(frozen=True)
class Content:
    """A file to send.

    Attributes:
        path: Path in the repository.
        source: Absolute path on disk; or the bytes to send instead.
        size: In bytes.
        kind: "weights", "adapter", "configuration", "code", "processor", "card", "figure", "record" or "evaluation".
    """

    path: str
    source: Path | bytes
    size: int
    kind: str


@dataclass(frozen=True)
class Contents:
    """The files to send, and those that are left: path -> why. The path of a whole folder ends in "/"."""

    sent: list[Content]
    left: dict[str, str] = field(default_factory=dict)


def contents(checkpoint: str | os.PathLike, generated: Mapping[str, bytes] | None = None) -> Contents:
    """Chooses the files to send from the folder of a checkpoint or an adapter; reads only indexes and `report.json`.

    The diagnosis is sent without samples of the data: see [`public_report`].

    Args:
        checkpoint: The folder.
        generated: Path in the repository -> bytes of files to send instead of the folder's, or in addition.

    Raises:
        ValueError: The folder does not exist; it has no weights, only pickled ones, two sets of them, or not all
            shards; a file to send is a link to outside the folder; a path of `generated` is not on the list.
    """
    folder, generated = Path(checkpoint), dict(generated or {})
    if not folder.is_dir():
        raise ValueError(f"{checkpoint} is not a folder. Give the folder of a checkpoint or of an adapter.")
    if unknown := [path for path in generated if _kind(path) is None]:
        raise ValueError(f"{unknown[0]} is not on the list of files that are sent. Add its name in contents.py.")
    folder = folder.resolve()
    kinds = dict.fromkeys(_weights(folder), "weights")
    report, figures = _report(folder / DIAGNOSTICS / REPORT)
    kinds |= dict.fromkeys((f"{DIAGNOSTICS}/{name}" for name in figures), "figure")

    sent, left, outside = [], {}, []
    for path in _listed(folder):
        relative = path.relative_to(folder).as_posix()
        kind = kinds.get(relative) or _kind(relative)
        if relative in generated:
            continue
        if reason := _reason(path, kind):
            left[relative + ("/" if path.is_dir() else "")] = reason
        elif not is_inside(path, folder):
            outside.append(f"{relative} -> {path.resolve()}")
        elif relative != f"{DIAGNOSTICS}/{REPORT}":
            sent.append(Content(relative, path, path.stat().st_size, str(kind)))
        elif report is None:
            left[relative] = "not a report that this version can read"
        else:
            generated[relative] = report
    if outside:
        raise ValueError(
            f"{len(outside)} files of {checkpoint} lie outside it, behind links: {', '.join(outside)}. Put copies of "
            "them in their place (`cp -rL` copies a folder so)."
        )
    sent += [Content(path, content, len(content), str(_kind(path))) for path, content in generated.items()]
    return Contents(sorted(sent, key=lambda content: content.path), dict(sorted(left.items())))


def public_report(text: str) -> tuple[bytes, list[str]]:
    """`report.json` without questions, images and attention maps, in the same schema; and the figures it still names.

    The attention of each question keeps its measures; `question` is empty, `image` null and `maps` an empty list.

    Args:
        text: `report.json`.

    Raises:
        ValueError: It has another schema.
    """
    try:
        content = json_object(text.encode(), "it")
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {version}, not {SCHEMA_VERSION}")
        for report in filter(None, (content["report"], content["against"])):
            report["attention"] = [{**each, "question": "", "image": None, "maps": []} for each in report["attention"]]
        names = [drawing["file"] for drawing in content["figures"]]
        names = [name for name in names if name.endswith(".png") and not re.fullmatch(_SHOWS_A_SAMPLE, name)]
        content["figures"] = [drawing for drawing in content["figures"] if drawing["file"] in names]
        content["provenance"].pop("first question", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a valid report: {error}") from error
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(), names


def shards_of(folder: Path) -> list[str]:
    """The files that the index of a folder names.

    Raises:
        ValueError: The index cannot be read, or names a file that does not exist.
    """
    names = shards(json_object((folder / INDEX).read_bytes(), str(folder / INDEX)), str(folder / INDEX))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} lacks {', '.join(absent)} of the {len(names)} shards that {INDEX} names. Copy them there, or "
            "save the model again."
        )
    return names


def _weights(folder: Path) -> list[str]:
    """The files of weights that `from_pretrained` would read; none for an adapter."""
    found = [name for name in (WEIGHTS, INDEX, ADAPTER_WEIGHTS) if (folder / name).exists()]
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds {' and '.join(found)}, weights of two saves. Remove those that should not be published."
        )
    if not found:
        pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
        hint = f" Pickled files ({', '.join(pickled)}) are not sent: load the model and save it again."
        inside = ", ".join(sorted(path.name for path in folder.glob("checkpoint-*")))
        inside = f" It has {inside}: name one of them." if inside else ""
        raise ValueError(
            f"{folder} has no weights: no {WEIGHTS}, {INDEX} or {ADAPTER_WEIGHTS}.{hint if pickled else inside}"
        )
    return [INDEX, *shards_of(folder)] if found == [INDEX] else [each for each in found if each == WEIGHTS]


def _report(file: Path) -> tuple[bytes | None, list[str]]:
    try:
        return public_report(file.read_text("utf-8"))
    except (OSError, ValueError):  # which `left` then says
        return None, []


def _listed(folder: Path) -> list[Path]:
    """Everything in the folder, and in its subfolders that files are sent from."""
    listed = []
    for path in sorted(folder.iterdir()):
        listed += sorted(path.iterdir()) if path.name in ALLOWED and path.is_dir() else [path]
    return listed


def _kind(path: str) -> str | None:
    parent, _, name = path.rpartition("/")
    for kind, patterns in ALLOWED.get(parent, {}).items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


def _reason(path: Path, kind: str | None) -> str | None:
    """Why a file or folder is not sent; None for one that is."""
    if kind and not path.is_dir() and path.suffix not in PICKLES:
        return None
    if path.name.startswith("."):
        return "hidden"
    for pattern, reason in _LEFT.items():
        if fnmatchcase(path.name, pattern):
            return reason
    if path.suffix in PICKLES:
        return "a pickle"
    if re.fullmatch(_SHOWS_A_SAMPLE, path.name):
        return "it shows a sample of the data"
    return "not on the list of what is sent"
