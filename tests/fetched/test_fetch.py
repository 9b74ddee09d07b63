# SPDX-License-Identifier: Apache-2.0
"""Fetching, against a real package index on the loopback interface, read by the real pip."""

import dataclasses
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from functools import partial

import pytest

from normalign_llava.fetched.fetch import Archive, FetchError, fetch, unpack


pytestmark = pytest.mark.slow
WHEEL = "tiny_part-1.0-py3-none-any.whl"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder that is a Python index; can stall in the middle of a file."""

    stalls, stalled, closing = False, threading.Event(), threading.Event()

    def copyfile(self, source, outputfile):
        if Handler.stalls and source.name.endswith(".whl"):
            outputfile.write(source.read(300_000))
            self.stalled.set()
            self.closing.wait(60)
        super().copyfile(source, outputfile)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    served = tmp_path_factory.mktemp("served")
    index = served / "simple" / "tiny-part" / "index.html"
    index.parent.mkdir(parents=True)
    index.write_text(f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>')
    info = "tiny_part-1.0.dist-info"
    with zipfile.ZipFile(served / WHEEL, "w") as file:
        file.writestr("tiny_part/weights.bin", bytes(range(256)) * 4096)
        file.writestr("tiny_part/__init__.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr(f"{info}/RECORD", "")
    handler = partial(Handler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads, server.wheel = True, (served / WHEEL).read_bytes()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        Handler.closing.set()
        server.shutdown()


@pytest.fixture
def part(registry, monkeypatch, tmp_path):
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{registry.server_port}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    digest = hashlib.sha256(registry.wheel).hexdigest()
    return Archive("pip", "tiny-part", "1.0", "MIT", "a test part", digest, ("tiny_part/*.bin",))


def kept(cache):
    """Names in the cache that are not hidden, as locks are."""
    return [path.name for path in (cache / "archives").iterdir() if not path.name.startswith(".")]


def test_fetches_once_through_the_users_index_and_unpacks_the_wanted(part, registry, monkeypatch):
    archive = fetch(part)
    assert archive.read_bytes() == registry.wheel
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert fetch(part) == archive
    folder = unpack(part)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert names == ["tiny_part/weights.bin"] and unpack(part) == folder


FETCH = """
import json, sys
from normalign_llava.fetched.fetch import Archive, fetch
fetch(Archive(**json.loads(sys.argv[1])))
"""


def test_a_killed_fetch_leaves_nothing_that_looks_whole(part, tmp_path, registry, monkeypatch):
    monkeypatch.setattr(Handler, "stalls", True)
    command = [sys.executable, "-c", FETCH, json.dumps(dataclasses.asdict(part))]
    process = subprocess.Popen(command, start_new_session=True)
    assert Handler.stalled.wait(60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert WHEEL not in kept(tmp_path)
    monkeypatch.setattr(Handler, "stalls", False)
    assert fetch(part).read_bytes() == registry.wheel
    assert kept(tmp_path) == [WHEEL]


@pytest.mark.parametrize("put_by_hand", [False, True])
def test_another_checksum_is_an_error_that_names_both(part, tmp_path, registry, put_by_hand):
    if put_by_hand:
        (tmp_path / "archives").mkdir()
        (tmp_path / "archives" / WHEEL).write_bytes(registry.wheel)
    with pytest.raises(FetchError, match=f"{WHEEL} is {part.sha256}, not {'0' * 64}"):
        fetch(dataclasses.replace(part, sha256="0" * 64))
    assert kept(tmp_path) == ([WHEEL] if put_by_hand else [])
