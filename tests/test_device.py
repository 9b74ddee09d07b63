"""What computes runs on a device that refuses the CPU's tensors, as CUDA does; without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.slow
def test_on_a_device_that_refuses_the_cpu_s_tensors():
    # In a process of its own: registering a device changes what torch does with the CPU's tensors, too.
    files = sorted(map(str, Path(__file__).with_name("on_strict_device").glob("*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
