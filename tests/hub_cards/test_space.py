"""The demo's page without a browser: what it measures, whom it answers, what it says of wrong input."""

import inspect
import os
import secrets
import signal
import socket
import threading
import time

import gradio as gr
import httpx
import pytest
import space_parts
import train_data
from driving import until
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from normalign_llava.data.rows import images as data_images
from normalign_llava.hub_cards.space import demo
from normalign_llava.hub_cards.space.demo import images as demo_images


pytestmark = pytest.mark.slow


TOKENS = 80
QUESTIONS = [("red", "what color is it?"), ("blue", "is there a circle?"), ("green", "what is in the image?")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return space_parts.checkpoint(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return demo.load(str(checkpoint))


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """Where Gradio puts what is uploaded."""
    folder = tmp_path_factory.mktemp("uploads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def url(loaded, uploads):
    app = demo.build_app(*loaded, title="Test", source="", max_new_tokens=TOKENS)
    port = space_parts.free_port()
    demo.launch(app, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True)
    yield f"http://127.0.0.1:{port}/"
    app.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {color: space_parts.plain(folder / f"{color}.png", color) for color, _ in QUESTIONS}


def client(url):
    return Client(url, verbose=False, analytics_enabled=False)


def test_the_command_serves_a_checkpoint(prepared, images, tmp_path):
    folder = space_parts.checkpoint(tmp_path, context=128)  # which ends answers
    port, question = space_parts.free_port(), "what color is it?"
    process = prepared.start(["-m", "normalign_llava", "demo", folder, "--port", port])
    try:
        with socket.socket() as connection:
            until(lambda: connection.connect_ex(("127.0.0.1", port)) == 0 or process.poll() is not None)
        assert process.poll() is None, process.wait().stderr
        user = client(f"http://127.0.0.1:{port}/")
        answer = user.predict(handle_file(images["red"]), question, 0, api_name="/ask")[0]
        assert answer and space_parts.direct_answer(folder, images["red"], question, 128).startswith(answer)
    finally:
        os.kill(process.pid, signal.SIGKILL)


def answering():
    return [thread for thread in threading.enumerate() if thread.name == "answer"]


def test_images_are_read_as_in_training():
    assert inspect.getsource(demo_images.upright_rgb) == inspect.getsource(data_images.upright_rgb)
    for limit in ("FORMATS", "MAX_RATIO", "MAX_SCANS"):
        assert getattr(demo_images, limit) == getattr(data_images, limit)


def wrong_file(folder, case):
    file = folder / f"{case}.png"
    if case == "EPS":  # for which Pillow would start Ghostscript
        Image.new("RGB", (4, 4)).save(file, "EPS")
    elif case == "scans":
        file.write_bytes(train_data.jpeg_of_scans(51))
    elif case == "truncated":
        space_parts.noise((64, 64)).save(file)
        file.write_bytes(file.read_bytes()[:3000])
    else:
        Image.new("1", (20000, 20000) if case == "giant" else (1, 300)).save(file)
    return file


def test_wrong_files_get_a_message_and_the_page_goes_on(tmp_path, url, images):
    user = client(url)
    for case in ("truncated", "EPS", "scans", "giant", "narrow"):
        with pytest.raises(AppError, match="no image that can be read"):
            user.predict(handle_file(wrong_file(tmp_path, case)), "what is it?", 0, api_name="/ask")
    assert user.predict(handle_file(images["red"]), "what is it?", 0, api_name="/ask")[0]


@pytest.mark.parametrize(
    ("image", "question", "message"),
    [
        ("red", " \n", "There is no question yet"),
        ("red", "what " * 200, r"takes 1,0\d\d tokens, and the model reads 512"),
        ("red", "is <image> one?", "holds &lt;image&gt;, which stands for the image"),  # the page shows HTML
    ],
)
def test_wrong_questions_get_a_message(url, images, image, question, message):
    with pytest.raises(AppError, match=message):
        client(url).predict(handle_file(images[image]), question, 0, api_name="/ask")


def test_users_at_the_same_time_get_their_own_answers(url, checkpoint, images):
    users = [client(url) for _ in QUESTIONS]
    jobs = [
        user.submit(handle_file(images[color]), question, 0, api_name="/ask")
        for user, (color, question) in zip(users, QUESTIONS, strict=True)
    ]
    threads, streams = 0, 0
    while not all(job.done() for job in jobs):
        threads = max(threads, len(answering()))
        streams = max(streams, sum(len(job.outputs()) > 1 and not job.done() for job in jobs))
        time.sleep(0.002)
    assert threads == 2  # of three, as many as the limit says
    assert streams >= 2  # two of them were reading parts of their answers while neither had ended
    answers = [job.result()[0] for job in jobs]
    assert answers == [space_parts.direct_answer(checkpoint, images[c], q, TOKENS) for c, q in QUESTIONS]
    assert len(set(answers)) == 3


def test_answers_stream_and_stop_when_told(images, tmp_path):
    longest, question = 1500, "what color is it?"  # an answer of many seconds, so that there is something to stop
    folder = space_parts.checkpoint(tmp_path, context=2048)
    begins = space_parts.direct_answer(folder, images["red"], question, 20)
    app = demo.build_app(*demo.load(str(folder)), title="Test", source="", max_new_tokens=longest)
    port = space_parts.free_port()
    demo.launch(app, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True)
    try:
        user = client(f"http://127.0.0.1:{port}/")
        job = user.submit(handle_file(images["red"]), question, 0, api_name="/ask")
        until(lambda: len(job.outputs()) > 3)
        assert len(answering()) == 1 and not job.done()
        job.cancel()
        until(lambda: not answering())
        texts = [output[0] for output in job.outputs()]
        assert 2 < len(set(texts)) < longest
        assert all(begins.startswith(text) or text.startswith(begins) for text in texts)
        with pytest.raises(AppError, match="no question"):
            user.predict(handle_file(images["red"]), "", 0, api_name="/ask")
    finally:
        app.close()


UPLOADED = {"_type": "gradio.FileData"}
ENTRIES = {
    "a path": lambda secret, link: {"path": str(secret)},
    "a path with meta of another kind": lambda secret, link: {"path": str(secret), "meta": {}},
    "by way of the uploads": lambda secret, link: {"path": f"{link.parent}/{os.path.relpath(secret, link.parent)}"},
    "a link among the uploads": lambda secret, link: {"path": str(link)},
    "as a URL of a file": lambda secret, link: {"path": None, "url": f"file://{secret}"},
    "a folder": lambda secret, link: {"path": str(link.parent)},
    "not there": lambda secret, link: {"path": f"{secret}.not"},
    "a zero byte": lambda secret, link: {"path": f"{secret}\0"},
}
"""What may come in place of an uploaded file: a file of the server, and a link to it in the folder of uploads."""


def call(url, *data):
    """All that the server says of one question, as its page asks it."""
    functions = httpx.get(f"{url}config").json()["dependencies"]
    (number,) = [function["id"] for function in functions if function["api_name"] == "ask"]
    session = secrets.token_hex(8)
    body = {"data": data, "fn_index": number, "session_hash": session}
    httpx.post(f"{url}gradio_api/queue/join", json=body).raise_for_status()
    return httpx.get(f"{url}gradio_api/queue/data", params={"session_hash": session}, timeout=60).text


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_file_of_the_server_is_no_image_to_ask_about(url, uploads, tmp_path, entry):
    secret = space_parts.plain(tmp_path / "secret.png", "red")
    (link := uploads / f"{len(os.listdir(uploads))}.png").symlink_to(secret)
    said = call(url, ENTRIES[entry](secret, link), "what is it?", 0)
    assert '"process_completed"' in said and '"process_generating"' not in said and "alt_text" not in said
    assert "The image is not among those uploaded here" in said and "secret" not in said


def test_no_address_is_fetched_for_an_image(url):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        for entry in ({"path": address}, {"path": address, "meta": UPLOADED}, {"path": None, "url": address}):
            said = call(url, entry, "what is it?", 0)
            assert '"process_generating"' not in said and "alt_text" not in said
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "[::1]:7860", "Origin": "http://[::1]:7860"}, 200),
        ({"Host": "localhost:9000", "Origin": "https://localhost:9000"}, 200),  # a forwarded port
        ({"Host": "localhost.evil.com", "Origin": "http://localhost.evil.com"}, 403),
        ({"Host": "127.0.0.1@evil.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:7860", "Origin": "http://localhost:8000"}, 403),
    ],
)
def test_other_pages_of_the_browser_are_refused(url, headers, status):
    files = {"files": ("image.png", b"0")}
    assert httpx.get(url, headers=headers).status_code == status
    assert httpx.post(f"{url}gradio_api/upload", files=files, headers=headers).status_code == status


def test_a_space_is_answered_under_its_own_name(monkeypatch):
    monkeypatch.setenv("SPACE_ID", "user/my-model-demo")
    with gr.Blocks(analytics_enabled=False) as app:
        gr.Markdown("hello")
    port = space_parts.free_port()
    demo.launch(app, server_port=port, prevent_thread_lock=True, quiet=True)
    name = {"Host": "user-my-model-demo.hf.space", "Origin": "https://user-my-model-demo.hf.space"}
    try:
        assert httpx.get(f"http://127.0.0.1:{port}/", headers=name).status_code == 200
    finally:
        app.close()
