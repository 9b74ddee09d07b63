"""What becomes of foreign text and of errors on the way to a terminal."""

import errno
import logging
import os
import signal
import sys
import warnings
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
import rich.console
import torch
import typer
from rich.control import Control
from rich.table import Table
from rich.text import Text

from normalign_llava.console import NOTICES, Console, Printed, escaped, hide_notices, printable
from normalign_llava.devices import device_error
from normalign_llava.errors import (
    NotWritable,
    check_installed,
    exit_on_error,
    write_failure,
    writing_to,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),  # a terminal's command
        ("a\rb\x08", "a\\rb\\x08"),
        ("\u202eabc", "\\u202eabc"),  # direction
        ("a\u200bb", "a\\u200bb"),  # no width
        ("a\u2028b\u2029", "a\\u2028b\\u2029"),  # separators of lines and paragraphs
        ("\ud83d", "\\ud83d"),  # half of a pair
        ("a\n\tb", "a\n\tb"),
        ("\u200c\u200d", "\u200c\u200d"),  # joiners, which some scripts need
        ("Größe 大 🔎", "Größe 大 🔎"),
    ],
)
def test_invisible_characters_are_escaped_and_no_others(text, shown):
    assert escaped(text) == shown


def test_half_a_surrogate_pair_is_a_question_mark():
    assert printable("a\ud83db é 🔎") == "a?b é 🔎"


def printed(renderable, console_class=Console) -> str:
    console = console_class(file=StringIO(), width=60)
    console.print(renderable)
    return console.file.getvalue()


def test_foreign_text_is_neither_markup_nor_a_command():
    assert printed("[red]a[/b] \x1b[31m\n") == "[red]a[/b] \\x1b[31m\n\n"
    assert printed(Text("a\x1b[1m")) == "a\\x1b[1m\n"


def test_foreign_text_keeps_the_columns_of_a_table():
    table = Table("name", "value")
    table.add_row("\x1b\x1b\x1b\x1b", "1")
    table.add_row("plain", "2")
    text = printed(table)
    lengths = {len(line) for line in text.splitlines()}
    assert len(lengths) == 1
    assert "\\x1b" * 4 in text


def test_on_a_terminal_numbers_have_no_colours_and_commands_of_rich_work():
    console = Console(file=StringIO(), width=60, force_terminal=True)
    console.print("3 rows in /data/run")
    console.print(Control.bell())
    assert console.file.getvalue() == "3 rows in /data/run\n\x07"


@dataclass
class Report(Printed):
    labels = {"steps": "optimizer steps"}
    model: str = "a\x1bb"
    steps: int = 1234567
    rate: float = 0.0123456
    done: bool = True
    failed: bool = False
    absent: str | None = None
    zero: int = 0
    many: list = field(default_factory=lambda: [1])
    named: dict = field(default_factory=lambda: {"a": 1})


def test_a_report_is_a_table_of_its_numbers_and_words():
    table_rows = []
    for line in printed(Report(), rich.console.Console).splitlines():
        if "│" in line:
            cells = line.strip("│").split("│")
            table_rows.append([cell.strip() for cell in cells])
    assert table_rows == [
        ["model", "a\\x1bb"],
        ["optimizer steps", "1,234,567"],
        ["rate", "0.01235"],
        ["done", "yes"],
        ["failed", "no"],
        ["zero", "0"],
    ]


def raised(error, *notes, file="/home/me/code.py"):
    """The error as it is after it was raised, by code of `file`."""
    for note in notes:
        error.add_note(note)
    try:
        exec(compile("raise error", file, "exec"), {"error": error})
    except BaseException as caught_error:
        return caught_error


def raised_in(package, error):
    """The error as it is after an installed package raised it."""
    return raised(error, file=f"/x/site-packages/{package}/a.py")


