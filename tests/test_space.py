"""The demo's page without a browser: what it measures, whom it answers, what it says of wrong input."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import space_parts
import torch
from driving import until
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from normalign_llava.hub_cards.demo import run_demo
from normalign_llava.hub_cards.space import demo
from normalign_llava.hub_cards.space.demo.asking import Asker
from normalign_llava.hub_cards.space.demo.figures import attention, describe_map, draw_map, summary
from normalign_llava.hub_cards.space.demo.measuring import Measured, Meter
from normalign_llava.hub_cards.space.demo.model import stream
from normalign_llava.hub_cards.space.demo.pictures import open_picture


TOKENS = 200
QUESTIONS = [("red", "what color is it?"), ("blue", "is there a circle?"), ("green", "what is in the picture?")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return space_parts.checkpoint(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return demo.load(str(checkpoint))


@pytest.fixture(scope="module")
def url(loaded):
    app = demo.build_app(*loaded, title="Test", source="", max_new_tokens=TOKENS)
    port = space_parts.free_port()
    demo.launch(app, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True)
    yield f"http://127.0.0.1:{port}/"
    app.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return {color: space_parts.plain(folder / f"{color}.png", color) for color, _ in QUESTIONS}


def client(url):
    return Client(url, verbose=False, analytics_enabled=False)


def answering():
    return [thread for thread in threading.enumerate() if thread.name == "answer"]


def picture_of_noise(size):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))


def test_what_is_measured_is_what_a_plain_forward_in_float64_gives(checkpoint):
    model, processor = demo.load(str(checkpoint))
    inputs = space_parts.prompt(processor, picture_of_noise((16, 16)), "what is it")
    answer = processor.tokenizer("a cat<|im_end|>", add_special_tokens=False)["input_ids"]
    measured = Meter(model, processor).measure(inputs, answer)

    reference, _ = demo.load(str(checkpoint))
    reference.double()
    ids = inputs["input_ids"][0].tolist() + answer
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    visual = [place for place, word in enumerate(words) if word == "<image>"]
    text = [place for place, word in enumerate(words) if word not in ("<image>", "<|im_start|>", "<|im_end|>")]
    asking = [place for place in text if place > visual[-1]]
    assert len(visual) == 4 and words[asking[-1]] == "t" and 0 < len(text) - len(asking) < len(asking)
    before_final_norm = []
    reference.get_decoder().norm.register_forward_pre_hook(lambda module, args: before_final_norm.append(args[0]))
    with torch.no_grad():
        output = reference(
            input_ids=torch.tensor([ids]),
            pixel_values=inputs["pixel_values"].double(),
            output_attentions=True,
            output_hidden_states=True,
        )
    states = [*output.hidden_states[:-1], *before_final_norm]
    assert len(states) == 3
    for kind, places in (("visual", visual), ("text", text)):
        expected = [
            sum(sum(v**2 for v in state[0, p].tolist()) ** 0.5 for p in places) / len(places) for state in states
        ]
        assert measured.norms[kind] == pytest.approx(expected, rel=1e-5)
    assert list(measured.shares) == [1, 2]
    for layer, maps in enumerate(output.attentions, 1):
        heads = maps[0].tolist()
        expected = [
            sum(head[row][column] for head in heads for row in asking) / (len(heads) * len(asking))
            for column in visual
        ]
        assert measured.shares[layer].tolist() == pytest.approx(expected, rel=1e-5)
    assert measured.grid == (2, 2)
    assert measured.vocabulary == model.config.text_embedding_norm
    line = summary(measured)
    assert f"{measured.norms['visual'][0]:#.3g}" in line and f"{measured.norms['text'][0]:#.3g}" in line
    assert f"{measured.norms['visual'][0] / measured.norms['text'][0]:#.3g}" in line


def test_a_measurement_sees_no_pass_of_another_thread(loaded):
    model, processor = demo.load(loaded[0].name_or_path)
    meter = Meter(model, processor)
    inputs = space_parts.prompt(processor, picture_of_noise((16, 16)), "what is it")
    alone = meter.measure(inputs, [5, 6])
    other_inputs = space_parts.prompt(processor, picture_of_noise((16, 16)), "is there anything else in the picture")
    stop, ended = threading.Event(), []

    def disturb():
        while not stop.is_set():
            ended.append(list(stream(model, other_inputs, 8)))

    others = [threading.Thread(target=disturb) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(20):
            again = meter.measure(inputs, [5, 6])
            assert again.norms == alone.norms
            assert {k: v.tolist() for k, v in again.shares.items()} == {k: v.tolist() for k, v in alone.shares.items()}
    finally:
        stop.set()
        for other in others:
            other.join()
    assert len(ended) > 3 and all(answer == ended[0] for answer in ended)


def test_the_map_of_a_layer_and_of_all(tmp_path):
    shares = {1: np.array([0.1, 0.1, 0.0, 0.2]), 3: np.array([0.0, 0.0, 0.6, 0.2])}
    measured = Measured(np.zeros((16, 16, 3)), (2, 2), shares=shares)
    title, found = attention(measured, 3)
    assert title == "Layer 3: 80.0% of the text's attention is on the picture"
    assert found.tolist() == pytest.approx([0, 0, 0.75, 0.25])
    assert describe_map(measured, found) == "Strongest in row 2 of 2, column 1 of 2, with 75.0% of it"
    title, found = attention(measured, 0)
    assert title == "Mean over layers: 60.0% of the text's attention is on the picture"
    assert found.tolist() == pytest.approx([0.125, 0.125, 0.375, 0.375])
    assert attention(measured, 2) == ("Layer 2 has no attention map that reaches the picture", None)
    assert draw_map(measured, "none", None).size == draw_map(measured, "one", found).size


def test_visual_tokens_that_are_no_patches_are_drawn_as_a_strip(tmp_path):
    model, processor = demo.load(str(space_parts.checkpoint(tmp_path, vision="registers")))
    measured = Meter(model, processor).measure(space_parts.prompt(processor, picture_of_noise((16, 16)), "?"), [])
    title, shares = attention(measured, 1)
    assert measured.grid is None and shares.shape == (8,)
    assert "of 8" in describe_map(measured, shares)
    strip = np.asarray(draw_map(measured, title, shares).convert("RGB"))
    assert len(np.unique(strip.reshape(-1, 3), axis=0)) > 100


def test_the_picture_is_shown_as_the_encoder_receives_it(loaded):
    model, processor = loaded
    picture = picture_of_noise((16, 32))  # the middle is what is left of it
    measured = Meter(*demo.load(model.name_or_path)).measure(space_parts.prompt(processor, picture, "?"), [])
    assert np.abs(measured.picture * 255 - np.asarray(picture.crop((0, 8, 16, 24)))).max() < 0.5


@pytest.mark.parametrize("case", ["cmyk", "palette", "turned", "animated", "deep", "grey"])
def test_pictures_of_every_kind_are_read(tmp_path, case):
    file, expected = tmp_path / "picture.png", (255, 0, 0)
    if case == "cmyk":
        Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(file := tmp_path / "picture.jpg")
    elif case == "palette":
        picture = Image.new("P", (4, 4), 0)
        picture.putpalette([255, 0, 0, 0, 0, 255])
        picture.save(file, transparency=0)
        expected = (255, 255, 255)
    elif case == "turned":
        picture = Image.new("RGB", (4, 2), "red")
        exif = picture.getexif()
        exif[0x0112] = 6
        picture.save(file, exif=exif)
        assert open_picture(str(file)).size == (2, 4)
    elif case == "animated":
        frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
        frames[0].save(file := tmp_path / "picture.gif", save_all=True, append_images=frames[1:])
    elif case == "deep":
        Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(file)
        expected = (128, 128, 128)
    else:
        Image.new("L", (4, 4), 77).save(file)
        expected = (77, 77, 77)
    found = open_picture(str(file))
    assert found.mode == "RGB"
    assert found.getpixel((0, 0)) == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("case", ["text", "truncated", "giant", "huge", "narrow", "empty"])
def test_a_wrong_file_gets_a_message_and_the_page_goes_on(tmp_path, url, pictures, case):
    file = tmp_path / "picture.png"
    if case == "text":
        file.write_text("no picture")
    elif case == "empty":
        file.write_bytes(b"")
    elif case == "truncated":
        picture_of_noise((64, 64)).save(file)
        file.write_bytes(file.read_bytes()[:3000])
    else:
        size = {"giant": (20000, 20000), "huge": (9000, 9000), "narrow": (1, 300)}[case]
        Image.new("1", size).save(file)
    user = client(url)
    expected = "no picture that can be read" if case in ("text", "truncated", "empty") else "too large or too narrow"
    with pytest.raises(AppError, match=expected):
        user.predict(handle_file(file), "what is it?", 0, api_name="/ask")
    assert user.predict(handle_file(pictures["red"]), "what is it?", 0, api_name="/ask")[0]


@pytest.mark.parametrize(
    ("picture", "question", "message"),
    [
        (None, "what is it?", "There is no picture yet"),
        ("red", " \n", "There is no question yet"),
        ("red", "what " * 200, r"takes 1,0\d\d tokens, and the model reads 512"),
        ("red", "is <image> one?", "which stands for the picture"),
    ],
)
def test_wrong_questions_get_a_message(url, pictures, picture, question, message):
    file = None if picture is None else handle_file(pictures[picture])
    with pytest.raises(AppError, match=message):
        client(url).predict(file, question, 0, api_name="/ask")


def test_a_failure_of_the_model_is_a_message_and_not_the_end(tmp_path, pictures):
    model, processor = demo.load(str(space_parts.checkpoint(tmp_path)))
    asker = Asker(model, processor, 4)
    weight = model.lm_head.weight.data
    model.lm_head.weight.data = weight[:, :-1]
    with pytest.raises(Exception, match="The model failed: RuntimeError") as failed:
        list(asker.ask({"path": str(pictures["red"])}, "what is it?", 0))
    assert type(failed.value).__name__ == "Error" and "Traceback" not in str(failed.value)
    model.lm_head.weight.data = weight
    assert list(asker.ask({"path": str(pictures["red"])}, "what is it?", 0))[-1][1].startswith("Norm on entry")


def test_users_at_the_same_time_get_their_own_answers(url, checkpoint, pictures):
    users = [client(url) for _ in QUESTIONS]
    jobs = [
        user.submit(handle_file(pictures[color]), question, 0, api_name="/ask")
        for user, (color, question) in zip(users, QUESTIONS, strict=True)
    ]
    threads, streams = 0, 0
    while not all(job.done() for job in jobs):
        threads = max(threads, len(answering()))
        streams = max(streams, sum(len(job.outputs()) > 1 and not job.done() for job in jobs))
        time.sleep(0.002)
    assert threads == 2  # of three, as many as the limit says
    assert streams >= 2  # two of them were reading parts of their answers while neither had ended
    results = [job.result() for job in jobs]
    answers = [result[0] for result in results]
    assert answers == [space_parts.direct_answer(checkpoint, pictures[c], q, TOKENS) for c, q in QUESTIONS]
    assert len(set(answers)) == 3

    alone = [
        client(url).predict(handle_file(pictures[color]), question, 0, api_name="/ask")
        for color, question in QUESTIONS
    ]
    for together, single in zip(results, alone, strict=True):
        assert together[:2] == single[:2]
        for figure in (2, 3):
            assert together[figure]["alt_text"] == single[figure]["alt_text"]
            assert Path(together[figure]["value"]).read_bytes() == Path(single[figure]["value"]).read_bytes()


def test_answers_stream_and_stop_when_told(pictures, tmp_path):
    longest, question = 3000, "what color is it?"  # an answer of many seconds, so that there is something to stop
    folder = space_parts.checkpoint(tmp_path, context=4096)
    begins = space_parts.direct_answer(folder, pictures["red"], question, 20)
    app = demo.build_app(*demo.load(str(folder)), title="Test", source="", max_new_tokens=longest)
    port = space_parts.free_port()
    demo.launch(app, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True)
    try:
        user = client(f"http://127.0.0.1:{port}/")
        job = user.submit(handle_file(pictures["red"]), question, 0, api_name="/ask")
        until(lambda: len(job.outputs()) > 3)
        assert len(answering()) == 1 and not job.done()
        job.cancel()
        until(lambda: not answering())
        texts = [output[0] for output in job.outputs()]
        assert 2 < len(set(texts)) < longest
        assert all(begins.startswith(text) or text.startswith(begins) for text in texts)
        with pytest.raises(AppError, match="no question"):
            user.predict(handle_file(pictures["red"]), "", 0, api_name="/ask")
    finally:
        app.close()


def test_a_file_of_the_server_is_not_a_picture_to_ask_about(url, tmp_path):
    secret = space_parts.plain(tmp_path / "secret.png", "red")
    data = {"data": [{"path": str(secret), "meta": {"_type": "gradio.FileData"}}, "what is it?", 0]}
    event = httpx.post(f"{url}gradio_api/call/ask", json=data).json()["event_id"]
    stream = httpx.get(f"{url}gradio_api/call/ask/{event}", timeout=60).text
    assert "event: error" in stream and "event: generating" not in stream


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({"config.json": '{"model_type": "llama"}'}, {}, "is a 'llama' model"),
        ({"adapter_config.json": "{}"}, {}, "normalign merge"),
        ({}, {}, "has no config.json"),
        ({}, {"concurrency": 0}, "concurrency is 0"),
    ],
)
def test_the_demo_refuses_what_it_cannot_show(tmp_path, files, arguments, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path, **arguments)


def test_nothing_is_written_beside_the_code():
    folder = Path(demo.__file__).parent
    assert {path.name for path in folder.parent.iterdir()} - {"__pycache__"} == {
        "__init__.py", "app.py", "demo", "requirements.txt", "README.md.jinja",
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        "__init__.py", "asking.py", "figures.py", "measuring.py", "model.py", "page.py", "pictures.py",
    }  # fmt: skip


def test_who_shows_no_page_imports_no_gradio():
    code = (
        "import sys, normalign_llava.hub_cards.{} as _; print(*sorted({{*sys.modules}} & {{'gradio', 'matplotlib'}}))"
    )
    for module in ("demo", "publish", "cli", "space"):
        command = [sys.executable, "-c", code.format(module)]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "\n", module
