# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The commit of a push: once, whatever becomes of its answer."""

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError

from .client import Client, may_pass
from .remote import Remote, read_remote
from .snapshot import File


def commit_once(
    client: Client,
    remote: Remote,
    additions: list[CommitOperationAdd],
    deletions: list[CommitOperationDelete],
    changed: list[File],
    message: str,
    create_pr: bool,
) -> tuple[str, str | None]:
    """Commits; returns the commit and the page of the pull request.

    A commit is not to be made twice. So after an error the branch is looked at before anything else: the commit may
    have landed although its answer was lost, and so may another publisher's. (Pull requests cannot be told apart.)
    """
    waits = iter(client.waits)
    while True:
        try:
            info = client.api.create_commit(
                remote.repo_id, [*additions, *deletions], commit_message=message, repo_type=remote.kind,
                revision=remote.branch, create_pr=create_pr, parent_commit=remote.commit,
            )  # fmt: skip
            return info.oid, info.pr_url
        except Exception as error:
            outrun = isinstance(error, HfHubHTTPError) and error.response.status_code == 412
            if create_pr or not (outrun or may_pass(error)):
                raise
            now = read_remote(client, remote.repo_id, remote.kind, remote.branch)
            if now is not None and now.commit != remote.commit:
                if _is_intended(now, remote, deletions, changed):
                    return now.commit, None
                raise other_publisher(client, now, remote.commit) from None
            if outrun or (wait := next(waits, None)) is None:
                raise
            client.wait(wait, error)


def other_publisher(client: Client, now: Remote, expected: str) -> OSError:
    """The error of a branch that is not at `expected` any more, because of someone else's commit."""
    commits = client.retry(client.api.list_repo_commits, now.repo_id, repo_type=now.kind, revision=now.commit)
    newest = commits[0]
    return OSError(
        f"Another publisher was faster: {now.branch} of {now.repo_id} is at their commit {newest.commit_id} "
        f"({newest.title!r} by {', '.join(newest.authors)}), no more at {expected}. Of this publication nothing was "
        "committed. Look at theirs, and publish again to put yours on top of it."
    )


def _is_intended(now: Remote, before: Remote, deletions: list[CommitOperationDelete], changed: list[File]) -> bool:
    """Whether `now` is what the commit was to make of `before`."""
    # Of large files the Hub notes by itself, in .gitattributes, that they are in LFS.
    written = {file.path for file in changed} | {".gitattributes"}
    kept = before.files.keys() - {deletion.path_in_repo for deletion in deletions} - written
    return (
        now.files.keys() - written == kept
        and all(now.files[path] == before.files[path] for path in kept)
        and all(file.is_stored_as(now.files.get(file.path)) for file in changed)
    )
