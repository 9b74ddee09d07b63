# SPDX-License-Identifier: Apache-2.0
"""Evaluation on benchmarks, by lm-evaluation-harness."""
