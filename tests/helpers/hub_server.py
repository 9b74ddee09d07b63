"""A real HTTP hub on the loopback interface, faults included: the real client pushes and pulls.

`HF_ENDPOINT` is read when huggingface_hub is imported, so a client of this server runs in a process
of its own, with [`HubServer.environment`]. What is stored and answered is in hub_answers.py.
"""

import os
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, RLock, Thread
from urllib.parse import parse_qs, unquote, urlsplit

from hub_answers import ROUTES, Account, Answer, Refusal, Repository, Request, address, reply


GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass
class Fault:
    """What becomes of the first `times` requests `"METHOD /path"` that match the pattern `request`.

    `kind` is the status of a refusal; or "pause", which sets `reached` and waits for `released`.
    """

    kind: str | int
    request: str
    times: int = 1
    reached: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)


class HubServer:
    """Serves repositories, to begin with the files of folders, while its `with` block runs."""

    def __init__(self, repositories: dict[str, Path] | None = None):
        self.lock = RLock()
        self.clear()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        for repo_id, folder in (repositories or {}).items():
            self.serve(repo_id, folder)

    def clear(self) -> None:
        """Makes it an empty hub without accounts, at the same address."""
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # method and path of each, in order
        self.sent: Counter[str] = Counter()  # "namespace/name/file" -> bytes of it
        self.received: Counter[str] = Counter()  # SHA-256 -> bytes of LFS content
        self.accounts: dict[str, Account] = {}
        self.faults: list[Fault] = []

    def environment(self, home: Path) -> dict[str, str]:
        """Environment for a client process with `home` as its cache."""
        foreign = ("HF_", "HUGGING_FACE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

    def token(self, name: str, role: str = "write") -> str:
        """A token of the account `name`, to "read" or to "write" in its own namespace."""
        token = f"hf_{secrets.token_hex(17)}"
        self.accounts[token] = Account(name, role)
        return token

    def create(self, repo_id: str, *, kind="model", private=False, files=None) -> Repository:
        """A repository as the Hub makes one, with a `.gitattributes`; then a commit of `files`."""
        repository = Repository(address(kind, repo_id), private)
        self.repositories[repository.address] = repository
        repository.change({".gitattributes": GITATTRIBUTES})
        if files:
            repository.change(files)
        return repository

    def serve(self, repo_id: str, folder: Path, kind: str = "model") -> Repository:
        """A public repository whose only commit is the files of a folder, and nothing else."""
        repository = self.repositories[address(kind, repo_id)] = Repository(address(kind, repo_id))
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        repository.change({str(file.relative_to(folder)): file.read_bytes() for file in files})
        return repository

    def repository(self, repo_id: str, kind: str = "model") -> Repository:
        """What the hub has under a name; KeyError if it has nothing."""
        return self.repositories[address(kind, repo_id)]

    def fault(self, kind: str | int, request: str, *, times: int = 1) -> Fault:
        """Makes requests fail or wait: see [`Fault`]."""
        self.faults.append(Fault(kind, request, times))
        return self.faults[-1]

    def __enter__(self) -> "HubServer":
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        try:
            self._serve()
        except ConnectionError:  # the client went away: a test ended it
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        address = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        line = f"{self.command} {address.path}"
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionAbortedError("the client went away")
        with self.hub.lock:
            self.hub.requests.append(line)
            faults = [fault for fault in self.hub.faults if fault.times]
            fault = next((fault for fault in faults if re.search(fault.request, line)), None)
            if fault:
                fault.times -= 1
        if fault and fault.kind == "pause":
            fault.reached.set()
            fault.released.wait()
        elif fault:
            return self._send(reply({"error": "this request was made to fail"}, int(fault.kind)))
        try:
            with self.hub.lock:
                answer = self._answer(address.path, parse_qs(address.query), body)
        except Refusal as refusal:
            answer = reply({"error": str(refusal)}, refusal.status, refusal.headers)
        self._send(answer)

    def _answer(self, path: str, query: dict[str, list[str]], body: bytes) -> Answer:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        account = self.hub.accounts.get(token)
        if token and account is None:
            raise Refusal(401, "Unauthorized", "Invalid credentials in Authorization header")
        request = Request(query, self.headers.get("Range", ""), body, account)
        for method, pattern, act in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command.replace("HEAD", "GET"):
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                return act(self.hub, request, **groups)
        raise Refusal(404, "NotFound", f"this hub does not know {self.command} {path}")

    def _send(self, answer: Answer) -> None:
        if self.command == "GET" and answer.download:
            with self.hub.lock:
                self.hub.sent[answer.download] += len(answer.body)
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *args: object) -> None:
        pass  # the test that asks for `requests` reports them
