# SPDX-License-Identifier: Apache-2.0
"""Opening a data set: files of rows, a folder of images, or anything that `datasets` reads."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, starmap
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeAlias

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, IterableDataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from ...checkpoint.files import is_hub_id
from ...checkpoint.opening import hub_dataset
from ...checkpoint.untrusted import is_inside
from ..rows.checks import warn_once
from ..rows.forms import COLUMNS, renamed
from ..rows.images import MAX_IMAGE_BYTES, SUFFIXES, ImageRules
from .arguments import FILES, DataArguments, DataSource, Filter, cores, parse_filters
from .files import (
    METADATA,
    READERS,
    ROWS,
    files_of_folder,
    images_of_folder,
    open_files,
    row_of_json,
)


AnyData: TypeAlias = Dataset | IterableDataset
CHUNK = 500  # rows that are read, checked and cached together
_BLOCK = 512  # bytes, of a tar file
_SHORT_FLOATS = ("float16", "float32")
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


class StoredRow(NamedTuple):
    """A row as it is stored, with the file or data set that it is from, and its number there."""

    source: str
    number: int
    content: Any


@dataclass
class Source:
    """An opened data set. Iterating yields its rows as they are stored, with known column names.

    Attributes:
        name: What messages call it.
        rules: Which files its images may be.
        data: Its rows, with images not decoded.
        columns: The columns to read, or the data's names of columns by known name.
        dataset: Id, commit and licence of a Hub data set: see [`hub_dataset`].
        filters: Which rows of a stream are read. For rows in memory see [`Source.filtered`].
        numbers: Numbers of the rows in memory, if some rows are not read.
        repeat: How often each row comes in an epoch.
    """

    name: str
    rules: ImageRules
    data: AnyData
    columns: list[str] | dict[str, str] | None = None
    dataset: dict[str, Any] | None = None
    filters: tuple[Filter, ...] = ()
    numbers: list[int] | None = None
    repeat: int = 1

    def __post_init__(self):
        self._kept_as_text = self.data.features == ROWS
        # Types of the columns that hold short floats or numbers of classes, perhaps in lists.
        self._restored_types = {}
        for column, column_type in (self.data.features or {}).items():
            is_short_float = getattr(column_type, "dtype", None) in _SHORT_FLOATS
            if is_short_float or "ClassLabel(" in repr(column_type):
                self._restored_types[column] = column_type
        # Rows are read as Arrow tables, unless the user has set a transform.
        if isinstance(self.data, Dataset) and self.data.format["type"] != "custom":
            columns = self.data.format["columns"]  # those that the user has hidden stay hidden
            if self.data.format["output_all_columns"]:
                columns = self.data.column_names
            self.data = self.data.with_format("arrow", columns=columns)

    def __iter__(self) -> Iterator[StoredRow]:
        if isinstance(self.data, Dataset):
            for start in range(0, len(self.data), CHUNK):
                yield from self.rows_at(range(len(self.data))[start : start + CHUNK])
            return
        stream = self.data.decode(False) if self.data.features else self.data
        for row in starmap(self._row, enumerate(stream.with_format(None))):
            if _meets(row.content, self.filters):
                yield self._named(row)

    def rows_at(self, numbers: Sequence[int]) -> list[StoredRow]:
        """Returns the rows in memory of these numbers, as iterating gives them.

        They are read together. That is faster than one by one.
        """
        assert isinstance(self.data, Dataset)
        if self.data.format["type"] == "arrow":
            stored_rows = self.data[numbers].to_pylist()
        else:  # the user's own transform
            stored_rows = [self.data[number] for number in numbers]
        return [self._named(row) for row in map(self._row, numbers, stored_rows)]

    def _row(self, number: int, stored: Any) -> StoredRow:
        """Returns a stored row with its own names of columns."""
        source_name = self.name
        if self.numbers:
            number = self.numbers[number]
        content = stored
        if self._kept_as_text:
            content = row_of_json(stored["json"])
            if stored["file"]:
                source_name = stored["file"]
                number = stored["number"]
            if stored["images"] and isinstance(content, dict):
                content.pop("image", None)
                content["images"] = stored["images"]
        if isinstance(content, dict):
            for column, column_type in self._restored_types.items():
                if column in content:
                    content = content | {column: _restored(content[column], column_type)}
        return StoredRow(source_name, number, content)

    def _named(self, row: StoredRow) -> StoredRow:
        """Returns a row with known names of columns."""
        content = row.content
        if not isinstance(content, dict) or not self.columns:
            return row
        if isinstance(self.columns, list):
            content = {column: content[column] for column in self.columns if column in content}
        else:
            content = renamed(content, self.columns)
        return row._replace(content=content)

    def check_named(self, option: str, named_columns: set[str]) -> None:
        """Raises ValueError if an option names a column that no row has under this name.

        Of a stream, only the first 1,000 rows are read.
        """
        if not named_columns:
            return
        row_limit = 1000 if isinstance(self.data, IterableDataset) else None
        known_columns = set[str]()
        for row in islice(replace(self, columns=None), row_limit):
            if isinstance(row.content, dict):
                known_columns.update(row.content)
            if named_columns <= known_columns:
                return
        raise ValueError(
            f"{option} names {', '.join(map(repr, named_columns - known_columns))}, but the "
            f"columns of the data are: {', '.join(sorted(known_columns))}"
        )

    def filtered(self, filters: tuple[Filter, ...]) -> "Source":
        """Returns the source with only its rows that meet all conditions. They keep their numbers.

        Raises:
            ValueError: No row has a compared column, no row meets the conditions, or a value to be
                compared by size is not a number.
        """
        if not filters:
            return self
        compared_columns = {condition.column for condition in filters}
        self.check_named("filters", compared_columns)
        if isinstance(self.data, IterableDataset):
            return replace(self, filters=filters)
        stored_rows = self.data
        if not self._kept_as_text:  # only what is compared is read
            stored_rows = stored_rows.select_columns(sorted(compared_columns))
        rows = enumerate(replace(self, columns=None, data=stored_rows))
        kept_numbers = [number for number, row in rows if _meets(row.content, filters)]
        conditions = " and ".join(map(str, filters))
        row_count = len(stored_rows)
        if not kept_numbers:
            raise ValueError(f"none of its {row_count:,} rows has {conditions}. Change filters.")
        warn_once(
            f"{self.name}: {len(kept_numbers):,} of {row_count:,} rows have {conditions}. The "
            "others are not read."
        )
        return replace(self, data=self.data.select(kept_numbers), numbers=kept_numbers)


def _meets(content: Any, filters: tuple[Filter, ...]) -> bool:
    """Whether a row meets all conditions. Content that is not a row does: the checks report it."""
    return not isinstance(content, dict) or all(condition.keeps(content) for condition in filters)


def _restored(value: Any, kind: Any) -> Any:
    """Returns a value of a type of `datasets` with the names of classes instead of their numbers.

    A float of 16 or 32 bits becomes the shortest number that has the same bits: 0.1 instead of
    0.10000000149011612.
    """
    if isinstance(kind, ClassLabel):
        if isinstance(value, int) and 0 <= value < len(kind.names):
            return kind.names[value]
        return value
    if isinstance(value, list):
        return [_restored(element, kind.feature) for element in value]
    if isinstance(value, dict):
        return {key: _restored(element, kind[key]) for key, element in value.items()}
    if isinstance(value, float) and kind.dtype in _SHORT_FLOATS:
        short_float = np.dtype(kind.dtype).type(value)
        return float(str(short_float))
    return value


def open_source(source: DataSource, streaming: bool, num_proc: int | None = None) -> Source:
    """Opens a data set.

    Args:
        source: Where its rows are, and which of them to read.
        streaming: Whether rows are read only when they are needed.
        num_proc: How many processes write the cache of `datasets`. By default one for each core.

    Raises:
        ValueError: The data set does not exist or cannot be read, or `columns` or `filters` do not
            fit its rows.
    """
    source.check_paths()
    path = Path(source.path)
    if path.suffix.lower() in FILES and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    hub_id = source.path if is_hub_id(source.path) and not path.exists() else None
    try:
        data, folder = _read_rows(source, streaming, num_proc)
        image_folder = source.image_folder or None
        if not image_folder and not hub_id:
            # If nothing has this path, it is a format that `datasets` knows.
            image_folder = str(folder) if path.exists() else source.data_dir or os.curdir
        rules = ImageRules(image_folder, hub_id)
        dataset = hub_dataset(hub_id) if hub_id else None
        opened = Source(source.path, rules, data, source.columns, dataset, repeat=source.repeat)
        named_columns = set(source.columns or ())
        if isinstance(source.columns, dict):
            named_columns = set(source.columns.values())
        opened.check_named("columns", named_columns)
        return opened.filtered(parse_filters(source.filters))
    except Exception as error:  # `datasets` raises errors of any kind on broken files
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        source_name = f"{source.path} of the Hub" if hub_id else source.path
        raise ValueError(
            f"The data set {source_name}, split {source.split!r}, cannot be read: {reason}"
        ) from error


def open_held_out(arguments: DataArguments, num_proc: int | None = None) -> Source:
    """Opens `eval_dataset_name`, whole if it has no splits, or the test split of `dataset_name`.

    Args:
        arguments: Options of the data.
        num_proc: How many processes write the cache of `datasets`. By default one for each core.

    Raises:
        ValueError: Held-out data are missing, or cannot be read.
    """
    source_name = arguments.eval_dataset_name or arguments.dataset_name
    if source_name is None:
        raise ValueError(f"A mixture has no test split. {_REMEDY}")
    source = DataSource.named(source_name, split="", **arguments.shared_options)
    if not arguments.eval_dataset_name:
        source.split = arguments.dataset_test_split
    elif not source.split:
        path = Path(source.path)
        has_splits = not path.is_file() and not (path / "state.json").is_file()
        source.split = arguments.dataset_test_split if has_splits else "train"
    if source_name == arguments.dataset_name:
        source.name = source.name or arguments.dataset_config
    try:
        return open_source(source, arguments.dataset_streaming, num_proc)
    except ValueError as error:
        raise ValueError(f"There is no held-out data. {error} {_REMEDY}") from error


def _read_rows(source: DataSource, streaming: bool, num_proc: int | None) -> tuple[AnyData, Path]:
    """Reads the rows of a data set. Returns them with the folder that they are from.

    Raises errors of any kind, as `datasets` does.
    """
    path = Path(source.path)
    if path.suffix.lower() in READERS:
        return open_files((source.path,), streaming), path.parent
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved_data = datasets.load_from_disk(str(path))
        splits = saved_data if isinstance(saved_data, DatasetDict) else {"train": saved_data}
        if source.split not in splits:
            raise ValueError(f"it has the splits {', '.join(splits)}.")
        saved_split = splits[source.split]
        _check_within(path, [file["filename"] for file in saved_split.cache_files])
        return saved_split, path
    if path.is_dir() and not (source.name or source.data_dir or source.data_files):
        files = _chosen_files(path, source.split)
        if not files:
            images = images_of_folder(path)
            if images and source.split != "train":
                raise ValueError("it is a folder of images without splits. Name a folder in it.")
            if images:
                return Dataset.from_dict({"image": images}), path
        elif files[0].lower().endswith(".tar"):
            source = replace(source, path="webdataset", data_files={source.split: files})
        else:
            return open_files(tuple(files), streaming), Path(files[0]).parent
    folder = path.parent if path.is_file() else path
    return _load_with_builder(source, streaming, num_proc), folder


def _chosen_files(folder: Path, split: str) -> list[str]:
    """Returns the files of rows of a split in a folder, none if `datasets` has to read it.

    Warns of files that are not read.

    Raises:
        ValueError: The split has no files, the files are in several folders, or links lead out of
            the folder.
    """
    files, unread_files = files_of_folder(folder, split)
    if unread_files:
        unread_names = ", ".join(Path(file).name for file in unread_files)
        warn_once(
            f"{folder} has files that are not read: {unread_names}. To read one of them, name it."
        )
    folders = sorted({Path(file).parent for file in files})
    if len(folders) > 1:
        raise ValueError(
            f"it has {METADATA} in several folders. Name one: {', '.join(map(str, folders))}."
        )
    _check_within(folder, files)
    return files


def _load_with_builder(source: DataSource, streaming: bool, num_proc: int | None) -> AnyData:
    """Loads the rows of a local file or folder, or of a Hub data set, as `datasets` reads them.

    [`Shards`] reads tar files.
    """
    path = Path(source.path)
    if path.is_file():
        builder_name = "webdataset" if path.suffix.lower() == ".tar" else "parquet"
        source = replace(source, path=builder_name, name=None, data_files=source.path)
    builder = datasets.load_dataset_builder(
        source.path, source.name, source.data_dir, source.data_files
    )
    files_by_split = builder.config.data_files or {}
    if path.is_dir() and not source.data_files:
        _check_within(path / (source.data_dir or ""), chain.from_iterable(files_by_split.values()))
    if isinstance(builder, WebDataset):
        # The cache of the rows depends on this code.
        builder = Shards(data_files=files_by_split, hash=Hasher.hash(Path(__file__).read_bytes()))
    if isinstance(builder, Parquet):
        builder.config.batch_size = 100  # by default a whole row group, of any size in memory
    if streaming:
        return builder.as_streaming_dataset(source.split)
    most_files = max(map(len, files_by_split.values()), default=1)
    processes = min(num_proc or cores(), most_files)
    # Nothing is verified, since cards are often wrong about the number of rows.
    builder.download_and_prepare(
        verification_mode="no_checks", num_proc=processes if processes > 1 else None
    )
    return builder.as_dataset(source.split)


def _check_within(folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError if a folder's links, card or `state.json` name files outside of it."""
    for file in files:
        if "://" in file or not is_inside(Path(file), folder.resolve()):
            raise ValueError(f"it leads to {file}, outside of the folder. Put the data there")


