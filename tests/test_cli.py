"""The command line as a person meets it: help at once, tables, errors that say what to do."""

import json
import subprocess
import sys

import pytest
import tiny_parts as parts
from typer.testing import CliRunner

from normalign_llava.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", ["", "build", "gain", "quickstart", "publish", "card", "demo", "serve"])
def test_help_needs_no_torch(command):
    code = (
        "import sys; from typer.testing import CliRunner; from normalign_llava.cli import app; "
        f"result = CliRunner().invoke(app, {[command, '--help'] if command else ['--help']!r}); "
        "assert result.exit_code == 0, result.output; assert 'Usage' in result.output; "
        "heavy = {'torch', 'transformers', 'trl'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_in_errors_are_not_broken_into_lines(tmp_path):
    folder = tmp_path / ("x" * 250)
    assert str(folder) in invoke("card", folder).stderr


def test_importing_the_package_is_lazy_and_complete():
    code = (
        "import sys, normalign_llava; assert 'torch' not in sys.modules; "
        "[getattr(normalign_llava, name) for name in normalign_llava.__all__]; "
        "from transformers import AutoConfig; AutoConfig.for_model('normalign_llava')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_build_prints_what_was_built(tmp_path):
    vision, language = parts.vision(tmp_path / "vision"), parts.language(tmp_path / "language")
    options = ["--output", tmp_path / "out", "--arm", "aligned", "--feature-layer", "-3,-1"]
    done = invoke("build", "--vision", vision, "--language", language, *options)
    assert done.exit_code == 0, done.output
    for words in ("N_text", "gain", "visual tokens per image", "aligned", "[-3, -1]", "M parameters"):
        assert words in done.output
    measured = invoke("gain", tmp_path / "out", "--json", "--top", 2)
    assert json.loads(measured.output)["n_text"] == pytest.approx(
        json.loads((tmp_path / "out/build.json").read_text())["n_text"]
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["build", "--output", "x"], ["--vision and --language, or --from-llava"]),
        (["build", "--output", "x", "--from-llava", "a", "--vision", "b"], ["leave out --vision"]),
        (
            ["build", "--output", "x", "--vision", "v", "--language", "l", "--feature-layer", "last"],
            ["--feature-layer", "last"],
        ),
        (["build", "--output", "x", "--vision", "v", "--language", "l", "--arm", "best"], ["arm", "'gwc'", "'best'"]),
        (["gain", "/no/such/folder"], ["/no/such/folder"]),
    ],
)
def test_errors_are_lines_and_not_tracebacks(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code != 0 and not (tmp_path / "x").exists()
    assert "Traceback" not in done.output and all(word in done.output for word in words), done.output
