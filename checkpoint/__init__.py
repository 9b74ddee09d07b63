# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checkpoint folders: finding, checking and opening them, writing them whole, and where they come from."""
