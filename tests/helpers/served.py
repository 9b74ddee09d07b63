"""`transformers serve` in a process that cannot import the package."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from remote_code import BLOCK


@contextmanager
def served(folder: Path, arguments: list[str]) -> Iterator[str]:
    """The address of a server that was begun in a folder with these words after `transformers`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = folder / "log"
    code = BLOCK + "from transformers.cli.transformers import main; main()"
    where = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    words = [sys.executable, "-c", code, *arguments, *where]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(words, env=environment, cwd=folder, stdout=file, stderr=file)
    try:
        while True:
            assert server.poll() is None, log.read_text()
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()
