"""Runs mypy on the package, which it cannot find by itself because the repository's root is the package."""

import subprocess
import sys
import tempfile
from pathlib import Path


root = Path(__file__).resolve().parents[2]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "normalign_llava").symlink_to(root)
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "-p", "normalign_llava"]
    sys.exit(subprocess.run([*command, "--cache-dir", str(root / ".mypy_cache")], cwd=folder).returncode)
