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
_HUB_SETTINGS = re.compile("(HF_|HUGGING|TRANSFORMERS_).*(TOKEN|CACHE|OFFLINE)")
"""Environment variables that configure the Hub's client on this machine only."""


def ask_clean_process(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    base: str | None = None,
    base_revision: str | None = None,
    token: str | None = None,
) -> list[float]:
    """Loads a checkpoint with its own code, in a process without this package and with no cache.

    Args:
        source: Folder of a checkpoint or adapter, or with `revision` its Hub id.
        revision: Commit of `source` on the Hub.
        base: Hub id of an adapter's base.
        base_revision: Commit of the base.
        token: The only access token that the process may send.

    Returns:
        The [`first_logits`] of the model.

    Raises:
        ValueError: The checkpoint does not load. The message has the output of the process.
    """
    source_name = str(source) if revision else str(Path(source).resolve())
    environment = {
        variable: value
        for variable, value in os.environ.items()
        if not _HUB_SETTINGS.match(variable)
    }
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if token:
        environment["HF_TOKEN"] = token
    else:
        environment["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    if not revision and not base_revision:
        environment["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="clean-process-") as folder:
        environment["HF_HOME"] = f"{folder}/home"
        completed = subprocess.run(
            [sys.executable, "-P", __file__],  # files beside this one would shadow other modules
            cwd=folder,
            env=environment,
            input=json.dumps([source_name, revision, base, base_revision]),
            capture_output=True,
            text=True,
        )
    if completed.returncode != 0:
        output = completed.stderr[-2000:].strip() or f"It ended with status {completed.returncode}."
        if token:
            output = output.replace(token, "[token]")
        raise ValueError(f"{source} does not work in a process without this package:\n{output}")
    return json.loads(completed.stdout.splitlines()[-1])


def difference(before: list[float], after: list[float]) -> str | None:
    """Returns a sentence if logits differ by more than `TOLERANCE`."""
    largest = max(map(abs, before))
    deviation = max(
        abs(logit_after - logit_before)
        for logit_before, logit_after in zip(before, after, strict=True)
    )
    if deviation > TOLERANCE * largest:
        return (
            f"It answers differently: logits differ by {deviation:.3g}, of at most {largest:.3g}."
        )
    return None


def first_logits(model: Any, processor: Any) -> list[float]:
    """Returns the logits of the first token of a model's answer to a fixed image and question.

    Raises ValueError if they are not finite.
    """
    ramp = Image.linear_gradient("L")
    picture = Image.merge("RGB", (ramp, ramp.rotate(90), Image.radial_gradient("L")))
    content = [
        {"type": "image", "image": picture},
        {"type": "text", "text": "What is in the image?"},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model(**inputs.to(model.device, model.dtype))
    logits = output.logits[0, -1].double().cpu()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are NaN or infinite")
    return logits.tolist()


def main() -> None:
    """Loads what the request on the standard input names, and prints its logits."""
    sys.modules["normalign_llava"] = None  # type: ignore[assignment]  # importing it fails
    import torch
    from transformers import AutoProcessor
    from transformers.utils import cached_file, logging

    logging.disable_progress_bar()
    source, revision, base, base_revision = json.load(sys.stdin)
    if base is None:
        model = _load_model(source, revision)
    else:
        from peft import PeftModel

        base_model = _load_model(base, base_revision)
        model = PeftModel.from_pretrained(base_model, source, revision=revision)
        options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        if not cached_file(source, "processor_config.json", **options):
            source = base
            revision = base_revision
    processor = AutoProcessor.from_pretrained(source, revision=revision, trust_remote_code=True)
    with torch.inference_mode():
        print(json.dumps(first_logits(model.eval(), processor)))


def _load_model(source: str, revision: str | None) -> Any:
    """Loads a model with its own code. Raises ValueError unless it has exactly its tensors."""
    from transformers import AutoModelForImageTextToText

    model, loading_info = AutoModelForImageTextToText.from_pretrained(
        source,
        revision=revision,
        code_revision=revision,
        trust_remote_code=True,
        output_loading_info=True,
    )
    wrong_tensors = []
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong_tensors += loading_info[problem]
    if wrong_tensors:
        raise ValueError(
            f"tensors missing, or not in the model of config.json: {wrong_tensors[:10]}"
        )
    return model


if __name__ == "__main__":
    main()
