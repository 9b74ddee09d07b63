"""The demo: its answers, maps and refusals, its Space, and a person who uses that in a browser."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from types import SimpleNamespace

import demo_parts
import httpx
import numpy as np
import pytest
import tiny
import tiny_parts
import torch
from asking import generate
from browser import chromium, load
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from hub_server import HubServer
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from paths import ROOT
from PIL import Image
from remote_code import BLOCK
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from normalign_llava.hub_cards import demo
from normalign_llava.hub_cards.demo import GRADIO_VERSION, run_demo, space_files


pytestmark = pytest.mark.slow

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUESTION = "what color is it?"


def wait_until(condition, seconds=90.0):
    """Waits until `condition()` is true, and returns what it gave."""
    deadline = time.monotonic() + seconds
    value = condition()
    while not value:
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
        value = condition()
    return value


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def demo_app():
    """The module, imported when a test needs it: Gradio takes seconds."""
    return import_module("normalign_llava.hub_cards.demo_app")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return demo_parts.checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """The model and its processor."""
    return demo_parts.load(checkpoint)


@pytest.fixture(scope="module")
def red_image(tmp_path_factory):
    image_path = tmp_path_factory.mktemp("images") / "red.png"
    Image.new("RGB", (30, 40), "red").save(image_path)
    return image_path


@pytest.fixture(scope="module")
def app_url(demo_app, loaded):
    demo_page = demo_app.build_app(*loaded, title="Test", source="", max_new_tokens=80)
    demo_app.launch(demo_page, server_port=free_port(), prevent_thread_lock=True, quiet=True)
    yield demo_page.local_url
    demo_page.close()


def make_client(address):
    return Client(address, verbose=False, analytics_enabled=False)


def last_of(answers):
    """Returns the last answer and its maps."""
    *_, last_answer = answers
    return last_answer


@pytest.fixture(scope="module")
def finished_job(app_url, red_image):
    """A question that was answered."""
    job = make_client(app_url).submit(handle_file(red_image), QUESTION, api_name="/ask")
    job.result()
    return job


def test_the_page_streams_what_generate_answers(finished_job, checkpoint, red_image):
    answer, _ = finished_job.result()
    expected = generate(checkpoint, QUESTION, Image.open(red_image), tokens=80)[0].strip()
    assert answer == expected
    assert answer
    streamed_texts = [text for text, _ in finished_job.outputs()]
    assert len(set(streamed_texts)) > 3
    for text in streamed_texts:
        assert answer.startswith(text.strip())


def test_the_page_then_shows_the_maps(finished_job):
    _, attention_maps = finished_job.result()
    labels = [entry["caption"].partition(":")[0] for entry in attention_maps]
    assert labels == ["Mean", "Layer 1", "Layer 2"]
    assert Image.open(attention_maps[0]["image"]).size == (336, 336)


def load_with_uneven_attention(folder):
    """Returns the model and its processor."""
    model, processor = demo_parts.load(folder)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.data *= 50
    return model, processor


class AskedImage:
    """A model that was asked about an image, its maps, and the attention of a plain forward.

    The encoder gets the middle of the image, as four patches.
    """

    def __init__(self, demo_app, folder):
        model, processor = load_with_uneven_attention(folder)
        tokenizer = processor.tokenizer
        self.image = demo_parts.noise((16, 32))
        inputs = demo_parts.prompt(processor, self.image, "what is it")
        self.pixel_values = inputs["pixel_values"]
        answer = tokenizer("a cat<|im_end|>", add_special_tokens=False)
        answer_ids = torch.tensor([answer["input_ids"]])
        self.input_ids = torch.cat([inputs["input_ids"], answer_ids], 1)
        self.words = tokenizer.convert_ids_to_tokens(self.input_ids[0].tolist())
        self.maps = demo_app.attention(model, processor, inputs, self.input_ids)
        self.pictures = demo_app.heatmaps(self.maps, self.pixel_values[0], processor)
        self.attentions = self.plain_attentions(folder)

    def plain_attentions(self, folder):
        """Returns the attention of each layer of a plain forward in float64."""
        model, _ = load_with_uneven_attention(folder)
        with torch.no_grad():
            outputs = model.double()(
                input_ids=self.input_ids,
                pixel_values=self.pixel_values.double(),
                output_attentions=True,
            )
        return outputs.attentions

    def grey_middle(self):
        """Returns what the encoder gets, in grey and as large as a map."""
        middle = self.image.crop((0, 8, 16, 24))
        displayed = middle.resize((336, 336), Image.Resampling.NEAREST)
        return np.asarray(displayed.convert("L"), float)

    def patch_places(self):
        places = []
        for position, word in enumerate(self.words):
            if word == "<image>":
                places.append(position)
        return places[-4:]

    def asking_places(self):
        """Returns the places of the words after the image."""
        places = []
        last_patch = self.patch_places()[-1]
        for position in range(last_patch + 1, len(self.words)):
            if "<|im_" not in self.words[position]:
                places.append(position)
        return places

    def expected_shares(self, layer):
        """Returns how much the words after the image look at each patch, in the mean of heads."""
        attention = self.attentions[layer - 1][0]
        attention_to_patches = attention[:, self.asking_places()][:, :, self.patch_places()]
        return attention_to_patches.mean(dim=(0, 1)).tolist()


@pytest.fixture(scope="module", params=["clip", "registers"])
def asked_image(request, demo_app, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    folder = demo_parts.checkpoint(root, vision=request.param)
    return AskedImage(demo_app, folder)


def test_the_maps_are_those_of_a_plain_forward(asked_image):
    assert len(asked_image.attentions) == 2
    assert list(asked_image.maps) == [1, 2]
    for layer_number, shares in asked_image.maps.items():
        expected = asked_image.expected_shares(layer_number)
        assert shares.tolist() == pytest.approx(expected, rel=1e-5)


def test_captions_of_maps_have_the_shares_of_the_image(asked_image):
    attention_maps = asked_image.maps
    mean_share = (attention_maps[1].sum() + attention_maps[2].sum()).item() / 2
    assert len(asked_image.pictures) == 3
    assert asked_image.pictures[0][1] == f"Mean: {mean_share:.1%}"
    for layer_number in attention_maps:
        image_share = sum(asked_image.expected_shares(layer_number))
        assert asked_image.pictures[layer_number][1] == f"Layer {layer_number}: {image_share:.1%}"


def test_the_maps_lie_where_the_patches_are(asked_image):
    """What a map adds to the grey image is brightest where the attention is."""
    grey_image = asked_image.grey_middle()
    for layer_number in asked_image.maps:
        picture, _ = asked_image.pictures[layer_number]
        map_image = np.asarray(picture, float).mean(2)
        added_color = map_image - 0.4 * grey_image
        patches = added_color.reshape(2, 168, 2, 168)
        brightness = patches.mean((1, 3)).flatten()
        expected = asked_image.expected_shares(layer_number)
        assert np.argsort(brightness).tolist() == np.argsort(expected).tolist()


def test_an_answer_that_still_runs_in_another_thread_is_in_no_map(demo_app, loaded):
    model, processor = loaded
    inputs = demo_parts.prompt(processor, demo_parts.noise((16, 16)), "red?")
    other_inputs = demo_parts.prompt(processor, demo_parts.noise((16, 16)), "blue")
    expected = demo_app.attention(model, processor, inputs, inputs["input_ids"])

    def run_in_another_thread(*arguments):
        forward_hook.remove()
        thread = Thread(target=model, kwargs=dict(other_inputs))
        thread.start()
        thread.join()

    forward_hook = model.get_decoder().norm.register_forward_hook(run_in_another_thread)
    attention_maps = demo_app.attention(model, processor, inputs, inputs["input_ids"])
    for layer_number, shares in expected.items():
        assert torch.equal(attention_maps[layer_number], shares)


@pytest.fixture
def endless(tmp_path):
    """A model that reads 1024 tokens, whose answers have no end, and its processor."""
    model, processor = demo_parts.load(demo_parts.checkpoint(tmp_path, context=1024))
    model.generation_config.eos_token_id = None
    return model, processor


def test_an_answer_ends_when_it_is_stopped(demo_app, endless, red_image):
    model, _ = endless
    forwards = []
    with model.register_forward_hook(lambda *_: forwards.append(1)):
        answers = demo_app.answer(*endless, str(red_image), QUESTION, 900)
        next(answers)
        next(answers)
        answers.close()
    assert 0 < len(forwards) < 900


def test_an_answer_ends_with_the_context(demo_app, endless, red_image):
    long_question = "what is it? " * 78
    answers = demo_app.answer(*endless, str(red_image), long_question, 900)
    answer_text, attention_maps = last_of(answers)
    assert answer_text
    assert len(attention_maps) == 3


def test_a_question_that_is_longer_than_the_context_is_refused(demo_app, endless, red_image):
    longer_question = "what is it? " * 90
    with pytest.raises(demo_app.gr.Error, match="the model reads 1,024"):
        next(demo_app.answer(*endless, str(red_image), longer_question, 900))


def test_wrong_questions_get_a_message_and_the_page_goes_on(app_url, red_image):
    client = make_client(app_url)
    for question, message in (
        (" \n", "Give an image"),
        ("is <image> one?", "stands for an image"),
    ):
        with pytest.raises(AppError, match=message):
            client.predict(handle_file(red_image), question, api_name="/ask")
    answer, _ = client.predict(handle_file(red_image), QUESTION, api_name="/ask")
    assert answer


@pytest.mark.parametrize("size", [(4001, 20), (20, 4001)])
def test_a_strip_is_refused_that_an_image_processor_would_make_huge(demo_app, tmp_path, size):
    strip_path = tmp_path / "strip.png"
    Image.new("RGB", size).save(strip_path)
    with pytest.raises(demo_app.gr.Error, match="too narrow"):
        demo_app.open_image(strip_path)


def test_an_image_may_be_200_times_as_wide_as_high(demo_app, tmp_path):
    image_path = tmp_path / "whole.png"
    Image.new("RGB", (4000, 20)).save(image_path)
    assert demo_app.open_image(image_path).size == (4000, 20)


BLACK = (0, 0, 0)
WHITE = (255, 255, 255)
RED = (255, 0, 0)


def half_transparent_image():
    """Returns an image that is red, and transparent on the right, where it is black beneath."""
    image = Image.new("RGBA", (20, 10), (*RED, 255))
    image.paste((0, 0, 0, 0), (10, 0, 20, 10))
    return image


def assert_color(image, place, expected):
    difference = np.subtract(image.getpixel(place), expected)
    assert np.abs(difference).max() <= 2


SHOWN_IMAGES = {
    "rgba.png": (half_transparent_image(), RED, WHITE),
    "palette.png": (half_transparent_image().quantize(8), RED, WHITE),
    "grey.png": (Image.linear_gradient("L").rotate(90), BLACK, WHITE),
    "cmyk.jpg": (Image.new("CMYK", (20, 10)), WHITE, WHITE),
    "bits.png": (Image.new("1", (20, 10)), BLACK, BLACK),
}


@pytest.mark.parametrize("file_name", SHOWN_IMAGES)
def test_an_image_is_shown_in_colour_and_on_white(demo_app, tmp_path, file_name):
    image, left, right = SHOWN_IMAGES[file_name]
    image.save(tmp_path / file_name)
    opened = demo_app.open_image(str(tmp_path / file_name))
    assert opened.mode == "RGB"
    assert opened.size == image.size
    assert_color(opened, (1, 1), left)
    assert_color(opened, (opened.width - 2, 1), right)


def test_an_image_is_shown_upright(demo_app, tmp_path):
    quarter_turn = Image.Exif()
    quarter_turn[274] = 6
    image_path = tmp_path / "turned.png"
    half_transparent_image().convert("RGB").save(image_path, exif=quarter_turn)
    assert demo_app.open_image(str(image_path)).size == (10, 20)


def write_16_bits(image_path):
    Image.new("I;16", (4, 4)).save(image_path)


def write_floats(image_path):
    Image.new("F", (4, 4)).save(image_path)


def write_noise(image_path):
    demo_parts.noise((40, 40)).save(image_path)


def write_words(image_path):
    image_path.write_text("words")


def write_cut(image_path):
    write_noise(image_path)
    image_path.write_bytes(image_path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("file_name", "write_file"),
    [
        ("deep.png", write_16_bits),
        ("float.tiff", write_floats),
        ("old.tga", write_noise),
        ("words.png", write_words),
        ("cut.png", write_cut),
    ],
)
def test_a_file_that_is_not_an_image_of_8_bits_is_refused(
    demo_app, tmp_path, file_name, write_file
):
    image_path = tmp_path / file_name
    write_file(image_path)
    with pytest.raises(demo_app.gr.Error, match="cannot be read. Save it as PNG"):
        demo_app.open_image(str(image_path))


@pytest.mark.parametrize(
    ("has_image", "question"),
    [
        (False, QUESTION),
        (True, None),
        (True, " \n"),
    ],
)
def test_an_image_and_a_question_are_needed(demo_app, loaded, red_image, has_image, question):
    image_path = None
    if has_image:
        image_path = str(red_image)
    with pytest.raises(demo_app.gr.Error, match="Give an image and a question"):
        next(demo_app.answer(*loaded, image_path, question, 5))


def test_an_answer_without_words_is_told_so(demo_app, tmp_path, red_image):
    model, processor = demo_parts.load(demo_parts.checkpoint(tmp_path))
    space_token = processor.tokenizer.convert_tokens_to_ids(" ")

    def prefer_space(module, hidden_states, logits):
        changed = torch.zeros_like(logits)
        changed[..., space_token] = 1
        return changed

    model.lm_head.register_forward_hook(prefer_space)
    answers = demo_app.answer(model, processor, str(red_image), QUESTION, 5)
    answer_text, attention_maps = last_of(answers)
    assert answer_text == "(The answer is empty.)"
    assert len(attention_maps) == 3


@pytest.mark.parametrize(
    ("missing_bytes", "expected"),
    [
        (0, torch.float32),
        (1, "auto"),
    ],
)
def test_a_space_without_a_gpu_computes_in_float32_if_that_fits(
    demo_app, loaded, monkeypatch, missing_bytes, expected
):
    model, _ = loaded
    float32_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(demo_app, "SPACE_MEMORY", float32_bytes - missing_bytes)
    assert demo_app.cpu_dtype(model.config) == expected


def test_the_demo_is_of_this_package_s_models(tmp_path):
    folder = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    with pytest.raises(ValueError, match="is a 'llava' model. The demo is for NormAlign"):
        run_demo(folder)


@pytest.fixture
def served_pages(demo_app, monkeypatch):
    """What pages are built of and how they are served, in place of serving them."""
    built_pages = []
    build_app = demo_app.build_app

    def build(model, processor, **options):
        page = build_app(model, processor, **options)
        return SimpleNamespace(model=model, page=page, **options)

    def launch(app, **options):
        built_pages.append((app, options))

    monkeypatch.setattr(demo_app, "build_app", build)
    monkeypatch.setattr(demo_app, "launch", launch)
    return built_pages


def assert_ready(model):
    """Asserts that a model is in float32, on the best device, and gives attention maps."""
    assert model.dtype == torch.float32
    assert not model.training
    assert model.get_decoder().config._attn_implementation == "eager"
    assert (model.device.type == "cuda") == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("options", "server_name", "server_port", "guard_count"),
    [
        ({"host": "localhost"}, "localhost", None, 1),
        ({"port": 5}, "127.0.0.1", 5, 1),
        # Under other addresses, the server does not know its names.
        ({"host": "0.0.0.0", "port": 7}, "0.0.0.0", 7, 0),
    ],
    ids=str,
)
def test_the_demo_is_served_where_it_is_asked_to(
    served_pages, checkpoint, options, server_name, server_port, guard_count
):
    run_demo(checkpoint, **options)
    ((_, launch_options),) = served_pages
    assert launch_options["server_name"] == server_name
    assert launch_options["server_port"] == server_port
    assert len(launch_options["app_kwargs"]["middleware"]) == guard_count


@pytest.mark.parametrize("is_named", [True, False], ids=["by-its-name", "as-this-folder"])
def test_the_demo_has_the_name_of_its_checkpoint(served_pages, checkpoint, monkeypatch, is_named):
    monkeypatch.chdir(checkpoint)
    if is_named:
        run_demo(checkpoint)
    else:
        run_demo(".")
    ((demo_page, _),) = served_pages
    assert demo_page.title == "NormAlign-LLaVA"
    assert "Ask `model.v1.5` about" in demo_page.source
    assert demo_page.source in demo_page.page.description
    assert_ready(demo_page.model)


def test_the_demo_of_a_model_of_the_hub_is_of_the_commit_that_was_found(
    served_pages, checkpoint, monkeypatch
):
    opening = import_module("normalign_llava.checkpoint.opening")
    opened = opening.open_checkpoint(str(checkpoint))
    opened_checkpoints = []

    def open_checkpoint(*arguments):
        opened_checkpoints.append(arguments)
        return opened

    monkeypatch.setattr(demo, "require_checkpoint", lambda name: (f"{name}, found", COMMIT))
    monkeypatch.setattr(opening, "open_checkpoint", open_checkpoint)
    run_demo("user/m")
    assert opened_checkpoints == [("user/m, found", COMMIT)]
    ((demo_page, _),) = served_pages
    assert "`user/m`" in demo_page.source


@pytest.fixture
def dtype_calls(demo_app, monkeypatch):
    """The configurations of which the precision on a CPU is asked, and how they are loaded."""
    asked_dtypes = []

    def cpu_dtype(config, **options):
        asked_dtypes.append((config.model_type, options))
        return torch.float32

    monkeypatch.setattr(demo_app, "cpu_dtype", cpu_dtype)
    return asked_dtypes


def test_a_space_serves_the_model_that_it_names(
    served_pages, dtype_calls, demo_app, checkpoint, tmp_path
):
    settings = {"model": str(checkpoint), "revision": COMMIT}
    (tmp_path / "space.json").write_text(json.dumps(settings))
    demo_app.main(tmp_path)

    if not torch.cuda.is_available():
        code_options = {"code_revision": COMMIT, "trust_remote_code": True}
        assert dtype_calls == [("normalign_llava", code_options)]
    ((demo_page, launch_options),) = served_pages
    assert launch_options == {}
    assert demo_page.title == "model.v1.5"
    page = f"https://huggingface.co/{checkpoint}"
    assert demo_page.source == f"Ask [{checkpoint}]({page}) about an image."
    assert_ready(demo_page.model)


@pytest.fixture
def built_page(demo_app, loaded):
    return demo_app.build_app(*loaded, title="T", source="S")


def test_a_page_keeps_nothing_and_asks_nothing_of_others(built_page):
    assert not built_page.cache_examples
    assert built_page.flagging_mode == "never"
    assert built_page.delete_cache == (3600, 3600)
    assert not built_page.analytics_enabled


def test_a_page_takes_an_image_and_a_question(built_page):
    assert built_page.title == "T"
    assert built_page.description.startswith("S ")
    image_input, question_input = built_page.input_components
    assert image_input.type == "filepath"
    assert image_input.sources == ["upload", "clipboard"]
    assert question_input.label == "Question"
    _, example_question = built_page.examples[0]
    assert example_question == "What is in the image?"


def test_a_page_answers_greedily(built_page, loaded):
    model, _ = loaded
    assert model.generation_config.do_sample is False


def test_an_image_that_is_not_normalized_is_shown_as_it_is(demo_app, tmp_path):
    """Where nothing looks, it is 0.4 of its grey and 0.6 of the darkest colour of the map."""
    _, processor = demo_parts.load(demo_parts.checkpoint(tmp_path))
    processor.image_processor.do_normalize = False
    image = Image.new("RGB", (16, 16), (200, 200, 200))
    inputs = demo_parts.prompt(processor, image, "what?")
    attention_maps = {1: torch.tensor([1.0, 0.0, 0.0, 0.0])}
    for picture, _ in demo_app.heatmaps(attention_maps, inputs["pixel_values"][0], processor):
        difference = np.subtract(picture.getpixel((330, 330)), (80, 80, 82))
        assert np.abs(difference).max() <= 1


def ask_server(address, *inputs):
    """Returns all that the server says of one question, asked as its page does."""
    functions = httpx.get(f"{address}config").json()["dependencies"]
    (function_id,) = [function["id"] for function in functions if function["api_name"] == "ask"]
    session = secrets.token_hex(8)
    question = {
        "data": inputs,
        "fn_index": function_id,
        "session_hash": session,
    }
    httpx.post(f"{address}gradio_api/queue/join", json=question).raise_for_status()
    return httpx.get(f"{address}gradio_api/queue/data?session_hash={session}", timeout=60).text


def assert_refused(events):
    assert '"process_completed"' in events
    assert '"success":false' in events
    assert "caption" not in events


either_key = pytest.mark.parametrize("key", ["path", "url"])
any_meta = pytest.mark.parametrize(
    "meta",
    [
        {},
        {"meta": {}},
        {"meta": {"_type": "gradio.FileData"}},
    ],
    ids=str,
)


@any_meta
@either_key
def test_files_of_the_server_are_not_images(app_url, red_image, key, meta):
    image = {"path": None, key: str(red_image), **meta}
    assert_refused(ask_server(app_url, image, QUESTION))


@any_meta
@either_key
def test_addresses_are_not_images(app_url, key, meta):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        image = {"path": None, key: f"http://127.0.0.1:{port}/image.png", **meta}
        assert_refused(ask_server(app_url, image, QUESTION))
        # Nobody has asked for it.
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture(scope="module")
def command_url(prepared, checkpoint):
    """The address that the command serves a checkpoint at."""
    port = free_port()
    process = prepared.start(["-m", "normalign_llava", "demo", checkpoint, "--port", port])

    def answers_or_ended():
        with socket.socket() as probe:
            answers = probe.connect_ex(("127.0.0.1", port)) == 0
        return answers or process.poll() is not None

    try:
        wait_until(answers_or_ended)
        assert process.poll() is None, process.wait().stderr
        yield f"http://127.0.0.1:{port}/"
    finally:
        os.kill(process.pid, signal.SIGKILL)


def test_the_command_serves_a_checkpoint(command_url, checkpoint, red_image):
    client = make_client(command_url)
    answer, _ = client.predict(handle_file(red_image), QUESTION, api_name="/ask")
    assert answer
    expected = generate(checkpoint, QUESTION, Image.open(red_image), tokens=256)[0]
    assert expected.startswith(answer)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9000", 200),
        ("localhost.evil", 400),
        ("evil.com", 400),
    ],
)
def test_the_command_serves_only_under_this_computer_s_names(command_url, host, status):
    response = httpx.get(command_url, headers={"Host": host})
    assert response.status_code == status


SPACE_CODE = ("app.py", "answering.py")


@pytest.fixture
def planned_space():
    """The content of a Space's files."""
    return space_files("user/1.5", COMMIT)


