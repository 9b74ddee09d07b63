# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Asking a checkpoint in a fresh process that has the checkpoint's own code and not this package.

This file is also the script of that process, so it imports nothing of the package.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


PACKAGE = "normalign_llava"
MAX_NEW_TOKENS = 8


def answer_each(model, processor, asked: list[list[dict]]) -> list[str]:
    """Answers conversations one by one, greedily.

    Args:
        model: The model.
        processor: Its processor.
        asked: Conversations that end with the user's turn; images as paths.

    Returns:
        The answers.
    """
    answers = []
    for messages in asked:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs.to(model.device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers.append(processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def answer_elsewhere(checkpoint: Path, asked: list[list[dict]]) -> list[str]:
    """`answer_each` in a fresh process, with `trust_remote_code=True`, an empty cache and the package barred.

    Raises:
        RuntimeError: The process failed; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        request.write_text(json.dumps({"checkpoint": str(checkpoint.resolve()), "asked": asked}), encoding="utf-8")
        environment = os.environ | {"HF_HOME": str(Path(folder) / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, str(request), str(reply)]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{checkpoint} does not load elsewhere:\n{run.stderr[-2000:]}")
        return json.loads(reply.read_text(encoding="utf-8"))


def main(request: Path, reply: Path) -> None:
    """Loads the checkpoint with its own code and writes its answers."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]  # its names would hide others'
    sys.modules[PACKAGE] = None  # type: ignore[assignment]  # an import of it fails from here on

    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    content = json.loads(request.read_text(encoding="utf-8"))
    checkpoint = content["checkpoint"]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, trust_remote_code=True)
    if not type(model).__module__.startswith("transformers_modules."):
        raise RuntimeError(f"the model's class came from {type(model).__module__}, not from the checkpoint")
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    reply.write_text(json.dumps(answer_each(model, processor, content["asked"])), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
