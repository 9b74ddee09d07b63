# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What other people's files may ask for: caps on bytes and numbers, and the guard of memory. Imports no torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


MAX_IMAGE_BYTES = 256 * 2**20
"""Bytes of one encoded image."""

MAX_TABLE_BYTES = 2**30
"""Bytes that the rows of parquet files may take, unless the size of the files explains them."""

MAX_NUMBER = 2**25
"""Any number in a configuration; they become sizes. The largest among transformers' own defaults is 20 million."""

MAX_LAYERS = 1_000
"""Layers of a model. Each takes milliseconds and kilobytes, so that a limit of memory acts after minutes only."""

SETTINGS_BYTES = 2 * 2**30
"""Memory that reading a configuration may take, and making its model without weights; a large one takes 100 MiB."""

TEMPLATE_BYTES = 2**30
"""Memory that rendering a chat template may take; ordinary ones take kilobytes."""


@contextmanager
def limited_memory(size: int | None) -> Iterator[None]:
    """Lets the process take `size` more bytes of address space within the block; None for no limit. It acts on Linux.

    Raises:
        MemoryError: The block takes more. Libraries that are not Python may raise their own error, or abort.
    """
    if not size or sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + size, *most]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def free_memory() -> int:
    """Bytes that this process can take: of what is free in the machine, and of what its container (cgroup) may have.

    Pages of files that the kernel can drop count as free.
    """
    free = [psutil.virtual_memory().available]
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is none, or no limit: "max"
            most, taken = (int(Path(folder, name).read_text()) for name in (limit, used))
            counted = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            free.append(most - taken + int(counted["active_file"]) + int(counted["inactive_file"]))
    return max(0, min(free))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
