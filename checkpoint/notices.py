# SPDX-License-Identifier: Apache-2.0
"""Licence texts and notices of the parts, which go with a checkpoint in its folder `notices/`.

`build` copies them to `notices/vision/` and `notices/language/` and names them in `build.json`, as
`"notices": ["notices/language/LICENSE", ...]`. What carries that record along carries them too.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from transformers.utils import logging

from .files import atomic_write
from .opening import FAILURES
from .untrusted import files_of


logger = logging.get_logger(__name__)

NOTICES = "notices"
"""The folder of a checkpoint with the notices of its parts."""

LARGEST_NOTICE = 2**20
"""Bytes of the largest file that is taken for a notice."""

_NAME = re.compile(
    r"(licen[cs]es?|notices?|copying|copyright|use_policy)"
    r"([-_. ][-\w. ]*)?",
    re.IGNORECASE,
)
_TEXTS = ("", ".txt", ".md", ".rst")
_CARRIED = re.compile(r"notices/(vision|language)/[-\w. ]+")


def notices_of_part(name: str, revision: str | None) -> dict[str, bytes]:
    """Licence texts and notices in a part's folder or Hub repository, by name.

    Files of text with such names count, up to [`LARGEST_NOTICE`] bytes. Warns if the Hub cannot be
    asked for them.
    """
    folder = Path(name)
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.is_file() and _is_notice(path.name)]
        sizes = {path.name: path.stat().st_size for path in files}
    else:
        try:
            listed = HfApi().list_repo_tree(name, revision=revision)
            entries = [entry for entry in listed if isinstance(entry, RepoFile)]
            sizes = {entry.path: entry.size for entry in entries if _is_notice(entry.path)}
        except FAILURES as error:
            reason = str(error).partition("\n")[0]
            logger.warning(f"The licence and notices of {name} could not be fetched: {reason}")
            return {}
    chosen = sorted(path for path, size in sizes.items() if size <= LARGEST_NOTICE)
    return _contents(name, chosen, revision)


def checkpoint_notices(
    build: Mapping[str, Any] | None, name: str, revision: str | None = None
) -> dict[str, bytes]:
    """The notices that the record `build.json` of a checkpoint names, by path, if they are there.

    `name` is the checkpoint's folder or Hub id. Names that are no place for a notice are left out.
    """
    named = (build or {}).get("notices")
    paths = named if isinstance(named, list) else []
    chosen = [path for path in paths if isinstance(path, str) and _is_carried(path)]
    return _contents(name, chosen, revision)


def place_of(part: str, name: str) -> str:
    """Where a checkpoint has a part's notice; `part` is `"vision"` or `"language"`."""
    return f"{NOTICES}/{part}/{name}"


def write_notices(folder: Path, notices: Mapping[str, bytes]) -> None:
    """Writes notices, by path, into a checkpoint's folder."""
    for path, content in notices.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as partial:
            partial.write_bytes(content)


def _is_notice(name: str) -> bool:
    """Whether a part's file is a licence text or a notice, by its name."""
    suffix = Path(name).suffix
    is_text = suffix.lower() in _TEXTS or suffix[1:].isdigit() or suffix.isupper()
    return is_text and _NAME.fullmatch(name) is not None


def _is_carried(path: str) -> bool:
    """Whether a path is one at which [`place_of`] puts a notice."""
    return _CARRIED.fullmatch(path) is not None and _is_notice(Path(path).name)


def _contents(name: str, paths: list[str], revision: str | None) -> dict[str, bytes]:
    """The contents of those files that exist and are small."""
    contents = {}
    for path in paths:
        for file in files_of(name, [path], revision):
            if file.stat().st_size <= LARGEST_NOTICE:
                contents[path] = file.read_bytes()
    return contents
