# SPDX-License-Identifier: Apache-2.0
"""What is trained: the model and its modules, adapters, and how they are divided among processes."""
