# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, which lands whole or not at all."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ... import __version__
from ...checkpoint.names import CARD
from ..card.hand_written import decode_card


LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN, with a token from https://huggingface.co/settings/tokens"

NOTHING_IGNORED = "# Everything that is published is sent.\n"
"""Replaces the repository's own `.gitignore`, by which the client would skip files without a word."""


@dataclass(frozen=True)
class Repository:
    """A branch of a repository, as it was when somebody looked.

    Attributes:
        kind: "model" or "space".
        commit: The head of the branch, that of `main` if there is no such branch; None if there is no repository.
        files, card: Paths at `commit`, and the text of its `README.md`.
    """

    api: HfApi
    repo_id: str
    kind: str = "model"
    branch: str = "main"
    commit: str | None = None
    has_branch: bool = False
    private: bool = False
    gated: bool = False
    files: frozenset[str] = frozenset()
    card: str | None = None

    @property
    def url(self) -> str:
        """Its page."""
        return f"{self.api.endpoint}/{'' if self.kind == 'model' else f'{self.kind}s/'}{self.repo_id}"

    @property
    def reading_token(self) -> str | None:
        """The token, if reading needs one."""
        return str(self.api.token) if self.private or self.gated else None


@dataclass(frozen=True)
class Pushed:
    """What a push has done.

    Attributes:
        repository: The branch before.
        commit: The commit that holds the files: the new one, or the head if nothing had to change.
        deleted: Paths of the files that were removed.
        pull_request: Page of the pull request that was opened.
    """

    repository: Repository
    commit: str
    deleted: list[str]
    pull_request: str | None = None

    @property
    def changed(self) -> bool:
        """Whether there is a new commit."""
        return self.commit != self.repository.commit


