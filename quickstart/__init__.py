# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign quickstart`: a first checkpoint from real parts, with no account and no GPU.

`parts` pins the archives, `fetch` downloads them, `convert` turns two of them into Hugging Face model folders, `data`
makes the questions, `train` runs two recipes of the training room, `evaluate` asks held-out questions, `reload` asks
again in a process that has the checkpoint alone, `results` keeps the scores in the checkpoint, `report` shows it all,
and `run` strings them together.
"""
