# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Whether this machine is fast in half precision: measured once, not guessed from a processor's name."""

import hashlib
import logging
import os
import platform
import timeit
from functools import cache, partial
from pathlib import Path

import torch
from filelock import FileLock
from transformers import PreTrainedConfig
from transformers.utils import is_torch_bf16_gpu_available

from .files import cache_dir, json_or_none, write_json


logger = logging.getLogger(__name__)

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def half_precision_pays(dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> bool:
    """Whether a device multiplies matrices of half precision at least twice as fast as float32 ones.

    A CPU is measured, since many only emulate bfloat16, and the seconds are kept in `precision/` of the cache folder,
    so that all processes agree. GPUs are asked; one that only emulates bfloat16, such as a T4, counts as slow.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        device: Type of the device, such as `"cpu"`; by default the accelerator's, or the CPU.
    """
    accelerator = torch.accelerator.current_accelerator()
    device = device or (accelerator.type if accelerator and torch.accelerator.is_available() else "cpu")
    if device == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return dtype == torch.float16 or is_torch_bf16_gpu_available()
    seconds = _remembered_seconds()
    return seconds["float32"] > 2 * seconds[str(dtype).removeprefix("torch.")]


@cache  # one line in a process
def warn_if_slow(dtype: str | torch.dtype | None, device: str | None = None) -> None:
    """Warns in one line if a precision that was asked for is slow on this device."""
    name = str(dtype).removeprefix("torch.")
    if name in HALVES and not half_precision_pays(HALVES[name], device):
        logger.warning(f"{name} was asked for, but this machine only emulates it. float32 is faster, in more memory.")


def dtype_to_load(dtype: str | torch.dtype, config: PreTrainedConfig | None) -> str | torch.dtype:
    """The dtype to load a model in to run it: "auto" becomes float32 if the checkpoint's own is slow on this machine.

    That is on CPUs alone, where memory is rarely short; a GPU runs the checkpoint's own. Says so in one line, and
    warns if another that was asked for is slow.
    """
    if torch.cuda.is_available() or config is None:
        return dtype
    stored = config.dtype or config.get_text_config().dtype
    if dtype != "auto":
        warn_if_slow(dtype, "cpu")
    elif stored in HALVES.values() and not half_precision_pays(stored, "cpu"):
        name = str(stored).removeprefix("torch.")
        logger.warning(f"Loading in float32: this processor only emulates the checkpoint's {name} (--dtype {name}).")
        return "float32"
    return dtype


def seconds_file() -> Path:
    """Where the seconds are kept of this processor, these settings of torch and oneDNN, and this version of torch."""
    switches = {name: value for name, value in os.environ.items() if name.startswith(("ATEN_", "DNNL_", "ONEDNN_"))}
    machine = [processor(), sorted(switches.items()), torch.__version__, torch.get_num_threads()]
    return cache_dir() / "precision" / f"{hashlib.sha256(repr(machine).encode()).hexdigest()[:16]}.json"


@cache  # a process has one answer, however it asks
def _remembered_seconds() -> dict[str, float]:
    file = seconds_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):  # processes of one run wait for the first, which measures undisturbed
            if (found := json_or_none(file)) is None:
                write_json(file, found := _seconds())
            return found
    except OSError:  # the folder cannot be written
        return _seconds()


def _seconds() -> dict[str, float]:
    """The shortest time of a product of matrices whose sizes are common in training, by precision."""
    found = {}
    for name, dtype in {"float32": torch.float32, **HALVES}.items():
        x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
        found[name] = min(timeit.repeat(partial(torch.nn.functional.linear, x, weight), number=1, repeat=5))
    return found


def processor() -> list[str]:
    """What tells this processor from another: on Linux the name and features of the first core."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if platform.system() == "Linux" else ""
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    lines = [line for line in about.partition("\n\n")[0].splitlines() if line.startswith(names)]
    return lines or [platform.machine(), platform.processor()]
