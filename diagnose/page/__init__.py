# SPDX-License-Identifier: Apache-2.0
"""`report.html`, one file for a person."""
