# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m normalign_llava.train`, and what `accelerate launch -m` starts: the same as `normalign train`."""

import sys

from normalign_llava.cli import app


app(["train", *sys.argv[1:]], prog_name="normalign")
