# SPDX-License-Identifier: Apache-2.0
"""What is trained: the model, its modules, adapters, and how processes divide them."""