@pytest.fixture
def required_lines(planned_space):
    return planned_space["requirements.txt"].decode().splitlines()


def test_the_files_of_a_space(planned_space):
    assert set(planned_space) == {"README.md", "requirements.txt", "space.json", *SPACE_CODE}


def test_the_card_of_a_space(planned_space):
    space_card = SpaceCard(planned_space["README.md"].decode())
    assert COMMIT in space_card.text
    assert space_card.data.title == "1.5"
    assert space_card.data.models == ["user/1.5"]
    assert space_card.data.sdk == "gradio"
    assert space_card.data.sdk_version == GRADIO_VERSION
    assert space_card.data.app_file == "app.py"
    assert len(space_card.data.short_description) <= 60  # the Hub's limit


def test_a_space_requires_what_its_code_imports(planned_space, required_lines):
    code = "\n".join(planned_space[file_name].decode() for file_name in SPACE_CODE)
    assert "from ." not in code
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    required = {
        Requirement(requirement).name.replace("pillow", "PIL") for requirement in required_lines
    }
    assert imported - sys.stdlib_module_names == required | {"gradio", "answering"}


def test_a_space_requires_the_versions_that_the_package_does(required_lines):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in required_lines:
        assert requirement.startswith(tuple(project["dependencies"]))


# Keeps a list of what the process looks up or connects to beyond this computer.
WATCH = """
def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect"):
        host = str(arguments[0] if event == "socket.getaddrinfo" else arguments[1][0]).strip("b'")
        if host not in ("None", "", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
            with open({log!r}, "a") as file:
                file.write(f"{{event}} {{host}}\\n")
sys.addaudithook(watch)
"""
SPACE_NAME = "user/model.v1.5"


