# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pushing: the contents of a repository in one commit, which is there whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, field

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from ...checkpoint.names import CARD
from .client import Client
from .commit import commit_once, other_publisher
from .manifest import NAME, Manifest
from .remote import Remote, read_remote, stale
from .snapshot import File, Snapshot, changed_error, in_memory


MESSAGE = "Publish with normalign-llava"

MADE_WITH = {"model": {".gitattributes"}, "dataset": {".gitattributes"}, "space": {".gitattributes", CARD}}
"""Kind of a repository -> the files that the Hub makes it with."""

NOTHING_IGNORED = "# Everything that is published is sent.\n"
"""In place of the repository's own `.gitignore`, by which the client would leave files out without a word."""


@dataclass(frozen=True)
class Pushed:
    """What a push has done.

    Attributes:
        url: Page of the repository.
        commit: The commit that holds the contents: the new one, or the head where nothing was to change.
        parent: The commit before; `commit` itself where nothing was to change.
        branch: Where it is; of a pull request, what that is against.
        private, gated: Whether the repository is.
        files: Path -> bytes of all that is there of ours.
        sent_files: Paths that were new or different.
        sent_bytes: Their size. Of large ones the Hub takes what it does not have.
        deleted: Paths that were removed.
        pull_request: Its page, where one was opened.
    """

    repo_id: str
    url: str
    commit: str
    parent: str
    branch: str
    private: bool
    gated: bool
    files: dict[str, int]
    sent_files: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    deleted: list[str] = field(default_factory=list)
    pull_request: str | None = None

    @property
    def changed(self) -> bool:
        return self.commit != self.parent


def push_snapshot(
    client: Client,
    snapshot: Snapshot,
    repo_id: str,
    *,
    before: Remote | None,
    kind: str = "model",
    private: bool | None = None,
    revision: str = "main",
    create_pr: bool = False,
    message: str = MESSAGE,
    notify: Callable[[str], object] = print,
) -> Pushed:
    """Makes a branch of a repository hold these files, by one commit, or none where it does already.

    What an earlier push sent and this one does not is removed in the same commit; files of other people stay. At any
    moment the branch is at the commit before or at the new one. After a failure the same call sends only the rest.

    Args:
        client: The client, whose account was checked.
        snapshot: All that the repository is to hold of ours, as it was read.
        repo_id: `"namespace/name"`. The repository and the branch are made where they are not there.
        before: What the branch was when these files were chosen, None for no repository. If it is another by now, that
            is an error.
        kind: "model", "space" or "dataset".
        private: For a new repository; None leaves it to the namespace's default.
        revision: Branch.
        create_pr: Open a pull request against the branch.
        message: Title of the commit.
        notify: Is told what happens.

    Returns:
        What was done.

    Raises:
        ValueError: A repository that is not private or public as asked, or files that changed meanwhile. Nothing was
            committed.
        OSError: The Hub or the connection failed, or another publisher was faster; the message says what stands.
    """
    with client.step(f"preparing {repo_id}", "Nothing was sent."):
        remote = _prepared(client, repo_id, kind, private, revision, create_pr, notify)
        if before is None:
            if remote.files.keys() - MADE_WITH[kind]:
                raise other_publisher(client, remote, "its first")
        elif remote.commit != before.commit:
            raise other_publisher(client, remote, before.commit)
        earlier = remote.manifest(client)
    files = with_manifest(snapshot)
    sizes = {file.path: file.size for file in files}
    changed = [file for file in files if not file.is_stored_as(remote.files.get(file.path))]
    deleted = stale(client, remote, earlier, [file.path for file in files])
    url = f"{client.api.endpoint}/{'' if kind == 'model' else f'{kind}s/'}{repo_id}"
    if not changed and not deleted:
        notify(f"{repo_id} holds all of this already.")
        return Pushed(repo_id, url, remote.commit, remote.commit, revision, remote.private, remote.gated, sizes)

    size = sum(file.size for file in changed)
    notify(
        f"Sending {len(changed)} of {len(files)} files, {size / 1e6:.1f} MB, to {repo_id}; removing {len(deleted)}."
    )
    additions = [CommitOperationAdd(file.path, file.source) for file in changed]
    unseen = f"{repo_id} is as it was; what was uploaded is kept there unseen. Publish again to send only the rest."
    with client.step(f"uploading to {repo_id}", unseen):
        try:
            client.api.preupload_lfs_files(  # which asks again by itself
                repo_id, additions, repo_type=kind, revision=revision, create_pr=create_pr, free_memory=False,
                gitignore_content=NOTHING_IGNORED,
            )  # fmt: skip
        except Exception:
            snapshot.check()  # a file that was cut short is refused, and that would be the reason
            raise
        snapshot.check()
        differing = [
            addition.path_in_repo
            for addition, file in zip(additions, changed, strict=True)
            if addition.upload_info.sha256.hex() != file.sha256
        ]
        if differing:
            raise changed_error(differing)
    deletions = [CommitOperationDelete(path) for path in deleted]
    either = (
        "Look there whether a pull request was opened all the same, before you publish again."
        if create_pr
        else f"{repo_id} is as it was or, if only the answer was lost, as it is to be. Publish again to send the rest."
    )
    with client.step(f"committing to {repo_id}", either):
        commit, pull_request = commit_once(client, remote, additions, deletions, changed, message, create_pr)
    return Pushed(
        repo_id, url, commit, remote.commit, revision, remote.private, remote.gated, sizes,
        [file.path for file in changed], size, deleted, pull_request,
    )  # fmt: skip


