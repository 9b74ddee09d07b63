# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Training with TRL's `SFTTrainer`: the paper's two stages, LoRA and QLoRA, on one process or many."""
