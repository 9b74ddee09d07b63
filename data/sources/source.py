# SPDX-License-Identifier: Apache-2.0
"""Opening a data set: files of rows, a folder of images, or anything that `datasets` reads."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, TypeAlias

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
from ..rows.forms import COLUMNS, renamed
from ..rows.images import SUFFIXES, ImageRules
from ..rows.zips import MAX_IMAGE_BYTES
from .arguments import FILES, DataArguments, DataSource, cores
from .files import (
    METADATA,
    READERS,
    ROWS,
    files_of_folder,
    images_of_folder,
    loaded,
    open_files,
    warn_once,
)
from .filters import Filter, parse_filters


AnyData: TypeAlias = Dataset | IterableDataset
CHUNK = 500  # rows that are read, checked and cached together
_BLOCK = 512  # bytes, of a tar file
_SHORT_FLOATS: dict[str, Any] = {"float16": np.float16, "float32": np.float32}
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


@dataclass
class Source:
    """An opened data set; iterating gives the name of a file or its own, a number and a row."""

    name: str
    rules: ImageRules
    data: AnyData  # with images not decoded
    columns: list[str] | dict[str, str] | None = None
    dataset: dict[str, Any] | None = None  # id, commit and licence: see [`hub_dataset`]
    filters: tuple[Filter, ...] = ()  # which rows of a stream are read; for others see `filtered`
    numbers: list[int] | None = None  # of the rows in memory, if some are not read

    def __post_init__(self):
        self._kept_as_text = self.data.features == ROWS
        # The types of columns that hold numbers of classes, perhaps in lists, or short floats.
        kinds = (self.data.features or {}).items()
        self._kinds = {column: kind for column, kind in kinds if _is_restored(kind)}
        if isinstance(self.data, Dataset) and self.data.format["type"] != "custom":
            # One's own transform is kept, and columns that one has hidden stay so.
            every = self.data.format["output_all_columns"]
            shown = self.data.column_names if every else self.data.format["columns"]
            self.data = self.data.with_format("arrow", columns=shown)

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        if isinstance(self.data, Dataset):
            starts = range(0, len(self.data), CHUNK)
            yield from chain.from_iterable(self.rows(start, CHUNK) for start in starts)
        else:
            stored = self.data.decode(False) if self.data.features else self.data
            for number, row in enumerate(stored.with_format(None)):
                name, number_in_file, raw = self._raw(number, row)
                if not isinstance(raw, dict) or all(each.keeps(raw) for each in self.filters):
                    yield name, number_in_file, self._named(raw)

    def rows(self, start: int, count: int) -> list[tuple[str, int, Any]]:
        """At most `count` rows in memory from a number on, as iterating gives them."""
        assert isinstance(self.data, Dataset)
        return self.rows_at(range(start, min(start + count, len(self.data))))

    def rows_at(self, numbers: Sequence[int]) -> list[tuple[str, int, Any]]:
        """The rows in memory of these numbers, as iterating gives them; read at once."""
        assert isinstance(self.data, Dataset)
        if self.data.format["type"] != "arrow":  # one's own transform
            stored = [self.data[number] for number in numbers]
        elif isinstance(numbers, range):
            stored = self.data[numbers.start : numbers.stop].to_pylist()
        else:
            stored = self.data[list(numbers)].to_pylist()
        rows = [self._raw(number, row) for number, row in zip(numbers, stored, strict=True)]
        return [(name, number, self._named(raw)) for name, number, raw in rows]

    def _raw(self, number: int, raw: Any) -> tuple[str, int, Any]:
        """A stored row with its own columns, and the file and the number that name it."""
        name = self.name
        number = self.numbers[number] if self.numbers else number
        if self._kept_as_text:
            stored, raw = raw, loaded(raw["json"])
            if stored["file"]:
                name, number = stored["file"], stored["number"]
            if stored["images"] and isinstance(raw, dict):
                raw = {column: value for column, value in raw.items() if column != "image"}
                raw["images"] = stored["images"]
        if isinstance(raw, dict):
            for column, kind in self._kinds.items():
                if column in raw:
                    raw = raw | {column: _restored(raw[column], kind)}
        return name, number, raw

    def _named(self, raw: Any) -> Any:
        """A row with known names of columns."""
        if not isinstance(raw, dict) or not self.columns:
            return raw
        if isinstance(self.columns, list):
            return {column: raw[column] for column in self.columns if column in raw}
        return renamed(raw, self.columns)

    def check_columns(self) -> None:
        """Raises ValueError if `columns` names one that no row has, or of a stream no early row."""
        columns = self.columns.values() if isinstance(self.columns, dict) else self.columns
        self._check_named("columns", {*(columns or ())})

    def _check_named(self, option: str, named: set[str]) -> None:
        known = set[str]()
        limit = 1000 if isinstance(self.data, IterableDataset) else None
        for _, _, raw in islice(replace(self, columns=None), limit) if named else ():
            known.update(raw if isinstance(raw, dict) else ())
            if named <= known:
                return
        if absent := ", ".join(map(repr, named - known)):
            has = ", ".join(sorted(known))
            raise ValueError(f"{option} names {absent}, which no row has. Its columns are: {has}")

    def filtered(self, filters: tuple[Filter, ...]) -> "Source":
        """The source with those of its rows that meet all conditions, which keep their numbers.

        Raises ValueError if a column is in no row, or holds no number where it has to.
        """
        if not filters:
            return self
        self._check_named("filters", {condition.column for condition in filters})
        if isinstance(self.data, IterableDataset):
            return replace(self, filters=filters)
        stored = self.data
        if not self._kept_as_text:  # only what is compared is read
            stored = stored.select_columns(sorted({condition.column for condition in filters}))
        kept = []
        for number, (_, _, raw) in enumerate(replace(self, columns=None, data=stored)):
            # What is no row is kept, since checks name it.
            if not isinstance(raw, dict) or all(condition.keeps(raw) for condition in filters):
                kept.append(number)
        listed = " and ".join(map(str, filters))
        counts = f"{len(kept):,} of {len(stored):,} rows"
        if not kept:
            raise ValueError(f"none of its {len(stored):,} rows has {listed}. Change filters.")
        warn_once(f"{self.name}: {counts} have {listed}. Others are not read.")
        return replace(self, data=self.data.select(kept), numbers=kept)


def _is_restored(kind: Any) -> bool:
    """Whether values of a type of `datasets` are not what their numbers are: see [`_restored`]."""
    return getattr(kind, "dtype", None) in _SHORT_FLOATS or "ClassLabel(" in repr(kind)


def _restored(value: Any, kind: Any) -> Any:
    """A value of a type of `datasets`, with the names of classes in place of their numbers.

    A number of 16 or 32 bits is the shortest that is stored so: 0.1, not 0.10000000149011612.
    """
    if isinstance(kind, ClassLabel):
        is_number = isinstance(value, int) and 0 <= value < len(kind.names)
        return kind.names[value] if is_number else value
    if isinstance(value, list):
        return [_restored(element, kind.feature) for element in value]
    if isinstance(value, dict):
        return {key: _restored(element, kind[key]) for key, element in value.items()}
    if isinstance(value, float) and kind.dtype in _SHORT_FLOATS:
        return float(str(_SHORT_FLOATS[kind.dtype](value)))
    return value


def open_source(source: DataSource, streaming: bool, num_proc: int | None = None) -> Source:
    """Opens a data set; `num_proc` processes, or one a core, write the cache of `datasets`."""
    path = Path(source.path)
    is_file = path.suffix.lower() in FILES
    source.check_paths()
    if is_file and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    hub = source.path if not path.exists() and is_hub_id(source.path) else None
    try:
        data, here = _read(source, streaming, num_proc)
        beside = str(here) if path.exists() else None if hub else source.data_dir or os.curdir
        rules = ImageRules(source.image_folder or beside, hub)
        opened = Source(source.path, rules, data, source.columns, hub_dataset(hub) if hub else None)
        opened.check_columns()
        opened = opened.filtered(parse_filters(source.filters))
    except Exception as error:  # `datasets` raises errors of any kind on broken files
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        name = f"{source.path}{' of the Hub' if hub else ''}, split {source.split!r},"
        raise ValueError(f"The data set {name} cannot be read: {reason}") from error
    return opened


def open_held_out(arguments: DataArguments, num_proc: int | None = None) -> Source:
    """Opens `eval_dataset_name`, whole if it has no splits, or the test split of `dataset_name`."""
    own = arguments.eval_dataset_name
    if (name := own or arguments.dataset_name) is None:
        raise ValueError(f"A mixture has no test split. {_REMEDY}")
    shared = {
        "image_folder": arguments.image_folder,
        "columns": arguments.columns,
        "filters": arguments.filters,
    }
    source = DataSource.named(name, split="", **shared)
    if not own or not source.split:
        whole = Path(source.path).is_file() or (Path(source.path) / "state.json").is_file()
        source.split = "train" if own and whole else arguments.dataset_test_split
    if name == arguments.dataset_name:
        source.name = source.name or arguments.dataset_config
    try:
        return open_source(source, arguments.dataset_streaming, num_proc)
    except ValueError as error:
        raise ValueError(f"There is no held-out data. {error} {_REMEDY}") from error


def _read(source: DataSource, streaming: bool, num_proc: int | None) -> tuple[AnyData, Path]:
    """The rows of a data set, and the folder that they are from."""
    path = Path(source.path)
    if path.suffix.lower() in READERS:
        return open_files((source.path,), streaming), path.parent
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_saved(path, source.split), path
    if path.is_dir() and not (source.name or source.data_dir or source.data_files):
        files, others = files_of_folder(path, source.split)
        if others:
            names = ", ".join(Path(file).name for file in others)
            warn_once(f"{path} has files that are not read: {names}. To read one of them, name it.")
        folders = sorted({Path(file).parent for file in files})
        if len(folders) > 1:
            listed = ", ".join(map(str, folders))
            raise ValueError(f"it has {METADATA} in several folders. Name one: {listed}.")
        check_within(path, files)
        if files and not files[0].lower().endswith(".tar"):
            return open_files(tuple(files), streaming), folders[0]
        if files:
            source = replace(source, path="webdataset", data_files={source.split: files})
        elif images := images_of_folder(path):
            if source.split != "train":
                raise ValueError("it is a folder of images without splits. Name a folder in it.")
            return Dataset.from_dict({"image": images}), path
    return load(source, streaming, num_proc), path.parent if path.is_file() else path


def load(source: DataSource, streaming: bool, num_proc: int | None) -> AnyData:
    """The rows of a file or folder here, or of a Hub data set; errors are of any kind."""
    is_file = (path := Path(source.path)).is_file()
    kind = "webdataset" if path.suffix.lower() == ".tar" else "parquet"
    words = (kind,) if is_file else (source.path, source.name)
    files = source.path if is_file else source.data_files
    builder = datasets.load_dataset_builder(*words, data_dir=source.data_dir, data_files=files)
    if path.is_dir() and not source.data_files:
        named = builder.config.data_files or {}
        check_within(path / (source.data_dir or ""), chain.from_iterable(named.values()))
    if isinstance(builder, WebDataset):
        version = Hasher.hash(Path(__file__).read_bytes())
        builder = Shards(data_files=builder.config.data_files, hash=version)
    if isinstance(builder, Parquet):
        builder.config.batch_size = 100  # a row group, as by default, may become any size in memory
    if streaming:
        return builder.as_streaming_dataset(source.split)
    # Cards are often wrong about the number of rows; they are counted here.
    files_of_split = max(map(len, (builder.config.data_files or {}).values()), default=1)
    processes = min(num_proc or cores(), files_of_split)
    num_proc = processes if processes > 1 else None
    builder.download_and_prepare(verification_mode="no_checks", num_proc=num_proc)
    return builder.as_dataset(source.split)


def load_saved(folder: Path, split: str) -> Dataset:
    """A split of a folder that `save_to_disk` wrote; errors are of any kind."""
    saved = datasets.load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)}.")
    check_within(folder, [file["filename"] for file in splits[split].cache_files])
    return splits[split]


def check_within(folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError if a folder's links, card or `state.json` name files outside of it."""
    for file in files:
        if "://" in file or not is_inside(Path(file), folder.resolve()):
            raise ValueError(f"it leads to {file}, which is not in the folder. Put the data there")


