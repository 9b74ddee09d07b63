"""Runs mypy on the package, which is the repository's root, and on the scripts beside it."""

import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def link_package(folder) -> None:
    """Puts the package into a folder under its name. By itself, mypy would not see it."""
    (Path(folder) / "normalign_llava").symlink_to(ROOT)


def run_mypy(folder, *words, **options) -> subprocess.CompletedProcess:
    """Runs mypy in a folder with the project's settings."""
    settings = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    command = [sys.executable, "-m", "mypy", *settings, *words]
    return subprocess.run(command, cwd=folder, **options)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        link_package(temporary)
        others = "/(benchmarks|build|experiments|tests)/"
        package = run_mypy(temporary, "--exclude", others, "-p", "normalign_llava")
    scripts = run_mypy(ROOT, "benchmarks", "experiments")
    sys.exit(package.returncode or scripts.returncode)