@contextmanager
def hub_errors(doing: str, state: str = "Nothing was sent.") -> Iterator[None]:
    """Turns an error of the Hub, the connection or an upload into an OSError of one line that ends in `state`."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:  # RuntimeError: of uploads, mostly caused by an HTTPError
        cause = error if isinstance(error, HTTPError) else error.__cause__ or error
        reason = str(cause)
        if isinstance(cause, HfHubHTTPError):
            reason = f"({cause.response.status_code}) {cause.server_message or cause}"
        reason = " ".join(reason.split()).rstrip(".")
        raise OSError(f"{doing} failed at {constants.ENDPOINT}: {reason}. {state}") from None


def log_in(repo_id: str, token: str | None = None, create_pr: bool = False) -> HfApi:
    """The client of an account that may publish as `repo_id`, or only open a pull request there."""
    token = (token or get_token() or "").strip()
    if not token:
        raise ValueError(f"There is no token to publish with. {LOG_IN}.")
    if not (token.isascii() and token.isprintable()) or " " in token:
        # Sent, it would be an illegal header, which the HTTP library shows in its error.
        raise ValueError(f"The token holds a space, a line break or a letter that no token has. {LOG_IN}.")
    api = HfApi(token=token, library_name="normalign-llava", library_version=__version__)
    with hub_errors("Checking the token"):
        account = api.whoami()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f'The token of {account["name"]} may only read. {LOG_IN}, which has the role "write".')
    names = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
    namespace = repo_id.split("/")[0]
    if namespace.lower() not in [name.lower() for name in names] and not create_pr:
        raise ValueError(
            f"{repo_id} belongs to {namespace}, and the token to {account['name']}, who may publish as "
            f"{' or '.join(f'{name}/...' for name in names)}. Choose one of these; "
            f"to propose a change to {namespace}'s repository, use --create-pr of normalign publish."
        )
    return api


def find_repository(api: HfApi, repo_id: str, *, kind: str = "model", branch: str = "main") -> Repository:
    """The repository as it is now. Raises OSError if the Hub or the connection failed."""
    with hub_errors(f"Looking at {repo_id}"):
        try:
            info, has_branch = api.repo_info(repo_id, repo_type=kind, revision=branch), True
        except RevisionNotFoundError:
            info, has_branch = api.repo_info(repo_id, repo_type=kind), False
        except RepositoryNotFoundError:
            return Repository(api, repo_id, kind, branch)
        files = frozenset(api.list_repo_files(repo_id, repo_type=kind, revision=info.sha))
        card = None
        if CARD in files:
            file = Path(api.hf_hub_download(repo_id, CARD, repo_type=kind, revision=info.sha))
            card = decode_card(file.read_bytes(), repo_id)
    gated = bool(getattr(info, "gated", False))  # a Space has no such attribute
    return Repository(api, repo_id, kind, branch, info.sha, has_branch, bool(info.private), gated, files, card)


def check_options(repository: Repository, private: bool | None, create_pr: bool) -> None:
    """Raises ValueError if the repository is not private or public as asked, or lacks what a pull request needs."""
    repo_id = repository.repo_id
    if create_pr and not repository.has_branch:
        raise ValueError(
            f"{repo_id} has no branch {repository.branch}, and a pull request needs something to change. Its owner "
            "creates it first, by publishing without --create-pr."
        )
    if repository.commit and private not in (None, repository.private):
        is_now, wanted = ("private", "public") if repository.private else ("public", "private")
        raise ValueError(
            f"{repo_id} exists and is {is_now}; publishing does not make it {wanted}. Change that in its settings on "
            f"the Hub, or leave out --{wanted}."
        )


def push(
    repository: Repository,
    files: Mapping[str, bytes | Path],
    stale: Collection[str],
    *,
    message: str = "Publish with normalign-llava",
    private: bool | None = None,
    create_pr: bool = False,
    notify: Callable[[str], object] = print,
) -> Pushed:
    """Makes a branch of a repository hold `files`, by one commit, or none if it does already.

    At any moment the branch is at the commit before or at the new one. After a failure the same call sends the rest.

    Args:
        repository: The branch, created if it does not exist. If it has moved since, that is an error.
        files: Path in the repository -> content, or a file that has it.
        stale: Paths in the repository that the commit removes.
        message: Title of the commit.
        private, create_pr, notify: As in [`publish`].

    Raises:
        OSError: The Hub or the connection failed, or somebody else has made a commit; the message says what stands.
    """
    api, repo_id = repository.api, repository.repo_id
    additions = [CommitOperationAdd(path, content) for path, content in files.items()]
    if not repository.has_branch:
        with hub_errors(f"Creating {repo_id}"):
            repository = _created(repository, private)
    size = sum(addition.upload_info.size for addition in additions)
    notify(f"Sending {len(additions)} files, {size / 1e6:.1f} MB, to {repo_id}: those that it lacks.")
    kind, branch = repository.kind, repository.branch
    with hub_errors("Uploading", f"{repo_id} is unchanged. Publish again to send only the rest."):
        # A checkpoint to resume from holds the weights once more: all but the first find them on the Hub.
        first = {addition.upload_info.sha256: addition for addition in additions}.values()
        for batch in (first, additions):
            api.preupload_lfs_files(
                repo_id, batch, repo_type=kind, revision=branch, create_pr=create_pr, free_memory=False,
                gitignore_content=NOTHING_IGNORED,
            )  # fmt: skip
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *map(CommitOperationDelete, stale)]
    again = "Look there whether it was opened, before you" if create_pr else "Nothing is sent twice:"
    try:
        with hub_errors("The pull request" if create_pr else "The commit", f"{again} publish again."):
            made = api.create_commit(
                repo_id, operations, commit_message=message, repo_type=kind, revision=branch, create_pr=create_pr,
                parent_commit=repository.commit,
            )  # fmt: skip
    except OSError as error:
        raise OSError(f"{error} {_head(repository)}") from None
    return Pushed(repository, made.oid, [*stale], made.pr_url)


def _created(repository: Repository, private: bool | None) -> Repository:
    api, repo_id, kind, branch = repository.api, repository.repo_id, repository.kind, repository.branch
    if repository.commit is None:
        api.create_repo(repo_id, repo_type=kind, private=private, space_sdk="gradio" if kind == "space" else None)
        repository = find_repository(api, repo_id, kind=kind, branch=branch)
    if not repository.has_branch:
        api.create_branch(repo_id, repo_type=kind, branch=branch, revision=repository.commit)
        repository = find_repository(api, repo_id, kind=kind, branch=branch)
    return repository


def _head(repository: Repository) -> str:
    """Whether the branch has moved, as a sentence."""
    with suppress(HTTPError):
        repo_id, kind, branch = repository.repo_id, repository.kind, repository.branch
        newest = repository.api.list_repo_commits(repo_id, repo_type=kind, revision=branch)[0]
        if newest.commit_id == repository.commit:
            return f"{repo_id} is unchanged."
        by = ", ".join(newest.authors)
        return f"{branch} of {repo_id} has moved since, to {newest.commit_id} ({newest.title!r} by {by})."
    return f"Whether {repo_id} has changed is not known: it cannot be asked."
