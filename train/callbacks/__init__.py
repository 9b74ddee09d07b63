# SPDX-License-Identifier: Apache-2.0
"""What is measured, checked, shown and answered while a model is trained."""
