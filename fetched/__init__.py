# SPDX-License-Identifier: Apache-2.0
"""Real parts and data that pip and npm fetch, for quickstart, offline suite and experiments."""
