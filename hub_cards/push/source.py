# SPDX-License-Identifier: Apache-2.0
"""What is published of a checkpoint folder: only files whose names are on a list."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ...checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    INDEX,
    TRAINING_RECORD,
    WEIGHTS,
)
from ...checkpoint.untrusted import refuse_unreadable
from ...diagnose.report import REPORT, report_json
from ...evaluation.results import EVALUATION, SUMMARY
from ..card.facts import (
    DIAGNOSTICS,
    GGUF,
    MODELFILE,
    NOTICES,
    gguf_files,
    read_public_report,
    weight_files,
)


CODE = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")
_MODEL_FILES = (
    WEIGHTS,
    INDEX,
    "model-*-of-*.safetensors",
    ADAPTER_WEIGHTS,
    ADAPTER_CONFIG,
    "config.json",
    *CODE,
    "generation_config.json",
    BUILD_RECORD,
    TRAINING_RECORD,
    DYNAMICS,
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "*.gguf",
    MODELFILE,
)
OWN_NAMES = {
    "": _MODEL_FILES,
    "chat_templates": ("*.jinja",),
    EVALUATION: (SUMMARY,),
    DIAGNOSTICS: (REPORT, "*.png"),
    **dict.fromkeys(NOTICES, ("[!.]*",)),
    GGUF: ("*.gguf", MODELFILE),
}
"""Patterns of the files that this package and transformers write, by folder.

A later publication that lacks such a file removes it from the repository, if an earlier one wrote
it and nobody has changed it since. Only weights that would be loaded and figures that `report.json`
names are sent."""
READ = {
    "": (
        *_MODEL_FILES,
        "pytorch_model*",
        "adapter_model.bin",
        "tf_model*.h5",
        "flax_model*",
        "video_preprocessor_config.json",
    ),
    "chat_templates": ("*",),
    "custom_generate": ("*",),  # code that `generate` would run
}
"""Patterns of the files that are read with the model, or could be taken for it."""
SENT = OWN_NAMES | {"": (*_MODEL_FILES, CARD, "LICENSE*", "LICENCE*", "NOTICE*")}
"""Patterns of the files that are sent: `OWN_NAMES`, and files by people, which stay there."""
LARGEST_NOTICE = 2**20  # bytes


@dataclass(frozen=True)
class PublishSource:
    """What is published of a folder.

    Attributes:
        folder: The folder.
        files: The contents by path in the repository. For weights it is the file.
        sizes: The bytes of each file, by the same path.
        excluded: The paths that stay here.
    """

    folder: Path
    files: dict[str, bytes | Path]
    sizes: dict[str, int]
    excluded: list[str]


def choose_files(
    folder: Path, generated: Mapping[str, bytes], *, with_gguf: bool = False
) -> PublishSource:
    """Chooses the files to send, and reads the small ones, so that what is checked is what is sent.

    Args:
        folder: Folder of a checkpoint or adapter.
        generated: Contents by path that are sent instead of the folder's files.
        with_gguf: Whether GGUF files and the Modelfile beside them are sent.

    Raises:
        ValueError: The weights, the report of a diagnosis or a notice are not valid.
    """
    folder = folder.resolve()
    # Weights that would be loaded, figures that the report names, GGUF files.
    needed = set(weight_files(folder))
    if folder / WEIGHTS not in needed:
        needed.add(folder / INDEX)
    report = read_public_report(folder)
    needed |= {folder / DIAGNOSTICS / figure["file"] for figure in report.get("figures", ())}
    sent_gguf = gguf_files(folder) if with_gguf else []
    for file in sent_gguf:
        needed |= {file, file.with_name(MODELFILE)}
    files: dict[str, bytes | Path] = {}
    excluded = []
    for repo_path, local_path in _paths(folder).items():
        if local_path.is_dir():
            excluded.append(f"{repo_path}/")
        elif not _is_sent(local_path, repo_path, needed):
            excluded.append(repo_path)
        elif repo_path.startswith(NOTICES):
            files[repo_path] = read_notice(local_path)
        elif local_path.suffix in (".safetensors", ".gguf"):
            files[repo_path] = local_path
        else:
            files[repo_path] = local_path.read_bytes()
    files.update(generated)
    if report:
        files[f"{DIAGNOSTICS}/{REPORT}"] = report_json(report).encode()
    files = dict(sorted(files.items()))
    sizes = {}
    for repo_path, content in files.items():
        sizes[repo_path] = content.stat().st_size if isinstance(content, Path) else len(content)
    return PublishSource(folder, files, sizes, sorted(excluded))


def _paths(folder: Path) -> dict[str, Path]:
    """Returns what is in a folder, and in its folders whose files may be sent, by relative path."""
    opened = {*OWN_NAMES, "notices"}  # that has the folders in `NOTICES`
    local_paths = {}
    for parent in filter(Path.is_dir, map(folder.joinpath, sorted(opened))):
        for local_path in sorted(parent.iterdir()):
            repo_path = local_path.relative_to(folder).as_posix()
            if not (local_path.is_dir() and repo_path in opened):
                local_paths[repo_path] = local_path
    return local_paths


def _is_sent(local_path: Path, repo_path: str, needed: set[Path]) -> bool:
    """Returns whether a file is sent, given which of the optional ones are."""
    if not local_path.is_file() or not matches(repo_path, SENT):
        return False
    if repo_path.startswith(NOTICES):
        return True
    is_optional = local_path.suffix in (".safetensors", ".png", ".gguf")
    is_optional = is_optional or local_path.name in (INDEX, MODELFILE)
    return local_path in needed or not is_optional


def read_notice(file: Path) -> bytes:
    """Reads a licence or notice. Raises ValueError unless it is a plain text of up to 1 MiB."""
    size = file.stat().st_size
    remedy = "Remove it, or replace it by the text of the licence."
    if size > LARGEST_NOTICE:
        raise ValueError(f"{file} has {size:,} bytes, and a notice {LARGEST_NOTICE:,}. {remedy}")
    content = file.read_bytes()
    with refuse_unreadable(str(file), remedy=remedy):
        text = content.decode("utf-8")
    if "\0" in text:
        raise ValueError(f"{file} is not plain text: it has a null character. {remedy}")
    return content


def matches(path: str, patterns: Mapping[str, tuple[str, ...]]) -> bool:
    """Returns whether a path in a repository fits [`OWN_NAMES`], [`READ`] or [`SENT`]."""
    folder_name, _, file_name = path.rpartition("/")
    return any(fnmatchcase(file_name, pattern) for pattern in patterns.get(folder_name, ()))
