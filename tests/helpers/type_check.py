"""Runs mypy on the package, which is the repository's root, and on the scripts beside it."""

import subprocess
import sys
import tempfile
from pathlib import Path


root = Path(__file__).resolve().parents[2]
options = ["--config-file", root / "pyproject.toml", "--cache-dir", root / ".mypy_cache"]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "normalign_llava").symlink_to(root)  # by itself mypy would not see it
    command = [sys.executable, "-m", "mypy", *options]
    others = "/(benchmarks|build|experiments|tests)/"
    package = subprocess.run([*command, "--exclude", others, "-p", "normalign_llava"], cwd=folder)
    scripts = subprocess.run([*command, "benchmarks", "experiments"], cwd=root)
sys.exit(package.returncode or scripts.returncode)
