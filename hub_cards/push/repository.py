# SPDX-License-Identifier: Apache-2.0
"""A repository on the Hub: who may write to it, what it holds, and one commit, whole or none.

`publication.json` in it says which files a publication wrote, and so may replace later.
"""

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
from huggingface_hub.utils.sha import git_hash

from ... import __version__
from ...checkpoint.files import CARD
from .source import OWN_NAMES, READ, matches


RECORD = "publication.json"  # in a repository: what this package wrote to it
NOTHING_IGNORED = "# Everything that is published is sent.\n"
"""Replaces the repository's own `.gitignore`. The client would silently skip the files in it."""
LOG_IN = "Use `hf auth login` or HF_TOKEN, with a token of https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Repository:
    """A branch of a repository, as it was when [`find_repository`] read it.

    Attributes:
        api: The client of the account that reads it.
        repo_id: Its Hub id.
        kind: "model" or "space".
        branch: The name of the branch.
        commit: The head of the branch, or of `main` if the branch does not exist. None if the
            repository does not exist.
        private: Whether it is private.
        files: The id of each file's content by path. It is the SHA-256 if it is in LFS, otherwise
            git's blob id.
        recorded: The ids by path of what earlier publications wrote, according to their record.
        card: The text of its `README.md`, "" if there is none.
    """

    api: HfApi
    repo_id: str
    kind: str = "model"
    branch: str = "main"
    commit: str | None = None
    private: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    card: str = ""

    def is_as_published(self, path: str) -> bool:
        """Returns whether this package published a file, and nobody has changed it since."""
        return self.files[path] in self.recorded.get(path, ())

    @property
    def url(self) -> str:
        """Page of a model."""
        return f"{self.api.endpoint}/{self.repo_id}/tree/{self.branch}"


@contextmanager
def hub_errors(state: str = "Nothing was sent.") -> Iterator[None]:
    """Turns errors of the Hub, the connection and uploads into an OSError of one line.

    Args:
        state: The last sentence of the error: what has been sent.
    """
    try:
        yield
    except (errors.HTTPError, RuntimeError) as error:
        # Uploads raise a RuntimeError from the error itself.
        is_outer = isinstance(error, RuntimeError) and error.__cause__
        root_cause = error.__cause__ if is_outer else error
        description = str(root_cause)
        if isinstance(root_cause, errors.HfHubHTTPError):
            description = (
                f"({root_cause.response.status_code}) {root_cause.server_message or root_cause}"
            )
        description = " ".join(description.split()).rstrip(".")
        raise OSError(f"{ENDPOINT} failed: {description}. {state}") from None


def log_in(repo_id: str, token: str | None = None, create_pr: bool = False) -> HfApi:
    """Returns the client of an account that may publish.

    Args:
        repo_id: Hub id of the repository to publish.
        token: Access token, by default from `hf auth login` or HF_TOKEN.
        create_pr: Whether a pull request is enough. Any account may open one.

    Raises:
        ValueError: The token is missing, or may not write to the repository.
        OSError: The Hub or the connection failed.
    """
    token = (token or get_token() or "").strip()
    if not token:
        raise ValueError(f"A token is needed to publish. {LOG_IN}.")
    api = HfApi(token=token, library_name="normalign-llava", library_version=__version__)
    with hub_errors():
        account = api.whoami()
    user_name = account["name"]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            f'The token of {user_name} may only read. {LOG_IN}, with the role "write".'
        )
    namespaces = [owner["name"] for owner in (account, *account.get("orgs", []))]
    owner_name = repo_id.rpartition("/")[0]
    is_member = owner_name.lower() in map(str.lower, namespaces)
    if owner_name and not create_pr and not is_member:
        choices = " or ".join(f"{namespace}/..." for namespace in namespaces)
        raise ValueError(
            f"{user_name} may publish as {choices}, not as {repo_id}. Propose it: --create-pr."
        )
    return api


def find_repository(api: HfApi, name: str, kind: str = "model", branch: str = "main") -> Repository:
    """Reads a repository as it is now. Raises OSError if the Hub or the connection failed."""
    with hub_errors():
        try:
            repo_info = api.repo_info(name, repo_type=kind, revision=branch)
        except errors.RevisionNotFoundError:
            repo_info = api.repo_info(name, repo_type=kind)
        except errors.RepositoryNotFoundError:
            return Repository(api, name, kind, branch)
        commit = repo_info.sha
        file_ids = {}
        for entry in api.list_repo_tree(name, recursive=True, repo_type=kind, revision=commit):
            if isinstance(entry, RepoFile):
                file_ids[entry.path] = entry.lfs.sha256 if entry.lfs else entry.blob_id

        def download(path: str) -> bytes:
            if path not in file_ids:
                return b""
            file = api.hf_hub_download(name, path, repo_type=kind, revision=commit)
            return Path(file).read_bytes()

        written_ids = _recorded(download(RECORD))
        if written_ids:  # a file of that name without our records is somebody else's
            written_ids[RECORD] = [file_ids[RECORD]]
        return Repository(
            api,
            name,
            kind,
            branch,
            commit=commit,
            private=bool(repo_info.private),
            files=file_ids,
            recorded=written_ids,
            card=download(CARD).decode("utf-8-sig", "replace"),
        )


def _recorded(record: bytes) -> dict[str, Sequence[str]]:
    """Returns the ids by path in the content of `RECORD`, if this package wrote it."""
    try:
        content = json.loads(record)
        if content["written_by"] != "normalign-llava" or content["schema_version"] != 1:
            return {}
        ids_by_path = content["files"].items()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}
    return {path: content_ids for path, content_ids in ids_by_path if isinstance(content_ids, list)}


