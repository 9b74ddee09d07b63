# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign quickstart`: a first checkpoint from real parts, without an account or a GPU.

`convert` turns two of the fetched archives into Hugging Face model folders, `train` runs two recipes, `evaluate` asks
held-out questions, `results` writes the scores into the checkpoint, `display` prints, `journal` and `time_left` keep
time, and `run` does all in order.
"""
