# SPDX-License-Identifier: Apache-2.0
"""Errors of full memory, of libraries of kernels, and of GPUs, in words."""

import re
import traceback


MORE = "Use a machine with more."
_FULL = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.I)
_AMOUNT = re.compile(r"tried to allocate [\d.]+ \w+(\. GPU \d+ has .*? is free)?", re.I)
_KERNELS = re.compile(r"[\\/](bitsandbytes|flash_attn|(?<=-packages[\\/])(?:triton|kernels))[\\/]")


def device_error(error: BaseException, remedy: str = MORE) -> str | None:
    """Returns a sentence about full memory, failed kernels or a failed GPU, or None.

    If memory is full, the error's first note says where.

    Args:
        error: The error, with its traceback.
        remedy: A sentence that says what to do if memory is full.
    """
    if isinstance(error, OSError | ImportError) or not isinstance(error, Exception):
        return None
    message, traceback_text = first_cause(error)
    may_be_torch = isinstance(error, RuntimeError | AssertionError)
    if isinstance(error, MemoryError) or (may_be_torch and _FULL.search(message)):
        place = ""
        for note in getattr(error, "__notes__", [])[:1]:
            place = f" in {note}"
        amount = _AMOUNT.search(message)
        if amount:
            place += f": {amount[0]}"
        return f"Out of memory{place}. {remedy}"
    first_line = message.partition("\n")[0].rstrip(".") or type(error).__name__
    kernels = _KERNELS.findall(traceback_text)
    if kernels:
        return f"{kernels[-1]} failed: {first_line}. Does its version fit torch and this machine?"
    if may_be_torch and re.search(r"\b(CUDA|cuDNN|CUBLAS\w*|HIP|NVIDIA|XPU)\b", first_line):
        return f"The GPU failed: {first_line}. Does this build of torch fit the GPU and its driver?"
    return None


def first_cause(error: BaseException) -> tuple[str, str]:
    """Returns message and traceback of an error, or of the first error in loading a tensor.

    transformers reports such an error by another one, and keeps it in a local variable.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        loading_info = frame.f_locals.get("loading_info")
        for report in getattr(loading_info, "conversion_errors", {}).values():
            message_line = re.search(r"^[\w.]+: (.+)$", report, re.M)
            if message_line:
                return message_line[1], report
            return report, report
    return str(error), "".join(traceback.format_tb(error.__traceback__))