def with_manifest(snapshot: Snapshot) -> list[File]:
    """All that is sent: the files, and the manifest by which the next publication knows them."""
    manifest = Manifest({file.path: file.sha256 for file in snapshot.files})
    return [*snapshot.files, in_memory(NAME, manifest.to_bytes())]


def _prepared(
    client: Client,
    repo_id: str,
    kind: str,
    private: bool | None,
    revision: str,
    create_pr: bool,
    notify: Callable[[str], object],
) -> Remote:
    """The repository with the branch, made where they are not there."""
    remote = read_remote(client, repo_id, kind, revision)
    check_remote(remote, repo_id, private, create_pr)
    if remote is None:
        sdk = "gradio" if kind == "space" else None
        client.retry(client.api.create_repo, repo_id, repo_type=kind, private=private, space_sdk=sdk, exist_ok=True)
        notify(f"Made the repository {repo_id}.")
        remote = read_remote(client, repo_id, kind, revision)
        check_remote(remote, repo_id, private, create_pr)  # someone else may have been faster
    if remote is not None and not remote.has_branch:
        client.retry(
            client.api.create_branch, repo_id, repo_type=kind, branch=revision, revision=remote.commit, exist_ok=True
        )
        notify(f"Made the branch {revision}.")
        remote = read_remote(client, repo_id, kind, revision)
    if remote is None:
        raise OSError(f"{repo_id} was made, but the Hub does not show it. Publish again in a moment.")
    return remote


def check_remote(remote: Remote | None, repo_id: str, private: bool | None, create_pr: bool) -> None:
    """Raises ValueError if the repository is not private or public as asked, or lacks what a pull request needs."""
    if create_pr and (remote is None or not remote.has_branch):
        what = repo_id if remote is None else f"The branch {remote.branch} of {repo_id}"
        raise ValueError(
            f"{what} is not there, and a pull request needs something to change. Its owner makes it first, by "
            "publishing without --create-pr."
        )
    if remote is not None and private is not None and private != remote.private:
        is_now, wanted = ("private", "public") if remote.private else ("public", "private")
        raise ValueError(
            f"{repo_id} is there and {is_now}; publishing does not make it {wanted}. Change that in its settings on "
            f"the Hub, or leave out --{wanted}."
        )
