# SPDX-License-Identifier: Apache-2.0
"""Fetching, against a real package index on the loopback interface, read by the real pip and npm."""

import dataclasses
import hashlib
import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest

from normalign_llava.fetched.fetch import Archive, FetchError, fetch, unpack


pytestmark = pytest.mark.slow


WHEEL, TARBALL = "tiny_part-1.0-py3-none-any.whl", "tiny-part-1.0.0.tgz"


class Registry(http.server.ThreadingHTTPServer):
    """Serves a folder that is a Python index and an npm registry; can stall in the middle of a file."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.stalls, self.stalled, self.closing = False, threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Registry

    def copyfile(self, source, outputfile):
        if self.server.stalls and source.name.endswith(".whl"):
            outputfile.write(source.read(300_000))
            self.server.stalled.set()
            self.server.closing.wait(60)
        super().copyfile(source, outputfile)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    path = tmp_path_factory.mktemp("wheel") / WHEEL
    info = "tiny_part-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_part/weights.bin", bytes(range(256)) * 4096)
        archive.writestr("tiny_part/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture(scope="module")
def tarball():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in (("package.json", b'{"name": "tiny-part", "version": "1.0.0"}'), ("a.png", b"pixels")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def registry(wheel, tarball, monkeypatch, tmp_path):
    served = tmp_path / "served"
    (served / "simple" / "tiny-part").mkdir(parents=True)
    server = Registry(served)
    (served / WHEEL).write_bytes(wheel)
    (served / TARBALL).write_bytes(tarball)
    (served / "simple" / "tiny-part" / "index.html").write_text(f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>')
    entry = {"name": "tiny-part", "version": "1.0.0", "dist": {"tarball": f"{server.url}/{TARBALL}"}}
    document = {"name": "tiny-part", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": entry}}
    (served / "tiny-part").write_text(json.dumps(document))
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("npm_config_registry", server.url)
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def part(wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    digest = hashlib.sha256(wheel).hexdigest()
    return Archive("pip", "tiny-part", "1.0", "MIT", "a test part", digest, ("tiny_part/*.bin",))


def kept(cache):
    """Names in the cache that are not hidden, as locks are."""
    return [path.name for path in (cache / "archives").iterdir() if not path.name.startswith(".")]


def test_fetches_through_the_users_index_once(registry, part, tmp_path, wheel):
    archive = fetch(part)
    assert archive.read_bytes() == wheel
    registry.shutdown()
    assert fetch(part) == archive


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_fetches_through_the_users_npm_registry(registry, part, tmp_path, tarball):
    digest = hashlib.sha256(tarball).hexdigest()
    npm_part = dataclasses.replace(part, client="npm", version="1.0.0", sha256=digest)
    assert npm_part.filename == TARBALL
    assert fetch(npm_part).read_bytes() == tarball
    with pytest.raises(FetchError, match="npm could not fetch it and said:(.|\n)*No matching version"):
        fetch(dataclasses.replace(npm_part, version="2.0.0"))


FETCH = """
import json, sys
from normalign_llava.fetched.fetch import Archive, fetch
print(fetch(Archive(**json.loads(sys.argv[1]))))
"""


def start(part):
    command = [sys.executable, "-c", FETCH, json.dumps(dataclasses.asdict(part))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_fetch_leaves_nothing_that_looks_whole(registry, part, tmp_path, wheel):
    registry.stalls = True
    process = start(part)
    assert registry.stalled.wait(60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert WHEEL not in kept(tmp_path)
    registry.stalls = False
    assert fetch(part).read_bytes() == wheel
    assert kept(tmp_path) == [WHEEL]


@pytest.mark.parametrize("put_by_hand", [False, True])
def test_another_checksum_is_an_error_that_names_both(registry, part, tmp_path, wheel, put_by_hand):
    pinned = dataclasses.replace(part, sha256="0" * 64)
    if put_by_hand:
        (tmp_path / "archives").mkdir()
        (tmp_path / "archives" / WHEEL).write_bytes(wheel)
    with pytest.raises(FetchError) as error:
        fetch(pinned)
    for said in (WHEEL, "0" * 64, hashlib.sha256(wheel).hexdigest()):
        assert said in str(error.value)
    assert kept(tmp_path) == ([WHEEL] if put_by_hand else [])


def test_unpacks_the_wanted_members_only(registry, part):
    folder = unpack(part)
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] == [
        "tiny_part/weights.bin"
    ]
    assert unpack(part) == folder
