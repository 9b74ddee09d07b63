"""A small disk, to be filled."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own in memory, with the options `size`: `size=64k`, or `nr_inodes=99`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder]
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