DOES_IT_FIT = "Does its version fit torch and this machine?"
FULL = "CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has 23 GiB of which 1 GiB is free. Or"
ASKED = "Tried to allocate 2.31 GiB. GPU 0 has 23 GiB of which 1 GiB is free"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("any"), "Out of memory. Less!"),
        (raised(MemoryError(), "a step", "another"), "Out of memory in a step. Less!"),
        (torch.OutOfMemoryError(FULL), f"Out of memory: {ASKED}. Less!"),
        (RuntimeError("[enforce fail] can't allocate memory"), "Out of memory. Less!"),
        (RuntimeError("mmap: Cannot allocate memory"), "Out of memory. Less!"),
    ],
    ids=str,
)
def test_full_memory_is_named_with_a_remedy(error, expected):
    assert device_error(error, "Less!").startswith(expected)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: no kernel.\nMore."), "CUDA error: no kernel. D"),
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not comp"),
        (RuntimeError("CUBLAS_STATUS_FAILED"), "CUBLAS_STATUS_FAILED. Does"),
        (RuntimeError("cuDNN error: x"), "cuDNN error: x. Does"),
        (RuntimeError("HIP error: x"), "HIP error: x. Does"),
        (RuntimeError("Found no NVIDIA driver"), "Found no NVIDIA driver. Does"),
        (RuntimeError("XPU error: x"), "XPU error: x. Does"),
    ],
    ids=str,
)
def test_an_error_of_a_gpu_is_named_as_such(error, expected):
    message = device_error(error, "Less!")
    assert message.startswith(f"The GPU failed: {expected}")


TRITON_IN_BITSANDBYTES = raised_in("bitsandbytes", raised_in("triton", ValueError("a")))
TORCH_IN_BITSANDBYTES = raised_in("bitsandbytes", raised_in("torch", ValueError("a")))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised_in("bitsandbytes", KeyError("k")), "bitsandbytes failed: 'k'. Does "),
        (raised_in("triton", ValueError()), f"triton failed: ValueError. {DOES_IT_FIT}"),
        (raised_in("kernels", ValueError("a.\nb")), f"kernels failed: a. {DOES_IT_FIT}"),
        (raised_in("flash_attn", ValueError("a")), f"flash_attn failed: a. {DOES_IT_FIT}"),
        (TRITON_IN_BITSANDBYTES, f"triton failed: a. {DOES_IT_FIT}"),
        # torch is not a library of kernels.
        (TORCH_IN_BITSANDBYTES, f"bitsandbytes failed: a. {DOES_IT_FIT}"),
    ],
    ids=str,
)
def test_an_error_of_a_library_of_kernels_names_the_library(error, expected):
    assert device_error(error, "Less!").startswith(expected)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        raised_in("bitsandbytes", OSError("of a file")),
        raised_in("bitsandbytes", ImportError("of a module")),
        raised_in("bitsandbytes", KeyboardInterrupt()),
        RuntimeError("shapes differ"),
        ValueError("CUDA error"),
        RuntimeError("BARRACUDA"),
        raised(ValueError("a"), file="/home/me/triton/a.py"),
        raised_in("other", ValueError("a")),
    ],
    ids=str,
)
def test_an_error_of_anything_else_is_no_device_error(error):
    assert device_error(error, "Less!") is None


def exit_code(error, *notes, **options) -> int:
    """The status with which a command ends that raises an error."""
    with pytest.raises(typer.Exit) as exit, exit_on_error(**options):
        raise raised(error, *notes)
    return exit.value.exit_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no \x1b row"), "no \\x1b row"),
        (FileNotFoundError(2, "No such file", "a.json"), "[Errno 2] No such file: 'a.json'"),
        (FloatingPointError("step 3"), "step 3"),
        (ImportError("of no module"), "of no module"),
        (MemoryError(), "Out of memory. Less!"),
        (RuntimeError("CUDA error: x"), "The GPU failed: CUDA error: x. Does this build of torch "),
    ],
)
def test_an_error_that_a_user_can_mend_is_a_line(capsys, error, expected):
    assert exit_code(error, full="Less!") == 1
    output, error_line = capsys.readouterr()
    assert output == ""
    assert error_line.startswith(f"Error: {expected}")
    assert error_line.count("\n") == 1


MISSING_GRADIO = ModuleNotFoundError("No module named 'gradio'")


def test_a_module_that_is_missing_belongs_to_the_extra_of_the_command(capsys):
    assert exit_code(MISSING_GRADIO, extra="demo") == 1
    line = capsys.readouterr().err
    assert line.startswith("Error: No module named 'gradio'. Install it: pip install ")
    assert "'.[demo]'" in line
    assert "'normalign-llava[demo] @ git+URL'" in line