class Shards(WebDataset):
    """Reads tar files. Files of one name, such as 7.jpg and 7.json, are a row.

    Unlike in the parent class, rows may have different files, and the .json file may have any
    columns.
    """

    DECODERS: ClassVar[dict] = {}

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=ROWS)

    @classmethod
    def _get_pipeline_from_tar(
        cls, tar_path: str, tar_iterator: Iterable[tuple[str, BinaryIO]]
    ) -> Iterator[dict[str, Any]]:
        if os.path.isfile(tar_path):
            with open(tar_path, "rb") as shard:
                first_block = shard.read(_BLOCK)
                shard.seek(max(0, os.path.getsize(tar_path) - _BLOCK))
                # `tarfile` would take the end of a shard that is cut off for its end.
                if first_block[257:262] == b"ustar" and shard.read() != bytes(_BLOCK):
                    raise ValueError(f"{tar_path} is cut off. Copy it again")
        for sample in super()._get_pipeline_from_tar(tar_path, _limited(tar_iterator)):
            key = sample.pop("__key__")
            del sample["__url__"]
            yield cls._row(key, sample)

    @classmethod
    def _row(cls, key: str, files: dict[str, bytes]) -> dict[str, Any]:
        """Returns a row in the columns `ROWS`: its .json file, other columns, and images."""
        images = []
        columns = dict[str, str]()
        json_text = "{}"
        for file_name in sorted(files, key=_in_order):
            content = files[file_name]
            column = file_name.lower().removesuffix(".txt")
            if file_name.lower() == "txt":
                column = "caption"
            if f".{column}".endswith(SUFFIXES):
                images.append({"path": f"{key}.{file_name}", "bytes": content})
            elif column == "json":
                json_text = content.decode("utf-8-sig", "backslashreplace")
            elif column in COLUMNS:  # bytes that are not UTF-8 become surrogates: the row is bad
                columns[column] = content.decode("utf-8-sig", "surrogateescape")
            else:  # it is not read, or makes the row bad
                spellings = {column, f".{column}"}  # `datasets` 4.7 has dots before extensions
                if not spellings.isdisjoint(cls.VIDEO_EXTENSIONS):
                    column = "video"
                elif not spellings.isdisjoint(cls.AUDIO_EXTENSIONS):
                    column = "audio"
                columns[column] = "a file"
        row = row_of_json(json_text)
        if isinstance(row, dict):
            json_text = json.dumps(row | columns)
        return {"json": json_text, "images": images}


def _limited(files: Iterable[tuple[str, BinaryIO]]) -> Iterator[tuple[str, BinaryIO]]:
    """Yields the files of a shard with only the bytes that are used.

    A file may be sparse or packed, and far larger than its shard.
    """
    for name, file in files:
        suffix = PurePosixPath(name).suffix.lower()
        is_used = suffix in (*SUFFIXES, ".json", ".txt") or suffix[1:] in COLUMNS
        most_bytes = MAX_IMAGE_BYTES + 1 if is_used else 0
        yield name, io.BytesIO(file.read(most_bytes))


def _in_order(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts the files of a row, 2 before 10."""
    sort_key = []
    for part in re.split(r"(\d+)", name):
        sort_key.append((int(part), "") if part.isdigit() else (0, part))
    return sort_key
