"""What computes runs on a device that refuses the CPU's tensors, as CUDA does; without a GPU."""

from pathlib import Path

import pytest
from paths import ROOT


RUN = """
import os, sys, pytest
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_on_a_device_that_refuses_the_cpu_s_tensors(prepared):
    # In a process of its own: registering a device changes what torch does with the CPU's tensors.
    files = sorted(map(str, Path(__file__).with_name("on_strict_device").glob("*.py")))
    done = prepared.run(["-c", RUN, *files], ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
