"""The texts that each command may print, found in the source: which functions it reaches."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from paths import ROOT


PACKAGE = "normalign_llava"
FOLDERS = {file.parent for file in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"\bnormalign [a-z][^`\n]*")


@dataclass
class Module:
    """A file of the package: its definitions, and what the names in it stand for."""

    name: str
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


Node = tuple[str, str]  # module and top-level name in it


def module_name(file: Path) -> str:
    """`normalign_llava.train.run` of `train/run.py`."""
    name_parts = file.relative_to(ROOT).with_suffix("").parts
    if file.name == "__init__.py":
        name_parts = name_parts[:-1]
    return ".".join((PACKAGE, *name_parts))


@cache
def modules() -> dict[str, Module]:
    """All modules of the package by name."""
    file_paths = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        file_paths += folder.rglob("*.py")
    modules_by_name = {}
    for file_path in file_paths:
        module = read(file_path)
        modules_by_name[module.name] = module
    return modules_by_name


def read(file_path: Path) -> Module:
    module = Module(module_name(file_path))
    package = module.name
    if file_path.name != "__init__.py":
        package = module.name.rpartition(".")[0]
    syntax_tree = ast.parse(file_path.read_text(encoding="utf-8"))
    for statement in syntax_tree.body:
        for defined_name in defined(statement):
            module.definitions[defined_name] = statement
    for node in ast.walk(syntax_tree):
        if isinstance(node, ast.ImportFrom):
            source_module = imported_module(node, package)
            for alias in node.names:
                local_name = alias.asname or alias.name
                module.imports[local_name] = (source_module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                local_name = alias.asname or alias.name
                module.imports[local_name] = (alias.name, None)
    return module


def imported_module(node: ast.ImportFrom, package: str) -> str:
    """The module from which a statement of a package imports."""
    if not node.level:
        return node.module
    package_parts = package.split(".")
    source_parts = package_parts[: len(package_parts) - node.level + 1]
    if node.module:
        source_parts.append(node.module)
    return ".".join(source_parts)


def defined(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def resolve(module: Module, name: str, attribute: str | None) -> Node | None:
    """The definition that a name, or an attribute of a module of that name, stands for."""
    if attribute is None and name in module.definitions:
        return module.name, name
    if name not in module.imports:
        return None
    source_module, imported_name = module.imports[name]
    submodule = f"{source_module}.{imported_name}"
    if is_defined(submodule, attribute):
        return submodule, attribute
    if is_defined(source_module, imported_name):
        return source_module, imported_name
    return None


def is_defined(module: str, name: str | None) -> bool:
    """Whether a module of the package defines a name."""
    return module in modules() and name in modules()[module].definitions


def references(module: Module, statement: ast.AST) -> Iterator[Node]:
    """What a definition names, apart from its own arguments and variables."""
    own_names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.arg):
            own_names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own_names.add(node.id)
    for node in ast.walk(statement):
        definition = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            object_name = node.value.id
            if object_name not in own_names:
                definition = resolve(module, object_name, node.attr)
        elif isinstance(node, ast.Name) and node.id not in own_names:
            definition = resolve(module, node.id, None)
        if definition is not None:
            yield definition


def reached(command: str) -> set[Node]:
    """All definitions that the function of a command may use."""
    waiting = [(f"{PACKAGE}.cli", command)]
    seen = set(waiting)
    while waiting:
        waiting_module, definition_name = waiting.pop()
        module = modules()[waiting_module]
        statement = module.definitions[definition_name]
        for node in references(module, statement):
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


def texts(statement: ast.stmt) -> Iterator[str]:
    """The strings in a definition but docstrings and words of other programs' command lines.

    What is filled in is `X`.
    """
    docstrings = set()
    parts_of_f_strings = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
        if isinstance(node, ast.JoinedStr):
            parts_of_f_strings.update(node.values)
    for node in ast.walk(statement):
        if node in docstrings or node in parts_of_f_strings:
            continue
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(text_of_part(part) for part in node.values)
        if " " in text.strip():
            yield text


def text_of_part(part: ast.expr) -> str:
    """The text of a part of an f-string; `X` for what is filled in."""
    if isinstance(part, ast.Constant):
        return part.value
    return "X"
