"""`serve` in a process of its own, and requests to it as they go over the wire."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx


SERVE = """
import json, sys
from normalign_llava.serve import serve
serve(sys.argv[1], port=0, device="cpu", **json.loads(sys.argv[2]))
"""


class Server:
    """A server's process, and its address."""

    def __init__(self, process, url):
        self.process, self.url, self._client = process, url, httpx.Client(timeout=300)

    def post(self, body):
        """The answer to a request: a dict, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        return self._client.post(f"{self.url}/chat/completions", content=content, headers=headers)

    def ask(self, text="hi", **options):
        """The answer to a question that is answered at once."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0, **options}
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    @property
    def requests(self):
        """How many requests the server says are under way."""
        return self._client.get(self.url.removesuffix("/v1") + "/health").json()["requests"]

    def wait_for_requests(self, count):
        """Returns when so many are under way."""
        deadline = time.monotonic() + 300
        while (now := self.requests) != count:
            assert time.monotonic() < deadline, f"{now} requests are under way, not {count}"
            time.sleep(0.05)

    def begin(self, body, sent=None):
        """A connection on which the body, or its first `sent` bytes, has been sent and nothing read."""
        host, port = self.url.split("/")[2].split(":")
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((host, int(port)), timeout=300)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:sent])
        return connection


@contextmanager
def served(checkpoint, folder, environment=None, typed="", **options):
    """Yields the server of a checkpoint, with `typed` on its standard input."""
    environment = {**os.environ, "HF_HOME": str(folder / "home"), **(environment or {"HF_HUB_OFFLINE": "1"})}
    (folder / "typed").write_text(typed)
    with open(folder / "log", "w") as log, open(folder / "typed") as stdin:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(checkpoint), json.dumps(options)],
            env=environment, cwd=folder, stdin=stdin, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving "), (folder / "log").read_text()
        yield Server(process, line.split()[-1])
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
