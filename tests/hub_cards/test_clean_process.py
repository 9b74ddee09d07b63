"""Loading a checkpoint in a fresh process that cannot import the package, from a folder and from a hub."""

import pytest
import tiny_parts as parts
import torch
from hub_server import HubServer
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.hub_cards.push.clean_process import QUESTION, ask_clean_process, difference


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
    assert answer.input_ids == inputs["input_ids"][0].tolist()
    torch.testing.assert_close(torch.tensor(answer.logits).abs(), logits.abs().float().sort(descending=True)[0][:32])


def test_a_private_repository_is_read_with_its_token_alone(checkpoint, answer, monkeypatch):
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of this machine, so not of the clean process
        token = hub.token("somebody", role="read")
        monkeypatch.setenv("HF_TOKEN", token)
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        commit = hub.create("somebody/my-model.v1.5", private=True, files=files).commit
        with pytest.raises(ValueError, match="does not work in a process without this package") as error:
            ask_clean_process("somebody/my-model.v1.5", revision=commit)
        assert token not in str(error.value) and "somebody/my-model.v1.5" in str(error.value)
        got = ask_clean_process("somebody/my-model.v1.5", revision=commit, token=token)
    assert difference(answer, got) is None
    assert any(f"/{commit}/model.safetensors" in request for request in hub.requests)


def test_an_adapter_is_asked_on_its_base(checkpoint, answer, tmp_path, monkeypatch):
    torch.manual_seed(5)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    settings = LoraConfig(
        r=2, target_modules=targets, modules_to_save=["multi_modal_projector"], init_lora_weights=False
    )
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.save_pretrained(tmp_path / "adapter")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # of this machine, so not those of the clean process
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    got = ask_clean_process(tmp_path / "adapter", base=checkpoint)
    assert not (tmp_path / "cache").exists()
    assert got.input_ids == answer.input_ids
    told = difference(answer, got)
    assert told is not None and "weights: " in told and "logits: " in told
