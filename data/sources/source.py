# SPDX-License-Identifier: Apache-2.0
"""Opening a data set: files of rows, a folder of images, or anything that `datasets` reads."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, load_dataset_builder, load_from_disk
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from ...checkpoint.find import is_hub_id
from ...checkpoint.provenance import hub_dataset
from ...checkpoint.untrusted import is_inside
from ..rows.forms import UNKNOWN
from ..rows.images import ABSENT, ImageRules
from ..rows.parse import DroppedRow
from ..rows.reports import warn_once
from ..rows.unread import renamed
from ..rows.zips import MAX_TABLE_BYTES, opened as opened_zip
from .arguments import FILES, DataArguments, DataSource, cores
from .files import METADATA, READERS, files_of_folder, images_of_folder, loaded, rows_of_file
from .shards import Shards, are_shards, row_of_sample


MAX_EXPANSION = 100
"""How many times the bytes of parquet files their rows may take, beyond `MAX_TABLE_BYTES`."""

CHUNK = 500
"""Rows that are read, checked and cached together."""

_PEEKED = 1000  # rows of a stream that are searched for columns
_PARQUET_ROWS = 100  # read together; a row group, as by default, may become any size in memory
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


@dataclass
class Source:
    """An opened data set. Iterating gives the name of the file or data set, the row's number, and the row as stored.

    Attributes:
        name: Its name in errors and reports.
        rules: Which files its images may be.
        columns: As of [`DataSource`].
        files: Files of rows, in place of `data`.
        data: Rows in memory, with images not decoded, or a stream.
        dataset: A Hub data set's id, commit and licence: see [`hub_dataset`].
    """

    name: str
    rules: ImageRules
    columns: list[str] | dict[str, str] | None = None
    files: tuple[str, ...] = ()
    data: Dataset | IterableDataset | None = None
    dataset: dict[str, Any] | None = None

    def __post_init__(self):
        if isinstance(self.data, Dataset) and self.data.format["type"] != "custom":  # one's own transform is kept
            self.data = self.data.with_format("arrow")

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        for file in self.files:
            for number, text in enumerate(self._texts(file)):
                yield file, number, self.parsed(text)
        found: Iterable[Any] = ()
        if isinstance(self.data, Dataset):
            found = chain.from_iterable(map(self.rows, range(0, len(self.data), CHUNK)))
        elif self.data is not None:
            found = map(self._selected, self.data.decode(False) if self.data.features else self.data)
        for number, raw in enumerate(found):
            yield self.name, number, raw

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The rows in memory as chunks of `CHUNK`: name, number of the first row, and JSON texts, if of a file."""
        for file in self.files:
            rows = enumerate(self._texts(file))
            while chunk := list(islice(rows, CHUNK)):
                yield {"source": file, "start": chunk[0][0], "rows": [text for _, text in chunk]}
        for start in range(0, len(self.data) if isinstance(self.data, Dataset) else 0, CHUNK):
            yield {"source": self.name, "start": start, "rows": None}

    @cached_property
    def _classes(self) -> dict[str, Any]:
        """The types of columns that hold numbers of classes, perhaps in lists."""
        features = (self.data.features or {}) if self.data is not None else {}
        return {column: kind for column, kind in features.items() if "ClassLabel(" in repr(kind)}

    def parsed(self, text: str) -> Any:
        """The row of a JSON text."""
        return self._selected(loaded(text))

    def rows(self, start: int, count: int | None = None) -> list[Any]:
        """The rows of `data` in memory from a number on, as stored: `count` of them, by default a chunk."""
        assert isinstance(self.data, Dataset)
        stop = min(start + (count or CHUNK), len(self.data))
        if self.data.format["type"] == "arrow":
            return list(map(self._selected, self.data[start:stop].to_pylist()))
        return [self._selected(self.data[number]) for number in range(start, stop)]

    def _texts(self, file: str) -> Iterator[str]:
        try:
            yield from rows_of_file(file)
        except ValueError as error:
            if not (others := [other for other in self.files if other != file]):
                raise
            raise ValueError(f"{error} To read a file alone, name it: {', '.join(others)}.") from error

    def remedy(self, bad: list[DroppedRow]) -> dict[str, str]:
        """What would read some bad rows: the one file of a folder whose rows are known, and where images are."""
        unknown = {row.source for row in bad if row.reason.startswith(UNKNOWN)}
        files = [file for file in self.files if file not in unknown]
        found = {"data": files[0]} if unknown and len(files) == 1 else {}
        folder = Path(self.rules.folder or os.curdir)
        for absent in [row.file for row in bad if row.file and ABSENT in row.reason][:1]:
            name = os.path.relpath(folder / absent, folder)
            places = [place for place in sorted(folder.glob("*")) if _holds(place, name)]
            found |= {"images": str(places[0])} if places else {}
        return found

    def identity(self) -> list:
        """What changes when the rows change."""
        files = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in self.files]
        data = self.data._fingerprint if isinstance(self.data, Dataset) else None
        folder = self.rules.folder
        return [self.name, os.path.abspath(folder or ""), folder, self.rules.hub, self.columns, files, data]

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

    def _selected(self, raw: Any) -> Any:
        raw = row_of_sample(raw)
        if self._classes and isinstance(raw, dict):
            raw = raw | {column: _with_names(raw.get(column), kind) for column, kind in self._classes.items()}
        if not self.columns or not isinstance(raw, dict):
            return raw
        if isinstance(self.columns, list):
            return {column: raw[column] for column in self.columns if column in raw}
        return renamed(raw, self.columns)


