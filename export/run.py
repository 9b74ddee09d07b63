# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint to llama.cpp: vision part, text part, Ollama's Modelfile."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from ..assembly.adapter import open_adapter
from ..assembly.merge import merge_adapter
from ..checkpoint.files import ADAPTER_CONFIG, finished_folder
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import HALVES
from ..console import Printed
from ..errors import check_installed
from ..keywords import takes_fields
from .ollama import modelfile
from .record import write_export_record
from .requirements import check_exportable, describe_resizing


TOWER_DTYPES = {**HALVES, "float32": torch.float32}
TEXT_TYPES = ("f16", "bf16", "f32", "q8_0")
MERGED = "merged"
MODELFILE = "Modelfile"
SCRIPT = "convert_hf_to_gguf.py"
_FILE_NAME = re.compile(r"[\w][\w.+-]*")
_READ_BY_SCRIPT = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


@dataclass(frozen=True)
class ExportReport(Printed):
    """What `normalign export` wrote.

    Attributes:
        output: The folder.
        vision_file: Name of the GGUF file with vision encoder, projector and norm.
        text_file: Name of the GGUF file with the language model.
        difference: Largest difference between visual tokens of sample pictures here and by
            llama.cpp's arithmetic, over their largest number.
        resizing: What llama.cpp does with a picture of another size, and what training did.
        next_commands: What to run next, in order.
    """

    labels = {
        "vision_file": "vision part",
        "text_file": "text part",
        "difference": "largest difference of visual tokens, relative",
        "resizing": "pictures of other sizes",
    }

    output: str
    vision_file: str
    text_file: str
    difference: float
    resizing: str
    next_commands: list[str]


@dataclass(frozen=True)
class ExportOptions:
    """The arguments of [`export_gguf`]. Its docstring explains them."""

    model: str | os.PathLike
    output: str | os.PathLike
    _: KW_ONLY
    name: str | None = None
    dtype: str | torch.dtype = "float16"
    llama_cpp: str | os.PathLike | None = None
    text_type: str = "f16"
    base: str | None = None
    base_quantization: str | None = None


@takes_fields(ExportOptions)
def export_gguf(options: ExportOptions) -> ExportReport:
    """Writes a checkpoint as GGUF files that an unmodified llama.cpp runs.

    `mmproj-NAME.gguf` has the vision encoder up to the layer that is read, projector and norm.
    llama.cpp's own script writes the language model to `NAME.gguf`. `Modelfile` names both for
    Ollama, with chat template and stop tokens. `export.json` has the hash of the weights, for
    `normalign publish`. An adapter is merged first.

    Args:
        model: A checkpoint's folder or Hub id, or an adapter's folder.
        output: Folder to create, or an empty one. It is written as a whole or not at all.
        name: Name of the files. By default it is the name of the model's folder or repository.
        dtype: Dtype of the vision encoder's matrices: float16, bfloat16 or float32.
        llama_cpp: Folder of llama.cpp's sources. Without it, the language model is not written, and
            `next_commands` begin with the command that writes it.
        text_type: The script's `--outtype`, one of `TEXT_TYPES`.
        base, base_quantization: As of [`merge_adapter`], if the model is an adapter.

    Raises:
        TypeError: An option does not exist.
        ValueError: llama.cpp cannot compute the model, a file is missing or damaged, or the script
            fails. Nothing is written then.
        OSError: The model cannot be fetched, or the files cannot be written.
        ImportError: The package `gguf` is missing.
    """
    check_installed("gguf", "export", "`normalign export`")
    from .mmproj import write_mmproj

    tower_dtype = TOWER_DTYPES.get(str(options.dtype).removeprefix("torch."))
    if tower_dtype is None:
        raise ValueError(f"dtype must be one of {', '.join(TOWER_DTYPES)}, got {options.dtype!r}.")
    text_type = options.text_type
    if text_type not in TEXT_TYPES:
        raise ValueError(f"text_type must be one of {', '.join(TEXT_TYPES)}, got {text_type!r}.")
    script = None
    if options.llama_cpp:
        script = _require_script(Path(os.path.expanduser(options.llama_cpp)))
    source = Path(os.path.expanduser(options.model))
    name = options.name or source.resolve().name
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(
            f"name must be a file's name without spaces, got {name!r}. Give one with --name "
            "(name=...)."
        )
    vision_file = f"mmproj-{name}.gguf"
    text_file = f"{name}.gguf"
    output = Path(os.path.expanduser(options.output))
    with finished_folder(output) as folder:
        checkpoint = _open_or_merge(source, options, folder / MERGED)
        difference = write_mmproj(checkpoint, folder / vision_file, name, tower_dtype)
        write_export_record(folder, checkpoint)
        if script:
            _write_text(script, checkpoint, folder / text_file, text_type)
            shutil.rmtree(folder / MERGED, ignore_errors=True)
        instructions = modelfile(checkpoint.processor, text_file, vision_file)
        (folder / MODELFILE).write_text(instructions, "utf-8")
    commands = [
        ["llama-server", "-m", str(output / text_file), "--mmproj", str(output / vision_file)],
        ["ollama", "create", name, "-f", str(output / MODELFILE)],
    ]
    if not script:
        is_merged = (output / MERGED).is_dir()
        converted = output / MERGED if is_merged else checkpoint.name
        script_path = f"LLAMA_CPP/{SCRIPT}"
        commands.insert(0, _script_command(script_path, converted, output / text_file, text_type))
    return ExportReport(
        output=str(output),
        vision_file=vision_file,
        text_file=text_file if script else "not written",
        difference=difference,
        resizing=describe_resizing(checkpoint.processor.image_processor),
        next_commands=list(map(shlex.join, commands)),
    )


def _open_or_merge(source: Path, options: ExportOptions, merged_folder: Path) -> Checkpoint:
    """Opens a checkpoint that llama.cpp can compute. An adapter is merged to `merged_folder`.

    Raises:
        ValueError: The model does not exist, or llama.cpp cannot compute it.
    """
    if not (source / ADAPTER_CONFIG).is_file():
        checkpoint = open_checkpoint(options.model)
        check_exportable(checkpoint.name, checkpoint.config, checkpoint.processor.image_processor)
        return checkpoint
    quantization = options.base_quantization
    adapter = open_adapter(source, options.base, quantization)
    check_exportable(str(source), adapter.config, adapter.processor.image_processor)
    merge_adapter(source, merged_folder, base=options.base, base_quantization=quantization)
    return open_checkpoint(merged_folder)


def _require_script(llama_cpp: Path) -> Path:
    """Returns llama.cpp's script. Raises ValueError if the folder has none."""
    script = llama_cpp / SCRIPT
    if not script.is_file():
        raise ValueError(
            f"{llama_cpp} has no {SCRIPT}. Give the folder of llama.cpp's sources: "
            "`git clone https://github.com/ggml-org/llama.cpp`."
        )
    return script


def _script_command(script: Path | str, model: Path | str, file: Path, text_type: str) -> list[str]:
    """Returns the command that writes a language model to `file`."""
    python = sys.executable if isinstance(script, Path) else "python"
    return [python, str(script), str(model), "--outfile", str(file), "--outtype", text_type]


def _write_text(script: Path, checkpoint: Checkpoint, file: Path, text_type: str) -> None:
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
    command = _script_command(script, folder, file, text_type)
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ended.returncode or not file.is_file():
        last_lines = "\n".join(ended.stderr.strip().splitlines()[-5:])
        raise ValueError(
            f"llama.cpp's script failed on the language model of {checkpoint.name}: "
            f"`{shlex.join(command)}`\n{last_lines}"
        )
