# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the hub of the tests does for those who write: repositories, branches, uploads, commits."""

import base64
import hashlib
import json
import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from hub_card import metadata
from hub_reading import REVISION
from hub_repository import Blob, Refusal, Repository, address, git_blob_id, stored_in_lfs
from hub_request import GIT, REPO, Answer, Request, Route, may_write, reply, signed_in, writable


if TYPE_CHECKING:
    from hub_server import HubServer


def create_repository(hub: "HubServer", request: Request) -> Answer:
    kind, repo_id = _named(request)
    may_write(request, repo_id)
    if address(kind, repo_id) in hub.repositories:
        message = f"You already created this {kind} repo"
        return reply({"error": message, "url": hub.page(kind, repo_id)}, 409, {"X-Error-Message": message})
    private = request.json().get("visibility") == "private" or bool(request.json().get("private"))
    hub.create(repo_id, kind=kind, private=private)
    return reply({"url": hub.page(kind, repo_id), "name": repo_id})


def create_branch(hub: "HubServer", request: Request, kind: str, repo_id: str, name: str) -> Answer:
    repository = writable(hub, request, kind, repo_id)
    repository.branches[name] = repository.resolve(request.json().get("startingPoint", "main")).oid
    return reply({})


def validate_yaml(hub: "HubServer", request: Request) -> Answer:
    try:
        found = metadata(request.json()["content"])
    except ValueError as error:
        return reply({"errors": [{"message": str(error)}], "warnings": []}, status=400)
    missing = [] if found else [{"message": "empty or missing yaml metadata in repo card"}]
    return reply({"errors": [], "warnings": missing})


def preupload(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    repository = writable(hub, request, kind, repo_id, proposal=_proposes(request, revision))
    files, answered = repository.resolve(revision).files, []
    hosted = repository.read(".gitignore", revision).decode() if ".gitignore" in files else ""
    ignored = request.json().get("gitIgnore", hosted).splitlines()
    for asked in request.json()["files"]:
        path, sample = asked["path"], base64.b64decode(asked["sample"])
        mode = "lfs" if stored_in_lfs(path, asked["size"], sample) else "regular"
        known = {"oid": files[path]} if path in files else {}
        ignore = any(fnmatch(path, pattern) for pattern in ignored)
        answered.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, **known})
    return reply({"files": answered})


def batch(hub: "HubServer", request: Request, repo_id: str, kind: str = "model") -> Answer:
    repository = writable(hub, request, kind, repo_id, proposal=True)
    answered: list[dict] = []
    for asked in request.json()["objects"]:
        answered.append({"oid": asked["oid"], "size": asked["size"]})
        if asked["oid"] not in repository.blobs:
            href = f"{hub.page(kind, repo_id)}.git/lfs/{asked['oid']}"
            answered[-1]["actions"] = {"upload": {"href": href}}
    return reply({"transfer": "basic", "objects": answered})


def upload(hub: "HubServer", request: Request, repo_id: str, sha256: str, kind: str = "model") -> Answer:
    # The address is the permit, as with the signed addresses of the Hub's storage: no token comes with it.
    repository = hub.repositories.get(address(kind, repo_id))
    if repository is None:
        raise Refusal(404, "NotFound", f"no upload is expected at {request.path}")
    if hashlib.sha256(request.body).hexdigest() != sha256:
        raise Refusal(400, "BadDigest", f"what was received has another SHA-256 than {sha256}")
    repository.blobs[sha256] = Blob(len(request.body), request.body)
    hub.received[sha256] += len(request.body)
    return Answer()


def commit(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    repository = writable(hub, request, kind, repo_id, proposal=_proposes(request, revision))
    header, *operations = [json.loads(line) for line in request.body.splitlines()]
    head = repository.resolve(revision)
    if header["value"].get("parentCommit", head.oid) != head.oid:
        raise Refusal(412, "PreconditionFailed", "A commit has happened since. Please refresh and try again.")
    if revision not in repository.branches:
        raise Refusal(400, "BadRequest", f"{revision} is no branch")
    files = dict(head.files)
    for operation in operations:
        _apply(repository, files, operation["key"], operation["value"])
    branch = repository.open_pull_request(head) if request.asks("create_pr") else revision
    made = repository.advance(branch, files, header["value"]["summary"], signed_in(request).name, parent=head.oid)
    page = hub.page(kind, repo_id)
    answered = {"success": True, "commitOid": made.oid, "commitUrl": f"{page}/commit/{made.oid}", "hookOutput": ""}
    if request.asks("create_pr"):
        answered["pullRequestUrl"] = f"{page}/discussions/{branch.removeprefix('refs/pr/')}"
    return reply(answered)


def _apply(repository: Repository, files: dict[str, str], key: str, value: dict) -> None:
    """One line of a commit, applied to the snapshot `files`."""
    path = value["path"].rstrip("/")
    if key == "file":
        content = base64.b64decode(value["content"])
        if path == "README.md":
            try:
                metadata(content.decode())
            except ValueError as error:
                raise Refusal(400, "BadRequest", str(error)) from error
        files[path] = git_blob_id(content)
        repository.blobs[files[path]] = Blob(len(content), content)
    elif key == "lfsFile":
        _check_stored(repository, value["oid"], value.get("size"))
        files[path] = value["oid"]
    elif key == "deletedFile":
        if path not in files:
            raise Refusal(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
        del files[path]
    else:
        raise Refusal(400, "BadRequest", f"this hub does not know the operation {key}")


def _check_stored(repository: Repository, sha256: str, size: int | None) -> None:
    """Refuses content that no upload has brought, or that has another size."""
    if sha256 not in repository.blobs:
        raise Refusal(400, "BadRequest", f"an LFS pointer pointed to a file that does not exist: {sha256}")
    if size not in (None, repository.blobs[sha256].size):
        raise Refusal(400, "BadRequest", f"{sha256} has {repository.blobs[sha256].size} bytes, not {size}")


def _named(request: Request) -> tuple[str, str]:
    """Kind and id of the repository that a body names."""
    asked = request.json()
    return asked.get("type") or "model", f"{asked.get('organization') or signed_in(request).name}/{asked['name']}"


def _proposes(request: Request, revision: str) -> bool:
    """Whether a request is for a pull request, which anyone may open."""
    return request.asks("create_pr") or revision.startswith("refs/pr/")


NAME = "(?P<name>[^/]+)"
LFS = rf"{GIT}\.git"
WRITING: list[Route] = [
    ("POST", re.compile("/api/repos/create"), create_repository),
    ("POST", re.compile(f"{REPO}/branch/{NAME}"), create_branch),
    ("POST", re.compile("/api/validate-yaml"), validate_yaml),
    ("POST", re.compile(f"{REPO}/preupload/{REVISION}"), preupload),
    ("POST", re.compile(f"{LFS}/info/lfs/objects/batch"), batch),
    ("PUT", re.compile(f"{LFS}/lfs/(?P<sha256>[0-9a-f]{{64}})"), upload),
    ("POST", re.compile(f"{REPO}/commit/{REVISION}"), commit),
]