def _with_names(value: Any, kind: Any) -> Any:
    """A value of a type of `datasets`, with the names of classes in place of their numbers."""
    if isinstance(kind, ClassLabel):
        return kind.names[value] if isinstance(value, int) and 0 <= value < len(kind.names) else value
    if isinstance(value, list):
        return [_with_names(each, kind.feature) for each in value]
    if isinstance(value, dict):
        return {key: _with_names(each, kind[key]) for key, each in value.items()}
    return value


def open_source(source: DataSource, streaming: bool, num_proc: int | None = None) -> Source:
    """Opens a data set; no row is read yet, but for those that `datasets` writes to its cache.

    That is done by `num_proc` processes, by default one for each core, as far as there are files for them.

    Raises:
        ValueError: It does not exist or cannot be read.
    """
    path = Path(source.path)
    suffix = path.suffix.lower()
    is_file = suffix in FILES
    source.check_paths()
    if is_file and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    here = str(path.parent if is_file else path) if path.exists() else None
    hub = source.path if here is None and is_hub_id(source.path) else None
    folder = source.image_folder or here or (None if hub else source.data_dir or os.curdir)
    opened = Source(source.path, ImageRules(folder, hub), source.columns)
    try:
        if suffix in READERS:
            opened.files = (source.path,)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            opened = replace(opened, data=_saved(path, source.split))
        elif path.is_dir() and not (source.name or source.data_dir or source.data_files):
            opened = _folder(opened, path, source, streaming, num_proc)
        else:
            data = _load(source, streaming, num_proc)
            opened = replace(opened, data=data, dataset=hub_dataset(hub) if hub else None)
        if here and are_shards(opened.data):
            opened = replace(opened, rules=replace(opened.rules, shards=here))
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


def _folder(opened: Source, path: Path, source: DataSource, streaming: bool, num_proc: int | None) -> Source:
    """A folder with files of rows, with metadata of images, with images alone, or one that `datasets` reads."""
    files, others = files_of_folder(path, source.split)
    if others:
        names = ", ".join(Path(file).name for file in others)
        warn_once(f"{path} has files that are not read: {names}. To read one of them, name it.")
    if files:
        folders = sorted({str(Path(file).parent) for file in files})
        if len(folders) > 1:
            raise ValueError(f"it has {METADATA} in several folders. Name one of them: {', '.join(folders)}.")
        _check_inside(path, files)
        if files[0].lower().endswith(".tar"):
            shards = replace(source, data_files={source.split: files})
            return replace(opened, data=_load(shards, streaming, num_proc))
        return replace(opened, files=tuple(files), rules=ImageRules(source.image_folder or folders[0]))
    if images := images_of_folder(path):
        if source.split != "train":
            raise ValueError("it is a folder of images, and has no splits. Name a folder in it.")
        return replace(opened, data=Dataset.from_dict({"image": images}))
    return replace(opened, data=_load(source, streaming, num_proc))


def _holds(place: Path, image: str) -> bool:
    """Whether a folder or a zip file has an image of this path."""
    if place.suffix.lower() != ".zip" or place.is_dir():
        return (place / image).is_file()
    with suppress(ValueError):
        opened_zip(str(place)).entry(image)
        return True
    return False


def _check_inside(folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError if a folder's links, card or `state.json` name files outside of it."""
    for file in files:
        if "://" in file or not is_inside(Path(file), folder.resolve()):
            raise ValueError(f"it would have {file} read, which is not in the folder. Put the data there")


def _load(source: DataSource, streaming: bool, num_proc: int | None) -> Dataset | IterableDataset:
    is_file = (path := Path(source.path)).is_file()
    kind = "webdataset" if path.suffix.lower() == ".tar" else "parquet"
    words = (kind,) if is_file else (source.path, source.name)
    files: dict[str, Any] = {"data_dir": source.data_dir, "data_files": source.path if is_file else source.data_files}
    builder = load_dataset_builder(*words, **files)
    if path.is_dir() and not source.data_files:
        named = builder.config.data_files or {}
        _check_inside(path / (source.data_dir or ""), [file for split in named.values() for file in split])
    if isinstance(builder, WebDataset):
        builder = Shards(data_files=builder.config.data_files)
    if isinstance(builder, Parquet):
        builder.config.batch_size = _PARQUET_ROWS
    if streaming:
        return builder.as_streaming_dataset(source.split)
    if isinstance(builder, Parquet):
        builder._generate_tables = _limited(builder._generate_tables)
    # Cards are often wrong about the number of rows; they are counted here.
    files_of_split = max(map(len, (builder.config.data_files or {}).values()), default=1)
    processes = min(num_proc or cores(), files_of_split)
    builder.download_and_prepare(verification_mode="no_checks", num_proc=processes if processes > 1 else None)
    return builder.as_dataset(source.split)


def _limited(tables: Callable[..., Iterator[tuple[Any, pyarrow.Table]]]) -> Callable:
    """The tables of parquet files, which `datasets` writes to its cache, up to a limit.

    A file says nothing of the size of its rows that could be trusted: one long value may be repeated a million times.
    """

    def limited(files: list[str], **options: Any) -> Iterator[tuple[Any, pyarrow.Table]]:
        size, taken = sum(os.path.getsize(file.rpartition("::")[2]) for file in files), 0
        for key, table in tables(files, **options):
            taken += table.nbytes
            if taken > max(MAX_TABLE_BYTES, MAX_EXPANSION * size):
                raise ValueError(
                    f"its rows take more than {taken / 2**30:.1f} GiB of {size:,} bytes in parquet files. If that is "
                    "meant, save the data with save_to_disk of `datasets`"
                )
            yield key, table

    return limited


def _saved(folder: Path, split: str) -> Dataset:
    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)}.")
    _check_inside(folder, [file["filename"] for file in splits[split].cache_files])
    return splits[split]
