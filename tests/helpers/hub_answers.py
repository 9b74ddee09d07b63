"""What the hub of the tests stores (a commit is a snapshot of paths and blobs), and its answers."""

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import RepoCard


if TYPE_CHECKING:
    from hub_server import HubServer


LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".parquet", ".arrow", ".zip")


class Refusal(Exception):
    """What the hub does not do: an HTTP status, the Hub's error code, a message, more headers."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {
            "X-Error-Code": code,
            "X-Error-Message": message,
        }
        if headers:
            self.headers.update(headers)


@dataclass(frozen=True)
class Commit:
    """A snapshot: path -> blob id, which is git's SHA-1 or, in LFS, the SHA-256 of the content."""

    oid: str
    parent: str | None
    files: dict[str, str]


class Repository:
    """A repository, its page at `address` below the Hub's; a private one is its owner's alone."""

    def __init__(self, address: str, private: bool = False):
        self.address = address
        self.private = private
        self.branches: dict[str, str] = {}  # name -> id of the newest commit
        self.blobs: dict[str, bytes] = {}  # id -> content, uploads that are in no commit among them
        self._commits: dict[str, Commit] = {}

    @property
    def commit(self) -> str:
        """Id of the newest commit of `main`."""
        return self.branches["main"]

    def files(self) -> dict[str, int]:
        """Path -> size in bytes, on `main`."""
        sizes = {}
        for file_path, blob_id in self.head().files.items():
            sizes[file_path] = len(self.blobs[blob_id])
        return sizes

    def commits(self) -> list[Commit]:
        """Those that lead to `main`, newest first."""
        commits = [self.head()]
        while commits[-1].parent is not None:
            parent = self._commits[commits[-1].parent]
            commits.append(parent)
        return commits

    def head(self, branch: str = "main") -> Commit:
        """The newest commit of a branch."""
        return self._commits[self.branches[branch]]

    def read(self, path: str) -> bytes:
        """A file's content on `main`; KeyError if there is no such file."""
        return self.blobs[self.head().files[path]]

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch or an id names."""
        commit_id = self.branches.get(revision, revision)
        if commit_id not in self._commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self._commits[commit_id]

    def advance(self, branch: str, files: dict[str, str], parent: str | None) -> Commit:
        """Makes the snapshot `files` the newest commit of a branch."""
        sorted_files = dict(sorted(files.items()))
        commit = Commit(secrets.token_hex(20), parent, sorted_files)
        self._commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def change(self, contents: dict[str, bytes]) -> Commit:
        """A commit on `main` that adds or replaces files, in LFS where the Hub would."""
        files = {}
        parent = None
        if self.branches:
            files = dict(self.head().files)
            parent = self.head().oid
        for path, content in contents.items():
            if stored_in_lfs(path, content):
                blob_id = hashlib.sha256(content).hexdigest()
            else:
                blob_id = git_blob_id(content)
            files[path] = blob_id
            self.blobs[blob_id] = content
        return self.advance("main", files, parent)

    def entry(self, path: str, commit: Commit) -> dict:
        """A file or a folder as `tree` lists it."""
        if path not in commit.files:
            return {
                "type": "directory",
                "path": path,
                "size": 0,
                "oid": git_blob_id(path.encode()),
            }
        blob_id = commit.files[path]
        size = len(self.blobs[blob_id])
        entry = {
            "type": "file",
            "path": path,
            "size": size,
            "oid": blob_id,
        }
        if in_lfs(blob_id):
            entry["oid"] = git_blob_id(blob_id.encode())
            entry["lfs"] = {
                "oid": blob_id,
                "size": size,
                "pointerSize": 134,
            }
        return entry


def git_blob_id(content: bytes) -> str:
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content).hexdigest()


def in_lfs(blob_id: str) -> bool:
    return len(blob_id) == 64  # a SHA-256


def stored_in_lfs(path: str, sample: bytes) -> bool:
    """Whether the Hub wants a file in LFS: by its suffix, or because its first bytes are binary."""
    if path.endswith(LFS_SUFFIXES):
        return True
    return b"\0" in sample[:512]


class Account(NamedTuple):
    """Who asks: the bearer of a token of role "read" or "write"."""

    name: str
    role: str


@dataclass(frozen=True)
class Request:
    """A request, read whole."""

    query: dict[str, list[str]]
    range: str
    body: bytes
    account: Account | None

    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def signed_in(self) -> Account:
        if self.account is None:
            raise Refusal(401, "Unauthorized", "Invalid username or password.")
        return self.account


@dataclass(frozen=True)
class Answer:
    """An answer. `download` names the file whose content it carries: `namespace/name/file`."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    download: str | None = None


def reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """An answer in JSON."""
    all_headers = {"Content-Type": "application/json"}
    if headers:
        all_headers.update(headers)
    body = json.dumps(value).encode()
    return Answer(body, status, all_headers)


def address(kind: str, repo_id: str) -> str:
    if kind == "model":
        return repo_id
    return f"{kind}s/{repo_id}"


def visible(hub: "HubServer", request: Request, kind: str, repo_id: str) -> Repository:
    """A repository, for a request that may read it. To others a private one does not exist."""
    repository = hub.repositories.get(address(kind, repo_id))
    if repository is None:
        raise Refusal(404, "RepoNotFound", "Repository not found")
    owner_name = repo_id.split("/")[0]
    is_owner = request.account is not None and request.account.name == owner_name
    if repository.private and not is_owner:
        raise Refusal(404, "RepoNotFound", "Repository not found")
    return repository


def whoami(hub: "HubServer", request: Request) -> Answer:
    account = request.signed_in()
    access_token = {"displayName": "test", "role": account.role}
    user_answer = {
        "type": "user",
        "name": account.name,
        "auth": {"accessToken": access_token},
        "orgs": [{"name": "lab"}],
    }
    return reply(user_answer)


def info(hub: "HubServer", request: Request, kind, repo_id, revision="main") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    card_text = ""
    if "README.md" in commit.files:
        card_blob = repository.blobs[commit.files["README.md"]]
        card_text = card_blob.decode("utf-8", "replace")
    repo_card = RepoCard(card_text, ignore_metadata_errors=True)
    information = {
        "id": repo_id,
        "sha": commit.oid,
        "private": repository.private,
        "tags": [],
        "siblings": [{"rfilename": path} for path in commit.files],
        "cardData": repo_card.data.to_dict(),
    }
    return reply(information)


def with_folders(paths) -> set[str]:
    """Paths of files, and of all folders that they are in."""
    all_paths = set(paths)
    for file_path in paths:
        for slash_match in re.finditer("/", file_path):
            all_paths.add(file_path[: slash_match.start()])
    return all_paths


def tree(hub: "HubServer", request: Request, kind, repo_id, revision, folder="") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    prefix = ""
    if folder:
        prefix = f"{folder}/"
    paths = sorted(path for path in with_folders(commit.files) if path.startswith(prefix))
    if folder and not paths:
        raise missing_entry(folder, commit)
    if request.query.get("recursive") != ["true"]:
        paths = [path for path in paths if "/" not in path.removeprefix(prefix)]
    entries = [repository.entry(path, commit) for path in paths]
    return reply(entries)


def missing_entry(path: str, commit: Commit) -> Refusal:
    headers = {"X-Repo-Commit": commit.oid}
    return Refusal(404, "EntryNotFound", f"no {path}", headers)


def download(hub: "HubServer", request: Request, repo_id, revision, path, kind="model") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    if path not in commit.files:
        raise missing_entry(path, commit)
    blob_id = commit.files[path]
    blob = repository.blobs[blob_id]
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "X-Repo-Commit": commit.oid,
        "ETag": f'"{blob_id}"',
    }
    if in_lfs(blob_id):
        headers["X-Linked-Etag"] = f'"{blob_id}"'
        headers["X-Linked-Size"] = str(len(blob))

    downloaded_file = f"{repo_id}/{path}"
    byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range)
    if byte_range is None:
        return Answer(blob, 200, headers, download=downloaded_file)
    first_byte = int(byte_range[1])
    last_byte = min(int(byte_range[2]), len(blob) - 1)
    headers["Content-Range"] = f"bytes {first_byte}-{last_byte}/{len(blob)}"
    content = blob[first_byte : last_byte + 1]
    return Answer(content, 206, headers, download=downloaded_file)


def create_repository(hub: "HubServer", request: Request) -> Answer:
    wanted = request.json()
    account = request.signed_in()
    kind = wanted.get("type") or "model"
    owner = wanted.get("organization") or account.name
    repo_id = f"{owner}/{wanted['name']}"
    status = 409
    if address(kind, repo_id) not in hub.repositories:
        status = 200
        private = wanted.get("private") or wanted.get("visibility") == "private"
        hub.create(repo_id, kind=kind, private=private)
    created = {
        "url": f"{hub.url}/{address(kind, repo_id)}",
        "name": repo_id,
    }
    return reply(created, status)


def create_branch(hub: "HubServer", request: Request, kind, repo_id, name) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    starting_point = request.json().get("startingPoint", "main")
    starting_commit = repository.resolve(starting_point)
    repository.branches[name] = starting_commit.oid
    return reply({})


