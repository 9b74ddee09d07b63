# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Benchmarks as task files of lm-evaluation-harness: YAML, and in Python what YAML cannot say.

Of a task's functions `documents` gives the rows that the harness asks about, once their columns are checked, `text`
the prompt for a row, `target` its right answer, and `results` the scores of an answer, by metric.
"""
