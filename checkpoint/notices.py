# SPDX-License-Identifier: Apache-2.0
"""Licence texts and notices of the parts. A checkpoint has them in its folder `notices/`.

`build` copies them to `notices/vision/` and `notices/language/` and names them in `build.json`, as
`"notices": ["notices/language/LICENSE", ...]`. Commands that copy that record copy them too.
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
from .untrusted import fetch_files


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
# Where `place_of` puts notices.
_CARRIED = re.compile(r"notices/(vision|language)/[-\w. ]+")


def fetch_part_notices(name: str, revision: str | None) -> dict[str, bytes]:
    """Returns licence texts and notices in a part's folder or Hub repository, by name.

    Files of text with such names count, up to [`LARGEST_NOTICE`] bytes. Warns if the Hub cannot be
    asked for them.
    """
    file_names = []
    folder = Path(name)
    if folder.is_dir():
        file_names = [path.name for path in folder.iterdir() if path.is_file()]
    else:
        try:
            for entry in HfApi().list_repo_tree(name, revision=revision):
                if isinstance(entry, RepoFile) and entry.size <= LARGEST_NOTICE:
                    file_names.append(entry.path)
        except FAILURES as error:
            reason = str(error).partition("\n")[0]
            logger.warning(f"The licence and notices of {name} could not be fetched: {reason}")
            return {}
    return _fetch_contents(name, sorted(filter(_is_notice, file_names)), revision)


def fetch_notices(
    build: Mapping[str, Any] | None, name: str, revision: str | None = None
) -> dict[str, bytes]:
    """Returns the notices that the record `build.json` of a checkpoint names, by path.

    Names outside `notices/` are left out, and so are missing files.

    Args:
        build: The record.
        name: The checkpoint's folder or Hub id.
        revision: A branch, tag or commit of the Hub.
    """
    named_paths = (build or {}).get("notices")
    if not isinstance(named_paths, list):
        return {}
    chosen_paths = []
    for path in named_paths:
        if isinstance(path, str) and _CARRIED.fullmatch(path) and _is_notice(Path(path).name):
            chosen_paths.append(path)
    return _fetch_contents(name, chosen_paths, revision)


def place_of(part: str, name: str) -> str:
    """Returns where a checkpoint has a notice of its part `"vision"` or `"language"`."""
    return f"{NOTICES}/{part}/{name}"


def write_notices(folder: Path, notices: Mapping[str, bytes]) -> None:
    """Writes notices, by path, into a checkpoint's folder."""
    for path, content in notices.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as partial_file:
            partial_file.write_bytes(content)


def _is_notice(name: str) -> bool:
    """Whether a part's file is a licence text or a notice, by its name."""
    suffix = Path(name).suffix
    is_text = suffix.lower() in _TEXTS or suffix[1:].isdigit() or suffix.isupper()
    return is_text and _NAME.fullmatch(name) is not None


def _fetch_contents(name: str, paths: list[str], revision: str | None) -> dict[str, bytes]:
    """Returns the contents of those files that exist and are small."""
    contents = {}
    for path in paths:
        for file in fetch_files(name, [path], revision):
            if file.stat().st_size <= LARGEST_NOTICE:
                contents[path] = file.read_bytes()
    return contents
