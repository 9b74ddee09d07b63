# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: finding, checking, loading and writing them, and their provenance."""
