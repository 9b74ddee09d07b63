# SPDX-License-Identifier: Apache-2.0
"""Data sets that `datasets` reads: parquet files, WebDataset's shards, folders of `save_to_disk`, those of the Hub."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

from datasets import Dataset, DatasetDict, DatasetInfo, IterableDataset, load_dataset_builder, load_from_disk
from datasets.fingerprint import Hasher
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from ...checkpoint.untrusted import is_inside
from ..rows.forms import COLUMNS
from ..rows.images import SUFFIXES
from ..rows.zips import MAX_IMAGE_BYTES
from .arguments import DataSource, cores
from .files import ROWS, loaded


_PARQUET_ROWS = 100  # read together; a row group, as by default, may become any size in memory
_BLOCK = 512  # bytes, of a tar file


def load(source: DataSource, streaming: bool, num_proc: int | None) -> Dataset | IterableDataset:
    """The rows of a file or folder here, or of a Hub data set; errors are of any kind."""
    is_file = (path := Path(source.path)).is_file()
    kind = "webdataset" if path.suffix.lower() == ".tar" else "parquet"
    words = (kind,) if is_file else (source.path, source.name)
    files: dict[str, Any] = {"data_dir": source.data_dir, "data_files": source.path if is_file else source.data_files}
    builder = load_dataset_builder(*words, **files)
    if path.is_dir() and not source.data_files:
        named = builder.config.data_files or {}
        check_inside(path / (source.data_dir or ""), [file for split in named.values() for file in split])
    if isinstance(builder, WebDataset):
        builder = Shards(data_files=builder.config.data_files, hash=Hasher.hash(Path(__file__).read_bytes()))
    if isinstance(builder, Parquet):
        builder.config.batch_size = _PARQUET_ROWS
    if streaming:
        return builder.as_streaming_dataset(source.split)
    # Cards are often wrong about the number of rows; they are counted here.
    files_of_split = max(map(len, (builder.config.data_files or {}).values()), default=1)
    processes = min(num_proc or cores(), files_of_split)
    builder.download_and_prepare(verification_mode="no_checks", num_proc=processes if processes > 1 else None)
    return builder.as_dataset(source.split)


def load_saved(folder: Path, split: str) -> Dataset:
    """A split of a folder that `save_to_disk` wrote; errors are of any kind."""
    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)}.")
    check_inside(folder, [file["filename"] for file in splits[split].cache_files])
    return splits[split]


def check_inside(folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError if a folder's links, card or `state.json` name files outside of it."""
    for file in files:
        if "://" in file or not is_inside(Path(file), folder.resolve()):
            raise ValueError(f"it would have {file} read, which is not in the folder. Put the data there")


class Shards(WebDataset):
    """The builder of `datasets` for tar files in which the files of one name, `7.jpg` and `7.json`, are a row.

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
                elif column in {"json", *COLUMNS}:
                    files[column] = sample[name].decode("utf-8-sig", "backslashreplace")
                else:  # as what is not read, or makes the row a bad one
                    kinds = {"video": cls.VIDEO_EXTENSIONS, "audio": cls.AUDIO_EXTENSIONS}  # with or without dots
                    names = (kind for kind in kinds if {column, f".{column}"} & {*kinds[kind]})
                    files[next(names, column)] = "a file"
            text = files.pop("json", "{}")
            row = loaded(text)
            yield {"json": json.dumps(row | files) if isinstance(row, dict) else text, "images": images}


def _in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts the files of a row, 2 before 10."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]


def _bytes_to_read(name: str) -> int:
    """Most bytes that are read of a file, which may be sparse or packed."""
    suffix = PurePosixPath(name).suffix.lower()
    return MAX_IMAGE_BYTES + 1 if suffix in (*SUFFIXES, ".json", ".txt") or suffix[1:] in COLUMNS else 0


def _check_end(path: str) -> None:
    """Raises ValueError if a local shard is cut off, which `tarfile` takes for its end."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            start = file.read(_BLOCK)
            file.seek(max(0, os.path.getsize(path) - _BLOCK))
            if start[257:262] == b"ustar" and file.read() != bytes(_BLOCK):
                raise ValueError(f"{path} is cut off. Copy it again")
