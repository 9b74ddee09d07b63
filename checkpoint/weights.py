# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: language model, vision tower and projector in files of their own, and an index.

Tensors are written one at a time, so no model need be in memory; `safetensors` writes whole files.
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

from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .files import INDEX, WEIGHTS, atomic_write, write_json
from .untrusted import files_of


SHARD_BYTES = 5 * 10**9  # most bytes of one file, unless one tensor has more
COMPARED_ROWS = 16  # of each tensor, before a file is linked in place of writing it

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """For `save_pretrained` without weights, of which it would show that no file is written."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def save_model(
    model: NormAlignLlavaForConditionalGeneration,
    folder: Path,
    layout: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """`save_pretrained`, with weights, or those of `layout`, as [`write_weights`] writes them."""
    with no_progress_bar():
        model.save_pretrained(folder, state_dict={})
    write_weights(folder, layout or stored_tensors(model), **options)


def stored_tensors(
    model: NormAlignLlavaForConditionalGeneration, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` stores: gain and bias in float32, tied ones once."""
    tensors = dict(model.state_dict() if state_dict is None else state_dict)
    tensors |= {name: value.float() for name, value in tensors.items() if "projector.norm." in name}
    if model.lm_head.weight is model.get_input_embeddings().weight:
        tensors.pop("lm_head.weight", None)
    return tensors


def write_weights(
    folder: Path,
    layout: Mapping[str, Tensor],
    values: Iterable[tuple[str, Tensor]] | None = None,
    linked: Mapping[str, Path] | None = None,
) -> None:
    """Writes tensors and the index into a folder, in place of its earlier weights.

    Existing files are replaced, never written into: they may be linked from other checkpoints.

    Args:
        layout: All tensors by name, for shapes and dtypes; they may be on meta.
        values: All names and values, in any order, to cast to those dtypes; by default `layout`'s.
        linked: Files to link in place of writing, or copy if that fails: see [`unchanged_files`].
    """
    files, places, linked = shards_of(layout), dict[str, tuple[BinaryIO, int]](), linked or {}
    with ExitStack() as opened:
        for file_name, names in files.items():
            partial = opened.enter_context(atomic_write(folder / file_name))
            if file_name in linked:
                try:
                    os.link(os.path.realpath(linked[file_name]), partial)
                except OSError:  # the file system has no hard links, or it is another one
                    shutil.copy2(linked[file_name], partial)
                continue
            # Tensors have no gaps. Sorted by the size of their numbers, all of them are aligned.
            names = sorted(names, key=lambda name: (-layout[name].itemsize, name))
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                begin, end = end, end + layout[name].nbytes
                header[name] = {**_described(layout[name]), "data_offsets": [begin, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file: BinaryIO = opened.enter_context(partial.open("wb"))
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                places[name] = file, 8 + len(text) + header[name]["data_offsets"][0]
        for name, value in layout.items() if values is None else values:
            if name in places:
                file, start = places.pop(name)
                value = value.detach().to("cpu", layout[name].dtype).contiguous().reshape(-1)
                file.seek(start)
                file.write(value.view(torch.uint8).numpy())
        if places:
            raise ValueError(f"{len(places)} tensors have no value, among them {min(places)}.")
    parameters = sum(tensor.numel() for tensor in layout.values())
    sizes = {"total_parameters": parameters, "total_size": size_of(layout)}
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))})
    for earlier in (folder / WEIGHTS, *folder.glob("model-*.safetensors")):
        if earlier.name not in files:
            earlier.unlink(missing_ok=True)


def unchanged_files(
    layout: Mapping[str, Tensor], frozen: Collection[str], folders: Sequence[Path]
) -> dict[str, Path]:
    """Files of weights that need not be written, since a checkpoint among `folders` has them.

    They are those of modules in `frozen` whose tensors have the same names, shapes and dtypes there
    and, unless `layout` is on meta, the same numbers in [`COMPARED_ROWS`] rows of each, the first
    and the last among them: all would be as slow to read as to write.
    """
    unchanged = dict[str, Path]()
    for file_name, names in shards_of(layout).items():
        if module_of_file(names[0]) in frozen:
            tensors = {name: layout[name] for name in names}
            files = (folder / file_name for folder in folders if (folder / file_name).is_file())
            if file := next((file for file in files if _holds(file, tensors)), None):
                unchanged[file_name] = file
    return unchanged


def index_folder(name: str, revision: str | None) -> list[Path]:
    """The folder of a checkpoint's index; none if its weights are in one file."""
    return [index.parent for index in files_of(name, [INDEX], revision)]


def shards_of(layout: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Names of files, and of the tensors in each: of one module, in order, up to `SHARD_BYTES`."""
    modules: dict[str, list[list[str]]] = {}
    for name, tensor in layout.items():
        shards = modules.setdefault(module_of_file(name), [[]])
        before = sum(layout[other].nbytes for other in shards[-1])
        if shards[-1] and before + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    return {
        # Names by which transformers knows files that a later save replaces.
        f"model-{module}-{number:05}-of-{len(shards):05}.safetensors": names
        for module, shards in modules.items()
        for number, names in enumerate(shards, 1)
    }


def size_of(layout: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors of a layout, which may lie on meta."""
    return sum(tensor.nbytes for tensor in layout.values())


def free_space(folder: Path) -> int:
    """Bytes that are free on the file system of a folder, which need not exist."""
    while not (folder := folder.resolve()).exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, size: int, remedy: str) -> None:
    """Raises ValueError if there is less space for a folder than `size` bytes."""
    if (free := free_space(folder)) < size:
        needed, left = f"{size / 1e9:,.1f} GB", f"{free / 1e9:,.1f} GB"
        raise ValueError(f"{needed} are to be written to {folder}, where {left} are free. {remedy}")


def module_of_file(tensor: str) -> str:
    """The module whose file holds a tensor."""
    modules = ("vision_tower", "multi_modal_projector")
    return next((module for module in modules if f"{module}." in tensor), "language_model")


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape]}


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    with safe_open(path, "pt") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        described = {
            name: {"dtype": kept.get_dtype(), "shape": kept.get_shape()}
            for name, kept in stored.items()
        }
        if described != {name: _described(tensor) for name, tensor in tensors.items()}:
            return False
        known = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        return all(_same_rows(stored[name], tensor) for name, tensor in known.items())


def _same_rows(stored: Any, tensor: Tensor) -> bool:
    """Whether a slice of a file has a tensor's numbers, in rows spread over it."""
    if not tensor.ndim:
        return torch.equal(stored[...], tensor.cpu())
    rows = tensor.shape[0]
    for row in torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long().tolist():
        if not torch.equal(stored[row : row + 1], tensor[row : row + 1].cpu()):
            return False
    return True
