# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch` starts this as `python -m normalign_llava.train`. It is `normalign train`."""

import sys

from normalign_llava.cli import app


app(["train", *sys.argv[1:]], prog_name="normalign")
