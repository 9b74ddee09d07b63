# SPDX-License-Identifier: Apache-2.0
"""The model card, written from what lies in a checkpoint folder."""
