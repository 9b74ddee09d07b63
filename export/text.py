# SPDX-License-Identifier: Apache-2.0
"""Writes the language model of a checkpoint as GGUF with llama.cpp's own script."""

import shlex
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from ..checkpoint.opening import Checkpoint


SCRIPT = "convert_hf_to_gguf.py"
_READ_BY_SCRIPT = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


def find_script(llama_cpp: Path) -> Path:
    """Returns llama.cpp's script. Raises ValueError if the folder has none."""
    script = llama_cpp / SCRIPT
    if not script.is_file():
        raise ValueError(
            f"{llama_cpp} has no {SCRIPT}. Give the folder of llama.cpp's sources: "
            "`git clone https://github.com/ggml-org/llama.cpp`."
        )
    return script


def script_command(script: Path | str, model: Path | str, file: Path, text_type: str) -> list[str]:
    """Returns the command that writes a language model to `file`."""
    python = sys.executable if isinstance(script, Path) else "python"
    return [python, str(script), str(model), "--outfile", str(file), "--outtype", text_type]


def write_text(script: Path, checkpoint: Checkpoint, file: Path, text_type: str) -> None:
    """Writes the language model with llama.cpp's script.

    Args:
        script: llama.cpp's script.
        checkpoint: The checkpoint. If it is on the Hub, its files are fetched.
        file: The file to write.
        text_type: A value of the script's `--outtype`.

    Raises:
        ValueError: The script fails. The error has its last lines.
    """
    folder = Path(checkpoint.name)
    if not folder.is_dir():
        folder = Path(
            snapshot_download(
                checkpoint.name, revision=checkpoint.revision, allow_patterns=_READ_BY_SCRIPT
            )
        )
    command = script_command(script, folder, file, text_type)
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ended.returncode or not file.is_file():
        last_lines = "\n".join(ended.stderr.strip().splitlines()[-5:])
        raise ValueError(
            f"llama.cpp's script failed on the language model of {checkpoint.name}: "
            f"`{shlex.join(command)}`\n{last_lines}"
        )
