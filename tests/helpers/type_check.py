"""Runs mypy on the package, which is the repository's root: by itself mypy would not see it."""

import subprocess
import sys
import tempfile
from pathlib import Path


root = Path(__file__).resolve().parents[2]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "normalign_llava").symlink_to(root)
    command = [sys.executable, "-m", "mypy", "-p", "normalign_llava"]
    command += ["--config-file", root / "pyproject.toml", "--cache-dir", root / ".mypy_cache"]
    sys.exit(subprocess.run(command, cwd=folder).returncode)
