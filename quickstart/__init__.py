# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign quickstart`: a first checkpoint from real parts, with no account and no GPU.

`convert` turns two of the fetched archives into Hugging Face model folders, `train` runs two recipes of the training
room, `evaluate` asks held-out questions, `results` keeps the scores in the checkpoint, `display` shows it all, and
`run` strings them together.
"""
