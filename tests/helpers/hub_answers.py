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
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}


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
        return {path: len(self.blobs[blob_id]) for path, blob_id in self.head().files.items()}

    def commits(self) -> list[Commit]:
        """Those that lead to `main`, newest first."""
        listed = [self.head()]
        while (parent := listed[-1].parent) is not None:
            listed.append(self._commits[parent])
        return listed

    def head(self, branch: str = "main") -> Commit:
        """The newest commit of a branch."""
        return self._commits[self.branches[branch]]

    def read(self, path: str) -> bytes:
        """A file's content on `main`; KeyError if there is no such file."""
        return self.blobs[self.head().files[path]]

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch or an id names."""
        oid = self.branches.get(revision, revision)
        if oid not in self._commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self._commits[oid]

    def advance(self, branch: str, files: dict[str, str], parent: str | None) -> Commit:
        """Makes the snapshot `files` the newest commit of a branch."""
        oid = secrets.token_hex(20)
        self._commits[oid] = Commit(oid, parent, dict(sorted(files.items())))
        self.branches[branch] = oid
        return self._commits[oid]

    def change(self, contents: dict[str, bytes]) -> Commit:
        """A commit on `main` that adds or replaces files, in LFS where the Hub would."""
        before = self.head() if self.branches else Commit("", None, {})
        stored = {}
        for path, content in contents.items():
            large = stored_in_lfs(path, content)
            stored[path] = hashlib.sha256(content).hexdigest() if large else git_blob_id(content)
            self.blobs[stored[path]] = content
        return self.advance("main", before.files | stored, before.oid or None)

    def entry(self, path: str, commit: Commit) -> dict:
        """A file or a folder as `tree` lists it."""
        if path not in commit.files:
            return {"type": "directory", "path": path, "size": 0, "oid": git_blob_id(path.encode())}
        blob_id = commit.files[path]
        size = len(self.blobs[blob_id])
        entry = {"type": "file", "path": path, "size": size, "oid": blob_id}
        if in_lfs(blob_id):
            entry["oid"] = git_blob_id(blob_id.encode())
            entry["lfs"] = {"oid": blob_id, "size": size, "pointerSize": 134}
        return entry


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def in_lfs(blob_id: str) -> bool:
    return len(blob_id) == 64  # a SHA-256


def stored_in_lfs(path: str, sample: bytes) -> bool:
    """Whether the Hub wants a file in LFS: by its suffix, or because its first bytes are binary."""
    return path.endswith(LFS_SUFFIXES) or b"\0" in sample[:512]


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
    headers = {"Content-Type": "application/json", **(headers or {})}
    return Answer(json.dumps(value).encode(), status, headers)


def address(kind: str, repo_id: str) -> str:
    return repo_id if kind == "model" else f"{kind}s/{repo_id}"


def visible(hub: "HubServer", request: Request, kind: str, repo_id: str) -> Repository:
    """A repository, for a request that may read it. To others a private one does not exist."""
    repository = hub.repositories.get(address(kind, repo_id))
    account = request.account
    owner = account.name if account else None
    if repository is None or repository.private and repo_id.split("/")[0] != owner:
        raise Refusal(404, "RepoNotFound", "Repository not found")
    return repository


def whoami(hub: "HubServer", request: Request) -> Answer:
    account = request.signed_in()
    token = {"displayName": "test", "role": account.role}
    known = {"type": "user", "name": account.name, "auth": {"accessToken": token}}
    return reply(known | {"orgs": [{"name": "lab"}]})


def info(hub: "HubServer", request: Request, kind, repo_id, revision="main") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    card = commit.files.get("README.md")
    content = repository.blobs[card].decode("utf-8", "replace") if card else ""
    known = {"id": repo_id, "sha": commit.oid, "private": repository.private, "tags": []}
    known["siblings"] = [{"rfilename": path} for path in commit.files]
    known["cardData"] = RepoCard(content, ignore_metadata_errors=True).data.to_dict()
    return reply(known)


def tree(hub: "HubServer", request: Request, kind, repo_id, revision, folder="") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    inside = f"{folder}/" if folder else ""
    folders = {path[: end.start()] for path in commit.files for end in re.finditer("/", path)}
    listed = [path for path in sorted({*commit.files, *folders}) if path.startswith(inside)]
    if folder and not listed:
        raise Refusal(404, "EntryNotFound", f"no {folder}", {"X-Repo-Commit": commit.oid})
    if request.query.get("recursive") != ["true"]:
        listed = [path for path in listed if "/" not in path.removeprefix(inside)]
    return reply([repository.entry(path, commit) for path in listed])


def download(hub: "HubServer", request: Request, repo_id, revision, path, kind="model") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    if path not in commit.files:
        raise Refusal(404, "EntryNotFound", f"no {path}", {"X-Repo-Commit": commit.oid})
    blob_id = commit.files[path]
    blob = repository.blobs[blob_id]
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    headers |= {"X-Repo-Commit": commit.oid, "ETag": f'"{blob_id}"'}
    if in_lfs(blob_id):
        headers |= {"X-Linked-Etag": f'"{blob_id}"', "X-Linked-Size": str(len(blob))}
    status = 200
    content = blob
    if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", request.range):
        first = int(asked[1])
        last = min(int(asked[2]), len(blob) - 1)
        status = 206
        content = blob[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(blob)}"
    return Answer(content, status, headers, download=f"{repo_id}/{path}")


def create_repository(hub: "HubServer", request: Request) -> Answer:
    asked = request.json()
    account = request.signed_in()
    kind = asked.get("type") or "model"
    repo_id = f"{asked.get('organization') or account.name}/{asked['name']}"
    known = address(kind, repo_id) in hub.repositories
    if not known:
        private = asked.get("private") or asked.get("visibility") == "private"
        hub.create(repo_id, kind=kind, private=private)
    answered = {"url": f"{hub.url}/{address(kind, repo_id)}", "name": repo_id}
    return reply(answered, 409 if known else 200)


def create_branch(hub: "HubServer", request: Request, kind, repo_id, name) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    repository.branches[name] = repository.resolve(request.json().get("startingPoint", "main")).oid
    return reply({})


def preupload(hub: "HubServer", request: Request, kind, repo_id, revision) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    files = repository.resolve(revision).files
    answered = []
    hosted = repository.blobs[files[".gitignore"]].decode() if ".gitignore" in files else ""
    ignored = request.json().get("gitIgnore", hosted).splitlines()
    for asked in request.json()["files"]:
        path = asked["path"]
        sample = base64.b64decode(asked["sample"])
        mode = "lfs" if stored_in_lfs(path, sample) else "regular"
        known = {"oid": files[path]} if path in files else {}
        ignore = any(fnmatch(path, pattern) for pattern in ignored)
        answered.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, **known})
    return reply({"files": answered})


def validate_yaml(hub: "HubServer", request: Request) -> Answer:
    card = RepoCard(request.json()["content"], ignore_metadata_errors=True)
    licence = card.data.get("license") or "other"
    known = ("apache-2.0", "mit", "llama3.2", "other")
    faults = [] if licence in known else [{"message": f'"license" must be one of {known}'}]
    return reply({"errors": faults, "warnings": []}, 400 if faults else 200)


def batch(hub: "HubServer", request: Request, repo_id, kind="model") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    answered = []
    for asked in request.json()["objects"]:
        upload = {"upload": {"href": f"{hub.url}/{repository.address}.git/lfs/{asked['oid']}"}}
        actions = {} if asked["oid"] in repository.blobs else {"actions": upload}
        answered.append({"oid": asked["oid"], "size": asked["size"], **actions})
    return reply({"transfer": "basic", "objects": answered})


def upload(hub: "HubServer", request: Request, repo_id, sha256, kind="model") -> Answer:
    # No token comes with it: as in the Hub's storage, the address is the permit.
    hub.repositories[address(kind, repo_id)].blobs[sha256] = request.body
    hub.received[sha256] += len(request.body)
    return Answer()


def commit(hub: "HubServer", request: Request, kind, repo_id, revision) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    request.signed_in()
    header, *operations = [json.loads(line) for line in request.body.splitlines()]
    head = repository.resolve(revision)
    if header["value"].get("parentCommit", head.oid) != head.oid:
        raise Refusal(412, "PreconditionFailed", "A commit has happened since.")
    files = dict(head.files)
    for operation in operations:
        value = operation["value"]
        match operation["key"]:
            case "file":
                content = base64.b64decode(value["content"])
                files[value["path"]] = git_blob_id(content)
                repository.blobs[git_blob_id(content)] = content
            case "lfsFile" if value["oid"] in repository.blobs:
                files[value["path"]] = value["oid"]
            case "deletedFile":
                del files[value["path"]]
            case key:
                raise Refusal(400, "BadRequest", f"this hub cannot do {key} of {value['path']}")
    proposal = request.query.get("create_pr")
    branch = "refs/pr/1" if proposal else revision
    oid = repository.advance(branch, files, head.oid).oid
    page = f"{hub.url}/{repository.address}"
    answered = {"success": True, "hookOutput": "", "commitOid": oid}
    answered["commitUrl"] = f"{page}/commit/{oid}"
    return reply(answered | ({"pullRequestUrl": f"{page}/discussions/1"} if proposal else {}))


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
