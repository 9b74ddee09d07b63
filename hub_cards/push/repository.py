# SPDX-License-Identifier: Apache-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, whole or none."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoCard,
    errors,
)
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import get_token

from ... import __version__
from ...checkpoint.files import CARD


RECORD = "publication.json"  # in a repository: what this package wrote to it
NOTHING_IGNORED = "# Everything that is published is sent.\n"
"""In place of the repository's own `.gitignore`: the client skips what is in it without a word."""
LOG_IN = "Use `hf auth login` or HF_TOKEN, with a token of https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Repository:
    """A branch of a repository, as it was when somebody looked.

    `commit` is its head, that of `main` if there is no such branch, None without a repository;
    `files` has for each path the id of its content, in LFS the SHA-256, else git's blob id;
    `written` has the ids of what earlier publications of this package wrote, by their record.
    `card` is the text of its `README.md`. `kind` is "model" or "space".
    """

    api: HfApi
    repo_id: str
    kind: str = "model"
    branch: str = "main"
    commit: str | None = None
    private: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)
    card: str | None = None

    def wrote(self, path: str) -> bool:
        """Whether this package wrote a file, and nobody has changed it since."""
        return self.files[path] in self.written.get(path, ())

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
        files: dict[str, str] = {}
        tree = api.list_repo_tree(name, recursive=True, repo_type=kind, revision=info.sha)
        for entry in tree:
            if isinstance(entry, RepoFile):
                files[entry.path] = entry.lfs.sha256 if entry.lfs else entry.blob_id
        card = None
        if CARD in files:
            file = api.hf_hub_download(name, CARD, repo_type=kind, revision=info.sha)
            card = Path(file).read_bytes().decode("utf-8-sig", "replace")
        written: dict[str, Sequence[str]] = {}
        if RECORD in files:
            file = api.hf_hub_download(name, RECORD, repo_type=kind, revision=info.sha)
            written = _recorded(Path(file).read_bytes())
            if written:  # somebody else's file of that name is not ours
                written[RECORD] = [files[RECORD]]
    return Repository(api, name, kind, branch, info.sha, bool(info.private), files, written, card)


def _recorded(record: bytes) -> dict[str, Sequence[str]]:
    """The ids by path in the content of `RECORD`; none if this package did not write it."""
    try:
        content = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("written_by") != "normalign-llava":
        return {}
    files = content.get("files")
    if content.get("schema_version") != 1 or not isinstance(files, dict):
        return {}
    return {path: ids for path, ids in files.items() if isinstance(ids, list)}


def push(
    repository: Repository,
    added: Sequence[CommitOperationAdd],
    removed: Collection[str],
    *,
    private: bool | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes a branch hold `added` and no longer `removed`: one commit, or none if it does already.

    At any moment it is at the commit before or at the new one; after a failure the same call sends
    the rest. What the repository ignores is sent too. Raises OSError also if somebody has made a
    commit since `repository` was read, and ValueError if the Hub refuses the card's front matter.
    """
    api, repo_id, head = repository.api, repository.repo_id, repository.commit
    kind, branch = repository.kind, repository.branch
    with hub_errors(f"{repo_id} is as it was or complete. Run the command again to send the rest."):
        if head is None:
            sdk = "gradio" if kind == "space" else None
            api.create_repo(repo_id, repo_type=kind, private=private, space_sdk=sdk)
        if branch != "main" and not create_pr:
            api.create_branch(repo_id, repo_type=kind, branch=branch, revision=head, exist_ok=True)
        check_front_matter(added, kind)  # before the upload
        api.preupload_lfs_files(
            repo_id,
            added,
            repo_type=kind,
            revision=branch,
            create_pr=create_pr,
            free_memory=False,
            gitignore_content=NOTHING_IGNORED,
        )
        return api.create_commit(
            repo_id,
            [*added, *map(CommitOperationDelete, removed)],
            commit_message="Publish with normalign-llava",
            repo_type=kind,
            revision=branch,
            parent_commit=head,
            create_pr=create_pr,
        )


def check_front_matter(added: Sequence[CommitOperationAdd], kind: str) -> None:
    """Raises ValueError if the Hub refuses the front matter of a card that is to be sent."""
    for addition in added:
        if addition.path_in_repo != CARD:
            continue
        with addition.as_file() as file:
            card = RepoCard(file.read().decode("utf-8"), ignore_metadata_errors=True)
        try:
            card.validate(repo_type=kind)
        except ValueError as error:
            remedy = f"Correct the front matter of {CARD}, which the Hub refuses"
            raise ValueError(f"{remedy}: {error}") from error
