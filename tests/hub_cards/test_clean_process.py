"""Loading a checkpoint in a fresh process that cannot import the package, from a hub; from a folder in publishing."""

import demo_parts
import pytest
import torch
from hub_server import HubServer
from PIL import Image
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.hub_cards.push.clean_process import QUESTION, ask_clean_process, first_logits


pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_without_a_token_of_this_machine_it_gets_what_the_package_gives(built, monkeypatch):
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of this machine, so not of the clean process
        monkeypatch.setenv("HF_TOKEN", "hf_nobody")  # which the hub refuses
        files = {path.name: path.read_bytes() for path in built.iterdir()}
        commit = hub.create("somebody/my-model.v1.5", files=files).commit
        answer = ask_clean_process("somebody/my-model.v1.5", revision=commit)
    assert any(f"/{commit}/model-vision_tower-00001-of-00001.safetensors" in request for request in hub.requests)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(built)
    processor = AutoProcessor.from_pretrained(built)
    ramp = Image.linear_gradient("L")
    image = Image.merge("RGB", (ramp, ramp.rotate(90), Image.radial_gradient("L")))
    with torch.no_grad():
        logits = model(**demo_parts.prompt(processor, image, QUESTION)).logits[0, -1].double()
    torch.testing.assert_close(torch.tensor(answer).double(), logits, rtol=1e-5, atol=1e-6)
    torch.nn.init.constant_(model.model.multi_modal_projector.linear_1.weight, torch.nan)
    with pytest.raises(ValueError, match="NaN"), torch.no_grad():
        first_logits(model, processor)
