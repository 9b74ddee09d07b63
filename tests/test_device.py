"""What computes runs on a device that refuses the CPU's tensors, as CUDA does; without a GPU."""

from pathlib import Path

import pytest
from paths import ROOT


RUN = """
import os
import sys

import pytest

for variable in list(os.environ):
    if variable.startswith("PYTEST_"):
        del os.environ[variable]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_on_a_device_that_refuses_the_cpu_s_tensors(prepared):
    # In a process of its own: registering a device changes what torch does with the CPU's tensors.
    folder = Path(__file__).with_name("on_strict_device")
    test_paths = sorted(str(path) for path in folder.glob("*.py"))
    process = prepared.run(["-c", RUN, *test_paths], ROOT)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
