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

from normalign_llava.console import Console, Printed, escaped, printable
from normalign_llava.devices import device_error
from normalign_llava.errors import NotWritable, exit_on_error, write_failure, writing_to
from normalign_llava.extras import check_installed
from normalign_llava.log_filters import NOTICES, hide_notices


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


def printed(renderable, console_of=Console):
    console = console_of(file=StringIO(), width=60)
    console.print(renderable)
    return console.file.getvalue()


def test_foreign_text_is_neither_markup_nor_a_command_and_keeps_the_columns():
    assert printed("[red]a[/b] \x1b[31m\n") == "[red]a[/b] \\x1b[31m\n\n"
    assert printed(Text("a\x1b[1m")) == "a\\x1b[1m\n"
    table = Table("name", "value")
    table.add_row("\x1b\x1b\x1b\x1b", "1")
    table.add_row("plain", "2")
    lines = printed(table).splitlines()
    assert len({len(line) for line in lines}) == 1 and "\\x1b" * 4 in "".join(lines)


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
    lines = printed(Report(), rich.console.Console).splitlines()
    cells = [line.strip("│").split("│") for line in lines if "│" in line]
    assert [[cell.strip() for cell in row] for row in cells] == [
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
    except BaseException as caught:
        return caught


DOES_IT_FIT = "Does its version fit torch and this machine?"
FULL = "CUDA out of memory. Tried to allocate 2.31 GiB. GPU 0 has 23 GiB of which 1 GiB is free. Or"
ASKED = "Tried to allocate 2.31 GiB. GPU 0 has 23 GiB of which 1 GiB is free"
KERNELS = "/x/site-packages/{}/a.py".format
TORCH = KERNELS("torch")  # which is no library of kernels


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("any"), "Out of memory. Less!"),
        (raised(MemoryError(), "a step", "another"), "Out of memory in a step. Less!"),
        (torch.OutOfMemoryError(FULL), f"Out of memory: {ASKED}. Less!"),
        (RuntimeError("[enforce fail] can't allocate memory"), "Out of memory. Less!"),
        (RuntimeError("mmap: Cannot allocate memory"), "Out of memory. Less!"),
        (ValueError("out of memory"), None),
        (raised(OSError("of a file"), file=KERNELS("bitsandbytes")), None),
        (raised(ImportError("of a module"), file=KERNELS("bitsandbytes")), None),
        (raised(KeyboardInterrupt(), file=KERNELS("bitsandbytes")), None),
        (RuntimeError("shapes differ"), None),
        (RuntimeError("CUDA error: no kernel.\nMore."), "The GPU failed: CUDA error: no kernel. D"),
        (AssertionError("Torch not compiled with CUDA enabled"), "The GPU failed: Torch not comp"),
        (RuntimeError("CUBLAS_STATUS_FAILED"), "The GPU failed: CUBLAS_STATUS_FAILED. Does"),
        (ValueError("CUDA error"), None),
        (RuntimeError("BARRACUDA"), None),
        (raised(KeyError("k"), file=KERNELS("bitsandbytes")), "bitsandbytes failed: 'k'. Does "),
        (raised(ValueError(), file=KERNELS("triton")), f"triton failed: ValueError. {DOES_IT_FIT}"),
        (raised(ValueError("a.\nb"), file=KERNELS("kernels")), f"kernels failed: a. {DOES_IT_FIT}"),
        (
            raised(ValueError("a"), file=KERNELS("flash_attn")),
            f"flash_attn failed: a. {DOES_IT_FIT}",
        ),
        (
            raised(raised(ValueError("a"), file=KERNELS("triton")), file=KERNELS("bitsandbytes")),
            f"triton failed: a. {DOES_IT_FIT}",  # which bitsandbytes called
        ),
        (
            raised(raised(ValueError("a"), file=TORCH), file=KERNELS("bitsandbytes")),
            f"bitsandbytes failed: a. {DOES_IT_FIT}",  # in what it called of torch
        ),
        (RuntimeError("cuDNN error: x"), "The GPU failed: cuDNN error: x. Does"),
        (RuntimeError("HIP error: x"), "The GPU failed: HIP error: x. Does"),
        (RuntimeError("Found no NVIDIA driver"), "The GPU failed: Found no NVIDIA driver. Does"),
        (RuntimeError("XPU error: x"), "The GPU failed: XPU error: x. Does"),
        (raised(ValueError("a"), file="/home/me/triton/a.py"), None),
        (raised(ValueError("a"), file=KERNELS("other")), None),
    ],
    ids=str,
)
def test_an_error_of_a_device_is_told_as_such(error, said):
    told = device_error(error, "Less!")
    assert told is None if said is None else told.startswith(said), told


