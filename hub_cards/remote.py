# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is on the Hub before a push, and after."""

from dataclasses import dataclass

from huggingface_hub import RepoFile, get_session, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from .client import Client
from .manifest import NAME, Manifest


@dataclass(frozen=True)
class Remote:
    """A repository at the head of a branch.

    Attributes:
        repo_id, kind, branch: Which; kind is "model", "space" or "dataset".
        commit: The head; that of `main` where the branch is not there.
        has_branch: Whether it is.
        private: Whether the repository is.
        files: Path -> id of the content at `commit`: the SHA-256 in LFS, git's SHA-1 elsewhere.
    """

    repo_id: str
    kind: str
    branch: str
    commit: str
    has_branch: bool
    private: bool
    files: dict[str, str]

    def read(self, client: Client, path: str) -> bytes:
        """A small file's content."""
        url = hf_hub_url(self.repo_id, path, repo_type=self.kind, revision=self.commit, endpoint=client.api.endpoint)
        return client.ask(_downloaded, url, client.token)

    def manifest(self, client: Client) -> Manifest | None:
        """What our last publication left there."""
        return Manifest.from_bytes(self.read(client, NAME)) if NAME in self.files else None


def look(client: Client, repo_id: str, kind: str = "model", branch: str = "main") -> Remote | None:
    """The repository as it is now; None where it is not there, or not for this account to see."""
    api = client.api
    try:
        info, has_branch = client.ask(api.repo_info, repo_id, repo_type=kind, revision=branch), True
    except RevisionNotFoundError:
        info, has_branch = client.ask(api.repo_info, repo_id, repo_type=kind), False
    except RepositoryNotFoundError:
        return None

    def listed() -> dict[str, str]:
        tree = api.list_repo_tree(repo_id, recursive=True, revision=info.sha, repo_type=kind)
        return {
            file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in tree if isinstance(file, RepoFile)
        }

    return Remote(repo_id, kind, branch, str(info.sha), has_branch, bool(info.private), client.ask(listed))


def _downloaded(url: str, token: str) -> bytes:
    response = get_session().get(url, headers=build_hf_headers(token=token), follow_redirects=True)
    hf_raise_for_status(response)
    return response.content
