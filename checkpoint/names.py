# SPDX-License-Identifier: Apache-2.0
"""Names of the files in a checkpoint folder: those of transformers and PEFT, and our records."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CARD = "README.md"
BUILD_RECORD = "build.json"
"""What `normalign build` built."""
TRAINING_RECORD = "training.json"
"""How a checkpoint was trained: the resolved recipe, data, hardware, versions."""
DYNAMICS = "dynamics.jsonl"
"""Inter-layer cosines during training, one line per measured step (figure 5)."""
STATE = "trainer_state.json"
"""The Trainer's state, with the log."""
