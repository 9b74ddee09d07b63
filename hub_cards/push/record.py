# SPDX-License-Identifier: Apache-2.0
"""`publication.json` in a repository: which files a publication wrote, and so may replace later."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils.sha import git_hash

from ...checkpoint.files import CARD
from .repository import RECORD, Repository
from .source import is_read, is_written


def additions(files: Mapping[str, bytes | Path]) -> list[CommitOperationAdd]:
    """What a commit adds of files by path, their SHA-256 computed, and the record of them."""
    added = [CommitOperationAdd(path, content) for path, content in files.items()]
    content = {"schema_version": 1, "written_by": "normalign-llava", "files": content_ids(added)}
    record = json.dumps(content, indent=2, sort_keys=True) + "\n"
    return [*added, CommitOperationAdd(RECORD, record.encode())]


def content_ids(added: Sequence[CommitOperationAdd]) -> dict[str, list[str]]:
    """By path, the ids that the Hub may give a content: its SHA-256, and its git blob id.

    The Hub names what is in LFS by the first and other files by the second. Weights are always in
    LFS, so they are not read once more for the second.
    """
    ids: dict[str, list[str]] = {}
    for addition in added:
        ids[addition.path_in_repo] = [addition.upload_info.sha256.hex()]
        if isinstance(addition.path_or_fileobj, bytes):
            ids[addition.path_in_repo].append(git_hash(addition.path_or_fileobj))
    return ids


def stale_files(repository: Repository, added: Sequence[CommitOperationAdd]) -> list[str]:
    """The files that an earlier publication wrote, nobody changed since, and this one lacks."""
    sent = {addition.path_in_repo for addition in added}
    return sorted(
        path
        for path in repository.files
        if path not in sent and is_written(path) and repository.wrote(path)
    )


def files_of_others(
    repository: Repository, added: Sequence[CommitOperationAdd] | None = None
) -> list[str]:
    """The files of a repository that stand in the way: others wrote them, or changed them since.

    They would be overwritten with another content, or be read together with the model. Without
    `added`, those that are read, whatever is sent. A model's card is no such file: it has a mark.
    """
    sent = content_ids(added or ())
    others = []
    for path, on_hub in sorted(repository.files.items()):
        is_card = path == CARD and repository.kind == "model"
        is_same = on_hub in sent.get(path, ())
        if is_card or is_same or repository.wrote(path):
            continue
        if path in sent or (repository.kind == "model" and is_read(path)):
            others.append(path)
    return others


def check_files_of_others(
    repository: Repository, added: Sequence[CommitOperationAdd] | None = None
) -> None:
    """Raises ValueError if there are [`files_of_others`]: lists them, and says what can be done."""
    others = files_of_others(repository, added)
    if not others:
        return
    sent = {addition.path_in_repo for addition in added or ()}
    listed = []
    for path in others:
        fate = "would be overwritten" if path in sent else "would be read beside the model"
        listed.append(f"- {path}, which {fate}")
    lines = "\n".join(listed)
    raise ValueError(
        f"{repository.repo_id} has files that no publication of this package wrote, or that were "
        f"changed since:\n{lines}\nNothing was sent. Choose another repository, or let them be "
        "overwritten or removed: `normalign publish` with --replace-files, and with the same "
        "repository and branch (in Python, replace_files=True)."
    )
