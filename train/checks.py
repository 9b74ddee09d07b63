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
from rich.progress import track
from transformers import LlavaProcessor

from .arguments import DataArguments
from .pictures import picture_problem
from .rows import DroppedRow, DroppedRows, canonical_row, picture_name, printable
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


def token_lengths(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[int | str]:
    """Tokens in each canonical row as the collator gives it, without decoding a picture, or why it has none."""
    per_image = processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]
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


def picture_problems(checked: Dataset, source: Source, arguments: DataArguments) -> dict[int, tuple]:
    """File and reason by number of the row. Not cached, because files come and go; shared among the processes."""
    state = PartialState()
    max_pixels = arguments.max_image_pixels if arguments.check_images else None
    paths = [] if arguments.check_images else checked["paths"][:]

    def problem(number: int) -> tuple[int, tuple | None]:
        images = checked[number]["images"] if arguments.check_images else picture_files(paths[number])
        return number, picture_problem(images, source.image_folder, max_pixels)

    numbers = range(state.process_index, len(checked), state.num_processes)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problem, numbers),
            f"Checking the pictures of {source.name}",
            total=len(numbers),
            disable=not (arguments.check_images and state.is_local_main_process),
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
