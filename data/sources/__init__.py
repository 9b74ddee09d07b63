# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: files, folders, Hub data sets, mixtures; in memory and streamed."""
