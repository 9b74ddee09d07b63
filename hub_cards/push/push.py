# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""One push: files to a branch of a repository in one commit, which lands whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.sha import git_hash

from ...checkpoint.names import CARD
from .client import Client, is_temporary
from .contents import Contents
from .repository import MANIFEST, Repository, manifest, read_repository


MESSAGE = "Publish with normalign-llava"

MADE_WITH = {"model": {".gitattributes"}, "dataset": {".gitattributes"}, "space": {".gitattributes", CARD}}
"""Kind of a repository -> the files that the Hub creates it with."""

NOTHING_IGNORED = "# Everything that is published is sent.\n"
"""Replaces the repository's own `.gitignore`, by which the client would skip files without a word."""

IN_MEMORY = 10 * 2**20
"""Bytes below which a file is read once and kept: the Hub wants all larger ones in LFS."""


@dataclass(frozen=True)
class Snapshot:
    """Files to send, hashed once.

    Attributes:
        operations: The files with the manifest. Small ones are in memory.
        stamps: File on disk -> size in bytes, time of its last change in ns, inode.
    """

    operations: list[CommitOperationAdd]
    stamps: dict[Path, tuple[int, int, int]]

    @property
    def sizes(self) -> dict[str, int]:
        """Path in the repository -> bytes."""
        return {each.path_in_repo: each.upload_info.size for each in self.operations}

    def check(self) -> None:
        """Raises ValueError if a file on disk changed since."""
        changed = [path for path, stamp in self.stamps.items() if not path.is_file() or _stamp(path) != stamp]
        if changed:
            raise ValueError(
                f"{', '.join(map(str, changed))} changed while being published. Nothing was committed. Is something "
                "still writing there? Publish again when it has ended."
            )


