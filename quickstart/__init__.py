# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign quickstart`: a first checkpoint from real parts, without an account or a GPU.

`train` runs two recipes, `evaluate` asks held-out questions and diagnoses, `display` prints, `journal` keeps what is
finished, and `run` does all in order.
"""
