# SPDX-License-Identifier: Apache-2.0
"""What `normalign publish` promises to refuse, by the command itself: then nothing is sent."""

import json
import pickle

import pytest
import stored
import torch
from safetensors.torch import load, save
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.hub_cards.push.clean_process import (
    ask_clean_process,
    difference,
    first_logits,
)


pytestmark = pytest.mark.slow
SECRET = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"
NORM = "model.multi_modal_projector.norm"


def token(folder):
    (folder / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    return "a Hugging Face token, hf_A"


def local_path(folder):
    (folder / "training.json").write_text(json.dumps({"stage": f"{folder.parent}/data"}))
    return f"training.json, line 1: a local path, {folder.parent}."


def a_pickle(folder):
    (folder / "tokenizer.model").write_bytes(pickle.dumps({"a": 1}))
    return "tokenizer.model: a pickle"


def changed_code(folder):
    code = folder / "modeling_normalign_llava.py"
    code.write_text(code.read_text() + "# changed\n")
    return "modeling_normalign_llava.py is not this version's"


def other_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "evil.Evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit")
    return "auto_map in config.json is not this version's"


def infinite_gain(folder):
    weights = stored.weights(folder)
    weights[f"{NORM}.weight"][3] = torch.inf
    stored.store(folder, weights)
    return f"{NORM}.weight has 1 NaN or infinite values"


def half_gain(folder):
    weights = stored.weights(folder)
    weights[f"{NORM}.weight"] = weights[f"{NORM}.weight"].bfloat16()
    stored.store(folder, weights)
    return f"{NORM}.weight is torch.bfloat16, not float32"


def notice(folder):
    (folder / "notices" / "vision").mkdir(parents=True)
    (folder / "notices" / "vision" / "LICENSE").write_text(f"of {SECRET}")
    return "notices/vision/LICENSE, line 1: a Hugging Face token"


def padding_on_the_right(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": "right"}))
    return "tokenizer_config.json pads on the right"


FAULTS = [token, local_path, a_pickle, changed_code, other_code, infinite_gain, half_gain, notice]
FAULTS += [padding_on_the_right]


@pytest.mark.parametrize("spoil", FAULTS)
def test_nothing_is_sent_of_what_must_not_be_published(publish, hub, folder, spoil):
    said = spoil(folder)
    status, shown = publish(folder, "--no-verify")
    assert status == 1 and said in shown and SECRET not in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    assert not hub.repositories


def test_a_commit_that_answers_otherwise_than_the_folder_is_reported(start, hub, folder):
    pause = hub.fault("pause", "GET /ann/m/resolve/.*language_model.*safetensors")
    process = start(folder)
    assert pause.reached.wait(120)
    repository = hub.repository("ann/m")
    (path,) = (name for name in stored.FILES if "language_model" in name)
    weights = load(repository.read(path))
    weights["model.language_model.norm.weight"] *= 1.01
    repository.blobs[repository.head().files[path]] = save(weights, {"format": "pt"})
    pause.released.set()
    ended = process.wait()
    shown = " ".join(ended.stderr.split())
    assert ended.returncode == 1 and "It answers differently: logits differ by" in shown
    assert f"ann/m is at {repository.commit}" in shown


def test_a_clean_process_has_no_cache_and_no_token_of_this_machine(
    hub, folder, tmp_path, monkeypatch
):
    served = hub.serve("lab/m", folder)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", SECRET)  # which the hub would refuse
    caches = ["HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE"]
    for name in caches:
        monkeypatch.setenv(name, str(tmp_path / name))
    logits = ask_clean_process("lab/m", revision=served.commit)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        here = first_logits(model, AutoProcessor.from_pretrained(folder))
    assert difference(here, logits) is None
    assert not [name for name in caches if (tmp_path / name).exists()]
    weights = [path for path in hub.sent if path.endswith(".safetensors")]
    assert len(weights) == 3  # all were fetched


def test_logits_that_differ_by_a_part_in_ten_thousand_are_reported():
    logits = [-2.0, 0.5, 1.0]
    assert difference(logits, [value * (1 + 1e-7) for value in logits]) is None
    for last in (1.0 + 1e-4, 1.0 - 1e-4):
        assert difference(logits, [*logits[:2], last]) is not None
    assert difference([-10.0, 1e-3], [-10.0, 1e-3 + 5e-5]) is None  # a share of the largest


def test_no_token_is_in_the_error_of_a_clean_process(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    config["model_type"] = SECRET  # which the error names
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not work in a process without this") as shown:
        ask_clean_process(folder, token=SECRET)
    assert "[token]" in str(shown.value) and SECRET not in str(shown.value)
