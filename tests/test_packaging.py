"""The wheel contains the package and its data, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_has_what_git_has_of_the_package(tmp_path):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    tree = tmp_path / "tree"  # away from anything that lies about in the working tree
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    files = [*tree.glob("*.py"), tree / "py.typed"]
    for file in tree.glob("*/__init__.py"):
        files += file.parent.rglob("*")
    sources = {f"normalign_llava/{file.relative_to(tree)}" for file in files if file.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(tree)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("normalign_llava/")}
    assert package == sources
    (about,) = {name.split("/")[0] for name in names - package}
    assert about == f"{wheel.name.split('-py3')[0]}.dist-info"
    entries = zipfile.ZipFile(wheel).read(f"{about}/entry_points.txt").decode()
    assert "[lmms_eval.models]\nnormalign_llava = normalign_llava.evaluation:lmms_model" in entries
