# SPDX-License-Identifier: Apache-2.0
"""Training with TRL's `SFTTrainer`: two stages, LoRA and QLoRA, on one process or many."""
