"""In a clone, `import NAME` from the root finds our NAME before an installed package."""

from importlib.metadata import packages_distributions
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def test_no_folder_or_file_at_the_root_hides_a_package_that_others_import():
    folder_names = {path.parent.name for path in ROOT.glob("*/*.py")}
    module_names = {path.stem for path in ROOT.glob("*.py")}
    assert "evaluation" in folder_names

    installed_names = set(packages_distributions())
    installed_names.add("evaluate")  # lm-eval imports it if it is there
    # Nobody imports an installed `tests`.
    allowed_names = {"normalign_llava", "tests"}
    hidden_names = (folder_names | module_names) & installed_names
    assert hidden_names - allowed_names == set()
