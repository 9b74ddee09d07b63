# SPDX-License-Identifier: Apache-2.0
"""`publication.json` in a repository: which files a publication wrote, and so may replace later."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils.sha import git_hash

from ...checkpoint.files import CARD
from .repository import RECORD, Repository
from .source import is_read_with_model, is_written_by_package


def additions(files: Mapping[str, bytes | Path]) -> list[CommitOperationAdd]:
    """Returns what a commit adds: files by path, and the record of them."""
    added = [CommitOperationAdd(path, content) for path, content in files.items()]
    record = {"schema_version": 1, "written_by": "normalign-llava", "files": content_ids(added)}
    record_text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    return [*added, CommitOperationAdd(RECORD, record_text.encode())]


def content_ids(added: Sequence[CommitOperationAdd]) -> dict[str, list[str]]:
    """Returns by path the ids that the Hub may give a content: its SHA-256, and its git blob id.

    The Hub names what is in LFS by the first and other files by the second. Weights are always in
    LFS, so they are not read once more for the second.
    """
    ids_by_path = {}
    for addition in added:
        identifiers = [addition.upload_info.sha256.hex()]
        if isinstance(addition.path_or_fileobj, bytes):
            identifiers.append(git_hash(addition.path_or_fileobj))
        ids_by_path[addition.path_in_repo] = identifiers
    return ids_by_path


def stale_files(repository: Repository, added: Sequence[CommitOperationAdd]) -> list[str]:
    """Returns the files of an earlier publication that nobody changed and this one lacks."""
    sent_paths = {addition.path_in_repo for addition in added}
    stale_paths = []
    for repo_path in repository.files:
        is_ours = is_written_by_package(repo_path) and repository.is_as_published(repo_path)
        if is_ours and repo_path not in sent_paths:
            stale_paths.append(repo_path)
    return sorted(stale_paths)


def files_of_others(
    repository: Repository, added: Sequence[CommitOperationAdd] | None = None
) -> list[str]:
    """Returns the files that others wrote or changed, and that stand in the way of a publication.

    They would be overwritten with another content, or be read together with the model. Without
    `added`, only the files that would be read are returned, whatever is sent. A model's card does
    not count, since a mark in the card says who wrote it.
    """
    is_model = repository.kind == "model"
    # The Hub names a content by one of several ids. `content_ids` says why.
    sent_ids = content_ids(added or ())
    obstacles = []
    for repo_path, content_id in sorted(repository.files.items()):
        would_be_overwritten = repo_path in sent_ids
        would_be_read = is_model and is_read_with_model(repo_path)
        may_be_replaced = (
            repository.is_as_published(repo_path)
            or content_id in sent_ids.get(repo_path, ())  # the same content is sent
            or (is_model and repo_path == CARD)
        )
        if (would_be_overwritten or would_be_read) and not may_be_replaced:
            obstacles.append(repo_path)
    return obstacles


def check_files_of_others(
    repository: Repository, added: Sequence[CommitOperationAdd] | None = None
) -> None:
    """Raises ValueError if there are [`files_of_others`]. It lists them, and what can be done."""
    obstacles = files_of_others(repository, added)
    if not obstacles:
        return
    sent_paths = {addition.path_in_repo for addition in added or ()}
    file_list = ""
    for repo_path in obstacles:
        consequence = (
            "would be overwritten" if repo_path in sent_paths else "would be read beside the model"
        )
        file_list += f"- {repo_path} {consequence}\n"
    raise ValueError(
        f"{repository.repo_id} has files that no publication of this package wrote, or that were "
        f"changed since:\n{file_list}Nothing was sent. Choose another repository, or let them be "
        "overwritten or removed: `normalign publish` with --replace-files, and with the same "
        "repository and branch (in Python, replace_files=True)."
    )
