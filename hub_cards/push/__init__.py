# SPDX-License-Identifier: Apache-2.0
"""What may be sent to the Hub, sending it in one commit, and verifying it."""
