"""Functions with many options: type checkers and `help` see each, and a wrong one is named."""

import pydoc
from dataclasses import fields
from inspect import signature
from textwrap import dedent

import pytest
from paths import ROOT
from type_check import link_package, run_mypy

from normalign_llava.assembly.build import BuildOptions, build_checkpoint
from normalign_llava.data.sources.mixtures import LoadOptions, load_data
from normalign_llava.diagnose.run import DiagnosisOptions, diagnose
from normalign_llava.evaluation.run import EvaluateOptions, evaluate
from normalign_llava.export.run import ExportOptions, export_gguf
from normalign_llava.hub_cards.push.publish import PublishOptions, publish


FUNCTIONS = {
    build_checkpoint: BuildOptions,
    diagnose: DiagnosisOptions,
    evaluate: EvaluateOptions,
    export_gguf: ExportOptions,
    load_data: LoadOptions,
    publish: PublishOptions,
}


def function_name(function) -> str:
    return function.__name__


def documented_arguments(function) -> set[str]:
    """The arguments that a docstring explains under `Args:`."""
    section = function.__doc__.partition("Args:\n")[2].partition("\n\n")[0]
    names = set()
    for line in dedent(section).splitlines():
        if not line.startswith(" "):
            names.update(name.strip() for name in line.partition(":")[0].split(","))
    return names


@pytest.mark.parametrize("function", FUNCTIONS, ids=function_name)
def test_help_shows_and_explains_each_option(function):
    names = [field.name for field in fields(FUNCTIONS[function])]
    parameters = signature(function).parameters
    assert sorted(parameters) == sorted(names)
    assert documented_arguments(function) == set(names)
    help_text = pydoc.plain(pydoc.render_doc(function))
    for name in names:
        assert f"{name}: " in help_text.partition("->")[0]


@pytest.mark.parametrize("function", FUNCTIONS, ids=function_name)
def test_an_unknown_option_is_named(function):
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'xyz'.$"):
        function("a", "b", xyz="c")


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [(export_gguf, "dtpye", "dtype"), (build_checkpoint, "chat_tempate", "chat_template")],
)
def test_an_option_that_is_spelled_alike_is_named(function, wrong, right):
    with pytest.raises(TypeError, match=rf"argument '{wrong}'. Did you mean '{right}'\?$"):
        function("a", "b", **{wrong: "c"})


@pytest.mark.parametrize(
    ("arguments", "keywords", "problem"),
    [
        (("a",), {}, "missing a required argument: 'output'"),
        (("a", "b", "c"), {}, "too many positional arguments"),
        (("a", "b"), {"model": "c"}, "multiple values for argument 'model'"),
    ],
)
def test_the_function_is_named_if_an_argument_is_missing_or_too_many(arguments, keywords, problem):
    with pytest.raises(TypeError, match=rf"^export_gguf\(\): {problem}$"):
        export_gguf(*arguments, **keywords)


QUICK = """
from dataclasses import KW_ONLY, dataclass
from keywords import takes_fields

@dataclass
class Options:
    model: str
    _: KW_ONLY
    name: str = "m"

@takes_fields(Options)
def describe(options: Options) -> int:
    return len(options.name)

number: int = describe("a", name="b")
describe(model="a")
describe("a", nane="b")
describe("a", name=3)
describe("a", "b")
text: str = describe("a")
"""

WRONG = """
from normalign_llava import build_checkpoint, evaluate, export_gguf, publish
from normalign_llava.data.sources.mixtures import LoadOptions, load_data
from normalign_llava.diagnose.run import diagnose

publish("a", "b/c", private=True)
evaluate(model="m", tasks=["a"])
build_checkpoint("v", "l", output="o", nane="a")
diagnose("m", nane="a")
evaluate("m", nane="a")
export_gguf("m", "o", nane="a")
publish("a", "b/c", nane="a")
publish("a", "b/c", private="yes")
"""


def reported(folder, code) -> list[tuple[int, str]]:
    """The lines of a script that mypy reports, and the kind of each error."""
    (folder / "script.py").write_text(code)
    checked = run_mypy("script.py", cwd=folder, capture_output=True, text=True)
    errors = []
    for line in checked.stdout.splitlines():
        if line.startswith("script.py") and " error: " in line:
            errors.append((int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]")))
    return errors


def test_a_type_checker_sees_the_fields_as_arguments(tmp_path):
    (tmp_path / "keywords.py").write_bytes((ROOT / "keywords.py").read_bytes())
    assert reported(tmp_path, QUICK) == [
        (17, "call-arg"),
        (18, "arg-type"),
        (19, "call-arg"),
        (20, "assignment"),
    ]


@pytest.mark.nightly
def test_a_type_checker_reports_a_wrong_option_of_each_function(tmp_path):
    link_package(tmp_path)
    assert reported(tmp_path, WRONG) == [
        (7, "call-arg"),
        (8, "call-arg"),
        (9, "call-arg"),
        (10, "call-arg"),
        (11, "call-arg"),
        (12, "arg-type"),
    ]
