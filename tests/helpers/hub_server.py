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

    `kind` is the status of a refusal. Or it is "pause": sets `reached` and waits for `released`.
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
        handler_class = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_class)
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
        variables = {}
        for variable_name, value in os.environ.items():
            if not variable_name.startswith(("HF_", "HUGGING_FACE")):
                variables[variable_name] = value
        return {
            **variables,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
        }

    def token(self, name: str, role: str = "write") -> str:
        """A token of the account `name`, to "read" or to "write" in its own namespace."""
        token = f"hf_{secrets.token_hex(17)}"
        self.accounts[token] = Account(name, role)
        return token

    def create(
        self,
        repo_id: str,
        *,
        kind: str = "model",
        private: bool = False,
        files: dict[str, bytes] | None = None,
    ) -> Repository:
        """A repository as the Hub makes one, with a `.gitattributes`; then a commit of `files`."""
        repository = Repository(address(kind, repo_id), private)
        self.repositories[repository.address] = repository
        repository.change({".gitattributes": GITATTRIBUTES})
        if files:
            repository.change(files)
        return repository

    def serve(self, repo_id: str, folder: Path, kind: str = "model") -> Repository:
        """A public repository whose only commit is the files of a folder, and nothing else."""
        repository = Repository(address(kind, repo_id))
        self.repositories[repository.address] = repository
        contents = {}
        for file_path in sorted(folder.rglob("*")):
            if file_path.is_file():
                name_in_repository = str(file_path.relative_to(folder))
                contents[name_in_repository] = file_path.read_bytes()
        repository.change(contents)
        return repository

    def repository(self, repo_id: str, kind: str = "model") -> Repository:
        """What the hub has under a name; KeyError if it has nothing."""
        return self.repositories[address(kind, repo_id)]

    def fault(self, kind: str | int, request: str, *, times: int = 1) -> Fault:
        """Makes requests fail or wait: see [`Fault`]."""
        fault = Fault(kind, request, times)
        self.faults.append(fault)
        return fault

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
        url = urlsplit(self.path)
        body_length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(body_length)
        if len(body) < body_length:
            raise ConnectionAbortedError("the client went away")
        request_line = f"{self.command} {url.path}"
        with self.hub.lock:
            self.hub.requests.append(request_line)
            fault = self._next_fault(request_line)
        if fault and fault.kind != "pause":
            error = {"error": "this request was made to fail"}
            return self._send(reply(error, int(fault.kind)))
        if fault:
            fault.reached.set()
            fault.released.wait()
        try:
            with self.hub.lock:
                answer = self._answer(url.path, parse_qs(url.query), body)
        except Refusal as refusal:
            error = {"error": str(refusal)}
            answer = reply(error, refusal.status, refusal.headers)
        self._send(answer)

    def _next_fault(self, request_line: str) -> Fault | None:
        """The first fault that this request meets, counted as met."""
        for fault in self.hub.faults:
            if fault.times and re.search(fault.request, request_line):
                fault.times -= 1
                return fault
        return None

    def _answer(self, path: str, query: dict[str, list[str]], body: bytes) -> Answer:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        account = self.hub.accounts.get(token)
        if token and account is None:
            raise Refusal(401, "Unauthorized", "Invalid credentials in Authorization header")
        byte_range = self.headers.get("Range", "")
        request = Request(query, byte_range, body, account)
        command = self.command.replace("HEAD", "GET")
        for method, pattern, answer_function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or method != command:
                continue
            path_parts = {}
            for part_name, quoted_text in match.groupdict().items():
                if quoted_text:
                    path_parts[part_name] = unquote(quoted_text)
            return answer_function(self.hub, request, **path_parts)
        raise Refusal(404, "NotFound", f"this hub does not know {self.command} {path}")

    def _send(self, answer: Answer) -> None:
        if self.command == "GET" and answer.download:
            with self.hub.lock:
                self.hub.sent[answer.download] += len(answer.body)
        self.send_response(answer.status)
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        for header_name, value in headers.items():
            self.send_header(header_name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *args: object) -> None:
        """Nothing is logged: the test that asks for `requests` reports them."""
