# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checks of rows before they are trained on: structure, length, and whether the pictures are there."""

from collections.abc import Iterator
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

from .arguments import DataArguments
from .pictures import picture_problem
from .rows import FEATURES, DroppedRow, DroppedRows, canonical_row, picture_name, printable
from .sources import Source


_CHUNK = 64  # rows tokenized together
_SHOWN = 5  # bad rows in an error


@dataclass
class Checks:
    """What rows are checked by."""

    processor: LlavaProcessor
    max_length: int | None
    arguments: DataArguments
    dropped_rows: DroppedRows | None

    def too_long(self, row: dict[str, Any]) -> DroppedRow | None:
        """The row as one to drop, if it has too many tokens."""
        if self.max_length is None or row["length"] <= self.max_length:
            return None
        reason = f"{row['length']} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row["file"], reason, row["length"])


def checked_rows(source: Source, processor: LlavaProcessor) -> Iterator[dict[str, Any]]:
    """All rows of a source, in order; those that cannot be trained on are empty and have a reason."""
    found = iter(source)
    while chunk := list(islice(found, _CHUNK)):
        checked = []
        for name, number, raw in chunk:
            row: dict[str, Any] = {"source": name, "row": number, "file": picture_name(raw), "reason": None}
            row |= {"images": [], "messages": [], "prompt_turns": 0, "length": 0, "image_count": 0, "paths": []}
            try:
                row |= canonical_row(raw, image_folder=source.image_folder, image_token=processor.image_token)
            except ValueError as error:
                row["reason"] = printable(str(error))
            checked.append(row)
        good = [row for row in checked if row["reason"] is None]
        for row, length in zip(good, token_lengths(processor, good), strict=True):
            row["reason" if isinstance(length, str) else "length"] = length
            row["image_count"] = len(row["images"])
            row["paths"] = [image["path"] for image in row["images"] if image["bytes"] is None]
        yield from checked


def kept_rows(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    """The rows of a source that pass all checks, in canonical form; the others are recorded.

    Raises:
        ValueError: There is a bad row and `bad_rows` is "stop", or no row is left at the end.
    """
    empty = True
    for row in checked_rows(source, checks.processor):
        dropped = checks.too_long(row)
        problem = (row["file"], row["reason"]) if row["reason"] else None
        if problem := problem or picture_problem(picture_files(row["paths"]), source.image_folder):
            dropped = DroppedRow(row["source"], row["row"], *problem)
            if checks.arguments.bad_rows == "stop":
                raise ValueError(stopped([dropped]))
        if not dropped:
            empty = False
            yield {column: row[column] for column in FEATURES}
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)
    if empty:  # begun again and again, it would never give a row
        raise ValueError(f"{source.name}: no row is left. It is empty, or all of its rows were dropped.")


def token_lengths(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[int | str]:
    """Tokens in each canonical row as the collator gives it, without decoding a picture, or why it has none."""
    per_image = tokens_per_image(processor)
    results: list[int | str] = []
    texts: list[str] = []
    for conversation in conversations:
        try:
            texts.append(str(processor.apply_chat_template(conversation["messages"], tokenize=False)))
            results.append(len(conversation["images"]))
        # Templates refuse a conversation with whatever Jinja or their authors raise.
        except Exception as error:
            results.append(f"the chat template refuses it: {error}")
    encoded = iter(processor.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
    for number, images in enumerate(results):
        if isinstance(images, int):
            tokens = next(encoded)
            results[number] = len(tokens) + images * (per_image - 1)
            if (printed := tokens.count(processor.image_token_id)) != images:
                results[number] = f"the chat template prints {printed} image tokens for {images} pictures"
    return results


def tokens_per_image(processor: LlavaProcessor) -> int:
    """Image tokens that a picture of any size becomes."""
    return processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]


def picture_problems(
    checked: Dataset, name: str, image_folder: str | None, max_pixels: int | None
) -> dict[int, tuple[str | None, str]]:
    """Looks at the pictures of all rows, as [`picture_problem`] does; the processes share the work.

    Nothing is cached, because files come and go.

    Args:
        checked: Rows as [`checked_rows`] gives them.
        name: Of the data set, for the progress bar.
        image_folder: The folder that no file may leave; None if there is none.
        max_pixels: Size up to which pictures are decoded; None to look for their files alone.

    Returns:
        File and reason by number of the row.
    """
    state = PartialState()
    paths = checked["paths"][:] if max_pixels is None else []

    def problem(number: int) -> tuple[int, tuple[str | None, str] | None]:
        images = picture_files(paths[number]) if max_pixels is None else checked[number]["images"]
        return number, picture_problem(images, image_folder, max_pixels)

    numbers = range(state.process_index, len(checked), state.num_processes)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problem, numbers),
            f"Checking the pictures of {escape(name)}",
            total=len(numbers),
            disable=max_pixels is None or not state.is_local_main_process,
        )
        found = [(number, problem) for number, problem in results if problem]
    return dict(gather_object(found))


def stopped(bad: list[DroppedRow]) -> str:
    """The error of a run that stops at bad rows."""
    shown = "\n".join(f"  {row}" for row in bad[:_SHOWN])
    more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"Rows that cannot be trained on:\n{shown}{more}\nMend them, or pass over such rows with --bad_rows skip."


def picture_files(paths: list[str]) -> list[dict[str, Any]]:
    """Images of a canonical row that are files."""
    return [{"path": path, "bytes": None} for path in paths]
