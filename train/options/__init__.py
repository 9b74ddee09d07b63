# SPDX-License-Identifier: Apache-2.0
"""Options of training: their fields, what they become, and how a command line is read."""
