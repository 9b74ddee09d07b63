# SPDX-License-Identifier: Apache-2.0
"""`python -m normalign_llava.train`, which `accelerate launch` starts, is `normalign train`."""

import sys

from normalign_llava.cli import app


app(["train", *sys.argv[1:]], prog_name="normalign")
