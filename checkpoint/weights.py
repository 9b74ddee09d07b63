# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: language model, vision tower and projector in files of their own, and an index.

Tensors are written one at a time, so that a model need not be in memory. `safetensors` by itself
writes whole files.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import logging

from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, stored_tensors
from .files import INDEX, WEIGHTS, atomic_write, write_json
from .untrusted import fetch_files


SHARD_BYTES = 5 * 10**9  # most bytes of one file, unless one tensor has more
COMPARED_ROWS = 16  # of each tensor, before a file is linked in place of writing it

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hides the progress bar of `save_pretrained`. It would show that no file is written."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def save_model(
    model: NormAlignLlavaForConditionalGeneration,
    folder: Path,
    layout: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Saves a model as `save_pretrained` does, but with weights as [`write_weights`] writes them.

    Args:
        model: The model.
        folder: The folder of the new checkpoint.
        layout: The tensors to write. By default, all of the model's.
        options: Further arguments of [`write_weights`].
    """
    with no_progress_bar():
        model.save_pretrained(folder, state_dict={})
    write_weights(folder, layout or stored_tensors(model), **options)


class SafetensorsWriter:
    """Writes a safetensors file one tensor at a time.

    Args:
        file: The open file.
        layout: All of its tensors by name, for shapes and dtypes. They may be on meta.
    """

    def __init__(self, file: BinaryIO, layout: Mapping[str, Tensor]):
        self._file = file
        self._layout = layout
        self._starts = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        # Without gaps between them, tensors are aligned if sorted by the size of their numbers.
        for tensor_name in sorted(layout, key=lambda name: (-layout[name].itemsize, name)):
            tensor = layout[tensor_name]
            self._starts[tensor_name] = start
            header[tensor_name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.nbytes],
            }
            start += tensor.nbytes
        header_text = json.dumps(header, separators=(",", ":")).encode()
        header_text += b" " * (-len(header_text) % 8)
        file.write(len(header_text).to_bytes(8, "little") + header_text)
        self._header_end = file.tell()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the numbers of a tensor, cast to its dtype in the layout."""
        tensor = tensor.detach().to("cpu", self._layout[name].dtype)
        numbers = tensor.contiguous().reshape(-1)
        self._file.seek(self._header_end + self._starts[name])
        self._file.write(numbers.view(torch.uint8).numpy())


def write_weights(
    folder: Path,
    layout: Mapping[str, Tensor],
    values: Iterable[tuple[str, Tensor]] | None = None,
    linked: Mapping[str, Path] | None = None,
) -> None:
    """Writes tensors and the index into a folder, in place of its earlier weights.

    Existing files are replaced, never written into: they may be linked from other checkpoints.

    Args:
        folder: The folder of a checkpoint.
        layout: All tensors by name, for shapes and dtypes. They may be on meta.
        values: All names and values, in any order, to cast to those dtypes. By default, these are
            the tensors of `layout`.
        linked: Files to link in place of writing, or copy if that fails: see [`reusable_files`].

    Raises:
        ValueError: A tensor has no value.
        NotWritable: The folder is read-only, or the disk is full.
    """
    shards = shards_of(layout)
    linked = linked or {}
    if values is None:
        values = layout.items()
    weight_map: dict[str, str] = {}
    writers: dict[str, SafetensorsWriter] = {}
    with ExitStack() as opened:
        for file_name, tensor_names in shards.items():
            weight_map |= dict.fromkeys(tensor_names, file_name)
            partial_file = opened.enter_context(atomic_write(folder / file_name))
            if file_name in linked:
                _link(linked[file_name], partial_file)
                continue
            file = opened.enter_context(partial_file.open("wb"))
            writer = SafetensorsWriter(file, {name: layout[name] for name in tensor_names})
            writers |= dict.fromkeys(tensor_names, writer)
        for tensor_name, value in values:
            if tensor_name in writers:
                writers.pop(tensor_name).write(tensor_name, value)
        if writers:
            raise ValueError(f"{len(writers)} tensors have no value, among them {min(writers)}.")
    total_sizes = {
        "total_parameters": sum(map(Tensor.numel, layout.values())),
        "total_size": size_of(layout),
    }
    index = {"metadata": total_sizes, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)
    for earlier_file in (folder / WEIGHTS, *folder.glob("model-*.safetensors")):
        if earlier_file.name not in shards:
            earlier_file.unlink(missing_ok=True)


