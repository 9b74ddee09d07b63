"""The wheel contains the package and its data, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The sources that a clone would have, away from anything that lies about in the working tree."""
    copy = tmp_path_factory.mktemp("tree") / "normalign"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


def sources(tree):
    rooms = [file.parent for file in tree.glob("*/__init__.py")]
    files = [*tree.glob("*.py"), tree / "py.typed", *(file for room in rooms for file in room.rglob("*"))]
    return {str(file.relative_to(tree)) for file in files if file.is_file()}


def test_wheel(tree, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name.removeprefix("normalign_llava/") for name in names if name.startswith("normalign_llava/")}
    assert package == sources(tree)
    others = {name.split("/")[0] for name in names if not name.startswith("normalign_llava/")}
    (about,) = others
    assert about == f"{wheel.name.split('-py3')[0]}.dist-info"
