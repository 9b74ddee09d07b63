"""A real HTTP hub on the loopback interface, for the real client: read-only, files from folders, bytes counted.

`HF_ENDPOINT` is read when huggingface_hub is imported, so a client of this server runs in a process of its own, with
[`HubServer.environment`].
"""

import hashlib
import json
import os
import re
from collections import Counter
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit


LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")


class Repository:
    """A model repository with one commit on `main`: the files of a folder."""

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder

    @cached_property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files().items())).encode()).hexdigest()

    def files(self) -> dict[str, int]:
        """Path in the repository -> size in bytes."""
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def entry(self, path: str) -> dict:
        """A file as `tree` and `paths-info` list it."""
        content = (self.folder / path).read_bytes()
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if path.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry


class HubServer:
    """Serves repositories while its `with` block runs.

    Args:
        repositories: name (`"namespace/name"`) -> folder.

    Attributes:
        sent: path of a file (`"namespace/name/file"`) -> bytes of it that were sent.
        requests: method and path of every request, in order.
    """

    def __init__(self, repositories: dict[str, Path]):
        self.repositories = {name: Repository(name, folder) for name, folder in repositories.items()}
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Environment for a client process with `home` as its cache."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
        return {**inherited, "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}

    def __enter__(self) -> "HubServer":
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {url.path}")
        path = unquote(url.path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?", path):
            self._api(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._refuse(404, "NotFound", f"this hub does not know {self.command} {path}")

    do_HEAD = do_GET
    do_POST = do_GET

    def _api(self, name: str, what: str | None, revision: str | None, folder: str | None) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if (repository := self._repository(name, revision or "main")) is None:
            return
        files = repository.files()
        if what == "tree":
            inside = f"{(folder or '').strip('/')}/".lstrip("/")
            listed = [path for path in files if path.startswith(inside)]
            if "recursive" not in self.query:
                listed = [path for path in listed if "/" not in path.removeprefix(inside)]
            self._json([repository.entry(path) for path in listed])
        elif what == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            self._json([repository.entry(path) for path in asked if path in files])
        else:
            self._json(
                {
                    "id": name,
                    "sha": repository.commit,
                    "private": False,
                    "gated": False,
                    "tags": [],
                    "siblings": [{"rfilename": path} for path in files],
                }
            )

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (repository := self._repository(name, revision)) is None:
            return
        if path not in repository.files():
            return self._refuse(404, "EntryNotFound", f"{name} has no {path}", {"X-Repo-Commit": repository.commit})
        content, entry = (repository.folder / path).read_bytes(), repository.entry(path)
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if lfs := entry.get("lfs"):
            headers |= {"X-Linked-Etag": f'"{lfs["oid"]}"', "X-Linked-Size": str(lfs["size"])}
        status, size = 200, len(content)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
            if first >= size:
                return self._refuse(416, "RangeNotSatisfiable", f"{path} has {size} bytes")
            status, content = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        if self.command == "GET":
            self.hub.sent[f"{name}/{path}"] += len(content)
        self._send(status, content, {"Content-Type": "application/octet-stream", **headers})

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif revision not in ("main", repository.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass  # the test that asks for `requests` reports them
