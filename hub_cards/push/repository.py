# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, which lands whole or not at all."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ... import __version__
from ...checkpoint.names import CARD
from ..card.write import card_in


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
    files: frozenset[str] = frozenset()
    card: str | None = None

    @property
    def url(self) -> str:
        """Its page, if it is a model's."""
        return f"{self.api.endpoint}/{self.repo_id}/tree/{self.branch}"


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
    """The client of an account that may publish as `repo_id`, by default its own, or open a pull request there."""
    token = (token or get_token() or "").strip()
    if not token:
        raise ValueError(f"There is no token to publish with. {LOG_IN}.")
    api = HfApi(token=token, library_name="normalign-llava", library_version=__version__)
    with hub_errors("Checking the token"):
        account = api.whoami()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f'The token of {account["name"]} may only read. {LOG_IN}, which has the role "write".')
    names = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
    namespace = repo_id.split("/")[0] if "/" in repo_id else account["name"]
    if namespace.lower() not in [name.lower() for name in names] and not create_pr:
        raise ValueError(
            f"{repo_id} belongs to {namespace}, and the token to {account['name']}, who may publish as "
            f"{' or '.join(f'{name}/...' for name in names)}, or propose a change with --create-pr of publish."
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
            card = card_in(file.parent)
    return Repository(api, repo_id, kind, branch, info.sha, has_branch, bool(info.private), files, card)


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
        ValueError: The Hub does not accept the card's metadata.
        OSError: The Hub or the connection failed, or somebody else has made a commit; the message says what stands.
    """
    api, repo_id, kind, branch = repository.api, repository.repo_id, repository.kind, repository.branch
    if not repository.has_branch:
        with hub_errors(f"Creating {repo_id}"):
            if repository.commit is None:
                sdk = "gradio" if kind == "space" else None
                api.create_repo(repo_id, repo_type=kind, private=private, space_sdk=sdk)
            if branch != "main":
                api.create_branch(repo_id, repo_type=kind, branch=branch, revision=repository.commit)
        repository = find_repository(api, repo_id, kind=kind, branch=branch)
    additions = [CommitOperationAdd(path, content) for path, content in files.items()]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *map(CommitOperationDelete, stale)]
    notify(f"Sending those of {len(additions)} files that {repo_id} lacks.")
    to_branch: dict[str, Any] = {"repo_type": kind, "revision": branch, "create_pr": create_pr}
    try:
        with hub_errors("Sending", "What was uploaded is not sent again: publish again."):
            ModelCard(bytes(files[CARD]).decode()).validate(kind)  # before the upload
            api.preupload_lfs_files(
                repo_id, additions, free_memory=False, gitignore_content=NOTHING_IGNORED, **to_branch
            )
            made = api.create_commit(
                repo_id, operations, commit_message=message, parent_commit=repository.commit, **to_branch
            )
    except ValueError as error:
        raise ValueError(f"Correct the front matter of {CARD}, which the Hub refuses: {error}") from None
    except OSError as error:
        raise OSError(f"{error} {_head(repository)}") from None
    return Pushed(repository, made.oid, [*stale], made.pr_url)


def _head(repository: Repository) -> str:
    """Whether the branch has moved, as a sentence."""
    with suppress(OSError):
        now = find_repository(repository.api, repository.repo_id, kind=repository.kind, branch=repository.branch)
        if now.commit == repository.commit:
            return f"{repository.repo_id} is unchanged."
        return f"{repository.branch} of {repository.repo_id} has moved since, to {now.commit}."
    return f"Whether {repository.repo_id} has changed is not known: it cannot be asked."
