# SPDX-License-Identifier: Apache-2.0
"""Records which weights GGUF files were made from: `export.json` beside them."""

from pathlib import Path

from ..checkpoint.files import write_json
from ..checkpoint.opening import Checkpoint
from ..checkpoint.untrusted import fetch_checked_weights, json_object
from ..evaluation.results import files_hash


EXPORT_RECORD = "export.json"


def weights_hash(files: list[Path]) -> str:
    """Returns the [`files_hash`] of the files of a checkpoint's weights, all in one folder."""
    return files_hash(files[0].parent, *[file.name for file in files])


def write_export_record(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the hash of a checkpoint's weights beside the GGUF files that were made from them."""
    files = fetch_checked_weights(checkpoint.name, checkpoint.revision)
    write_json(folder / EXPORT_RECORD, {"weights": weights_hash(files)})


def exported_weights(folder: Path) -> str | None:
    """Returns the hash of the weights that GGUF files in a folder were made from, if recorded.

    Raises ValueError if the record is not a JSON object.
    """
    file = folder / EXPORT_RECORD
    if not file.is_file():
        return None
    return json_object(file.read_bytes(), str(file)).get("weights")
