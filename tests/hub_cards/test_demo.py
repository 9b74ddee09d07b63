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
from functools import partial
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


def until(holds, seconds=90.0):
    """Waits until `holds()` is true, and returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
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
    return demo_parts.load(checkpoint)


@pytest.fixture(scope="module")
def red(tmp_path_factory):
    file = tmp_path_factory.mktemp("images") / "red.png"
    Image.new("RGB", (30, 40), "red").save(file)
    return file


@pytest.fixture(scope="module")
def url(demo_app, loaded):
    app = demo_app.build_app(*loaded, title="Test", source="", max_new_tokens=80)
    demo_app.launch(app, server_port=free_port(), prevent_thread_lock=True, quiet=True)
    yield app.local_url
    app.close()


def client(url):
    return Client(url, verbose=False, analytics_enabled=False)


def test_the_page_streams_what_generate_answers_and_then_shows_the_maps(url, checkpoint, red):
    job = client(url).submit(handle_file(red), QUESTION, api_name="/ask")
    answer, maps = job.result()
    expected = generate(checkpoint, QUESTION, Image.open(red), tokens=80)[0]
    assert answer == expected.strip() != ""
    texts = [text for text, _ in job.outputs()]
    assert len(set(texts)) > 3 and all(answer.startswith(text.strip()) for text in texts)
    assert [entry["caption"].partition(":")[0] for entry in maps] == ["Mean", "Layer 1", "Layer 2"]
    assert Image.open(maps[0]["image"]).size == (336, 336)


@pytest.mark.parametrize("vision", ["clip", "registers"])
def test_the_maps_are_those_of_a_plain_forward_and_lie_where_the_patches_are(
    demo_app, tmp_path, vision
):
    folder = demo_parts.checkpoint(tmp_path, vision=vision)
    (model, processor) = demo_parts.load(folder)
    (twin, _) = demo_parts.load(folder)
    for layer in (*model.get_decoder().layers, *twin.get_decoder().layers):
        layer.self_attn.q_proj.weight.data *= 50  # so that attention is uneven
    image = demo_parts.noise((16, 32))  # of which the encoder gets the middle
    inputs = demo_parts.prompt(processor, image, "what is it")
    answer = processor.tokenizer("a cat<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], 1)
    maps = demo_app.attention(model, processor, inputs, ids)
    words = processor.tokenizer.convert_ids_to_tokens(ids[0].tolist())
    patches = [place for place, word in enumerate(words) if word == "<image>"][-4:]
    asking = [n for n in range(patches[-1] + 1, len(words)) if "<|im_" not in words[n]]
    with torch.no_grad():
        pixels = inputs["pixel_values"].double()
        heads = twin.double()(input_ids=ids, pixel_values=pixels, output_attentions=True).attentions
    assert list(maps) == [1, 2] == list(range(1, len(heads) + 1))
    drawn = demo_app.heatmaps(maps, inputs["pixel_values"][0], processor)
    whole = (maps[1].sum() + maps[2].sum()).item() / 2
    assert drawn[0][1] == f"Mean: {whole:.1%}" and len(drawn) == 3
    for number, row in maps.items():
        layer = heads[number - 1][0].tolist()
        looks = len(layer) * len(asking)
        expected = [sum(head[n][p] for head in layer for n in asking) / looks for p in patches]
        assert row.tolist() == pytest.approx(expected, rel=1e-5)
        picture, caption = drawn[number]
        assert caption == f"Layer {number}: {sum(expected):.1%}"
        # What the map adds to the grey image is brightest where the attention is.
        grey = np.asarray(image.crop((0, 8, 16, 24)).resize((336, 336), 0).convert("L"), float)
        added = np.asarray(picture, float).mean(2) - 0.4 * grey
        quarters = [added[y : y + 168, x : x + 168].mean() for y in (0, 168) for x in (0, 168)]
        assert np.argsort(quarters).tolist() == np.argsort(expected).tolist()


def test_an_answer_that_still_runs_in_another_thread_is_in_no_map(demo_app, loaded):
    model, processor = loaded
    first, other = (
        demo_parts.prompt(processor, demo_parts.noise((16, 16)), text) for text in ("red?", "blue")
    )
    asked = (model, processor, first, first["input_ids"])
    expected = demo_app.attention(*asked)

    def elsewhere(*call):
        hook.remove()
        running = Thread(target=model, kwargs=dict(other))
        running.start()
        running.join()

    hook = model.get_decoder().norm.register_forward_hook(elsewhere)
    maps = demo_app.attention(*asked)
    assert all(torch.equal(maps[number], row) for number, row in expected.items())


def test_an_answer_ends_with_the_context_or_when_it_is_stopped(demo_app, tmp_path, red):
    model, processor = demo_parts.load(demo_parts.checkpoint(tmp_path, context=1024))
    model.generation_config.eos_token_id = None
    steps = []
    with model.register_forward_hook(lambda *_: steps.append(1)):
        answer = demo_app.answer(model, processor, str(red), QUESTION, 900)
        next(answer), next(answer)
        answer.close()
    assert 0 < len(steps) < 900
    *_, (text, maps) = demo_app.answer(model, processor, str(red), "what is it? " * 78, 900)
    assert text and len(maps) == 3
    with pytest.raises(demo_app.gr.Error, match="the model reads 1,024"):
        next(demo_app.answer(model, processor, str(red), "what is it? " * 90, 900))


def test_wrong_questions_get_a_message_and_the_page_goes_on(url, red):
    user = client(url)
    for question, message in ((" \n", "Give an image"), ("is <image> one?", "stands for an image")):
        with pytest.raises(AppError, match=message):
            user.predict(handle_file(red), question, api_name="/ask")
    assert user.predict(handle_file(red), QUESTION, api_name="/ask")[0]


@pytest.mark.parametrize("size", [(4001, 20), (20, 4001)])
def test_a_strip_is_refused_that_an_image_processor_would_make_huge(demo_app, tmp_path, size):
    file = tmp_path / "strip.png"
    whole = tmp_path / "whole.png"
    Image.new("RGB", size).save(file)
    Image.new("RGB", (4000, 20)).save(whole)
    with pytest.raises(demo_app.gr.Error, match="too narrow"):
        demo_app.open_image(file)
    assert demo_app.open_image(whole).size == (4000, 20)


def colours(image):
    """The colours at the left and the right of an image."""
    return image.getpixel((1, 1)), image.getpixel((image.width - 2, 1))


BLACK = (0, 0, 0)
WHITE = (255, 255, 255)
RED = (255, 0, 0)


def test_an_image_is_shown_upright_in_colour_and_on_white(demo_app, tmp_path):
    two = Image.new("RGBA", (20, 10), (255, 0, 0, 255))
    two.paste((0, 0, 0, 0), (10, 0, 20, 10))  # transparent, which is black beneath
    for name, image, expected in (
        ("rgba.png", two, (RED, WHITE)),
        ("palette.png", two.quantize(8), (RED, WHITE)),
        ("grey.png", Image.linear_gradient("L").rotate(90), (BLACK, WHITE)),
        ("cmyk.jpg", Image.new("CMYK", (20, 10)), (WHITE, WHITE)),
        ("bits.png", Image.new("1", (20, 10)), (BLACK, BLACK)),
    ):
        image.save(tmp_path / name)
        opened = demo_app.open_image(str(tmp_path / name))
        assert opened.mode == "RGB" and opened.size == image.size
        pairs = zip(colours(opened), expected, strict=True)
        assert all(np.abs(np.subtract(*pair)).max() <= 2 for pair in pairs), name
    turned = Image.Exif()
    turned[274] = 6  # by a quarter
    two.convert("RGB").save(tmp_path / "turned.png", exif=turned)
    assert demo_app.open_image(str(tmp_path / "turned.png")).size == (10, 20)


@pytest.mark.parametrize("name", ["deep.png", "float.tiff", "old.tga", "words.png", "cut.png"])
def test_a_file_that_is_no_image_of_8_bits_is_refused(demo_app, tmp_path, name):
    file = tmp_path / name
    if name == "deep.png":
        Image.new("I;16", (4, 4)).save(file)
    elif name == "float.tiff":
        Image.new("F", (4, 4)).save(file)
    elif name == "words.png":
        file.write_text("words")
    else:
        demo_parts.noise((40, 40)).save(file)
    if name == "cut.png":
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(demo_app.gr.Error, match="cannot be read. Save it as PNG"):
        demo_app.open_image(str(file))


@pytest.mark.parametrize("asked", [(None, QUESTION), ("red", None), ("red", " \n")])
def test_an_image_and_a_question_are_needed(demo_app, loaded, red, asked):
    file, question = asked
    with pytest.raises(demo_app.gr.Error, match="Give an image and a question"):
        next(demo_app.answer(*loaded, file and str(red), question, 5))


def one_hot(logits, token):
    """Logits of the same shape, of which one is higher than all others."""
    changed = torch.zeros_like(logits)
    changed[..., token] = 1
    return changed


def test_an_answer_without_words_is_told_so(demo_app, tmp_path, red):
    model, processor = demo_parts.load(demo_parts.checkpoint(tmp_path))
    space = processor.tokenizer.convert_tokens_to_ids(" ")
    model.lm_head.register_forward_hook(lambda module, states, logits: one_hot(logits, space))
    *_, (text, maps) = demo_app.answer(model, processor, str(red), QUESTION, 5)
    assert text == "(The answer is empty.)" and len(maps) == 3


def test_a_space_without_a_gpu_computes_in_float32_if_that_fits(demo_app, loaded, monkeypatch):
    model, _ = loaded
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    for room, dtype in ((size, torch.float32), (size - 1, "auto")):
        monkeypatch.setattr(demo_app, "SPACE_MEMORY", room)
        assert demo_app.cpu_dtype(model.config) == dtype


def test_the_demo_is_of_this_package_s_models(tmp_path):
    folder = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    with pytest.raises(ValueError, match="is a 'llava' model. The demo is for NormAlign"):
        run_demo(folder)


@pytest.fixture
def served(demo_app, monkeypatch):
    """What pages are built of and how they are served, in place of serving them."""
    pages = []
    build = demo_app.build_app

    def built(model, processor, **options):
        return SimpleNamespace(model=model, page=build(model, processor, **options), **options)

    monkeypatch.setattr(demo_app, "build_app", built)
    launch = lambda app, **options: pages.append((app, options))  # noqa: E731
    monkeypatch.setattr(demo_app, "launch", launch)
    return pages


def assert_ready(model):
    """A model in float32 that shows its attention, on the CPU or a GPU if there is one."""
    assert model.dtype == torch.float32 and not model.training
    assert model.get_decoder().config._attn_implementation == "eager"
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_demo_is_served_where_it_is_told_to_by_the_name_of_its_checkpoint(
    served, checkpoint, monkeypatch
):
    monkeypatch.chdir(checkpoint)
    run_demo(checkpoint, host="localhost")
    run_demo(".", port=5)
    run_demo(checkpoint, host="0.0.0.0", port=7)
    places = [(options["server_name"], options["server_port"]) for _, options in served]
    assert places == [("localhost", None), ("127.0.0.1", 5), ("0.0.0.0", 7)]
    guards = [options["app_kwargs"]["middleware"] for _, options in served]
    assert [len(guard) for guard in guards] == [1, 1, 0]  # other names are for other addresses
    for app, _ in served:
        assert app.title == "NormAlign-LLaVA" and "Ask `model.v1.5` about" in app.source
        assert app.source in app.page.description
        assert_ready(app.model)


def test_the_demo_of_a_model_of_the_hub_is_of_the_commit_that_was_found(
    served, checkpoint, monkeypatch
):
    opening = import_module("normalign_llava.checkpoint.opening")
    opened = opening.open_checkpoint(str(checkpoint))
    asked = []
    monkeypatch.setattr(demo, "require_checkpoint", lambda name: (f"{name}, found", COMMIT))
    monkeypatch.setattr(opening, "open_checkpoint", lambda *args: asked.append(args) or opened)
    run_demo("user/m")
    assert asked == [("user/m, found", COMMIT)] and "`user/m`" in served[0][0].source


def test_a_space_serves_the_model_that_it_names(
    served, demo_app, checkpoint, tmp_path, monkeypatch
):
    settings = {"model": str(checkpoint), "revision": COMMIT}
    asked = []

    def cpu_dtype(config, **code):
        asked.append((config.model_type, code))
        return torch.float32

    monkeypatch.setattr(demo_app, "cpu_dtype", cpu_dtype)
    (tmp_path / "space.json").write_text(json.dumps(settings))
    demo_app.main(tmp_path)
    code = {"code_revision": COMMIT, "trust_remote_code": True}
    assert torch.cuda.is_available() or asked == [("normalign_llava", code)]
    ((app, options),) = served
    assert app.title == "model.v1.5" and options == {}
    assert app.source == f"Ask [{checkpoint}](https://huggingface.co/{checkpoint}) about an image."
    assert_ready(app.model)


def test_a_page_asks_nothing_of_others_and_keeps_nothing(demo_app, loaded):
    page = demo_app.build_app(*loaded, title="T", source="S")
    assert page.title == "T" and page.description.startswith("S ")
    assert not page.cache_examples and page.flagging_mode == "never"
    assert page.delete_cache == (3600, 3600) and not page.analytics_enabled
    assert loaded[0].generation_config.do_sample is False
    image, question = page.input_components
    assert image.type == "filepath" and image.sources == ["upload", "clipboard"]
    assert question.label == "Question" and page.examples[0][1] == "What is in the image?"


def test_an_image_that_is_not_normalized_is_shown_as_it_is(demo_app, tmp_path):
    """Where nothing looks, 0.4 of its grey and 0.6 of the darkest colour of the map."""
    _, processor = demo_parts.load(demo_parts.checkpoint(tmp_path))
    processor.image_processor.do_normalize = False
    inputs = demo_parts.prompt(processor, Image.new("RGB", (16, 16), (200, 200, 200)), "what?")
    looks = {1: torch.tensor([1.0, 0.0, 0.0, 0.0])}
    for picture, _ in demo_app.heatmaps(looks, inputs["pixel_values"][0], processor):
        shown = np.subtract(picture.getpixel((330, 330)), (80, 80, 82))
        assert np.abs(shown).max() <= 1


def call(url, *data):
    """All that the server says of one question, as its page asks it."""
    functions = httpx.get(f"{url}config").json()["dependencies"]
    (number,) = [function["id"] for function in functions if function["api_name"] == "ask"]
    session = secrets.token_hex(8)
    body = {"data": data, "fn_index": number, "session_hash": session}
    httpx.post(f"{url}gradio_api/queue/join", json=body).raise_for_status()
    return httpx.get(f"{url}gradio_api/queue/data?session_hash={session}", timeout=60).text


@pytest.mark.parametrize("meta", [{}, {"meta": {}}, {"meta": {"_type": "gradio.FileData"}}])
@pytest.mark.parametrize("key", ["path", "url"])
def test_neither_files_of_the_server_nor_addresses_are_images(url, red, key, meta):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        for value in (str(red), f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"):
            said = call(url, {"path": None, key: value, **meta}, QUESTION)
            assert '"process_completed"' in said and '"success":false' in said
            assert "caption" not in said
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_command_serves_a_checkpoint_under_this_computer_s_names(prepared, checkpoint, red):
    port = free_port()
    process = prepared.start(["-m", "normalign_llava", "demo", checkpoint, "--port", port])
    try:
        with socket.socket() as probe:
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0 or process.poll() is not None)
        assert process.poll() is None, process.wait().stderr
        url = f"http://127.0.0.1:{port}/"
        answer = client(url).predict(handle_file(red), QUESTION, api_name="/ask")[0]
        expected = generate(checkpoint, QUESTION, Image.open(red), tokens=256)[0]
        assert answer and expected.startswith(answer)
        for host, status in (("localhost:9000", 200), ("localhost.evil", 400), ("evil.com", 400)):
            assert httpx.get(url, headers={"Host": host}).status_code == status
    finally:
        os.kill(process.pid, signal.SIGKILL)


def test_the_files_of_a_space():
    files = space_files("user/1.5", COMMIT)
    code = ("app.py", "answering.py")
    assert set(files) == {"README.md", "requirements.txt", "space.json", *code}
    card = SpaceCard(files["README.md"].decode())
    about = card.data
    assert about.title == "1.5" and about.models == ["user/1.5"] and COMMIT in card.text
    assert (about.sdk, about.sdk_version, about.app_file) == ("gradio", GRADIO_VERSION, "app.py")
    assert len(about.short_description) <= 60  # the Hub's limit
    text = "\n".join(files[name].decode() for name in code)
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert "from ." not in text
    lines = files["requirements.txt"].decode().splitlines()
    required = {Requirement(line).name.replace("pillow", "PIL") for line in lines}
    assert imported - sys.stdlib_module_names == required | {"gradio", "answering"}
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(line.startswith(tuple(package)) for line in lines)


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


@pytest.mark.nightly
def test_a_person_asks_a_published_space_about_an_image(tmp_path, red):
    folder = demo_parts.checkpoint(tmp_path, context=128)  # which ends answers
    space, site, outside, output = (tmp_path / name for name in ("space", "site", "outside", "log"))
    space.mkdir()
    site.mkdir()
    outside.touch()
    (site / "sitecustomize.py").write_text(BLOCK + WATCH.format(log=str(outside)))
    with HubServer({"user/model.v1.5": folder}) as hub, chromium(tmp_path / "profile") as browser:
        repository = hub.repository("user/model.v1.5")
        port = free_port()
        pinned = repository.commit
        repository.advance("main", {}, pinned)
        for path, content in space_files("user/model.v1.5", pinned).items():
            (space / path).write_bytes(content)
        environment = {**hub.environment(tmp_path / "home"), "PYTHONPATH": str(site)}
        environment |= {"GRADIO_SERVER_PORT": str(port), "GRADIO_TEMP_DIR": f"{tmp_path}/uploads"}
        environment.pop("GRADIO_ANALYTICS_ENABLED", None)
        command = [sys.executable, "-u", "app.py"]
        streams = {"stderr": subprocess.STDOUT}
        streams["stdout"] = output.open("w")
        process = subprocess.Popen(command, cwd=space, env=environment, **streams)
        try:
            until(lambda: "Running on" in output.read_text() or process.poll() is not None, 180)
            assert process.poll() is None, output.read_text()
            url = f"http://127.0.0.1:{port}/"
            page = load(browser, url, 390)
            find = partial(browser.find_elements, By.CSS_SELECTOR)
            (field,) = until(lambda: find("input[type=file]"))
            assert browser.title == "model.v1.5"
            field.send_keys(str(red))
            until(lambda: find("[data-testid=image] img, .image-frame img"))
            question, answer = find("label textarea")
            question.send_keys(QUESTION, Keys.ENTER)
            until(lambda: len(find(".grid-container img, .thumbnail-item img")) >= 3)
            said = answer.get_property("value")
            log = [json.loads(entry["message"]) for entry in browser.get_log("performance")]
            events = [entry["message"] for entry in log]
            sent = [event["params"] for event in events if event["method"].endswith("WillBeSent")]
            asked = [*page.requests, *(event["request"]["url"] for event in sent)]
            assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        finally:
            process.terminate()
            process.wait()
    assert said and generate(folder, QUESTION, Image.open(red), tokens=128)[0].startswith(said)
    assert len(page.requests) > 20
    assert all(address.startswith((url, "data:", "blob:")) for address in asked)
    assert outside.read_text() == "" and "Traceback" not in output.read_text()
