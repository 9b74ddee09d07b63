# SPDX-License-Identifier: Apache-2.0
"""What is measured, checked and shown while a model is trained."""
