# SPDX-License-Identifier: Apache-2.0
"""Checks of GGUF files before publishing: what they hold, and whether all are there."""

import struct
from pathlib import Path

from ..reading import MODELFILE, gguf_files, models_of


_HEADER = struct.Struct("<4sIQ")  # magic bytes, version, number of tensors


def check_gguf(checkpoint: Path) -> None:
    """Checks the GGUF files of a checkpoint folder, and the Modelfile beside them.

    Raises:
        ValueError: A file is not GGUF or has no tensors, or a Modelfile names a file that is
            missing. The error lists every fault.
    """
    files = gguf_files(checkpoint)
    faults = []
    for file in files:
        if not _has_tensors(file):
            faults.append(f"{file} is not a GGUF file with tensors. Write it again, or remove it.")
    for folder in sorted({file.parent for file in files}):
        faults += _modelfile_faults(folder / MODELFILE)
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
