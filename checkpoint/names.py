# SPDX-License-Identifier: Apache-2.0
"""Names of the files in a checkpoint folder: those of transformers and PEFT, and our records."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CARD = "README.md"
BUILD_RECORD = "build.json"  # what `normalign build` built
TRAINING_RECORD = "training.json"  # how a checkpoint was trained: the resolved recipe, data, hardware, versions
DYNAMICS = "dynamics.jsonl"  # inter-layer cosines during training, one line per measured step (figure 5)
STATE = "trainer_state.json"  # the Trainer's state, with the log
