"""Code in a process that cannot import the package."""

import json
import os
import subprocess
import sys


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "normalign_llava":
            raise ModuleNotFoundError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def run_blocked(tmp_path, code, *arguments, **variables):
    """Runs `code` with the package blocked and an empty cache; what it prints last is JSON."""
    home = tmp_path / "empty home"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **variables}
    words = [sys.executable, "-c", BLOCK + code, *map(str, arguments)]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
