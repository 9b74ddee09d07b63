# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checks of rows before training: their structure, their length, and whether their images exist."""

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from rich.markup import escape
from rich.progress import track
from transformers import LlavaProcessor

from ...errors import Console, escaped
from ..sources.arguments import DataArguments
from ..sources.source import Source
from .forms import PROMPT, image_name, unread_image
from .images import ImageRules, image_problem, printable
from .parse import FEATURES, BadRow, DroppedRow, DroppedRows, control_tokens, parse_row


logger = logging.getLogger(__name__)

_CHUNK = 64  # rows tokenized together
_SHOWN = 5  # reasons in an error
_PEEKED = 100  # rows of a stream that are searched for an image before training


@dataclass
class Checks:
    """Options of the checks."""

    processor: LlavaProcessor
    max_length: int | None = None
    bad_rows: str = "stop"
    check_images: bool = False
    max_image_pixels: int = DataArguments.max_image_pixels
    dropped_rows: DroppedRows | None = None

    def too_long(self, row: dict[str, Any]) -> DroppedRow | None:
        """The row as a dropped one if it has too many tokens, or None."""
        if self.max_length is None or row["length"] <= self.max_length:
            return None
        reason = f"{row['length']} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row["file"], reason, row["length"])


def parse_rows(source: Source, processor: LlavaProcessor) -> Iterator[dict[str, Any]]:
    """All rows of a source in order: in parsed form, as stored (`raw`), and their facts.

    Rows that cannot be trained on are empty and have a `reason`.
    """
    found = iter(source)
    tokens = {"image_token": processor.image_token, "control_tokens": control_tokens(processor.tokenizer)}
    while chunk := list(islice(found, _CHUNK)):
        rows = []
        for name, number, raw in chunk:
            row: dict[str, Any] = {"source": name, "row": number, "file": image_name(raw), "reason": None, "raw": raw}
            row |= {"images": [], "messages": [], "prompt_turns": 0, "length": 0, "image_count": 0, "paths": []}
            row |= {"form": None, "unread": None}
            try:
                row |= parse_row(raw, source.rules, **tokens)
            except ValueError as error:
                row["reason"] = printable(str(error))
            row["unread"] = None if row["images"] else unread_image(raw, row["messages"])
            if row["reason"] and row["unread"]:
                row["reason"] += f"; the {row['unread']} looks like an image and is not read"
            rows.append(row)
        parsed = [row for row in rows if row["reason"] is None]
        for row, length in zip(parsed, token_lengths(processor, parsed), strict=True):
            row["reason" if isinstance(length, str) else "length"] = length
            row["image_count"] = len(row["images"])
            row["paths"] = [image["path"] for image in row["images"] if image["bytes"] is None]
        yield from rows


