# SPDX-License-Identifier: Apache-2.0
"""`normalign quickstart`: a first checkpoint from real parts, without an account or a GPU."""