def ended(error, *notes, **options):
    """The status with which a command ends that raises an error."""
    with pytest.raises(typer.Exit) as exit, exit_on_error(**options):
        raise raised(error, *notes)
    return exit.value.exit_code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no \x1b row"), "no \\x1b row"),
        (FileNotFoundError(2, "No such file", "a.json"), "[Errno 2] No such file: 'a.json'"),
        (FloatingPointError("step 3"), "step 3"),
        (ImportError("of no module"), "of no module"),
        (MemoryError(), "Out of memory. Less!"),
        (RuntimeError("CUDA error: x"), "The GPU failed: CUDA error: x. Does this build of torch "),
    ],
)
def test_an_error_that_a_user_can_mend_is_a_line(capsys, error, said):
    assert ended(error, full="Less!") == 1
    out, line = capsys.readouterr()
    assert out == "" and line.startswith(f"Error: {said}") and line.count("\n") == 1


def test_a_module_that_is_missing_belongs_to_the_extra_of_the_command(capsys):
    missing = ModuleNotFoundError("No module named 'gradio'")
    assert ended(missing, extra="demo") == ended(missing) == 1
    with_extra, without = capsys.readouterr().err.splitlines()
    assert with_extra.startswith("Error: No module named 'gradio'. Install it: pip install ")
    assert "'.[demo]'" in with_extra and "'normalign-llava[demo] @ git+URL'" in with_extra
    assert without == "Error: No module named 'gradio'"
    assert ended(ImportError("cannot import name"), extra="demo") == 1
    assert capsys.readouterr().err == "Error: cannot import name\n"


@pytest.mark.parametrize(
    "error", [KeyError("ours"), RuntimeError("ours"), SystemExit(3), typer.Exit(0)], ids=repr
)
def test_what_is_no_user_s_error_goes_on_as_it_is(capsys, error):
    with pytest.raises(type(error)) as caught, exit_on_error(extra="demo"):
        raise error
    assert caught.value is error and capsys.readouterr() == ("", "")


def test_a_pipe_that_was_closed_is_no_error(capsys):
    with pytest.raises(BrokenPipeError), exit_on_error():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [(None, None, ""), ("0", "1", ""), ("1", "2", " in process 1"), (None, "2", "")],
)
def test_of_several_processes_the_one_is_named(monkeypatch, capsys, rank, size, told):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert ended(ValueError("no row")) == 1
    assert capsys.readouterr().err == f"Error{told}: no row\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_says_what_is_left_and_is_not_stopped_twice(
    capsys, monkeypatch, number, status
):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as exit, exit_on_error(stopped="Nothing was written."):
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaning_up = signal.getsignal(signal.SIGTERM)
    assert exit.value.exit_code == status and cleaning_up == signal.SIG_IGN
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capsys.readouterr().err == "Stopped. Nothing was written.\n"