def additions(files: Mapping[str, bytes | Path]) -> list[CommitOperationAdd]:
    """Returns what a commit adds: files by path, and the record of them."""
    added = [CommitOperationAdd(path, content) for path, content in files.items()]
    record = {"schema_version": 1, "written_by": "normalign-llava", "files": content_ids(added)}
    record_text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    return [*added, CommitOperationAdd(RECORD, record_text.encode())]


def content_ids(added: Sequence[CommitOperationAdd]) -> dict[str, list[str]]:
    """Returns by path the ids that the Hub may give a content: its SHA-256, and its git blob id.

    The Hub names what is in LFS by the first and other files by the second. Weights are always in
    LFS, so they are not read once more for the second.
    """
    ids_by_path = {}
    for addition in added:
        identifiers = [addition.upload_info.sha256.hex()]
        if isinstance(addition.path_or_fileobj, bytes):
            identifiers.append(git_hash(addition.path_or_fileobj))
        ids_by_path[addition.path_in_repo] = identifiers
    return ids_by_path


def stale_files(repository: Repository, added: Sequence[CommitOperationAdd]) -> list[str]:
    """Returns the files of an earlier publication that nobody changed and this one lacks."""
    unsent_paths = repository.files.keys() - content_ids(added).keys()
    ours = filter(repository.is_as_published, unsent_paths)
    return sorted(repo_path for repo_path in ours if matches(repo_path, OWN_NAMES))


def files_of_others(repository: Repository, added: Sequence[CommitOperationAdd] = ()) -> list[str]:
    """Returns the files that others wrote or changed, and that stand in the way of a publication.

    They would be overwritten with another content, or be read together with the model. Without
    `added`, only the files that would be read are returned, whatever is sent. A model's card does
    not count, since a mark in the card says who wrote it.
    """
    is_model = repository.kind == "model"
    # The Hub names a content by one of several ids. `content_ids` says why.
    sent_ids = content_ids(added)
    obstacles = []
    for repo_path, content_id in sorted(repository.files.items()):
        would_be_overwritten = repo_path in sent_ids
        would_be_read = is_model and matches(repo_path, READ)
        may_be_replaced = (
            repository.is_as_published(repo_path)
            or content_id in sent_ids.get(repo_path, ())  # the same content is sent
            or (is_model and repo_path == CARD)
        )
        if (would_be_overwritten or would_be_read) and not may_be_replaced:
            obstacles.append(repo_path)
    return obstacles


def check_files_of_others(repository: Repository, added: Sequence[CommitOperationAdd] = ()) -> None:
    """Raises ValueError if there are [`files_of_others`]. It lists them, and what can be done."""
    obstacles = files_of_others(repository, added)
    if not obstacles:
        return
    sent_ids = content_ids(added)
    file_list = ""
    for repo_path in obstacles:
        consequence = "overwritten" if repo_path in sent_ids else "read beside the model"
        file_list += f"- {repo_path} would be {consequence}\n"
    raise ValueError(
        f"{repository.repo_id} has files that no publication of this package wrote, or that were "
        f"changed since:\n{file_list}Nothing was sent. Choose another repository, or let them be "
        "overwritten or removed: `normalign publish` with --replace-files, and with the same "
        "repository and branch (in Python, replace_files=True)."
    )


def push(
    repository: Repository,
    added: Sequence[CommitOperationAdd],
    removed: Collection[str],
    *,
    private: bool | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Sends one commit to a branch, or none if nothing has to change.

    At any moment the branch is at the commit before or at the new one. After a failure the same
    call sends the rest. Files that the repository ignores are sent too.

    Args:
        repository: The branch as it was read.
        added: The files to add to it, or to replace in it.
        removed: The paths to remove from it.
        private: Whether a new repository is private. By default the namespace decides.
        create_pr: Open a pull request instead.

    Returns:
        The commit. It is the head if nothing had to change.

    Raises:
        ValueError: The Hub refuses the card's front matter.
        OSError: The Hub or the connection failed, or somebody has made a commit since `repository`
            was read.
    """
    api = repository.api
    repo_id = repository.repo_id
    kind = repository.kind
    branch = repository.branch
    parent_commit = repository.commit
    with hub_errors(f"{repo_id} is as it was or complete. Run the command again to send the rest."):
        if parent_commit is None:
            space_sdk = "gradio" if kind == "space" else None
            api.create_repo(repo_id, repo_type=kind, private=private, space_sdk=space_sdk)
        if branch != "main" and not create_pr:
            api.create_branch(
                repo_id, repo_type=kind, branch=branch, revision=parent_commit, exist_ok=True
            )
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
            parent_commit=parent_commit,
            create_pr=create_pr,
        )


def check_front_matter(added: Sequence[CommitOperationAdd], kind: str) -> None:
    """Raises ValueError if the Hub refuses the front matter of a card that is to be sent."""
    for addition in added:
        if addition.path_in_repo != CARD:
            continue
        with addition.as_file() as file:
            repo_card = RepoCard(file.read().decode("utf-8"), ignore_metadata_errors=True)
        try:
            repo_card.validate(repo_type=kind)
        except ValueError as error:
            problem = f"The Hub refuses the front matter of {CARD}. Correct it"
            raise ValueError(f"{problem}: {error}") from error
