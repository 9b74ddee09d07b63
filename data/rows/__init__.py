# SPDX-License-Identifier: Apache-2.0
"""Rows: their forms, their images, parsing and checking them."""
