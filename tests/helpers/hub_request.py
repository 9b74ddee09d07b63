# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the hub of the tests is asked and answers, and who may ask it what."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hub_repository import Refusal, Repository, address


if TYPE_CHECKING:
    from hub_server import HubServer


REPO = r"/api/(?P<kind>model|dataset|space)s/(?P<repo_id>[^/]+/[^/]+)"
GIT = r"/(?:(?P<kind>dataset|space)s/)?(?P<repo_id>[^/]+/[^/]+?)"
"""Where the interface and the files of a repository lie."""


@dataclass(frozen=True)
class Account:
    """Who asks: the bearer of a token of role "read" or "write"."""

    name: str
    role: str
    orgs: tuple[str, ...] = ()

    def owns(self, repo_id: str) -> bool:
        return repo_id.split("/")[0] in (self.name, *self.orgs)


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


Route = tuple[str, re.Pattern[str], Callable[..., Answer]]
"""A method, the path it is for, and the function that answers: called with the hub, the request and the groups."""


def reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """An answer in JSON."""
    return Answer(
        json.dumps(value, default=str).encode(), status, {"Content-Type": "application/json", **(headers or {})}
    )


def signed_in(request: Request) -> Account:
    """Who asks, which must be known."""
    if request.account is None:
        raise Refusal(401, "Unauthorized", "Invalid username or password.")
    return request.account


def visible(hub: "HubServer", request: Request, kind: str, repo_id: str) -> Repository:
    """A repository, for a request that may read it. To others a private one does not exist."""
    repository = hub.repositories.get(address(kind, repo_id))
    if repository is None or repository.private and not (request.account and request.account.owns(repo_id)):
        raise Refusal(404, "RepoNotFound", "Repository not found")
    return repository


def writable(hub: "HubServer", request: Request, kind: str, repo_id: str, *, proposal: bool = False) -> Repository:
    """A repository, for a request that may write to it, or only propose a change to it."""
    repository = visible(hub, request, kind, repo_id)
    if proposal:
        may_write(request)
    else:
        may_write(request, repo_id)
    return repository


def may_write(request: Request, repo_id: str | None = None) -> Account:
    """Refuses readers, and with `repo_id` those to whom that namespace does not belong."""
    account = signed_in(request)
    if account.role != "write":
        raise Refusal(403, "Forbidden", "This token has no write access: its role is read")
    if repo_id is not None and not account.owns(repo_id):
        raise Refusal(
            403, "Forbidden", f'You don\'t have the rights to write to the namespace "{repo_id.split("/")[0]}"'
        )
    return account
