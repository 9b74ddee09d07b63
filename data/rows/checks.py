# SPDX-License-Identifier: Apache-2.0
"""Checks of rows before training: their structure, their length, and whether their images exist."""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.markup import escape
from rich.progress import track
from transformers import LlavaProcessor

from ...errors import Console, escaped
from ..sources.arguments import DataArguments
from ..sources.source import Source
from .forms import PROMPT, image_name
from .images import ImageRules, image_problem
from .parse import DroppedRow, DroppedRows, control_tokens, parse_row
from .reports import by_kind, counted, warn_once
from .unread import unread_image
from .values import printable


_CHUNK = 64  # rows whose images are checked together
_SHOWN = 5  # reasons in an error

DEFAULT_SHARE, MANY_ROWS = 0.01, 10_000
"""Share of bad rows that is skipped by default where data are from the Hub, or have more than so many rows.

In a stream, a share is of the rows read so far, or of so many while fewer are read. In memory, the images of so many
rows are opened before training.
"""


@dataclass
class Checks:
    """Options of the checks; those that are not described here are options of [`DataArguments`].

    Attributes:
        processor: Determines the length of a row and the tokens that no text may contain; None to count no tokens.
        max_length: Tokens, image tokens included, above which a row is dropped; None for no limit.
        dropped_rows: Records dropped rows.
        processes: Number of processes that check rows in memory; by default one for each core.
    """

    processor: LlavaProcessor | None
    max_length: int | None = None
    bad_rows: str | float | None = None
    check_images: bool = False
    max_image_pixels: int = DataArguments.max_image_pixels
    dropped_rows: DroppedRows | None = None
    processes: int | None = None

    def too_long(self, row: dict[str, Any]) -> DroppedRow | None:
        """The row as a dropped one if it has too many tokens, or None."""
        if self.max_length is None or row["length"] <= self.max_length:
            return None
        reason = f"{row['length']} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row["file"], reason, row["length"])


def share_of_bad_rows(option: str | float | None, source: Source, rows: int | None = None) -> float:
    """The share of a source's rows that may be bad, by the option `bad_rows`; `rows` is None for a stream."""
    if option is None:
        return DEFAULT_SHARE if source.rules.hub or (rows or 0) > MANY_ROWS else 0.0
    return 0.0 if option == "stop" else 1.0 if option == "skip" else float(option)


def parse_rows(
    stored: Iterable[tuple[str, int, Any]], rules: ImageRules, processor: LlavaProcessor | None
) -> list[dict]:
    """Parses rows, and adds what is known of them; rows that cannot be trained on have a `reason`.

    `stored` has source, number and content of rows; the content is also in the result, as `raw`.
    Without a processor, lengths are 0.
    """
    tokens: dict[str, Any] = {}
    if processor:
        tokens = {"image_token": processor.image_token, "control_tokens": control_tokens(processor.tokenizer)}
    rows = []
    for name, number, raw in stored:
        row: dict[str, Any] = {"source": name, "row": number, "file": image_name(raw), "reason": None, "raw": raw}
        row |= {"form": None, "images": [], "messages": [], "learned": [], "left_out": [], "changed": []}
        row |= {"length": 0, "image_count": 0, "paths": []}
        try:
            row |= parse_row(raw, rules, **tokens)
        except ValueError as error:
            row["reason"] = printable(str(error))
        row["unread"] = None if row["images"] else unread_image(raw, row["messages"])
        row["left_out"] = [name for name in row["left_out"] if f"column {name}" != row["unread"]]
        if row["reason"] and row["unread"]:
            row["reason"] += f"; the {row['unread']} looks like an image and is not read"
        rows.append(row)
    parsed = [row for row in rows if row["reason"] is None]
    lengths = token_lengths(processor, parsed) if processor else [0] * len(parsed)
    for row, length in zip(parsed, lengths, strict=True):
        row["reason" if isinstance(length, str) else "length"] = length
        row["image_count"] = len(row["images"])
        row["paths"] = [image["path"] for image in row["images"] if image["bytes"] is None]
    return rows


