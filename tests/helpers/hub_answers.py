# SPDX-License-Identifier: Apache-2.0
"""What the hub of the tests is asked, and what it answers: to those who read, and to those who write."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from hub_repository import Commit, Refusal, Repository, git_blob_id, in_lfs, stored_in_lfs
from huggingface_hub import RepoCard


if TYPE_CHECKING:
    from hub_server import HubServer


LICENCES = ["apache-2.0", "mit", "llama3.2", "other"]


@dataclass(frozen=True)
class Account:
    """Who asks: the bearer of a token of role "read" or "write"."""

    name: str
    role: str
    orgs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request, read whole. `path` is as it was sent: quoted, without the query."""

    method: str
    path: str
    query: dict[str, list[str]]
    range: str
    body: bytes
    account: Account | None

    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def asks(self, flag: str) -> bool:
        return self.query.get(flag, [""])[0].lower() in ("1", "true")


@dataclass(frozen=True)
class Answer:
    """An answer. `download` names the file whose content it carries: `namespace/name/file`."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    download: str | None = None


def reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """An answer in JSON."""
    return Answer(
        json.dumps(value, default=str).encode(), status, {"Content-Type": "application/json"} | (headers or {})
    )


def address(kind: str, repo_id: str) -> str:
    """Where the Hub has a repository, below its own address: `user/name`, `datasets/user/name`, `spaces/user/name`."""
    return repo_id if kind == "model" else f"{kind}s/{repo_id}"


def signed_in(request: Request) -> Account:
    """Who asks, which must be known."""
    if request.account is None:
        raise Refusal(401, "Unauthorized", "Invalid username or password.")
    return request.account


def visible(hub: "HubServer", request: Request, kind: str, repo_id: str) -> Repository:
    """A repository, for a request that may read it. To others a private one does not exist."""
    repository, account = hub.repositories.get(address(kind, repo_id)), request.account
    owners = (account.name, *account.orgs) if account else ()
    if repository is None or repository.private and repo_id.split("/")[0] not in owners:
        raise Refusal(404, "RepoNotFound", "Repository not found")
    return repository


def whoami(hub: "HubServer", request: Request) -> Answer:
    account = signed_in(request)
    orgs = [{"type": "org", "name": name} for name in account.orgs]
    token = {"displayName": "test", "role": account.role}
    return reply({"type": "user", "name": account.name, "orgs": orgs, "auth": {"accessToken": token}})


def info(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str = "main") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    card = commit.files.get("README.md")
    content = repository.blobs[card].decode() if card else ""
    return reply(
        {
            "id": repo_id,
            "sha": commit.oid,
            "private": repository.private,
            "siblings": [{"rfilename": path} for path in commit.files],
            "tags": [],
            "cardData": RepoCard(content, ignore_metadata_errors=True).data.to_dict(),
        }
    )


def tree(
    hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str = "main", folder: str = ""
) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    inside = f"{folder}/" if folder else ""
    listed = [path for path in _with_folders(commit) if path.startswith(inside)]
    if folder and not listed:
        raise Refusal(404, "EntryNotFound", f"{folder} does not exist on {revision}", {"X-Repo-Commit": commit.oid})
    if not request.asks("recursive"):
        listed = [path for path in listed if "/" not in path.removeprefix(inside)]
    return reply([repository.entry(path, commit) for path in listed])


def paths_info(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    in_json = request.body.startswith(b"{")
    asked = request.json()["paths"] if in_json else parse_qs(request.body.decode()).get("paths", [])
    known = _with_folders(commit)
    return reply([repository.entry(path, commit) for path in asked if path in known])


def download(
    hub: "HubServer", request: Request, repo_id: str, revision: str, path: str, kind: str = "model"
) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    if path not in commit.files:
        raise Refusal(404, "EntryNotFound", f"{repo_id} has no {path}", {"X-Repo-Commit": commit.oid})
    blob_id = commit.files[path]
    blob = repository.blobs[blob_id]
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    headers |= {"X-Repo-Commit": commit.oid, "ETag": f'"{blob_id}"'}
    if in_lfs(blob_id):
        headers |= {"X-Linked-Etag": f'"{blob_id}"', "X-Linked-Size": str(len(blob))}
    status, content = 200, blob
    if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.range):
        first, last = int(asked[1]), min(int(asked[2] or len(blob) - 1), len(blob) - 1)
        status, content = 206, blob[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(blob)}"
    return Answer(content, status, headers, download=f"{repo_id}/{path}")


def create_repository(hub: "HubServer", request: Request) -> Answer:
    asked, account = request.json(), signed_in(request)
    kind, owner = asked.get("type") or "model", asked.get("organization") or account.name
    if account.role == "read" or owner not in (account.name, *account.orgs):
        raise Refusal(403, "Forbidden", f"You may not create a {kind} under the namespace {owner}")
    repo_id = f"{owner}/{asked['name']}"
    url = {"url": f"{hub.url}/{address(kind, repo_id)}"}
    if address(kind, repo_id) in hub.repositories:
        message = f"You already created this {kind} repo"
        return reply({"error": message, **url}, 409, {"X-Error-Message": message})
    hub.create(repo_id, kind=kind, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return reply({**url, "name": repo_id})


def create_branch(hub: "HubServer", request: Request, kind: str, repo_id: str, name: str) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    repository.branches[name] = repository.resolve(request.json().get("startingPoint", "main")).oid
    return reply({})


def validate_yaml(hub: "HubServer", request: Request) -> Answer:
    licence = RepoCard(request.json()["content"], ignore_metadata_errors=True).data.get("license") or "mit"
    errors = [] if licence in LICENCES else [{"message": f'"license" must be one of {LICENCES}'}]
    return reply({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    files, answered = repository.resolve(revision).files, []
    for asked in request.json()["files"]:
        path, sample = asked["path"], base64.b64decode(asked["sample"])
        mode = "lfs" if stored_in_lfs(path, asked["size"], sample) else "regular"
        known = {"oid": files[path]} if path in files else {}
        answered.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
    return reply({"files": answered})


def batch(hub: "HubServer", request: Request, repo_id: str, kind: str = "model") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    answered: list[dict] = []
    for asked in request.json()["objects"]:
        answered.append({"oid": asked["oid"], "size": asked["size"]})
        if asked["oid"] not in repository.blobs:
            answered[-1]["actions"] = {"upload": {"href": f"{hub.url}/{repository.address}.git/lfs/{asked['oid']}"}}
    return reply({"transfer": "basic", "objects": answered})


def upload(hub: "HubServer", request: Request, repo_id: str, sha256: str, kind: str = "model") -> Answer:
    # The address is the permit, as with the signed addresses of the Hub's storage: no token comes with it.
    hub.repositories[address(kind, repo_id)].blobs[sha256] = request.body
    hub.received[sha256] += len(request.body)
    return Answer()


def commit(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    repository = visible(hub, request, kind, repo_id)
    signed_in(request)
    header, *operations = [json.loads(line) for line in request.body.splitlines()]
    head = repository.resolve(revision)
    if header["value"].get("parentCommit", head.oid) != head.oid:
        raise Refusal(412, "PreconditionFailed", "A commit has happened since. Please refresh and try again.")
    files = dict(head.files)
    for operation in operations:
        _apply(repository, files, operation["key"], operation["value"])
    proposals = sum(name.startswith("refs/pr/") for name in repository.branches)
    branch = f"refs/pr/{1 + proposals}" if request.asks("create_pr") else revision
    made = repository.advance(branch, files, parent=head.oid)
    page = f"{hub.url}/{repository.address}"
    answered = {"success": True, "commitOid": made.oid, "commitUrl": f"{page}/commit/{made.oid}", "hookOutput": ""}
    if request.asks("create_pr"):
        answered["pullRequestUrl"] = f"{page}/discussions/{1 + proposals}"
    return reply(answered)


def _apply(repository: Repository, files: dict[str, str], key: str, value: dict) -> None:
    """One line of a commit, applied to the snapshot `files`."""
    path = value["path"]
    if key == "file":
        content = base64.b64decode(value["content"])
        files[path] = git_blob_id(content)
        repository.blobs[files[path]] = content
    elif key == "lfsFile" and value["oid"] in repository.blobs:
        files[path] = value["oid"]
    elif key == "deletedFile" and path in files:
        del files[path]
    else:
        raise Refusal(400, "BadRequest", f"this hub cannot do {key} of {path}")


def _with_folders(commit: Commit) -> list[str]:
    """The paths of a snapshot's files, and of the folders they lie in."""
    folders = {path[: end.start()] for path in commit.files for end in re.finditer("/", path)}
    return sorted([*commit.files, *folders])


API = r"/api/(?P<kind>model|dataset|space)s/(?P<repo_id>[^/]+/[^/]+)"
GIT = r"/(?:(?P<kind>dataset|space)s/)?(?P<repo_id>[^/]+/[^/]+?)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("GET", f"{API}(?:/revision/{REVISION})?", info),
    ("GET", f"{API}/tree/{REVISION}(?:/(?P<folder>.+))?", tree),
    ("POST", f"{API}/paths-info/{REVISION}", paths_info),
    ("GET", f"{GIT}/resolve/{REVISION}/(?P<path>.+)", download),
    ("POST", "/api/repos/create", create_repository),
    ("POST", f"{API}/branch/(?P<name>[^/]+)", create_branch),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"{API}/preupload/{REVISION}", preupload),
    ("POST", rf"{GIT}\.git/info/lfs/objects/batch", batch),
    ("PUT", rf"{GIT}\.git/lfs/(?P<sha256>[0-9a-f]{{64}})", upload),
    ("POST", f"{API}/commit/{REVISION}", commit),
]
"""A method, the path it is for, and the function that answers: called with the hub, the request and the groups."""
