"""What the header of the two Hub files tells a reviewer, checked against their syntax trees."""

import ast
import sys
from pathlib import Path

import pytest

import normalign_llava


ROOT = Path(normalign_llava.__file__).parent
FILES = ("configuration_normalign_llava.py", "modeling_normalign_llava.py")
REACHING = {"os", "sys", "io", "pathlib", "shutil", "subprocess", "socket", "urllib", "http", "ctypes", "pickle"}
OPENS = {
    "open",
    "exec",
    "eval",
    "compile",
    "__import__",
    "input",
    "breakpoint",
    "globals",
    "vars",
    "setattr",
    "delattr",
}
REACHES = {"load", "save", "load_file", "save_file", "cached_file", "hf_hub_download", "system", "run", "urlopen"}


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


@pytest.mark.parametrize("name", FILES)
def test_imports_reach_no_files_or_processes(name):
    for node in ast.walk(tree(name)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or node.module == "configuration_normalign_llava"
            modules = [node.module] if node.level == 0 else []
        for module in modules:
            top = module.split(".")[0]
            assert top in {"torch", "transformers"} | (sys.stdlib_module_names - REACHING), module


@pytest.mark.parametrize("name", FILES)
def test_no_files_processes_environment_or_evaluated_text(name):
    calls = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]
    assert calls
    assert not OPENS & {called(node) for node in calls}
    # torch and transformers could be made to load or fetch: none of their functions that do is called.
    last = {called(node).rsplit(".", 1)[-1] for node in calls}
    assert not last & REACHES
    # One import by name, of DeepSpeed, where ZeRO-3 is in use already.
    by_name = [ast.unparse(node) for node in calls if called(node) == "import_module"]
    assert by_name == (["import_module('deepspeed')"] if name == FILES[1] else [])