def test_a_module_that_is_missing_in_a_command_without_extra_is_named(capsys):
    assert exit_code(MISSING_GRADIO) == 1
    assert capsys.readouterr().err == "Error: No module named 'gradio'\n"


def test_a_name_that_cannot_be_imported_belongs_to_no_extra(capsys):
    assert exit_code(ImportError("cannot import name"), extra="demo") == 1
    assert capsys.readouterr().err == "Error: cannot import name\n"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("ours"),
        RuntimeError("ours"),
        SystemExit(3),
        typer.Exit(0),
    ],
    ids=repr,
)
def test_what_is_no_user_s_error_goes_on_as_it_is(capsys, error):
    with pytest.raises(type(error)) as caught, exit_on_error(extra="demo"):
        raise error
    assert caught.value is error
    assert capsys.readouterr() == ("", "")


def test_a_pipe_that_was_closed_is_no_error(capsys):
    with pytest.raises(BrokenPipeError), exit_on_error():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, " in process 1"),
        ({"WORLD_SIZE": "2"}, ""),
    ],
)
def test_of_several_processes_the_one_is_named(monkeypatch, capsys, variables, place):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert exit_code(ValueError("no row")) == 1
    assert capsys.readouterr().err == f"Error{place}: no row\n"


def signal_handlers() -> list:
    return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize(
    ("signal_number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
def test_a_command_that_is_stopped_says_what_is_left_and_is_not_stopped_twice(
    capsys, monkeypatch, signal_number, status
):
    monkeypatch.delenv("RANK", raising=False)
    handlers_before = signal_handlers()
    with pytest.raises(typer.Exit) as exit, exit_on_error(stopped="Nothing was written."):
        try:
            os.kill(os.getpid(), signal_number)
        finally:
            handler_while_cleaning_up = signal.getsignal(signal.SIGTERM)
    assert exit.value.exit_code == status
    assert handler_while_cleaning_up == signal.SIG_IGN
    assert signal_handlers() == handlers_before
    assert capsys.readouterr().err == "Stopped. Nothing was written.\n"


def test_the_first_process_prints_what_is_known_of_a_stop(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    status = exit_code(KeyboardInterrupt(), "Step 5 was done.", stopped="Nothing was done.")
    assert status == 130
    assert capsys.readouterr().err == "Stopped. Step 5 was done.\n"


def test_other_processes_print_nothing_of_a_stop(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert exit_code(KeyboardInterrupt(), stopped="Nothing was done.") == 130
    assert capsys.readouterr().err == ""


def test_a_signal_that_is_ignored_stays_ignored():
    handler_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_on_error():
            handler_inside = signal.getsignal(signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert handler_inside == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler_before)


def os_error(number, path=None) -> OSError:
    if path is None:
        return OSError(number, os.strerror(number))
    return OSError(number, os.strerror(number), str(path))


FULL_DISK = os.strerror(errno.ENOSPC)
ENFORCE_FAIL = "[enforce fail at inline_container.cc:603]"
FOLDER = Path("/data/run")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (os_error(errno.ENOSPC), FULL_DISK),
        (os_error(errno.EDQUOT, "/elsewhere"), os.strerror(errno.EDQUOT)),
        (os_error(errno.EFBIG), os.strerror(errno.EFBIG)),
        (RuntimeError("I/O error: No space left on device (os error 28)"), FULL_DISK),
        (
            RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"),
            "a fi",
        ),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "a file could not be wri"),
        (OSError("589824 requested and 154048 written"), "a file could not be written to its end"),
        (os_error(errno.EACCES, FOLDER / "config.json"), os.strerror(errno.EACCES)),
        (os_error(errno.EROFS, FOLDER), os.strerror(errno.EROFS)),
        (os_error(errno.EPERM, FOLDER / "a" / "b"), os.strerror(errno.EPERM)),
        (os_error(errno.ENOTDIR, FOLDER), os.strerror(errno.ENOTDIR)),
        (os_error(errno.EEXIST, FOLDER.parent), os.strerror(errno.EEXIST)),
    ],
    ids=repr,
)
def test_a_folder_that_cannot_be_written_to_is_named_with_the_cause(error, cause):
    with pytest.raises(NotWritable) as caught, writing_to(FOLDER):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith(f"{FOLDER} cannot be written to: {cause}")


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.EACCES, "/data/other"),
        os_error(errno.EACCES),
        os_error(errno.ENOENT, FOLDER / "config.json"),
        RuntimeError("error 28"),
        OSError(280, "none"),
    ],
    ids=repr,
)
def test_other_errors_while_a_folder_is_written_go_on_as_they_are(error):
    with pytest.raises(type(error)) as caught, writing_to(FOLDER):
        raise error
    assert caught.value is error


