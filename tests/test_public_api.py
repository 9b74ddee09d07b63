"""What scripts build on is public: experiments and benchmarks import only exported names."""

import ast

import pytest
from paths import ROOT

import normalign_llava


PACKAGE = "normalign_llava"
SCRIPTS = sorted([*ROOT.glob("experiments/*.py"), *ROOT.glob("benchmarks/*.py")])


def private_imports(code: str) -> list[str]:
    """Returns what a script imports of the package, except for the names that it exports."""
    private = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != PACKAGE]
            private += [name for name in names if name.partition(".")[0] == PACKAGE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            for alias in node.names:
                if node.module != PACKAGE or alias.name not in normalign_llava.__all__:
                    private.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == PACKAGE:
            names = {node.attr} - {*normalign_llava.__all__}
            private += [f"{PACKAGE}.{name}" for name in names]
    return private


@pytest.mark.parametrize(
    "script", SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.name}"
)
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
    for name in normalign_llava.__all__:
        assert getattr(normalign_llava, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        getattr(normalign_llava, "gone")  # noqa: B009
    assert dir(normalign_llava) == sorted(normalign_llava.__all__)
