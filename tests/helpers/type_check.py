"""Runs mypy on the package, which is the repository's root, and on the scripts beside it."""

import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
NOT_OF_THE_PACKAGE = "/(benchmarks|build|experiments|tests)/"


def run_mypy(*words: str, cwd: Path) -> int:
    """The status of mypy with our configuration and cache."""
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
    return subprocess.run(command, cwd=cwd).returncode


def check_package() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # By itself mypy would not see that the root is a package.
        package_link = Path(folder) / "normalign_llava"
        package_link.symlink_to(ROOT)
        return run_mypy(
            "--exclude",
            NOT_OF_THE_PACKAGE,
            "-p",
            "normalign_llava",
            cwd=Path(folder),
        )


def check_scripts() -> int:
    return run_mypy("benchmarks", "experiments", cwd=ROOT)


package_status = check_package()
scripts_status = check_scripts()
sys.exit(package_status or scripts_status)