@dataclass(frozen=True)
class Pushed:
    """What a push has done.

    Attributes:
        url: Page of the repository.
        commit: The commit that holds the files: the new one, or the head if nothing had to change.
        parent: The commit before; `commit` itself if nothing had to change.
        branch: The branch; of a pull request, the one that it is against.
        private, gated: Whether the repository is.
        files: Path -> bytes of every file of ours that is there.
        sent_files: Paths of the files that were new or different.
        sent_bytes: Their size. Large files that the Hub has already are not transferred again.
        deleted: Paths of the files that were removed.
        pull_request: Page of the pull request that was opened.
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


def take_snapshot(contents: Contents) -> Snapshot:
    """Reads the small files, and hashes all.

    Raises:
        ValueError: A file changed meanwhile.
        OSError: A file cannot be read.
    """
    stamps = {each.source: _stamp(each.source) for each in contents.sent if isinstance(each.source, Path)}
    operations = []
    for each in contents.sent:
        source = each.source
        if isinstance(source, Path) and each.size < IN_MEMORY:
            source = source.read_bytes()
        operations.append(CommitOperationAdd(each.path, source))
    sent = {each.path_in_repo: each.upload_info.sha256.hex() for each in operations}
    snapshot = Snapshot([*operations, CommitOperationAdd(MANIFEST, manifest(sent))], stamps)
    snapshot.check()
    return snapshot


def push_snapshot(
    client: Client,
    snapshot: Snapshot,
    repo_id: str,
    *,
    before: Repository | None,
    kind: str = "model",
    private: bool | None = None,
    revision: str = "main",
    create_pr: bool = False,
    message: str = MESSAGE,
    notify: Callable[[str], object] = print,
) -> Pushed:
    """Makes a branch of a repository hold these files, by one commit, or none if it does already.

    What an earlier push sent and this one does not is removed in the same commit; files of other people stay. At any
    moment the branch is at the commit before or at the new one. After a failure the same call sends only the rest.

    Args:
        client: The client, whose account was checked.
        snapshot: The files.
        repo_id: `"namespace/name"`. The repository and the branch are created if they do not exist.
        before: The branch when these files were chosen, None for no repository. If it has moved since, that is an
            error.
        kind: "model", "space" or "dataset".
        private: For a new repository; None leaves it to the namespace's default.
        revision: Branch.
        create_pr: Open a pull request against the branch.
        message: Title of the commit.
        notify: Is told what happens.

    Raises:
        ValueError: The repository is not private or public as asked, or files changed meanwhile. Nothing was
            committed.
        OSError: The Hub or the connection failed, or another publisher was faster; the message says what stands.
    """
    with client.step(f"preparing {repo_id}", "Nothing was sent."):
        remote = _create_missing(client, repo_id, kind, private, revision, create_pr, notify)
        if before is None:
            if remote.files.keys() - MADE_WITH[kind]:
                raise _other_publisher(client, remote, "its first")
        elif remote.commit != before.commit:
            raise _other_publisher(client, remote, before.commit)
        additions, deletions = _differences(client, snapshot, remote)
    url = f"{client.api.endpoint}/{'' if kind == 'model' else f'{kind}s/'}{repo_id}"
    if not additions and not deletions:
        notify(f"{repo_id} holds all of this already.")
        commit = remote.commit
        return Pushed(repo_id, url, commit, commit, revision, remote.private, remote.gated, snapshot.sizes)

    size = sum(addition.upload_info.size for addition in additions)
    notify(
        f"Sending {len(additions)} of {len(snapshot.operations)} files, {size / 1e6:.1f} MB, to {repo_id}; "
        f"removing {len(deletions)}."
    )
    unseen = f"{repo_id} is unchanged; the Hub keeps what was uploaded. Publish again to send only the rest."
    with client.step(f"uploading to {repo_id}", unseen):
        try:
            client.api.preupload_lfs_files(  # retries by itself
                repo_id, additions, repo_type=kind, revision=revision, create_pr=create_pr, free_memory=False,
                gitignore_content=NOTHING_IGNORED,
            )  # fmt: skip
        finally:
            snapshot.check()  # the Hub refuses a file that was cut short, and this is the reason
    either = (
        "Look there whether a pull request was opened all the same, before you publish again."
        if create_pr
        else f"{repo_id} is unchanged or, if only the answer was lost, complete. Publish again to make sure."
    )
    with client.step(f"committing to {repo_id}", either):
        commit, pull_request = _commit_once(client, snapshot, remote, [*additions, *deletions], message, create_pr)
    return Pushed(
        repo_id, url, commit, remote.commit, revision, remote.private, remote.gated, snapshot.sizes,
        [addition.path_in_repo for addition in additions], size,
        [deletion.path_in_repo for deletion in deletions], pull_request,
    )  # fmt: skip


def check_remote(remote: Repository | None, repo_id: str, private: bool | None, create_pr: bool) -> None:
    """Raises ValueError if the repository is not private or public as asked, or lacks what a pull request needs."""
    if create_pr and (remote is None or not remote.has_branch):
        what = repo_id if remote is None else f"The branch {remote.branch} of {repo_id}"
        raise ValueError(
            f"{what} does not exist, and a pull request needs something to change. Its owner creates it first, by "
            "publishing without --create-pr."
        )
    if remote is not None and private is not None and private != remote.private:
        is_now, wanted = ("private", "public") if remote.private else ("public", "private")
        raise ValueError(
            f"{repo_id} exists and is {is_now}; publishing does not make it {wanted}. Change that in its settings on "
            f"the Hub, or leave out --{wanted}."
        )


def _create_missing(
    client: Client,
    repo_id: str,
    kind: str,
    private: bool | None,
    revision: str,
    create_pr: bool,
    notify: Callable[[str], object],
) -> Repository:
    """The repository with the branch, created if they do not exist."""
    remote = read_repository(client, repo_id, kind, revision)
    check_remote(remote, repo_id, private, create_pr)
    if remote is None:
        sdk = "gradio" if kind == "space" else None
        client.retry(client.api.create_repo, repo_id, repo_type=kind, private=private, space_sdk=sdk, exist_ok=True)
        notify(f"Created the repository {repo_id}.")
        remote = read_repository(client, repo_id, kind, revision)
        check_remote(remote, repo_id, private, create_pr)  # someone else may have been faster
    if remote is not None and not remote.has_branch:
        client.retry(
            client.api.create_branch, repo_id, repo_type=kind, branch=revision, revision=remote.commit, exist_ok=True
        )
        notify(f"Created the branch {revision}.")
        remote = read_repository(client, repo_id, kind, revision)
    if remote is None:
        raise OSError(f"{repo_id} was created, but the Hub does not show it. Publish again in a moment.")
    return remote


def _differences(
    client: Client, snapshot: Snapshot, remote: Repository
) -> tuple[list[CommitOperationAdd], list[CommitOperationDelete]]:
    """What a commit has to change for `remote` to hold the snapshot."""
    additions = [each for each in snapshot.operations if not _is_stored(each, remote.files.get(each.path_in_repo))]
    stale = remote.stale(client, snapshot.sizes)
    return additions, [CommitOperationDelete(path) for path in stale]


def _is_stored(addition: CommitOperationAdd, content_id: str | None) -> bool:
    content = addition.path_or_fileobj
    own_ids = [addition.upload_info.sha256.hex(), *([git_hash(content)] if isinstance(content, bytes) else [])]
    return content_id in own_ids


def _commit_once(
    client: Client,
    snapshot: Snapshot,
    remote: Repository,
    operations: list[CommitOperationAdd | CommitOperationDelete],
    message: str,
    create_pr: bool,
) -> tuple[str, str | None]:
    """Commits on top of `remote`; returns the commit and the page of the pull request.

    A commit must not be made twice. So after an error the head of the branch decides: the commit may have landed
    although its answer was lost, or another publisher's may have. (Pull requests cannot be told apart.)
    """
    waits = iter(client.waits)
    while True:
        try:
            info = client.api.create_commit(
                remote.repo_id, operations, commit_message=message, repo_type=remote.kind, revision=remote.branch,
                create_pr=create_pr, parent_commit=remote.commit,
            )  # fmt: skip
            return info.oid, info.pr_url
        except Exception as error:
            outrun = isinstance(error, HfHubHTTPError) and error.response.status_code == 412
            if create_pr or not (outrun or is_temporary(error)):
                raise
            now = read_repository(client, remote.repo_id, remote.kind, remote.branch)
            if now is not None and now.commit != remote.commit:
                if not any(_differences(client, snapshot, now)):
                    return now.commit, None
                raise _other_publisher(client, now, remote.commit) from None
            if outrun or (wait := next(waits, None)) is None:
                raise
            client.wait(wait, error)


def _other_publisher(client: Client, now: Repository, expected: str) -> OSError:
    """The error of a branch that moved on from `expected` by someone else's commit."""
    commits = client.retry(client.api.list_repo_commits, now.repo_id, repo_type=now.kind, revision=now.commit)
    newest = commits[0]
    return OSError(
        f"Another publisher was faster: {now.branch} of {now.repo_id} is at their commit {newest.commit_id} "
        f"({newest.title!r} by {', '.join(newest.authors)}), no longer at {expected}. Nothing of this publication was "
        "committed. Look at theirs, and publish again to put yours on top of it."
    )


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