def preupload(hub: "HubServer", request: Request, kind, repo_id, revision) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    files = repository.resolve(revision).files
    hosted_patterns = ""
    if ".gitignore" in files:
        hosted_patterns = repository.blobs[files[".gitignore"]].decode()
    patterns = request.json().get("gitIgnore", hosted_patterns).splitlines()

    answers = []
    for wanted in request.json()["files"]:
        wanted_path = wanted["path"]
        upload_mode = "regular"
        if stored_in_lfs(wanted_path, base64.b64decode(wanted["sample"])):
            upload_mode = "lfs"
        answer = {
            "path": wanted_path,
            "uploadMode": upload_mode,
            "shouldIgnore": any(fnmatch(wanted_path, pattern) for pattern in patterns),
        }
        if wanted_path in files:
            answer["oid"] = files[wanted_path]
        answers.append(answer)
    return reply({"files": answers})


KNOWN_LICENSES = ("apache-2.0", "mit", "llama3.2", "other")


def validate_yaml(hub: "HubServer", request: Request) -> Answer:
    card_text = request.json()["content"]
    repo_card = RepoCard(card_text, ignore_metadata_errors=True)
    card_license = repo_card.data.get("license") or "other"
    report = {"errors": [], "warnings": []}
    if card_license in KNOWN_LICENSES:
        return reply(report)
    error = {"message": f'"license" must be one of {KNOWN_LICENSES}'}
    report["errors"].append(error)
    return reply(report, 400)


def batch(hub: "HubServer", request: Request, repo_id, kind="model") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    answers = []
    for wanted in request.json()["objects"]:
        content_id = wanted["oid"]
        answer = {"oid": content_id, "size": wanted["size"]}
        if content_id not in repository.blobs:
            upload_url = f"{hub.url}/{repository.address}.git/lfs/{content_id}"
            answer["actions"] = {"upload": {"href": upload_url}}
        answers.append(answer)
    return reply({"transfer": "basic", "objects": answers})


def upload(hub: "HubServer", request: Request, repo_id, sha256, kind="model") -> Answer:
    # No token comes with it: as in the Hub's storage, the address is the permit.
    repository = hub.repositories[address(kind, repo_id)]
    repository.blobs[sha256] = request.body
    hub.received[sha256] += len(request.body)
    return Answer()


def commit(hub: "HubServer", request: Request, kind, repo_id, revision) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    request.signed_in()
    header, *operations = [json.loads(line) for line in request.body.splitlines()]
    parent_commit = repository.resolve(revision)
    expected_parent = header["value"].get("parentCommit", parent_commit.oid)
    if expected_parent != parent_commit.oid:
        raise Refusal(412, "PreconditionFailed", "A commit has happened since.")
    files = dict(parent_commit.files)
    for operation in operations:
        value = operation["value"]
        match operation["key"]:
            case "file":
                content = base64.b64decode(value["content"])
                blob_id = git_blob_id(content)
                repository.blobs[blob_id] = content
                files[value["path"]] = blob_id
            case "lfsFile" if value["oid"] in repository.blobs:
                files[value["path"]] = value["oid"]
            case "deletedFile":
                del files[value["path"]]
            case key:
                raise Refusal(400, "BadRequest", f"this hub cannot do {key} of {value['path']}")
    is_proposal = bool(request.query.get("create_pr"))
    branch = revision
    if is_proposal:
        branch = "refs/pr/1"
    new_commit = repository.advance(branch, files, parent_commit.oid)
    page_url = f"{hub.url}/{repository.address}"
    answer = {
        "success": True,
        "hookOutput": "",
        "commitOid": new_commit.oid,
        "commitUrl": f"{page_url}/commit/{new_commit.oid}",
    }
    if is_proposal:
        answer["pullRequestUrl"] = f"{page_url}/discussions/1"
    return reply(answer)


API = r"/api/(?P<kind>model|dataset|space)s/(?P<repo_id>[^/]+/[^/]+)"
GIT = r"/(?:(?P<kind>dataset|space)s/)?(?P<repo_id>[^/]+/[^/]+?)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("GET", f"{API}(?:/revision/{REVISION})?", info),
    ("GET", f"{API}/tree/{REVISION}(?:/(?P<folder>.+))?", tree),
    ("GET", f"{GIT}/resolve/{REVISION}/(?P<path>.+)", download),
    ("POST", "/api/repos/create", create_repository),
    ("POST", f"{API}/branch/(?P<name>[^/]+)", create_branch),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"{API}/preupload/{REVISION}", preupload),
    ("POST", rf"{GIT}\.git/info/lfs/objects/batch", batch),
    ("PUT", rf"{GIT}\.git/lfs/(?P<sha256>[0-9a-f]{{64}})", upload),
    ("POST", f"{API}/commit/{REVISION}", commit),
]
"""Method, path, and the function that answers, called with the hub, the request and the groups."""
