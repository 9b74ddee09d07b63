"""Runs mypy on the package, which is the repository's root, and on the scripts beside it."""

import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
NOT_OF_THE_PACKAGE = "/(benchmarks|build|experiments|tests)/"


def run_mypy(*words: str, cwd: Path, **options) -> subprocess.CompletedProcess:
    """Runs mypy with our configuration and cache. `options` are of `subprocess.run`."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        *words,
    ]
    return subprocess.run(command, cwd=cwd, **options)


def link_package(folder: Path) -> None:
    """Puts the package into a folder. By itself mypy would not see that the root is a package."""
    (folder / "normalign_llava").symlink_to(ROOT)


def check_package() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        link_package(folder)
        words = ["--exclude", NOT_OF_THE_PACKAGE, "-p", "normalign_llava"]
        return run_mypy(*words, cwd=folder).returncode


def check_scripts() -> int:
    return run_mypy("benchmarks", "experiments", cwd=ROOT).returncode


if __name__ == "__main__":
    package_status = check_package()
    scripts_status = check_scripts()
    sys.exit(package_status or scripts_status)
