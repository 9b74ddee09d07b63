# SPDX-License-Identifier: Apache-2.0
"""Opening a data set: files of rows, a folder of images, or anything that `datasets` reads."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, IterableDataset
from datasets.exceptions import DatasetGenerationError

from ...checkpoint.find import is_hub_id
from ...checkpoint.provenance import hub_dataset
from ..rows.forms import UNKNOWN
from ..rows.images import ABSENT, ImageRules
from ..rows.parse import DroppedRow
from ..rows.reports import warn_once
from ..rows.unread import renamed
from ..rows.zips import opened as opened_zip
from .arguments import FILES, DataArguments, DataSource
from .files import METADATA, READERS, ROWS, files_of_folder, images_of_folder, loaded, open_files
from .stored import check_inside, load, load_saved


CHUNK = 500
"""Rows that are read, checked and cached together."""

_PEEKED = 1000  # rows of a stream that are searched for columns
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


@dataclass
class Source:
    """An opened data set. Iterating gives the name of the file or data set, the row's number, and the row as stored.

    Attributes:
        name: Name in errors and reports.
        rules: Rules for the files of its images.
        data: Rows in memory, with images not decoded, or a stream.
        columns: Attribute of [`DataSource`].
        files: The files of rows that `data` are from.
        dataset: A Hub data set's id, commit and licence: see [`hub_dataset`].
    """

    name: str
    rules: ImageRules
    data: Dataset | IterableDataset
    columns: list[str] | dict[str, str] | None = None
    files: tuple[str, ...] = ()
    dataset: dict[str, Any] | None = None

    def __post_init__(self):
        if isinstance(self.data, Dataset) and self.data.format["type"] != "custom":  # one's own transform is kept
            self.data = self.data.with_format("arrow")

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        if isinstance(self.data, Dataset):
            starts = range(0, len(self.data), CHUNK)
            yield from chain.from_iterable(self.rows(start, CHUNK) for start in starts)
        else:
            stored = self.data.decode(False) if self.data.features else self.data
            yield from (self._row(number, row) for number, row in enumerate(stored))

    def rows(self, start: int, count: int) -> list[tuple[str, int, Any]]:
        """At most `count` rows in memory from a number on, as iterating gives them."""
        assert isinstance(self.data, Dataset)
        numbers = range(start, min(start + count, len(self.data)))
        if self.data.format["type"] == "arrow":
            stored = self.data[numbers.start : numbers.stop].to_pylist()
        else:
            stored = [self.data[number] for number in numbers]
        return list(map(self._row, numbers, stored))

    @cached_property
    def _kept_as_text(self) -> bool:
        return self.data.features == ROWS

    @cached_property
    def _classes(self) -> dict[str, Any]:
        """The types of columns that hold numbers of classes, perhaps in lists."""
        return {column: kind for column, kind in (self.data.features or {}).items() if "ClassLabel(" in repr(kind)}

    def _row(self, number: int, raw: Any) -> tuple[str, int, Any]:
        name = self.name
        if self._kept_as_text:
            stored, raw = raw, loaded(raw["json"])
            if stored["file"]:
                name, number = stored["file"], stored["number"]
            if stored["images"] and isinstance(raw, dict):
                raw = {column: value for column, value in raw.items() if column != "image"}
                raw["images"] = stored["images"]
        if isinstance(raw, dict):
            raw = raw | {column: _with_names(raw.get(column), kind) for column, kind in self._classes.items()}
            if isinstance(self.columns, list):
                raw = {column: raw[column] for column in self.columns if column in raw}
            elif self.columns:
                raw = renamed(raw, self.columns)
        return name, number, raw

    def remedy(self, bad: list[DroppedRow]) -> dict[str, str]:
        """Options that would read bad rows: a folder's one file of known rows, the place of images."""
        unknown = {row.source for row in bad if row.reason.startswith(UNKNOWN)}
        files = [file for file in self.files if file not in unknown]
        options = {"data": files[0]} if unknown and len(files) == 1 else {}
        folder = Path(self.rules.folder or os.curdir)
        for absent in [row.file for row in bad if row.file and ABSENT in row.reason][:1]:
            name = os.path.relpath(folder / absent, folder)
            places = [place for place in sorted(folder.glob("*")) if _holds(place, name)]
            options |= {"images": str(places[0])} if places else {}
        return options

    def check_columns(self) -> None:
        """Raises ValueError if `columns` names one that no row has, or, of a stream, none of the first ones."""
        missing = dict.fromkeys(self.columns.values() if isinstance(self.columns, dict) else self.columns or ())
        known: dict[str, None] = {}
        limit = _PEEKED if isinstance(self.data, IterableDataset) else None
        for _, _, raw in islice(replace(self, columns=None), limit) if missing else ():
            known |= dict.fromkeys(raw if isinstance(raw, dict) else ())
            if not missing.keys() - known:
                return
        if absent := missing.keys() - known:
            raise ValueError(
                f"columns names {', '.join(map(repr, absent))}, which no row has. The data's columns are: "
                f"{', '.join(known) or 'none'}"
            )


