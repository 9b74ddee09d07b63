# SPDX-License-Identifier: Apache-2.0
"""Loading a checkpoint in a clean process. This file is its script: it imports nothing of ours."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image


TOLERANCE = 1e-5  # by how much logits of the same weights may differ, as a share of the largest


def ask_clean_process(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    base: str | None = None,
    base_revision: str | None = None,
    token: str | None = None,
) -> list[float]:
    """The [`first_logits`] of a checkpoint, with its own code in a process without this package.

    `source` is a folder or, with `revision`, a Hub id; with `base`, that of an adapter. The process
    starts from an empty cache in the temporary folder, and sends no token but `token`. Raises
    ValueError, with its output, if the checkpoint does not load.
    """
    request = [str(source if revision else Path(source).resolve()), revision, base, base_revision]
    # Settings of the Hub's client on this machine, which others do not have.
    settings = re.compile("(HF_|HUGGING|TRANSFORMERS_).*(TOKEN|CACHE|OFFLINE)")
    environment = {name: value for name, value in os.environ.items() if not settings.match(name)}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_TOKEN": token} if token else {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    environment |= {} if revision or base_revision else {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="clean-process-") as folder:
        run = subprocess.run(
            [sys.executable, "-P", __file__],  # files beside this one would shadow other modules
            cwd=folder, env=environment | {"HF_HOME": f"{folder}/home"},
            input=json.dumps(request), capture_output=True, text=True,
        )  # fmt: skip
    if run.returncode:
        output = run.stderr[-2000:].strip() or f"It ended with status {run.returncode}."
        output = output.replace(token, "[token]") if token else output
        raise ValueError(f"{source} does not work in a process without this package:\n{output}")
    return json.loads(run.stdout.splitlines()[-1])


def difference(before: list[float], after: list[float]) -> str | None:
    """A sentence if logits differ by more than `TOLERANCE`."""
    apart = max(abs(new - old) for old, new in zip(before, after, strict=True))
    if apart > TOLERANCE * (largest := max(map(abs, before))):
        return f"It answers differently: logits differ by {apart:.3g}, of at most {largest:.3g}."
    return None


def first_logits(model: Any, processor: Any) -> list[float]:
    """The logits of the first token of a model's answer to a fixed image and question."""
    ramp = Image.linear_gradient("L")
    image = Image.merge("RGB", (ramp, ramp.rotate(90), Image.radial_gradient("L")))
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the image?"}]
    chat = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **chat)
    logits = model(**inputs.to(model.device, model.dtype)).logits[0, -1].double().cpu()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are NaN or infinite")
    return logits.tolist()


def main() -> None:
    """Loads what the request on the standard input names, and prints its logits."""
    sys.modules["normalign_llava"] = None  # type: ignore[assignment]  # importing it fails
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import cached_file, logging

    logging.disable_progress_bar()
    source, revision, base, base_revision = json.load(sys.stdin)
    name, at = (base, base_revision) if base else (source, revision)
    model, info = AutoModelForImageTextToText.from_pretrained(
        name, revision=at, code_revision=at, trust_remote_code=True, output_loading_info=True
    )
    if wrong := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"tensors missing, or not in the model of config.json: {wrong[:10]}")
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, source, revision=revision)
        options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        if cached_file(source, "processor_config.json", **options):
            name, at = source, revision
    processor = AutoProcessor.from_pretrained(name, revision=at, trust_remote_code=True)
    with torch.inference_mode():
        print(json.dumps(first_logits(model.eval(), processor)))


if __name__ == "__main__":
    main()
