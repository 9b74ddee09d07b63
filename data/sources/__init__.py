# SPDX-License-Identifier: Apache-2.0
"""Sources of rows: files, folders, Hub data sets and mixtures, in memory and streamed."""
