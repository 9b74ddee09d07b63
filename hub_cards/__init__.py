# SPDX-License-Identifier: Apache-2.0
"""Publishing: the card, what may be sent, the push and its verification, the Space."""