def test_a_path_in_bytes_is_one_too():
    with pytest.raises(NotWritable), writing_to(FOLDER):
        raise OSError(errno.EACCES, "Permission denied", os.fsencode(FOLDER / "a"))


def test_of_folders_in_each_other_the_inner_one_is_named():
    inner_folder = FOLDER / "inner"
    expected = "^/data/run/inner cannot"
    with pytest.raises(NotWritable, match=expected), writing_to(FOLDER), writing_to(inner_folder):
        raise os_error(errno.ENOSPC)


def test_why_a_file_was_not_written_may_be_the_cause_of_the_error():
    try:
        try:
            raise os_error(errno.ENOSPC)
        except OSError as cause:
            raise RuntimeError("saving failed") from cause
    except RuntimeError as error:
        assert write_failure(error) == FULL_DISK


def test_another_error_does_not_say_why_a_file_was_not_written():
    assert write_failure(None) is None
    assert write_failure(os_error(errno.EACCES, "a")) is None


def test_a_module_that_is_installed_may_be_needed():
    check_installed("json", "demo", "The demo")


def test_a_module_that_is_needed_is_named_with_its_extra():
    message = r"^The demo needs no_such_module, but it is not installed\. .*'\.\[demo\]' in a"
    with pytest.raises(ImportError, match=message):
        check_installed("no_such_module", "demo", "The demo")


@pytest.fixture(params=[False, True], ids=["not asked", "asked to warn"])
def asked_to_warn(request, monkeypatch):
    """Hides notices as a command does, in a Python that may have been asked to warn."""
    for logger_name in NOTICES:
        monkeypatch.setattr(logging.getLogger(logger_name), "filters", [])
    warn_options = []
    if request.param:
        warn_options = ["always"]
    monkeypatch.setattr(sys, "warnoptions", warn_options)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        hide_notices()
        yield request.param


def is_logged(logger_name, message) -> bool:
    record = logging.makeLogRecord({"name": logger_name, "msg": message})
    return bool(logging.getLogger(logger_name).filter(record))


def is_warned(module, category) -> bool:
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.warn_explicit("it goes", category, "file.py", 1, module=module)
    return len(caught_warnings) == 1


@pytest.mark.parametrize("logger_name", NOTICES)
def test_notices_in_logs_are_hidden_unless_python_is_asked_to_warn(asked_to_warn, logger_name):
    notice = NOTICES[logger_name]
    assert is_logged(logger_name, f"See: {notice}, and so on") == asked_to_warn
    assert is_logged(logger_name, "What matters")


@pytest.mark.parametrize(
    "module", ["torch.ao", "transformers.trainer", "trl.models", "peft.tuners"]
)
def test_future_warnings_are_hidden_unless_python_is_asked_to_warn(asked_to_warn, module):
    assert is_warned(module, FutureWarning) == asked_to_warn
    assert is_warned(module, UserWarning)
    assert is_warned(module, DeprecationWarning)


def test_warnings_of_distutils_are_hidden_unless_python_is_asked_to_warn(asked_to_warn):
    assert is_warned("_distutils_hack", UserWarning) == asked_to_warn


@pytest.mark.usefixtures("asked_to_warn")
@pytest.mark.parametrize("module", ["mine", "torchvision.io"])
def test_future_warnings_of_other_modules_are_not_hidden(module):
    assert is_warned(module, FutureWarning)
