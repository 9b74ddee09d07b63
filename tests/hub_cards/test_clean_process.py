"""Loading a checkpoint in a fresh process that cannot import the package, from a folder and from a hub."""

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest
import tiny_parts as parts
import torch
from hub_server import HubServer
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.hub_cards.push.clean_process import QUESTION, Answer, ask_clean_process, difference


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("clean")
    folder = root / "my-model.v1.5"  # a dot, as in so many repository names
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language", tied=False), folder)
    return folder


@pytest.fixture(scope="module")
def answer(checkpoint):
    return ask_clean_process(checkpoint)


def test_a_clean_process_gets_what_the_package_gives(checkpoint, answer):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    ramp = Image.linear_gradient("L")
    image = Image.merge("RGB", (ramp, ramp.rotate(90), Image.radial_gradient("L")))
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}],
        add_generation_prompt=True,
    )
    inputs = processor(images=image, text=text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1].double()
    assert answer.model == "NormAlignLlavaForConditionalGeneration" and answer.dtype == "float32"
    assert answer.input_ids == inputs["input_ids"][0].tolist()
    assert answer.placeholders == answer.features == 4
    assert answer.parameters == model.num_parameters()
    torch.testing.assert_close(torch.tensor(answer.logits).abs(), logits.abs().float().sort(descending=True)[0][:32])
    assert answer.logits_norm == pytest.approx(logits.norm().item(), rel=1e-6)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.generated == expected.tolist()


def test_from_a_private_repository_it_is_the_same(checkpoint, answer, tmp_path):
    with HubServer() as hub:
        token = hub.token("somebody", role="read")
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        hub.create("somebody/my-model.v1.5", private=True, files=files)
        commit = hub.repository("somebody/my-model.v1.5").head().oid
        # Where the hub cannot be loaded from, the reason comes without the token.
        with pytest.raises(ValueError, match="does not work in a process without this package") as error:
            ask_clean_process("somebody/other", revision=commit, token=token, endpoint=hub.url)
        assert token not in str(error.value) and "somebody/other" in str(error.value)
        got = ask_clean_process("somebody/my-model.v1.5", revision=commit, token=token, endpoint=hub.url)
    assert difference(answer, got) is None
    assert any(f"/{commit}/model.safetensors" in request for request in hub.requests)


def test_an_adapter_is_asked_on_its_base(checkpoint, answer, tmp_path, monkeypatch):
    torch.manual_seed(5)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    settings = LoraConfig(
        r=2, target_modules=targets, modules_to_save=["multi_modal_projector"], init_lora_weights=False
    )
    adapted = get_peft_model(model, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.save_pretrained(tmp_path / "adapter")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # of this machine, so not those of the clean process
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    got = ask_clean_process(tmp_path / "adapter", base=checkpoint)
    assert not (tmp_path / "cache").exists()
    assert got.model == answer.model and got.input_ids == answer.input_ids
    assert got.parameters == sum(parameter.numel() for parameter in adapted.parameters())
    told = difference(answer, got)
    assert told is not None and "weights: " in told and "norm of the logits: " in told and "parameters: " in told


def test_a_damaged_checkpoint_is_an_error_that_says_why(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    os.unlink(folder / "modeling_normalign_llava.py")
    with pytest.raises(ValueError, match="modeling_normalign_llava.py") as error:
        ask_clean_process(folder)
    assert len(str(error.value).splitlines()) < 12, "what was called in between is of no use"
    assert str(error.value).startswith(f"{folder} does not work in a process without this package:")


ANSWER = Answer("Model", "float32", 10, "abc", [1, 2], 1, 1, [4.0, -3.0], 5.0, [7, 8])


@pytest.mark.parametrize(
    "changed, told",
    [
        ({}, None),
        ({"logits": [4.00003, -3.0]}, None),
        ({"logits": [4.0001, -3.0]}, "logits: up to 0.0001 apart, of at most 4"),
        ({"logits": [4.0]}, "logits: 2 before, 1 after"),
        ({"logits_norm": 5.001}, "norm of the logits: 5 before, 5.001 after"),
        ({"generated": [7, 9]}, r"generated: \[7, 8\] before, \[7, 9\] after"),
        ({"dtype": "bfloat16", "features": 2}, "dtype: .*; features: 1 before, 2 after"),
        ({"input_ids": [3] * 99}, r"input_ids: \[1, 2\] before, \[3, .*\.\.\. after"),
    ],
)
def test_differences_are_told_in_a_sentence(changed, told):
    found = difference(ANSWER, dataclasses.replace(ANSWER, **changed))
    assert found is None if told is None else re.search(told, found)