class LocalSpace:
    """A Space of a repository on a hub, in a process that records what it asks of others."""

    def __init__(self, hub, root):
        self.folder = root / "space"
        self.output = root / "output.txt"
        self.outside = root / "outside.txt"
        self.write_files(hub)
        self.environment = self.make_environment(hub, root)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"

    def write_files(self, hub):
        repository = hub.repository(SPACE_NAME)
        pinned = repository.commit
        repository.advance("main", {}, pinned)
        self.folder.mkdir()
        for file_name, content in space_files(SPACE_NAME, pinned).items():
            (self.folder / file_name).write_bytes(content)

    def make_environment(self, hub, root):
        site_folder = root / "site"
        site_folder.mkdir()
        self.outside.touch()
        watched = WATCH.format(log=str(self.outside))
        (site_folder / "sitecustomize.py").write_text(BLOCK + watched)
        environment = hub.environment(root / "home")
        environment["PYTHONPATH"] = str(site_folder)
        environment["GRADIO_TEMP_DIR"] = f"{root}/uploads"
        environment.pop("GRADIO_ANALYTICS_ENABLED", None)
        return environment

    @contextmanager
    def serve(self):
        with self.output.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", "app.py"],
                cwd=self.folder,
                env={**self.environment, "GRADIO_SERVER_PORT": str(self.port)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(lambda: self.is_running() or process.poll() is not None, 180)
            assert process.poll() is None, self.output.read_text()
            yield
        finally:
            process.terminate()
            process.wait()

    def is_running(self):
        return "Running on" in self.output.read_text()


def ask_in_browser(browser, image_path):
    """Uploads an image, asks about it, waits for the maps, and returns the answer."""

    def find(selector):
        return browser.find_elements(By.CSS_SELECTOR, selector)

    (file_input,) = wait_until(lambda: find("input[type=file]"))
    file_input.send_keys(str(image_path))
    wait_until(lambda: find("[data-testid=image] img, .image-frame img"))
    question_input, answer_output = find("label textarea")
    question_input.send_keys(QUESTION, Keys.ENTER)
    wait_until(lambda: len(find(".grid-container img, .thumbnail-item img")) >= 3)
    return answer_output.get_property("value")


def requested_addresses(browser):
    """Returns the addresses that the page has asked for since the log was read."""
    addresses = []
    for log_entry in browser.get_log("performance"):
        browser_event = json.loads(log_entry["message"])["message"]
        if browser_event["method"].endswith("WillBeSent"):
            addresses.append(browser_event["params"]["request"]["url"])
    return addresses


@pytest.mark.nightly
def test_a_person_asks_a_published_space_about_an_image(tmp_path, red_image):
    folder = demo_parts.checkpoint(tmp_path, context=128)  # it ends answers
    with HubServer({SPACE_NAME: folder}) as hub, chromium(tmp_path / "profile") as browser:
        local_space = LocalSpace(hub, tmp_path)
        with local_space.serve():
            loaded_page = load(browser, local_space.url, 390)
            answer = ask_in_browser(browser, red_image)
            later_requests = requested_addresses(browser)
            assert browser.title == "model.v1.5"
            assert browser.execute_script("return document.documentElement.scrollWidth") == 390

    assert answer
    expected = generate(folder, QUESTION, Image.open(red_image), tokens=128)[0]
    assert expected.startswith(answer)
    assert len(loaded_page.requests) > 20
    for address in [*loaded_page.requests, *later_requests]:
        assert address.startswith((local_space.url, "data:", "blob:"))
    assert local_space.outside.read_text() == ""
    assert "Traceback" not in local_space.output.read_text()
