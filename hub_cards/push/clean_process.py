# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Loading a checkpoint in a clean process: without this package, and with empty caches.

This file is also the script of that process, so it imports nothing of the package.
"""

import errno
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


TOLERANCE = 1e-5
"""How far logits of the same weights may differ, as a share of the largest."""

TIME_LIMIT = 1800
"""Seconds for the answers, once the model is loaded; a chat template may run without end."""

QUESTION = "What is in the image?"


@dataclass(frozen=True)
class Answer:
    """The answer of a checkpoint to a fixed image and question.

    Attributes:
        logits: Of the first token of the answer.
        answers: To the further conversations.
    """

    logits: list[float]
    answers: list[str]


def ask_clean_process(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    base: str | None = None,
    base_revision: str | None = None,
    token: str | None = None,
    asked: Sequence[list[dict[str, Any]]] = (),
) -> Answer:
    """Loads a checkpoint in a clean process with `trust_remote_code=True`, and asks it about an image.

    The process cannot import this package, and starts from an empty cache in the temporary folder, which must have
    room for a repository's files. It computes on the CPU; a quantized checkpoint where transformers places it. Without
    `token` no token of this machine is sent.

    Args:
        source: Folder of a checkpoint or, with `base`, of an adapter; or its Hub id.
        revision: Branch, tag or commit of a Hub id, of the code too; None for a folder.
        base, base_revision: Hub id and commit of the adapter's base.
        asked: Further conversations to answer, each up to the user's turn; images as paths.

    Raises:
        ValueError: The checkpoint does not load, its results are wrong, or it takes longer than `TIME_LIMIT`; the
            message ends with the output of the process, without the token.
        OSError: The temporary folder has no room.
    """
    request = {
        "source": str(source if revision else Path(source).resolve()),
        "revision": revision,
        "base": base,
        "base_revision": base_revision,
        "asked": list(asked),
        "time_limit": TIME_LIMIT,
    }
    # Settings of the Hub's client on this machine, which others do not have.
    own = ("TOKEN", "CACHE", "OFFLINE")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and any(map(name.count, own)))
    }
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_TOKEN": token} if token else {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    environment |= {} if revision or base_revision else {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="clean-process-") as folder:
        question, reply = Path(folder) / "question.json", Path(folder) / "reply.json"
        question.write_text(json.dumps(request), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, __file__, str(question), str(reply)],
            cwd=folder, env=environment | {"HF_HOME": f"{folder}/home"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if run.returncode and os.strerror(errno.ENOSPC) in run.stderr:
            raise OSError(f"{tempfile.gettempdir()} has no room to load {source}. Set TMPDIR to a folder that has.")
        if run.returncode:
            output = run.stderr[-2000:].strip() or f"It ended with status {run.returncode} and no output."
            output = output.replace(token, "[token]") if token else output
            raise ValueError(f"{source} does not work in a process without this package:\n{output}")
        return Answer(**json.loads(reply.read_text(encoding="utf-8")))


def difference(before: Answer, after: Answer) -> str | None:
    """A sentence if the logits of two answers differ by more than `TOLERANCE`."""
    apart = max(abs(one - other) for one, other in zip(before.logits, after.logits, strict=True))
    if apart > TOLERANCE * (largest := max(map(abs, before.logits))):
        return f"It answers differently: logits are up to {apart:.3g} apart, of at most {largest:.3g}."
    return None


def main(request: Path, reply: Path) -> None:
    """Loads what `request` names, and writes the answer."""
    here = Path(__file__).resolve().parent
    # The names of the files beside this one would shadow other modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    sys.modules["normalign_llava"] = None  # type: ignore[assignment]  # an import of it fails from here on

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    content = json.loads(request.read_text(encoding="utf-8"))
    asked, time_limit = content.pop("asked"), content.pop("time_limit")
    with torch.inference_mode():
        model, processor = _load(**content)
        faulthandler.dump_traceback_later(time_limit, exit=True)
        answer = _answer(model, processor, asked)
    reply.write_text(json.dumps(asdict(answer)), encoding="utf-8")


def _load(source: str, revision: str | None, base: str | None, base_revision: str | None):
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import cached_file

    name, at = (base, base_revision) if base else (source, revision)
    remote: dict[str, Any] = {"revision": at, "code_revision": at, "trust_remote_code": True}
    model, info = AutoModelForImageTextToText.from_pretrained(name, output_loading_info=True, **remote)
    if absent := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"tensors that are missing, or that the model of config.json does not have: {absent[:10]}")
    for each in (model.config, model):
        if not type(each).__module__.startswith("transformers_modules."):
            raise ValueError(f"{type(each).__name__} came from {type(each).__module__}, not with the checkpoint")
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, source, revision=revision)
        file = "processor_config.json"
        if cached_file(source, file, revision=revision, _raise_exceptions_for_missing_entries=False):
            name, at = source, revision
    return model.eval(), AutoProcessor.from_pretrained(name, revision=at, trust_remote_code=True)


def answer_each(model, processor, asked: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Answers conversations one by one, greedily, in at most 16 tokens."""
    answers = []
    for messages in asked:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs.to(model.device, model.dtype), max_new_tokens=16, do_sample=False)
        answers.append(processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def _answer(model, processor, asked: list[list[dict[str, Any]]]) -> Answer:
    from PIL import Image

    ramp = Image.linear_gradient("L")
    image = Image.merge("RGB", (ramp, ramp.rotate(90), Image.radial_gradient("L")))
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    ).to(model.device, model.dtype)  # fmt: skip
    logits = model(**inputs).logits[0, -1].double().cpu()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are NaN or infinite")
    return Answer(logits.tolist(), answer_each(model, processor, asked))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
