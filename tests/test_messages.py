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
from normalign_llava.train.options import option_parser


COMMANDS = typer.main.get_command(app).commands
# It sets the options of the commands that it runs itself.
ASKED = sorted(COMMANDS.keys() - {"quickstart"})
# Made of parts, the whole is tested below; a pattern; usage; another program's command.
PARTS = ("next_command", "after_stop", "_OURS", "USAGE", "Archive")
# What a command reaches in the source, but refuses before.
REFUSED_BEFORE = {("gain", "--base"), ("gain", "--base-quantization")}  # adapters


def options_of(command) -> set[str]:
    """The options of a command, as they are written."""
    options = set()
    for parameter in COMMANDS[command].params:
        options.update(parameter.opts)
        options.update(parameter.secondary_opts)
    if command == "train":
        options.update(option_parser()._option_string_actions)
        options.add("--help-all")
    return options


def unread_words(command, words) -> list[str]:
    """The words of a command line that the command would not read."""
    click_command = COMMANDS[command]
    context = click_command.context_class(click_command, info_name=command)
    _, unread, _ = click_command.make_parser(context).parse_args(list(words))
    return unread


def check(line):
    """Raises AssertionError unless a command line has a command and options that exist."""
    program, command, *words = shlex.split(line.replace("...", ""))
    assert program == "normalign", line
    assert command in COMMANDS, line

    # In a line on usage, `--option` stands for any.
    known_options = {*options_of(command), "--option"}
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert option in known_options, f"{line}: there is no {word}"
    if command != "train":
        unread = unread_words(command, words)
        assert not unread, f"{line}: {unread} would not be read"


def options_in(text) -> list[str]:
    """The options that a message names outside whole commands."""
    return OPTION.findall(COMMAND.sub("", text))


@pytest.mark.parametrize("command", ASKED)
def test_options_that_a_command_s_messages_name_are_its_own(command):
    known_options = options_of(command)
    for module_name, definition_name in reached(command):
        if module_name == "normalign_llava.cli" or definition_name in PARTS:
            continue
        place = f"{module_name}.{definition_name}"
        for text in texts(modules()[module_name].definitions[definition_name]):
            for option in options_in(text):
                is_known = option in known_options or (command, option) in REFUSED_BEFORE
                assert is_known, f"{place} says {text!r} in `normalign {command}`"


def commands_in_messages() -> list[str]:
    lines = []
    for module in modules().values():
        if module.name.endswith(".cli"):
            continue
        for definition_name, statement in module.definitions.items():
            if definition_name in PARTS:
                continue
            for text in texts(statement):
                lines += COMMAND.findall(text)
    return lines


def test_commands_in_messages_have_the_options_that_they_name():
    lines = commands_in_messages()
    assert len(lines) > 15
    for line in lines:
        command = line.rstrip(".,;: ").split()[1]
        assert command in COMMANDS, line
        for option in OPTION.findall(line):
            assert option in options_of(command), line


@pytest.mark.parametrize("stage", [None, "build", "align", "tune"])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_next_command_can_be_run(stage, adapters):
    command_line = next_command("a model", stage, adapters=adapters)
    check(command_line)
    assert "a model" in shlex.split(command_line)  # a folder with a space is one word


def joined_lines(text) -> list[str]:
    """Lines of text, of which those that end with a backslash go on."""
    return text.replace("\\\n", " ").splitlines()


def lines_of_page(page) -> list[str]:
    """Lines of the blocks of a shell, and code within sentences."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"`(normalign [^`\n]+)`", text)
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.S):
        for line in joined_lines(block):
            lines.append(line.split(" #")[0])
    return lines


def lines_of_notebook(notebook_path) -> list[str]:
    lines = []
    for cell in json.loads(notebook_path.read_text())["cells"]:
        source = "".join(cell["source"])
        for line in joined_lines(source):
            lines.append(line.lstrip("!% "))
    return lines


def shown_commands() -> list[str]:
    """The command lines in README, docs, experiments, notebooks and the templates of cards."""
    experiments = ROOT / "experiments"
    pages = {
        ROOT / "README.md",
        *DOCS.glob("*.md"),
        *experiments.glob("*.md"),
        *(ROOT / "hub_cards").rglob("templates/*"),
    }
    # The commands of this page are those of a commit.
    pages.remove(experiments / "first.md")

    lines = []
    for page in pages:
        lines += lines_of_page(page)
    for notebook_path in (ROOT / "notebooks").glob("*.ipynb"):
        lines += lines_of_notebook(notebook_path)
    stripped_lines = {line.strip() for line in lines}
    return sorted(line for line in stripped_lines if line.startswith("normalign "))


def test_commands_that_pages_show_exist():
    lines = shown_commands()
    assert len(lines) > 40
    for line in lines:
        check(line.replace("{{", "").replace("}}", ""))
