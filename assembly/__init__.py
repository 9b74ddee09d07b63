# SPDX-License-Identifier: Apache-2.0
"""Building checkpoints from two parts or a LLaVA checkpoint, and merging adapters into bases."""
