# SPDX-License-Identifier: Apache-2.0
"""The code and the machines of a run, for its record."""

import json
import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object


def code_commit() -> str | None:
    """Returns the git commit of this package's code, or None if it is not known.

    In a checkout it ends in "-dirty" if a file was changed. Elsewhere it is what pip installed.
    """
    root = Path(__file__).resolve().parents[2]
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    command += ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()
    with suppress(PackageNotFoundError, ValueError):  # as pip records it (PEP 610)
        recorded = distribution("normalign-llava").read_text("direct_url.json")
        if recorded:
            return json.loads(recorded).get("vcs_info", {}).get("commit_id")
    return None


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns the names of the `devices` of all processes, their `count`, and the `machine`.

    All processes must call this together.
    """
    index = None
    if device.type in ("cuda", "xpu"):
        index = device.index
        name = torch.get_device_module(device).get_device_name(device)
    else:
        name = _processor_name()
    devices = set(gather_object([(platform.node(), index, name)]))
    names = {name for _, _, name in devices}
    machine = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return {"devices": sorted(names), "count": len(devices), "machine": machine}


def _processor_name() -> str:
    """Returns the name of the processor on Linux, and the architecture elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.machine()