def _link(file: Path, target: Path) -> None:
    """Links a file, or copies it if the file system has no hard links or is another one."""
    try:
        os.link(os.path.realpath(file), target)
    except OSError:
        shutil.copy2(file, target)


def reusable_files(
    layout: Mapping[str, Tensor], frozen: Collection[str], folders: Sequence[Path]
) -> dict[str, Path]:
    """Returns files of frozen modules in earlier checkpoints that need not be written again.

    Tensors in them have the same names, shapes and dtypes as in `layout`. Unless `layout` is on
    meta, [`COMPARED_ROWS`] rows of each tensor are read and have the same numbers. Comparing all
    numbers would be as slow as writing them.

    Args:
        layout: The tensors to write, by name.
        frozen: The modules that are not trained.
        folders: The checkpoints that may have the files, the preferred one first.
    """
    unchanged = {}
    for file_name, tensor_names in shards_of(layout).items():
        if module_of_tensor(tensor_names[0]) not in frozen:
            continue
        tensors = {name: layout[name] for name in tensor_names}
        for folder in folders:
            file = folder / file_name
            if file.is_file() and _holds(file, tensors):
                unchanged[file_name] = file
                break
    return unchanged


def fetch_index_folder(name: str, revision: str | None) -> list[Path]:
    """Returns the folder of a checkpoint's index, or an empty list if it has one file of weights.

    The index is fetched from the Hub.
    """
    return [index.parent for index in fetch_files(name, [INDEX], revision)]


def shards_of(layout: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file.

    A file has tensors of one module, in order, up to `SHARD_BYTES`.
    """
    shards_by_module: dict[str, list[list[str]]] = {}
    for tensor_name, tensor in layout.items():
        shards = shards_by_module.setdefault(module_of_tensor(tensor_name), [[]])
        shard = shards[-1]
        shard_bytes = sum(layout[earlier_name].nbytes for earlier_name in shard)
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            shard = []
            shards.append(shard)
        shard.append(tensor_name)
    names_by_file = {}
    for module, shards in shards_by_module.items():
        for number, tensor_names in enumerate(shards, 1):
            # transformers knows by these names which files a later save replaces.
            file_name = f"model-{module}-{number:05}-of-{len(shards):05}.safetensors"
            names_by_file[file_name] = tensor_names
    return names_by_file


def size_of(layout: Mapping[str, Tensor]) -> int:
    """Returns the bytes of all tensors of a layout. They may lie on meta."""
    return sum(tensor.nbytes for tensor in layout.values())


def free_space(folder: Path) -> int:
    """Returns the free bytes on the file system of a folder. The folder need not exist."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, size: int, remedy: str) -> None:
    """Raises ValueError if fewer than `size` bytes are free for a folder."""
    free_bytes = free_space(folder)
    if free_bytes < size:
        raise ValueError(
            f"{size / 1e9:,.1f} GB are to be written to {folder}, where "
            f"{free_bytes / 1e9:,.1f} GB are free. {remedy}"
        )


def module_of_tensor(tensor: str) -> str:
    """Returns the module whose file holds a tensor."""
    for module in ("vision_tower", "multi_modal_projector"):
        if f"{module}." in tensor:
            return module
    return "language_model"


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Reads whether a file has these tensors, by their description and a sample of numbers."""
    with safe_open(path, "pt") as file:
        if set(file.keys()) != set(tensors):
            return False
        for tensor_name, tensor in tensors.items():
            stored = file.get_slice(tensor_name)
            description = (stored.get_dtype(), stored.get_shape())
            if description != (_DTYPE_NAMES[tensor.dtype], list(tensor.shape)):
                return False
            if not tensor.is_meta and not _has_same_rows(stored, tensor):
                return False
    return True


def _has_same_rows(stored: Any, tensor: Tensor) -> bool:
    """Whether a slice of a file has a tensor's numbers, in rows that are spread over it."""
    if not tensor.ndim:
        return torch.equal(stored[...], tensor.cpu())
    rows = len(tensor)
    for row in torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long().tolist():
        if not torch.equal(stored[row : row + 1], tensor[row : row + 1].cpu()):
            return False
    return True
