# SPDX-License-Identifier: Apache-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, which lands whole or not at all."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ... import __version__
from ...checkpoint.files import CARD


LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN, with a token from https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Repository:
    """A branch of a repository, as it was when somebody looked.

    `commit` is its head, that of `main` if there is no such branch, None without a repository; `files` are the paths
    there, `card` is the text of its `README.md`. `kind` is "model" or "space".
    """

    api: HfApi
    repo_id: str
    kind: str = "model"
    branch: str = "main"
    commit: str | None = None
    private: bool = False
    files: frozenset[str] = frozenset()
    card: str | None = None

    @property
    def url(self) -> str:
        """Page of a model."""
        return f"{self.api.endpoint}/{self.repo_id}/tree/{self.branch}"


@contextmanager
def hub_errors(state: str = "Nothing was sent.") -> Iterator[None]:
    """Makes an error of the Hub, the connection or an upload an OSError of one line that ends in `state`."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:  # RuntimeError: of uploads
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        text = str(cause)
        if isinstance(cause, HfHubHTTPError):
            text = f"({cause.response.status_code}) {cause.server_message or cause}"
        raise OSError(f"{constants.ENDPOINT} failed: {' '.join(text.split()).rstrip('.')}. {state}") from None


def log_in(repo_id: str, token: str | None = None, create_pr: bool = False) -> HfApi:
    """The client of an account that may publish as `repo_id`, or open a pull request; without an owner, as its own."""
    token = (token or get_token() or "").strip()
    if not token:
        raise ValueError(f"There is no token to publish with. {LOG_IN}.")
    api = HfApi(token=token, library_name="normalign-llava", library_version=__version__)
    with hub_errors():
        account = api.whoami()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f'The token of {account["name"]} may only read. {LOG_IN}, which has the role "write".')
    names = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
    owner = repo_id.rpartition("/")[0]
    if owner and not create_pr and owner.lower() not in [name.lower() for name in names]:
        own = " or ".join(f"{name}/..." for name in names)
        raise ValueError(f"{names[0]} may publish as {own}, not as {repo_id}. Propose it: --create-pr.")
    return api


def find_repository(api: HfApi, repo_id: str, *, kind: str = "model", branch: str = "main") -> Repository:
    """The repository as it is now. Raises OSError if the Hub or the connection failed."""
    with hub_errors():
        try:
            info = api.repo_info(repo_id, repo_type=kind, revision=branch)
        except RevisionNotFoundError:
            info = api.repo_info(repo_id, repo_type=kind)
        except RepositoryNotFoundError:
            return Repository(api, repo_id, kind, branch)
        files = frozenset(api.list_repo_files(repo_id, repo_type=kind, revision=info.sha))
        card = None
        if CARD in files:
            file = Path(api.hf_hub_download(repo_id, CARD, repo_type=kind, revision=info.sha))
            card = file.read_bytes().decode("utf-8-sig", "replace")
    return Repository(api, repo_id, kind, branch, info.sha, bool(info.private), files, card)


def push(
    repository: Repository,
    files: Mapping[str, bytes | Path],
    stale: Collection[str],
    *,
    private: bool | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes a branch hold `files`, and no longer `stale`, by one commit, or none if it does already.

    At any moment it is at the commit before or at the new one; after a failure the same call sends
    the rest. Raises OSError also if somebody has made a commit since `repository` was read.
    """
    api, repo_id, kind, branch = repository.api, repository.repo_id, repository.kind, repository.branch
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    with hub_errors(f"{repo_id} is as it was, or complete. Run the command again: it sends what the Hub lacks."):
        if repository.commit is None:
            api.create_repo(repo_id, repo_type=kind, private=private, space_sdk="gradio" if kind == "space" else None)
        if branch != "main" and not create_pr:
            api.create_branch(repo_id, repo_type=kind, branch=branch, revision=repository.commit, exist_ok=True)
        return api.create_commit(
            repo_id,
            [*operations, *map(CommitOperationDelete, stale)],
            commit_message="Publish with normalign-llava",
            repo_type=kind,
            revision=branch,
            parent_commit=repository.commit,
            create_pr=create_pr,
        )
