# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Runs the scripts of this folder on a GPU in bfloat16, one after another, and collects their figures in one file.

    python benchmarks/gpu.py [norm recipes ...] [--output benchmark-gpu.json]

The file has the figures of each script under its name, and under "failed" the last lines of those that failed.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch


HERE = Path(__file__).resolve().parent
SCRIPTS: dict[str, list[str]] = {
    "norm": [],
    "step": ["--parts", "1b"],
    "packing": [],
    "probe": [],
    "generate": ["--shape", "7b"],
    "recipes": [],
}
"""The scripts, with their options besides the device and the precision."""


def run(script: str, device: str, folder: Path) -> tuple[dict | None, str]:
    """What a script wrote, with its minutes; None if it failed. And the end of what it printed."""
    output, start = folder / f"{script}.json", time.monotonic()
    command = [sys.executable, f"{HERE / script}.py", "--device", device, "--bf16", *SCRIPTS[script]]
    print(f"$ {' '.join(command)}", flush=True)
    process = subprocess.Popen(
        [*command, "--output", str(output)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines = [*lines[-19:], line]
    if process.wait() or not output.exists():
        return None, "".join(lines)
    return {**json.loads(output.read_text()), "minutes": (time.monotonic() - start) / 60}, ""


def main() -> None:
    """Runs the scripts and writes the file; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="script", help=f"of {', '.join(SCRIPTS)}; all by default")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=Path("benchmark-gpu.json"))
    options = parser.parse_args()
    if unknown := sorted(set(options.scripts) - set(SCRIPTS)):
        parser.error(f"there is no script {', '.join(unknown)}, but {', '.join(SCRIPTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU. Install a build of torch for CUDA, or try the scripts with --device cpu")
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    }
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in options.scripts or SCRIPTS:
            figures, end = run(script, options.device, Path(folder))
            if figures is None:
                failed[script] = end
            else:
                found[script] = figures
            # After each, so that figures are kept if a later script takes the machine down.
            options.output.write_text(json.dumps({**found, "failed": failed}, indent=2) + "\n", encoding="utf-8")
    print(f"Written to {options.output}.")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
