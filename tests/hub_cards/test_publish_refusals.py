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

SECRET = f"hf_{'AbCdEfGhIj' * 3}KlMn"
GAIN = "model.multi_modal_projector.norm.weight"


def add_token(folder):
    (folder / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    return "a Hugging Face token, hf_A"


def add_local_path(folder):
    record = {"stage": f"{folder.parent}/data"}
    (folder / "training.json").write_text(json.dumps(record))
    return f"training.json, line 1: a local path, {folder.parent}."


def add_pickle(folder):
    (folder / "tokenizer.model").write_bytes(pickle.dumps({"a": 1}))
    return "tokenizer.model: a pickle"


def change_code(folder):
    code_path = folder / "modeling_normalign_llava.py"
    code_path.write_text(code_path.read_text() + "# changed\n")
    return "modeling_normalign_llava.py is not this version's"


def name_other_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "evil.Evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit")
    return "auto_map in config.json is not this version's"


def make_gain_infinite(folder):
    weights = stored.weights(folder)
    weights[GAIN][3] = torch.inf
    stored.store(folder, weights)
    return f"{GAIN} has 1 NaN or infinite values"


def make_gain_half_precision(folder):
    weights = stored.weights(folder)
    weights[GAIN] = weights[GAIN].bfloat16()
    stored.store(folder, weights)
    return f"{GAIN} is torch.bfloat16, not float32"


def add_token_to_notice(folder):
    notice_path = folder / "notices" / "vision" / "LICENSE"
    notice_path.parent.mkdir(parents=True)
    notice_path.write_text(f"of {SECRET}")
    return "notices/vision/LICENSE, line 1: a Hugging Face token"


def pad_on_the_right(folder):
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["padding_side"] = "right"
    config_path.write_text(json.dumps(config))
    return "tokenizer_config.json pads on the right"


@pytest.mark.parametrize(
    "spoil",
    [
        add_token,
        add_local_path,
        add_pickle,
        change_code,
        name_other_code,
        make_gain_infinite,
        make_gain_half_precision,
        add_token_to_notice,
        pad_on_the_right,
    ],
)
def test_nothing_is_sent_of_what_must_not_be_published(publish, hub, folder, spoil):
    message = spoil(folder)
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert message in printed_text
    assert SECRET not in printed_text
    for request in hub.requests:
        assert not request.startswith(("POST", "PUT"))
    assert not hub.repositories


def scale_published_weights(repository):
    """Changes weights in a repository after they were sent, in the same commit."""
    (weights_name,) = [name for name in stored.FILES if "language_model" in name]
    weights = load(repository.read(weights_name))
    weights["model.language_model.norm.weight"] *= 1.01
    blob_name = repository.head().files[weights_name]
    repository.blobs[blob_name] = save(weights, {"format": "pt"})


def test_a_commit_that_answers_otherwise_than_the_folder_is_reported(start, hub, folder):
    paused_request = hub.fault("pause", "GET /ann/m/resolve/.*language_model.*safetensors")
    process = start(folder)
    assert paused_request.reached.wait(120)
    repository = hub.repository("ann/m")
    scale_published_weights(repository)
    paused_request.released.set()

    ended_process = process.wait()
    printed_text = " ".join(ended_process.stderr.split())
    assert ended_process.returncode == 1
    assert "It answers differently: logits differ by" in printed_text
    assert f"ann/m is at {repository.commit}" in printed_text


CACHES = ["HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE"]


def test_a_clean_process_has_no_cache_and_no_token_of_this_machine(
    hub, folder, tmp_path, monkeypatch
):
    served = hub.serve("lab/m", folder)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", SECRET)  # the hub would refuse it
    for variable in CACHES:
        monkeypatch.setenv(variable, str(tmp_path / variable))

    logits = ask_clean_process("lab/m", revision=served.commit)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = first_logits(model, AutoProcessor.from_pretrained(folder))
    assert difference(expected, logits) is None
    for variable in CACHES:
        assert not (tmp_path / variable).exists()
    fetched = [file_path for file_path in hub.sent if file_path.endswith(".safetensors")]
    assert len(fetched) == 3  # these are all


def test_logits_that_differ_by_a_part_in_ten_thousand_are_reported():
    logits = [-2.0, 0.5, 1.0]
    assert difference(logits, [-2.0, 0.5, 1.0 + 1e-4]) is not None
    assert difference(logits, [-2.0, 0.5, 1.0 - 1e-4]) is not None


def test_logits_that_differ_by_less_are_alike():
    logits = [-2.0, 0.5, 1.0]
    nearly = [logit * (1 + 1e-7) for logit in logits]
    assert difference(logits, nearly) is None
    # The difference is a share of the largest.
    assert difference([-10.0, 1e-3], [-10.0, 1e-3 + 5e-5]) is None


def test_no_token_is_in_the_error_of_a_clean_process(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    config["model_type"] = SECRET  # the error names it
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not work in a process without this") as raised_error:
        ask_clean_process(folder, token=SECRET)
    assert "[token]" in str(raised_error.value)
    assert SECRET not in str(raised_error.value)
