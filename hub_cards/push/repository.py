# SPDX-License-Identifier: Apache-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, whole or none."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, errors
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import get_token

from ... import __version__
from ...checkpoint.files import CARD


LOG_IN = "Use `hf auth login` or HF_TOKEN, with a token of https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Repository:
    """A branch of a repository, as it was when somebody looked.

    `commit` is its head, that of `main` if there is no such branch, None without a repository;
    `files` are its paths, `card` is the text of its `README.md`. `kind` is "model" or "space".
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
    """Turns errors of Hub, connection and uploads into an OSError, a line that ends in `state`."""
    try:
        yield
    except (errors.HTTPError, RuntimeError) as error:  # RuntimeError: of uploads
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        text = str(cause)
        if isinstance(cause, errors.HfHubHTTPError):
            text = f"({cause.response.status_code}) {cause.server_message or cause}"
        text = " ".join(text.split()).rstrip(".")
        raise OSError(f"{ENDPOINT} failed: {text}. {state}") from None


def log_in(repo_id: str, token: str | None = None, create_pr: bool = False) -> HfApi:
    """The client of an account that may publish as `repo_id`, or with `create_pr` propose it."""
    token = (token or get_token() or "").strip()
    if not token:
        raise ValueError(f"There is no token to publish with. {LOG_IN}.")
    api = HfApi(token=token, library_name="normalign-llava", library_version=__version__)
    with hub_errors():
        account = api.whoami()
    name = account["name"]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f'The token of {name} may only read. {LOG_IN}, with the role "write".')
    names = [name, *(organisation["name"] for organisation in account.get("orgs", []))]
    owner = repo_id.rpartition("/")[0]
    if owner and not create_pr and owner.lower() not in map(str.lower, names):
        own = " or ".join(f"{user}/..." for user in names)
        raise ValueError(f"{name} may publish as {own}, not as {repo_id}. Propose it: --create-pr.")
    return api


def find_repository(api: HfApi, name: str, kind: str = "model", branch: str = "main") -> Repository:
    """The repository as it is now. Raises OSError if the Hub or the connection failed."""
    with hub_errors():
        try:
            info = api.repo_info(name, repo_type=kind, revision=branch)
        except errors.RevisionNotFoundError:
            info = api.repo_info(name, repo_type=kind)
        except errors.RepositoryNotFoundError:
            return Repository(api, name, kind, branch)
        files = frozenset(api.list_repo_files(name, repo_type=kind, revision=info.sha))
        card = None
        if CARD in files:
            file = api.hf_hub_download(name, CARD, repo_type=kind, revision=info.sha)
            card = Path(file).read_bytes().decode("utf-8-sig", "replace")
    return Repository(api, name, kind, branch, info.sha, bool(info.private), files, card)


def push(
    repository: Repository,
    files: Mapping[str, bytes | Path],
    stale: Collection[str],
    *,
    private: bool | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes a branch hold `files` and no longer `stale`, by one commit, or none if it does already.

    At any moment it is at the commit before or at the new one; after a failure the same call sends
    the rest. Raises OSError also if somebody has made a commit since `repository` was read.
    """
    api, repo_id, head = repository.api, repository.repo_id, repository.commit
    kind, branch = repository.kind, repository.branch
    additions = [CommitOperationAdd(path, content) for path, content in files.items()]
    with hub_errors(f"{repo_id} is as it was or complete. Run the command again to send the rest."):
        if head is None:
            sdk = "gradio" if kind == "space" else None
            api.create_repo(repo_id, repo_type=kind, private=private, space_sdk=sdk)
        if branch != "main" and not create_pr:
            api.create_branch(repo_id, repo_type=kind, branch=branch, revision=head, exist_ok=True)
        return api.create_commit(
            repo_id,
            [*additions, *map(CommitOperationDelete, stale)],
            commit_message="Publish with normalign-llava",
            repo_type=kind,
            revision=branch,
            parent_commit=head,
            create_pr=create_pr,
        )
