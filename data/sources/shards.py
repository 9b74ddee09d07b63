# SPDX-License-Identifier: Apache-2.0
"""WebDataset's shards: tar files in which the files of one name, such as `7.jpg` and `7.json`, are a row.

Images of local shards are read in place when a batch needs them: a row has their address. Those of a stream from the
Hub are read as they come.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar

from datasets import Dataset, DatasetInfo, Features, Image, IterableDataset, List, Value
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from ..rows.forms import COLUMNS
from ..rows.images import SUFFIXES
from ..rows.zips import MAX_IMAGE_BYTES
from .files import loaded


_TEXTS = (".json", ".txt")
_MEDIA = {"mp4": "video", "webm": "video", "avi": "video", "mov": "video", "mkv": "video"}
_MEDIA |= {"mp3": "audio", "wav": "audio", "flac": "audio", "ogg": "audio", "m4a": "audio"}
_SAMPLE = Features(
    {
        "__key__": Value("string"),
        "__url__": Value("string"),
        "images": List(Image(decode=False)),
        "json": Value("string"),
        "txt": Value("string"),
        "others": List({"name": Value("string"), "text": Value("string")}),
    }
)


class Shards(WebDataset):
    """The builder of `datasets`, for rows whose files differ. Only images and texts are read; others are named."""

    DECODERS: ClassVar[dict] = {}

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=_SAMPLE)

    @classmethod
    def _get_pipeline_from_tar(
        cls, tar_path: str, tar_iterator: Iterable[tuple[str, BinaryIO]]
    ) -> Iterator[dict[str, Any]]:
        files = _in_place(os.path.abspath(tar_path)) if _is_plain(tar_path) else tar_iterator
        read = (
            (name, file if isinstance(file, io.StringIO) else io.BytesIO(file.read(_bytes_to_read(name))))
            for name, file in files
        )
        for sample in super()._get_pipeline_from_tar(tar_path, read):
            key, url = sample.pop("__key__"), sample.pop("__url__")
            images, others, texts = [], [], dict[str, str]()
            for name in sorted(sample, key=_in_order):
                content, column = sample[name], name.lower().removesuffix(".txt")
                if f".{name}".lower().endswith(SUFFIXES):
                    inside = {"path": f"{key}.{name}", "bytes": content}
                    images.append({"path": content, "bytes": None} if isinstance(content, str) else inside)
                elif f".{name}".lower() in _TEXTS:
                    texts[name.lower()] = content.decode("utf-8-sig", "backslashreplace")
                else:
                    text = content.decode("utf-8-sig", "backslashreplace") if column in COLUMNS else None
                    others.append({"name": _MEDIA.get(column, column), "text": text})
            yield {
                **{"__key__": key, "__url__": url, "images": images, "others": others},
                **{name: texts.get(name) for name in ("json", "txt")},
            }


def _in_order(name: str) -> list[tuple[int, str]]:
    """By which files of a row are sorted: 2 comes before 10."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]


def _bytes_to_read(name: str) -> int:
    """How much of a file is read, at most: it may be sparse, or packed."""
    suffix = PurePosixPath(name).suffix.lower()
    return MAX_IMAGE_BYTES + 1 if suffix in (*SUFFIXES, *_TEXTS) or suffix[1:] in COLUMNS else 0


def _is_plain(path: str) -> bool:
    """Whether a shard is a local file that is not packed. Raises ValueError if it is a file that is no shard."""
    if not os.path.isfile(path):  # it is on the Hub
        return False
    if not tarfile.is_tarfile(path):
        raise ValueError(f"{path} is no tar file")
    with tarfile.open(path) as archive:
        return isinstance(archive.fileobj, io.BufferedReader)


def _in_place(path: str) -> Iterator[tuple[str, Any]]:
    """Name and content of the files in a local shard; of an image its address, and of a link to one no file's.

    Raises ValueError if the shard is cut off, which `tarfile` takes for its end.
    """
    with tarfile.TarFile(path) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # which would keep all of them
            name = PurePosixPath(member.name)
            is_image, is_link = name.suffix.lower() in SUFFIXES, member.issym() or member.islnk()
            if name.name.startswith((".", "__")) or not (member.isreg() or (is_image and is_link)):
                continue
            if is_link:
                yield member.name, io.StringIO(f"{path}/{member.name}")
            elif is_image and not member.issparse():
                yield member.name, io.StringIO(f"tar://{member.offset_data}+{member.size}::{path}")
            else:
                yield member.name, archive.extractfile(member)
        file: Any = archive.fileobj
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"{path} is cut off or broken at byte {archive.offset:,}. Copy it again")


def are_shards(data: Dataset | IterableDataset | None) -> bool:
    """Whether a data set is one that [`Shards`] has read."""
    return data is not None and data.features == _SAMPLE


def row_of_sample(raw: Any) -> Any:
    """The row of a sample of [`Shards`]; any other row unchanged.

    The columns are those of its .json file, and files called by a column, such as `7.question` or `7.question.txt`;
    `caption` is its .txt file. Images in the shard replace named ones. Further files are columns that are not read,
    called by their suffix, videos `video` and sounds `audio`.
    """
    if not isinstance(raw, dict) or raw.keys() != _SAMPLE.keys():
        return raw
    row = {} if raw["json"] is None else loaded(raw["json"])
    if not isinstance(row, dict):
        return row
    if raw["images"]:
        row = {column: value for column, value in row.items() if column != "image"} | {"images": raw["images"]}
    files = {each["name"]: each["text"] or "a file" for each in raw["others"]}
    if raw["txt"] is not None:
        files["caption"] = raw["txt"]
    replaced = {f"{name} of the .json file": row[name] for name in files if row.get(name) not in (None, files[name])}
    return row | files | replaced
