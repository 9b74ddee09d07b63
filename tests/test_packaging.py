"""The wheel contains the package and its data, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


def list_files() -> list[str]:
    """The files that git has, or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("needs a git checkout")
    return [file_name for file_name in listing.stdout.splitlines() if (ROOT / file_name).exists()]


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """A copy of these files, away from anything else in the working tree."""
    tree = tmp_path_factory.mktemp("source") / "tree"
    for file_name in list_files():
        copy = tree / file_name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file_name, copy)
    return tree


@pytest.fixture(scope="module")
def wheel_path(source_tree, tmp_path_factory):
    wheel_folder = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "-w", str(wheel_folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source_tree)],
        check=True,
        capture_output=True,
    )
    (path,) = wheel_folder.glob("*.whl")
    return path


def test_the_wheel_has_what_git_has_of_the_package(source_tree, wheel_path):
    source_files = [*source_tree.glob("*.py"), source_tree / "py.typed"]
    for init_file in source_tree.glob("*/__init__.py"):
        source_files += init_file.parent.rglob("*")
    expected_names = set()
    for source_file in source_files:
        if source_file.is_file():
            expected_names.add(f"normalign_llava/{source_file.relative_to(source_tree)}")

    wheel_names = set(zipfile.ZipFile(wheel_path).namelist())
    package_names = {name for name in wheel_names if name.startswith("normalign_llava/")}
    assert package_names == expected_names

    (metadata_folder,) = {name.split("/")[0] for name in wheel_names - package_names}
    wheel_name, _ = wheel_path.name.split("-py3")
    assert metadata_folder == f"{wheel_name}.dist-info"


def test_the_wheel_registers_the_model_of_lmms_eval(wheel_path):
    wheel_name, _ = wheel_path.name.split("-py3")
    entry_points = zipfile.ZipFile(wheel_path).read(f"{wheel_name}.dist-info/entry_points.txt")
    expected = "[lmms_eval.models]\nnormalign_llava = normalign_llava.evaluation:lmms_model"
    assert expected in entry_points.decode()