def test_what_is_known_of_a_stop_is_told_by_the_first_process_alone(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert ended(KeyboardInterrupt(), "Step 5 was done.", stopped="Nothing was done.") == 130
    assert capsys.readouterr().err == "Stopped. Step 5 was done.\n"
    monkeypatch.setenv("RANK", "1")
    assert ended(KeyboardInterrupt(), stopped="Nothing was done.") == 130
    assert capsys.readouterr().err == ""


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_on_error():
            inside = signal.getsignal(signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert inside == signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def os_error(number, file=None):
    return OSError(number, os.strerror(number), *([] if file is None else [str(file)]))


FULL_DISK = os.strerror(errno.ENOSPC)
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
        (os_error(errno.EACCES, FOLDER / "config.json"), os.strerror(errno.EACCES)),
        (os_error(errno.EROFS, FOLDER), os.strerror(errno.EROFS)),
        (os_error(errno.EPERM, FOLDER / "a" / "b"), os.strerror(errno.EPERM)),
        (os_error(errno.ENOTDIR, FOLDER), os.strerror(errno.ENOTDIR)),
        (os_error(errno.EEXIST, FOLDER.parent), os.strerror(errno.EEXIST)),
        (os_error(errno.EACCES, "/data/other"), None),
        (os_error(errno.EACCES), None),
        (os_error(errno.ENOENT, FOLDER / "config.json"), None),
        (RuntimeError("error 28"), None),
        (OSError(280, "none"), None),
    ],
    ids=repr,
)
def test_a_folder_that_cannot_be_written_to_is_told_from_other_errors(error, cause):
    with pytest.raises(Exception) as caught, writing_to(FOLDER):
        raise error
    if cause is None:
        assert caught.value is error
    else:
        assert isinstance(caught.value, NotWritable) and caught.value.__cause__ is error
        assert str(caught.value).startswith(f"{FOLDER} cannot be written to: {cause}")


def test_a_path_in_bytes_is_one_too():
    with pytest.raises(NotWritable), writing_to(FOLDER):
        raise OSError(errno.EACCES, "Permission denied", os.fsencode(FOLDER / "a"))


def test_of_folders_in_each_other_the_inner_one_is_named():
    outer = writing_to(FOLDER)
    inner = writing_to(FOLDER / "inner")
    with pytest.raises(NotWritable, match="^/data/run/inner cannot"), outer, inner:
        raise os_error(errno.ENOSPC)


def test_why_a_file_was_not_written_may_be_the_cause_of_the_error():
    try:
        try:
            raise os_error(errno.ENOSPC)
        except OSError as cause:
            raise RuntimeError("saving failed") from cause
    except RuntimeError as error:
        assert write_failure(error) == FULL_DISK
    assert write_failure(None) is None and write_failure(os_error(errno.EACCES, "a")) is None


def test_a_module_that_is_needed_is_named_with_its_extra():
    check_installed("json", "demo", "The demo")
    words = r"^The demo needs no_such_module, but it is not installed\. .*'\.\[demo\]' in a"
    with pytest.raises(ImportError, match=words):
        check_installed("no_such_module", "demo", "The demo")


@pytest.fixture
def unhidden(monkeypatch):
    """Loggers and warnings as before any command."""
    for name in NOTICES:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def passes(name, text):
    return bool(logging.getLogger(name).filter(logging.makeLogRecord({"name": name, "msg": text})))


def warned(module, category):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("it goes", category, "file.py", 1, module=module)
    return len(caught) == 1


@pytest.mark.parametrize("options", [[], ["always"]])
def test_notices_are_hidden_unless_python_is_told_to_warn(unhidden, monkeypatch, options):
    monkeypatch.setattr(sys, "warnoptions", options)
    hide_notices()
    for name, notice in NOTICES.items():
        assert passes(name, f"See: {notice}, and so on") == bool(options)
        assert passes(name, "What matters")
    for module in ("torch.ao", "transformers.trainer", "trl.models", "peft.tuners"):
        assert warned(module, FutureWarning) == bool(options)
        assert warned(module, UserWarning) and warned(module, DeprecationWarning)
    assert warned("_distutils_hack", UserWarning) == bool(options)
    assert warned("mine", FutureWarning) and warned("torchvision.io", FutureWarning)
