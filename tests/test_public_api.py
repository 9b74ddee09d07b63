"""What scripts build on is public: experiments and benchmarks import only exported names."""

import ast

import pytest
from paths import ROOT

import normalign_llava


PACKAGE = "normalign_llava"
SCRIPTS = sorted([*ROOT.glob("experiments/*.py"), *ROOT.glob("benchmarks/*.py")])


def is_of_package(module_name) -> bool:
    return module_name.partition(".")[0] == PACKAGE


def private_names(node) -> list[str]:
    """What a statement or expression uses of the package, except for the names that it exports."""
    names = []
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name != PACKAGE and is_of_package(alias.name):
                names.append(alias.name)
    elif isinstance(node, ast.ImportFrom) and is_of_package(node.module or ""):
        for alias in node.names:
            if node.module != PACKAGE or alias.name not in normalign_llava.__all__:
                names.append(f"{node.module}.{alias.name}")
    elif isinstance(node, ast.Attribute):
        is_exported = node.attr in normalign_llava.__all__
        if ast.unparse(node.value) == PACKAGE and not is_exported:
            names.append(f"{PACKAGE}.{node.attr}")
    return names


def private_imports(code: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(code)):
        names += private_names(node)
    return names


def script_name(script) -> str:
    return f"{script.parent.name}/{script.name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=script_name)
def test_scripts_import_only_what_the_package_exports(script):
    code = script.read_text(encoding="utf-8")
    assert private_imports(code) == []
    assert "sys.path" not in code


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("from normalign_llava import probe", []),
        ("import normalign_llava\nnormalign_llava.probe", []),
        ("from normalign_llava import cli", ["normalign_llava.cli"]),
        (
            "def f():\n    from normalign_llava.train.run import train",
            ["normalign_llava.train.run.train"],
        ),
        ("import normalign_llava.errors as errors", ["normalign_llava.errors"]),
        ("import normalign_llava\nnormalign_llava._EXPORTS", ["normalign_llava._EXPORTS"]),
    ],
)
def test_an_import_of_anything_else_is_found(code, private):
    assert private_imports(code) == private


def test_every_exported_name_exists():
    for exported_name in normalign_llava.__all__:
        assert getattr(normalign_llava, exported_name) is not None
    assert dir(normalign_llava) == sorted(normalign_llava.__all__)


def test_a_name_that_is_not_exported_is_missing():
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        getattr(normalign_llava, "gone")  # noqa: B009
