# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Building checkpoints from two parts or from a LLaVA checkpoint, and merging adapters into their bases."""