def token_lengths(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[int | str]:
    """Tokens of each parsed row, as the collator makes them, or why there are none; no image is decoded."""
    per_image = tokens_per_image(processor)
    texts = _rendered(processor, conversations)
    backend = processor.tokenizer.backend_tokenizer
    backend.no_padding()  # as the tokenizer does before each call
    backend.no_truncation()
    ids = iter(backend.encode_batch_fast([text for text in texts if isinstance(text, str)], add_special_tokens=False))
    results: list[int | str] = []
    for conversation, text in zip(conversations, texts, strict=True):
        if isinstance(text, Exception):
            results.append(f"the chat template refuses it: {text}")
            continue
        tokens, images = next(ids).ids, len(conversation["images"])
        results.append(len(tokens) + images * (per_image - 1))
        if (printed := tokens.count(processor.image_token_id)) != images:
            results[-1] = f"the chat template prints {printed} image tokens for {images} images"
    return results


def _rendered(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[str | Exception]:
    """The text of each conversation, or the error with which the chat template refuses it."""
    messages, template = [conversation["messages"] for conversation in conversations], processor.chat_template
    try:
        return processor.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:  # a template may raise any
        if len(conversations) == 1:
            return [error]
        return [text for conversation in conversations for text in _rendered(processor, [conversation])]


def tokens_per_image(processor: LlavaProcessor) -> int:
    """Number of image tokens of an image, whatever its size."""
    return processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]


def image_problems(
    images: Callable[[int], list[dict[str, Any]]], count: int, name: str, rules: ImageRules, max_pixels: int | None
) -> dict[int, tuple[str | None, str]]:
    """Checks the images of `count` rows with [`image_problem`]; the processes share the work.

    Nothing is cached, since files may change. Returns file and reason by the number of a row with a bad image.
    """
    state = PartialState()

    def problems(start: int) -> list[tuple[int, tuple[str | None, str]]]:
        """The bad ones of some rows that follow each other."""
        numbers = range(start, min(start + _CHUNK, stop))
        checked = ((number, image_problem(images(number), rules, max_pixels)) for number in numbers)
        return [(number, problem) for number, problem in checked if problem]

    # Each process takes rows that follow each other.
    begin, stop = (count * rank // state.num_processes for rank in (state.process_index, state.process_index + 1))
    starts = range(begin, stop, _CHUNK)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problems, starts) if max_pixels is not None else map(problems, starts),
            f"Checking the images of {escape(escaped(name))}",
            total=len(starts),
            console=Console(),
            transient=True,
            disable=max_pixels is None or not state.is_local_main_process,
        )
        return dict(gather_object([problem for some in results for problem in some]))


def bad_rows_message(
    source: Source,
    bad: list[DroppedRow],
    total: int | None = None,
    shown: int | None = _SHOWN,
    use: str = "trained on",
    share: float = 0.0,
) -> str:
    """The message of a run that stops at bad rows.

    Args:
        source: Their data set.
        bad: Bad rows, of which the message has the kinds of reason.
        total: Number of all rows, if it is known.
        shown: Most kinds in the message; None for all.
        use: What the rows are read for.
        share: Share of bad rows that is skipped at most.
    """
    lines = by_kind(bad, shown, total)
    skip = "skip such rows with `normalign train --bad_rows skip`" if use == "trained on" else "remove them"
    if 0 < share < 1:
        lines.append(f"These are {len(bad):,} rows, and a share of {share:g} is skipped at most.")
    options = {"data": "--dataset_name", "images": "--image_folder"}
    if use != "trained on":
        options = {"data": "--data", "images": "--image-folder"}
    if remedy := " ".join(f"{options[name]} {value}" for name, value in source.remedy(bad).items()):
        lines.append(f"Other rows or images are there: try {remedy}.")
    lines.append("Fix them." if len(bad) == total else f"Fix them, or {skip}.")
    return "\n".join([f"Rows that cannot be {use}:", *lines])


def check_images_are_read(name: str, rows: int, images: int, unread: dict[str, int]) -> None:
    """Warns of columns or texts that look like images and are not read; `unread` has their rows, see [`unread_image`].

    Raises:
        ValueError: No image was read, and most rows look as if they had one.
    """
    if not unread:
        return
    message = f"{name}: what looks like an image is not read: {counted(dict(Counter(unread).most_common(_SHOWN)))}."
    if not images and 2 * sum(unread.values()) > rows:
        raise ValueError(
            f"{message} No other image was found. Call a column image or images, or see docs/data.md for what is read."
        )
    warn_once(message)


def warn_of_captions(name: str, forms: Iterable[str]) -> None:
    """Warns once with which question captions are trained, if a data set has captions."""
    if not {"caption", "text"}.isdisjoint(forms):
        warn_once(
            f"{name}: captions are trained as answers to {PROMPT!r}. For other questions, give question and answer."
        )
