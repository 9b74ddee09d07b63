# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the hub of the tests answers to those who read: descriptions, lists, files."""

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from hub_card import description
from hub_repository import Commit, Refusal, in_lfs
from hub_request import GIT, REPO, Answer, Request, Route, reply, signed_in, visible


if TYPE_CHECKING:
    from hub_server import HubServer


def whoami(hub: "HubServer", request: Request) -> Answer:
    account = signed_in(request)
    user = {"type": "user", "id": account.name, "name": account.name, "fullname": account.name}
    orgs = [{"type": "org", "name": name} for name in account.orgs]
    token = {"displayName": "test", "role": account.role}
    return reply({**user, "orgs": orgs, "auth": {"type": "access_token", "accessToken": token}})


def info(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str = "main") -> Answer:
    repository = visible(hub, request, kind, repo_id)
    commit = repository.resolve(revision)
    described = {
        "id": repo_id,
        "author": repo_id.split("/")[0],
        "sha": commit.oid,
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "createdAt": repository.commits()[-1].date,
        "lastModified": repository.head().date,
        "siblings": [{"rfilename": path} for path in commit.files],
        "tags": [],
    }
    if (card := commit.files.get("README.md")) is not None:
        described |= description(repository.blobs[card].read().decode())
    return reply(described)


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


def commits(hub: "HubServer", request: Request, kind: str, repo_id: str, revision: str) -> Answer:
    listed = []
    for commit in visible(hub, request, kind, repo_id).commits(revision):
        text = {"title": commit.title, "message": ""}
        listed.append({"id": commit.oid, **text, "date": commit.date, "authors": [{"user": commit.author}]})
    return reply(listed)


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
        headers |= {"X-Linked-Etag": f'"{blob_id}"', "X-Linked-Size": str(blob.size)}
    status, first, last = 200, 0, blob.size - 1
    if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.range):
        first, last = int(asked[1]), min(int(asked[2] or last), last)
        if first > last:
            raise Refusal(
                416, "RangeNotSatisfiable", f"{path} has {blob.size} bytes", {"Content-Range": f"bytes */{blob.size}"}
            )
        status = 206
        headers["Content-Range"] = f"bytes {first}-{last}/{blob.size}"
    headers["Content-Length"] = str(last + 1 - first)
    content = blob.read(first, last) if request.method == "GET" else b""
    return Answer(content, status, headers, download=f"{repo_id}/{path}")


def _with_folders(commit: Commit) -> list[str]:
    """The paths of a snapshot's files, and of the folders they lie in."""
    folders = {path[: end.start()] for path in commit.files for end in re.finditer("/", path)}
    return sorted([*commit.files, *folders])


REVISION = r"(?P<revision>[^/]+)"
READING: list[Route] = [
    ("GET", re.compile("/api/whoami-v2"), whoami),
    ("GET", re.compile(rf"{REPO}(?:/revision/{REVISION})?"), info),
    ("GET", re.compile(rf"{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?"), tree),
    ("POST", re.compile(rf"{REPO}/paths-info/{REVISION}"), paths_info),
    ("GET", re.compile(f"{REPO}/commits/{REVISION}"), commits),
    ("GET", re.compile(f"{GIT}/resolve/{REVISION}/(?P<path>.+)"), download),
]
