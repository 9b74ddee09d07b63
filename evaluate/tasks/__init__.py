# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Benchmarks as task files of lm-evaluation-harness: YAML, and beside it in Python what YAML cannot say."""
