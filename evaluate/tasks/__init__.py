# SPDX-License-Identifier: Apache-2.0
"""Benchmarks as task files of lm-evaluation-harness: YAML, and in Python what YAML cannot say.

Of a task's functions `documents` gives the rows that the harness asks about, once their columns are checked, `text`
the prompt for a row, `target` its right answer, and `results` the scores of an answer, by metric.
"""
