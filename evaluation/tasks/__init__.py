# SPDX-License-Identifier: Apache-2.0
"""Benchmarks as task files of lm-evaluation-harness: YAML, and in Python what YAML cannot say."""
