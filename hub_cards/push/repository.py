# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A repository on the Hub at the head of a branch: its files, and which of them an earlier push of ours sent."""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from huggingface_hub import RepoFile, get_session, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from .client import Client


MANIFEST = "normalign_publication.json"
"""The file that lists what a push sent: path -> SHA-256. The next push removes what it no longer sends."""

SCHEMA_VERSION = 1

WEIGHTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_(model\.safetensors|config\.json)"
)
"""Weights, of which a repository holds one set."""


@dataclass(frozen=True)
class Repository:
    """A repository at the head of a branch.

    Attributes:
        repo_id, kind, branch: Which; kind is "model", "space" or "dataset".
        commit: The head; that of `main` if the branch does not exist.
        has_branch: Whether the branch exists.
        private, gated: Whether the repository is.
        files: Path -> id of the content at `commit`: the SHA-256 in LFS, git's SHA-1 elsewhere.
    """

    repo_id: str
    kind: str
    branch: str
    commit: str
    has_branch: bool
    private: bool
    gated: bool
    files: dict[str, str]

    def read(self, client: Client, path: str) -> bytes:
        """Content of a small file."""
        return read_file(client, self.repo_id, path, self.commit, self.kind)

    def stale(self, client: Client, sent: Collection[str]) -> list[str]:
        """Files that a push of the paths `sent` removes, sorted.

        These are the files that the last push sent and this one does not, unless somebody edited them since, and
        weights that would lie beside the new ones, such as shards of another count. Files that people added stay.
        """
        unsent = self.files.keys() - set(sent)
        recorded = read_manifest(self.read(client, MANIFEST)) if MANIFEST in self.files else {}
        removed = {path for path in unsent if WEIGHTS.fullmatch(path)} if any(map(WEIGHTS.fullmatch, sent)) else set()
        for path in unsent & recorded.keys():
            content_id, sha256 = self.files[path], recorded[path]
            if len(content_id) != len(sha256):  # git's id of a small file
                content_id = hashlib.sha256(self.read(client, path)).hexdigest()
            if content_id == sha256:
                removed.add(path)
        return sorted(removed)


def read_repository(client: Client, repo_id: str, kind: str = "model", branch: str = "main") -> Repository | None:
    """The repository as it is now; None if it does not exist or this account may not see it.

    Raises:
        ValueError: `branch` is a tag or a commit.
    """
    api = client.api
    try:
        info, has_branch = client.retry(api.repo_info, repo_id, repo_type=kind, revision=branch), True
    except RevisionNotFoundError:
        info, has_branch = client.retry(api.repo_info, repo_id, repo_type=kind), False
    except RepositoryNotFoundError:
        return None
    if has_branch and branch != "main" and not branch.startswith("refs/"):
        references = client.retry(api.list_repo_refs, repo_id, repo_type=kind)
        if branch not in [each.name for each in references.branches]:
            raise ValueError(f"{branch} of {repo_id} is a tag or a commit. Publish to a branch.")

    tree = api.list_repo_tree(repo_id, recursive=True, revision=info.sha, repo_type=kind)  # retries by itself
    files = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in tree if isinstance(file, RepoFile)}
    gated = bool(getattr(info, "gated", False))  # a Space has no such attribute
    return Repository(repo_id, kind, branch, str(info.sha), has_branch, bool(info.private), gated, files)


def read_file(client: Client, repo_id: str, path: str, commit: str, kind: str = "model") -> bytes:
    """Content of a small file of a repository, from no cache."""
    url = hf_hub_url(repo_id, path, repo_type=kind, revision=commit, endpoint=client.api.endpoint)

    def downloaded() -> bytes:
        response = get_session().get(url, headers=build_hf_headers(token=client.token), follow_redirects=True)
        hf_raise_for_status(response)
        return response.content

    return client.retry(downloaded)


def manifest(files: dict[str, str]) -> bytes:
    """The file [`MANIFEST`] of `files`, path -> SHA-256: the same bytes for the same files."""
    content = {"schema_version": SCHEMA_VERSION, "files": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def read_manifest(content: bytes) -> dict[str, str]:
    """Path -> SHA-256 of a manifest; empty if it is damaged or of another schema, and so proves nothing."""
    try:
        read = json.loads(content)
        version, files = read["schema_version"], read["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return files if version == SCHEMA_VERSION and isinstance(files, dict) else {}