def _with_names(value: Any, kind: Any) -> Any:
    """A value of a type of `datasets`, with the names of classes in place of their numbers."""
    if isinstance(kind, ClassLabel):
        return kind.names[value] if isinstance(value, int) and 0 <= value < len(kind.names) else value
    if isinstance(value, list):
        return [_with_names(element, kind.feature) for element in value]
    if isinstance(value, dict):
        return {key: _with_names(element, kind[key]) for key, element in value.items()}
    return value


def _holds(place: Path, image: str) -> bool:
    """Whether a folder or a zip file has an image of this path."""
    if place.suffix.lower() != ".zip" or place.is_dir():
        return (place / image).is_file()
    with suppress(ValueError):
        opened_zip(str(place)).entry(image)
        return True
    return False


def open_source(source: DataSource, streaming: bool, num_proc: int | None = None) -> Source:
    """Opens a data set; in memory, `datasets` writes files of rows, parquet files and shards to its cache.

    That is done by `num_proc` processes, by default one for each core, as far as there are files for them.

    Raises:
        ValueError: It does not exist or cannot be read.
    """
    path = Path(source.path)
    is_file = path.suffix.lower() in FILES
    source.check_paths()
    if is_file and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    hub = source.path if not path.exists() and is_hub_id(source.path) else None
    try:
        data, files = _read(source, streaming, num_proc)
        here = path.parent if is_file else Path(files[0]).parent if files else path
        folder = source.image_folder or (str(here) if path.exists() else None if hub else source.data_dir or os.curdir)
        dataset = hub_dataset(hub) if hub else None
        opened = Source(source.path, ImageRules(folder, hub), data, source.columns, files, dataset)
        opened.check_columns()
    except Exception as error:  # `datasets` raises errors of any kind on broken files
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        absent = f"{source.path} is no file or folder here. " if hub else ""
        raise ValueError(
            f"{absent}The data set {source.path}, split {source.split!r}, cannot be read: {reason}"
        ) from error
    return opened


def open_held_out(arguments: DataArguments, num_proc: int | None = None) -> Source:
    """Opens the held-out data: `eval_dataset_name`, or the test split of `dataset_name`.

    The former is read as a whole if it has no splits.

    Raises:
        ValueError: There is none.
    """
    name = arguments.eval_dataset_name or arguments.dataset_name
    if name is None:
        raise ValueError(f"A mixture has no test split. {_REMEDY}")
    source = DataSource.named(name, split="", image_folder=arguments.image_folder, columns=arguments.columns)
    if not arguments.eval_dataset_name or not source.split:
        whole = Path(source.path).is_file() or (Path(source.path) / "state.json").is_file()
        source.split = "train" if arguments.eval_dataset_name and whole else arguments.dataset_test_split
    if name == arguments.dataset_name:
        source.name = source.name or arguments.dataset_config
    try:
        return open_source(source, arguments.dataset_streaming, num_proc)
    except ValueError as error:
        raise ValueError(f"There is no held-out data. {error} {_REMEDY}") from error


def _read(
    source: DataSource, streaming: bool, num_proc: int | None
) -> tuple[Dataset | IterableDataset, tuple[str, ...]]:
    """The rows of a data set, and the files of rows that they are from, if there are any."""
    path = Path(source.path)
    if path.suffix.lower() in READERS:
        return open_files((source.path,), streaming), (source.path,)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_saved(path, source.split), ()
    if path.is_dir() and not (source.name or source.data_dir or source.data_files):
        files, others = files_of_folder(path, source.split)
        if others:
            names = ", ".join(Path(file).name for file in others)
            warn_once(f"{path} has files that are not read: {names}. To read one of them, name it.")
        folders = sorted({str(Path(file).parent) for file in files})
        if len(folders) > 1:
            raise ValueError(f"it has {METADATA} in several folders. Name one of them: {', '.join(folders)}.")
        check_inside(path, files)
        if files and not files[0].lower().endswith(".tar"):
            return open_files(tuple(files), streaming), tuple(files)
        if files:
            source = replace(source, data_files={source.split: files})
        elif images := images_of_folder(path):
            if source.split != "train":
                raise ValueError("it is a folder of images, and has no splits. Name a folder in it.")
            return Dataset.from_dict({"image": images}), ()
    return load(source, streaming, num_proc), ()
