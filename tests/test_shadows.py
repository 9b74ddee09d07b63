"""In a clone, `import NAME` from the root finds our NAME before an installed package."""

from importlib.metadata import packages_distributions
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def test_no_folder_or_file_at_the_root_hides_a_package_that_others_import():
    installed = set(packages_distributions()) | {"evaluate"}  # lm-eval imports it if it is there
    ours = {"normalign_llava", "tests"}  # nobody imports an installed `tests`
    folders = {file.parent.name for file in ROOT.glob("*/*.py")}
    modules = {file.stem for file in ROOT.glob("*.py")}
    assert "evaluation" in folders
    assert (folders | modules) & installed - ours == set()
