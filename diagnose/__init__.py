# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of any vision-language model: norms at the interface, rotation in depth, attention."""
