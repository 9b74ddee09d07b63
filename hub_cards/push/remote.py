# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is on the Hub before a push, and after."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from huggingface_hub import RepoFile, get_session, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from .client import Client
from .manifest import NAME, WEIGHTS, Manifest


@dataclass(frozen=True)
class Remote:
    """A repository at the head of a branch.

    Attributes:
        repo_id, kind, branch: Which; kind is "model", "space" or "dataset".
        commit: The head; that of `main` where the branch is not there.
        has_branch: Whether it is.
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
        """A small file's content."""
        return read(client, self.repo_id, path, self.commit, self.kind)

    def manifest(self, client: Client) -> Manifest | None:
        """What our last publication left there."""
        return Manifest.from_bytes(self.read(client, NAME)) if NAME in self.files else None


def read_remote(client: Client, repo_id: str, kind: str = "model", branch: str = "main") -> Remote | None:
    """The repository as it is now; None where it is not there, or not for this account to see.

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

    tree = api.list_repo_tree(repo_id, recursive=True, revision=info.sha, repo_type=kind)  # asks again by itself
    files = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in tree if isinstance(file, RepoFile)}
    gated = bool(getattr(info, "gated", False))  # which a Space cannot be
    return Remote(repo_id, kind, branch, str(info.sha), has_branch, bool(info.private), gated, files)


def read(client: Client, repo_id: str, path: str, commit: str, kind: str = "model") -> bytes:
    """A small file's content."""
    url = hf_hub_url(repo_id, path, repo_type=kind, revision=commit, endpoint=client.api.endpoint)

    def downloaded() -> bytes:
        response = get_session().get(url, headers=build_hf_headers(token=client.token), follow_redirects=True)
        hf_raise_for_status(response)
        return response.content

    return client.retry(downloaded)


def stale(client: Client, remote: Remote, earlier: Manifest | None, sent: Collection[str]) -> list[str]:
    """Files that a publication removes.

    They are what an earlier publication sent and this one does not, if they are as it sent them, and weights that
    would lie beside the new ones: shards of another number. What a person added or edited is not among them.

    Args:
        client: Reads files whose id on the Hub is not the manifest's.
        remote: What is there.
        earlier: The manifest there.
        sent: Paths of this publication.
    """
    unsent, recorded = remote.files.keys() - set(sent), earlier.files if earlier else {}
    removed = {path for path in unsent if WEIGHTS.fullmatch(path)} if any(map(WEIGHTS.fullmatch, sent)) else set()
    for path in unsent & recorded.keys():
        existing, was = remote.files[path], recorded[path]
        if existing == was or (
            len(existing) != len(was) and hashlib.sha256(remote.read(client, path)).hexdigest() == was
        ):
            removed.add(path)
    return sorted(removed)