class Shards(WebDataset):
    """The builder of `datasets` for tar files; those of one name, 7.jpg and 7.json, are a row.

    Unlike there, rows may have different files, and the .json file any columns.
    """

    DECODERS: ClassVar[dict] = {}

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=ROWS)

    @classmethod
    def _get_pipeline_from_tar(
        cls, tar_path: str, tar_iterator: Iterable[tuple[str, BinaryIO]]
    ) -> Iterator[dict[str, Any]]:
        _check_end(tar_path)
        read = ((name, io.BytesIO(file.read(_bytes_to_read(name)))) for name, file in tar_iterator)
        for sample in super()._get_pipeline_from_tar(tar_path, read):
            key, _ = sample.pop("__key__"), sample.pop("__url__")
            images, files = [], dict[str, str]()
            for name in sorted(sample, key=_in_order):
                column = "caption" if name.lower() == "txt" else name.lower().removesuffix(".txt")
                if f".{column}".endswith(SUFFIXES):
                    images.append({"path": f"{key}.{name}", "bytes": sample[name]})
                elif column == "json":
                    files[column] = sample[name].decode("utf-8-sig", "backslashreplace")
                elif column in COLUMNS:  # half a surrogate pair makes a bad row of what is no UTF-8
                    files[column] = sample[name].decode("utf-8-sig", "surrogateescape")
                else:  # not read, or makes the row bad; `datasets` 4.7 has dots before extensions
                    kinds = {"video": cls.VIDEO_EXTENSIONS, "audio": cls.AUDIO_EXTENSIONS}
                    names = (kind for kind in kinds if {column, f".{column}"} & {*kinds[kind]})
                    files[next(names, column)] = "a file"
            text = files.pop("json", "{}")
            if isinstance(row := loaded(text), dict):
                text = json.dumps(row | files)
            yield {"json": text, "images": images}


def _in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts the files of a row, 2 before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _bytes_to_read(name: str) -> int:
    """Most bytes that are read of a file, which may be sparse or packed."""
    suffix = PurePosixPath(name).suffix.lower()
    is_read = suffix in (*SUFFIXES, ".json", ".txt") or suffix[1:] in COLUMNS
    return MAX_IMAGE_BYTES + 1 if is_read else 0


def _check_end(path: str) -> None:
    """Raises ValueError if a local shard is cut off, which `tarfile` takes for its end."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            start = file.read(_BLOCK)
            file.seek(max(0, os.path.getsize(path) - _BLOCK))
            if start[257:262] == b"ustar" and file.read() != bytes(_BLOCK):
                raise ValueError(f"{path} is cut off. Copy it again")
