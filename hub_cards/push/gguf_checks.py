# SPDX-License-Identifier: Apache-2.0
"""Checks of GGUF files before publishing: what they hold, and of which weights they are."""

import struct
from pathlib import Path

from ...export.record import exported_weights, weights_hash
from ..reading import MODELFILE, gguf_files, models_of, weight_files


_HEADER = struct.Struct("<4sIQ")  # magic bytes, version, number of tensors


def check_gguf(checkpoint: Path) -> None:
    """Checks the GGUF files of a checkpoint folder, and the Modelfile beside them.

    Files that `normalign export` did not write have no record of their weights. They may be of
    other weights.

    Raises:
        ValueError: A file is not GGUF or has no tensors, a Modelfile names a file that is missing,
            or the files were exported from other weights. The error lists every fault.
    """
    files = gguf_files(checkpoint)
    faults = []
    for file in files:
        if not _has_tensors(file):
            faults.append(f"{file} is not a GGUF file with tensors. Write it again, or remove it.")
    folders = sorted({file.parent for file in files})
    for folder in folders:
        faults += _modelfile_faults(folder / MODELFILE)
    if not faults:  # hashing weights takes long
        faults = _outdated(checkpoint, folders)
    if faults:
        raise ValueError("\n- ".join(["These GGUF files cannot be published:", *faults]))


def _has_tensors(file: Path) -> bool:
    """Whether a file begins as a GGUF file that has tensors."""
    with file.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, _, tensor_count = _HEADER.unpack(header)
    return magic == b"GGUF" and tensor_count > 0


def _modelfile_faults(modelfile: Path) -> list[str]:
    """Returns a sentence for each GGUF file that a Modelfile names and that is missing."""
    if not modelfile.is_file():
        return []
    faults = []
    for name in models_of(modelfile):
        if name.endswith(".gguf") and not (modelfile.parent / name).is_file():
            faults.append(
                f"{modelfile} names {name}, but there is no such file. Write it, or correct or "
                "remove the Modelfile."
            )
    return faults


def _outdated(checkpoint: Path, folders: list[Path]) -> list[str]:
    """Returns a sentence for each folder whose GGUF files were exported from other weights."""
    recorded = {folder: exported_weights(folder) for folder in folders}
    if not any(recorded.values()):
        return []
    current_hash = weights_hash(weight_files(checkpoint))
    faults = []
    for folder, exported_hash in recorded.items():
        if exported_hash not in (None, current_hash):
            faults.append(
                f"{folder} was exported from other weights than {checkpoint} has now. Remove it "
                f"and run `normalign export {checkpoint}` again, or publish without --gguf."
            )
    return faults
