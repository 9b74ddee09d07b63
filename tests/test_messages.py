"""A command or an option that is printed or shown exists, in the command that prints it."""

import json
import re
import shlex

import pytest
import typer
from messages import COMMAND, OPTION, modules, reached, texts
from paths import DOCS, ROOT

from normalign_llava.cli import app
from normalign_llava.train.command import next_command
from normalign_llava.train.parsing import option_parser


COMMANDS = typer.main.get_command(app).commands
# It sets the options of the commands that it runs itself.
ASKED = sorted(COMMANDS.keys() - {"quickstart"})
# Made of parts, the whole is tested below; a pattern; usage; another program's command.
PARTS = ("next_command", "after_stop", "_OURS", "USAGE", "Archive")
# What a command reaches in the source, but refuses before.
REFUSED_BEFORE = {("gain", "--base"), ("gain", "--base-quantization")}  # adapters


def options_of(command):
    """The options of a command, as they are written."""
    words = {word for option in COMMANDS[command].params for word in option.opts}
    words |= {word for option in COMMANDS[command].params for word in option.secondary_opts}
    if command == "train":
        words |= {*option_parser()._option_string_actions, "--help-all"}
    return words


def check(line):
    """Raises AssertionError unless a command line has a command and options that exist."""
    program, command, *words = shlex.split(line.replace("...", ""))
    assert program == "normalign" and command in COMMANDS, line
    known = {*options_of(command), "--option"}  # any option, in a line on usage
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{line}: there is no {word}"
    if command == "train":
        return
    context = COMMANDS[command].context_class(COMMANDS[command], info_name=command)
    _, extra, _ = COMMANDS[command].make_parser(context).parse_args(list(words))
    assert not extra, f"{line}: {extra} would not be read"


@pytest.mark.parametrize("command", ASKED)
def test_options_that_a_command_s_messages_name_are_its_own(command):
    known = options_of(command)
    for module_of, name in reached(command):
        if module_of == "normalign_llava.cli" or name in PARTS:
            continue
        for text in texts(modules()[module_of].definitions[name]):
            for option in OPTION.findall(COMMAND.sub("", text)):
                if (command, option) in REFUSED_BEFORE:
                    continue
                assert option in known, f"{module_of}.{name} says {text!r} in `normalign {command}`"


def test_commands_in_messages_have_the_options_that_they_name():
    found = []
    for module in modules().values():
        for name, statement in module.definitions.items():
            if name in PARTS or module.name.endswith(".cli"):
                continue
            for text in texts(statement):
                found += COMMAND.findall(text)
    assert len(found) > 15
    for line in found:
        words = line.rstrip(".,;: ").split()
        assert words[1] in COMMANDS, line
        for option in OPTION.findall(line):
            assert option in options_of(words[1]), line


@pytest.mark.parametrize("stage", [None, "build", "align", "tune"])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_next_command_can_be_run(stage, adapters):
    check(next_command("a model", stage, adapters=adapters))


def shown_commands():
    """The command lines in README, docs, experiments, notebooks and the templates of cards."""
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "experiments").glob("*.md")]
    pages.remove(ROOT / "experiments" / "first.md")  # whose commands are those of a commit
    pages += (ROOT / "hub_cards").rglob("templates/*")
    lines = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.S):
            joined = block.replace("\\\n", " ")
            lines += [line.split(" #")[0] for line in joined.splitlines()]
        lines += re.findall(r"`(normalign [^`\n]+)`", text)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            source = "".join(cell["source"]).replace("\\\n", " ")
            lines += [line.lstrip("!% ") for line in source.splitlines()]
    return sorted({line.strip() for line in lines if line.strip().startswith("normalign ")})


def test_commands_that_pages_show_exist():
    lines = shown_commands()
    assert len(lines) > 40
    for line in lines:
        check(line.replace("{{", "").replace("}}", ""))
