# SPDX-License-Identifier: Apache-2.0
"""What commands print, and what they hide. Foreign text cannot control the terminal."""

import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar
from unicodedata import category

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.jupyter import JupyterMixin
from rich.segment import Segment
from rich.table import Table


class Console(rich.console.Console):
    """Rich's console without markup. Control characters in what it prints are escaped."""

    def __init__(self, **options):
        super().__init__(markup=False, highlight=False, **options)

    def render_str(self, text: str, **options):
        return super().render_str(escaped(text), **options)  # before its width is measured

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                segment = segment._replace(text=escaped(segment.text))
            yield segment


class Printed(JupyterMixin):
    """An object that terminals and notebooks show as its `renderable()`, with text escaped."""

    labels: ClassVar[dict[str, str]] = {}
    """Names in the table for fields whose own names do not say what they are."""

    def renderable(self) -> RenderableType:
        """Returns what `rich` prints: by default, a table of a dataclass' numbers and words."""
        table = Table(show_header=False)
        for field_name, field_value in vars(self).items():
            if field_value is not None and not isinstance(field_value, dict | list):
                table.add_row(self.labels.get(field_name, field_name), _cell(field_value))
        return table

    def __rich_console__(
        self, console: rich.console.Console, options: ConsoleOptions
    ) -> Iterable[Segment]:
        return Console().render(self.renderable(), options)


def _cell(value: Any) -> str:
    """Returns a number or a word as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


# Control, format (direction, no width), half a surrogate pair, line or paragraph separator.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def escaped(text: str) -> str:
    """Escapes invisible characters as in `\\x1b`, except line breaks, tabs and joiners."""
    invisible = {character for character in text if category(character) in _INVISIBLE}
    for character in invisible - {"\n", "\t", "\u200c", "\u200d"}:
        text = text.replace(character, ascii(character)[1:-1])
    return text


def printable(text: str) -> str:
    """Replaces half surrogate pairs by question marks. JSON may have them, but UTF-8 cannot."""
    return text.encode(errors="replace").decode()


# A piece of the message, by the name of its logger.
NOTICES = {
    "DeepSpeed": "Setting accelerator to CPU",  # on standard output, with and without it in use
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.builder": "Setting num_proc from",  # for a split of fewer files
    "transformers.configuration_utils": "must be `None` or an integer within the vocabulary",
    "transformers.modeling_utils": "| CONVERSION",  # the error that follows has what matters
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    "transformers.utils.import_utils": "requires torchvision (not installed)",  # Pillow serves
}


def hide_notices() -> None:
    """Hides `NOTICES`, and deprecation warnings of later imports, except with `python -W`."""
    if sys.warnoptions:
        return
    for logger_name in NOTICES:
        logging.getLogger(logger_name).addFilter(_is_worth_showing)
    warnings.filterwarnings("ignore", "", FutureWarning, r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", "", UserWarning, "_distutils_hack")  # of DeepSpeed's imports


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return NOTICES[record.name] not in str(record.msg)