def valid_rows(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    """The rows of a source that pass all checks, in parsed form; the others are recorded.

    Raises:
        ValueError: There is a bad row and `bad_rows` is "stop", or no row is left at the end.
    """
    empty = True
    for row in _valid(source, checks):
        empty = False
        if row["unread"]:
            _warn_once(f"{source.name}: what looks like an image is not read: {row['unread']}.")
        yield {column: row[column] for column in FEATURES}
    if empty:  # repeated without end, it would never give a row
        raise ValueError(f"{source.name}: no row is left. It is empty, or all of its rows were dropped.")


def has_images(source: Source, checks: Checks) -> bool:
    """Whether one of the first rows of a stream has an image.

    Raises:
        ValueError: There is a bad row and `bad_rows` is "stop", or [`check_images_are_read`] finds unread images.
    """
    rows, unread = 0, Counter[str]()
    for row in islice(_valid(source, checks), _PEEKED):
        if row["images"]:
            return True
        rows += 1
        unread.update([row["unread"]] if row["unread"] else [])
    check_images_are_read(source.name, rows, 0, unread)
    return False


def _valid(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    for row in parse_rows(source, checks.processor):
        dropped = checks.too_long(row)
        problem = (row["file"], row["reason"]) if row["reason"] else None
        if problem := problem or image_problem(image_files(row["paths"]), source.rules):
            dropped = DroppedRow(row["source"], row["row"], *problem)
            if checks.bad_rows == "stop":
                raise BadRow(stopped([dropped]))
        if not dropped:
            warn_of_captions(source.name, [row["form"]])
            yield row
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)


def token_lengths(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[int | str]:
    """Tokens of each parsed row, as the collator makes them, or why there are none; no image is decoded."""
    per_image = tokens_per_image(processor)
    results: list[int | str] = []
    texts: list[str] = []
    for conversation in conversations:
        try:
            texts.append(str(processor.apply_chat_template(conversation["messages"], tokenize=False)))
            results.append(len(conversation["images"]))
        except Exception as error:  # a template may refuse a conversation with any error
            results.append(f"the chat template refuses it: {error}")
    encoded = iter(processor.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
    for number, images in enumerate(results):
        if isinstance(images, int):
            tokens = next(encoded)
            results[number] = len(tokens) + images * (per_image - 1)
            if (printed := tokens.count(processor.image_token_id)) != images:
                results[number] = f"the chat template prints {printed} image tokens for {images} images"
    return results


def tokens_per_image(processor: LlavaProcessor) -> int:
    """Number of image tokens of an image, whatever its size."""
    return processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]


def image_problems(
    rows: Dataset, name: str, rules: ImageRules, max_pixels: int | None
) -> dict[int, tuple[str | None, str]]:
    """Checks the images of all rows with [`image_problem`]; the processes share the work.

    Nothing is cached, since files may change. With `max_pixels`, parsed rows are needed, and their images are decoded;
    with None, rows with the column `paths`, and only that the files exist is checked.

    Returns:
        File and reason, by the number of a row with a bad image.
    """
    state = PartialState()
    paths = rows["paths"][:] if max_pixels is None else []

    def problem(number: int) -> tuple[int, tuple[str | None, str] | None]:
        images = image_files(paths[number]) if max_pixels is None else rows[number]["images"]
        return number, image_problem(images, rules, max_pixels)

    numbers = range(state.process_index, len(rows), state.num_processes)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problem, numbers),
            f"Checking the images of {escape(escaped(name))}",
            total=len(numbers),
            console=Console(),
            disable=max_pixels is None or not state.is_local_main_process,
        )
        found = [(number, problem) for number, problem in results if problem]
    return dict(gather_object(found))


def stopped(bad: list[DroppedRow], found: int | None = None) -> str:
    """The message of a run that stops at bad rows: each reason once, with its first row and their number."""
    alike: dict[tuple[str, str], list[DroppedRow]] = {}
    for row in bad:
        reason = row.reason.replace(row.file, "") if row.file else row.reason
        alike.setdefault((row.source, reason), []).append(row)
    lines = []
    for rows in list(alike.values())[:_SHOWN]:
        shared = f" ({'all ' if len(rows) == found else ''}{len(rows):,} rows)" if len(rows) > 1 else ""
        lines.append(f"  {rows[0]}{shared}")
    more = sum(len(rows) for rows in list(alike.values())[_SHOWN:])
    lines += [f"  and {more:,} more"] if more else []
    return "\n".join(["Rows that cannot be trained on:", *lines, "Fix them, or skip such rows with --bad_rows skip."])


def check_images_are_read(name: str, rows: int, images: int, unread: dict[str, int]) -> None:
    """Warns of columns or texts that look like images and are not read; `unread` has their rows, see [`unread_image`].

    Raises:
        ValueError: No image was read, and most rows look as if they had one.
    """
    if not unread:
        return
    named = ", ".join(f"{what} ({count:,} rows)" for what, count in Counter(unread).most_common(_SHOWN))
    message = f"{name}: what looks like an image is not read: {named}."
    if not images and 2 * sum(unread.values()) > rows:
        raise ValueError(
            f"{message} No other image was found. Call a column image or images, or see docs/data.md for what is read."
        )
    _warn_once(message)


def warn_of_captions(name: str, forms: Iterable[str]) -> None:
    """Warns once with which question captions are trained, if a data set has captions."""
    if not {"caption", "text"}.isdisjoint(forms):
        _warn_once(
            f"{name}: captions are trained as answers to {PROMPT!r}. For other questions, give question and answer."
        )


def image_files(paths: list[str]) -> list[dict[str, Any]]:
    """Images of a parsed row by their paths."""
    return [{"path": path, "bytes": None} for path in paths]


@functools.cache
def _warn_once(message: str) -> None:
    if PartialState().is_main_process:
        logger.warning(message)
