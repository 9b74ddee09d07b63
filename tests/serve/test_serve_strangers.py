"""What a stranger may send to `serve`, and what a stranger's checkpoint may hold."""

import io
import json
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
import tiny_parts as parts
from malformed import BODIES, HI, packed, png, said, shown
from serving import served
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.serve import serve
from normalign_llava.serve.answering import MAX_REQUESTS


pytestmark = pytest.mark.slow


FOREVER = {"messages": HI, "max_tokens": 10**9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One whose answers end with a context of a million tokens: not while a test runs."""
    root = tmp_path_factory.mktemp("strangers")
    language = parts.language(root / "language", max_position_embeddings=10**6)
    build_checkpoint(parts.vision(root / "vision"), language, root / "built")
    model = AutoModelForImageTextToText.from_pretrained(root / "built")
    model.generation_config.eos_token_id = None
    model.save_pretrained(root / "model")
    AutoProcessor.from_pretrained(root / "built").save_pretrained(root / "model")
    return root / "model"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """Of a checkpoint that brings code which it does not need."""
    folder = tmp_path_factory.mktemp("server")
    theirs, _ = with_code_of_theirs(checkpoint, folder, of_the_configuration)
    with served(theirs, folder, typed="y\n" * 20) as server:
        yield server


def refused(answer, *words):
    """The error of an answer, checked for its form: OpenAI's, one line, and nothing of the server's inside."""
    assert 400 <= answer.status_code < 500, answer.text
    message = answer.json()["error"]["message"]
    assert message.endswith(".") and "\n" not in message and len(message) < 500 and "Traceback" not in message
    for word in words:
        assert word in message, message
    return message


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_request_is_answered_in_one_sentence(server, name):
    body, *words = BODIES[name]
    refused(server.post(b"null" if body is None else body), *words)


def test_after_all_these_the_server_answers(server):
    for method, path, status in (("GET", "/chat/completions", 405), ("POST", "/completions", 404)):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status and "POST /v1/chat/completions" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/chat/completions", content=json.dumps(said(*HI)))
    assert answer.status_code == 415 and "Content-Type" in answer.json()["error"]["message"]
    assert server.requests == 0 and server.ask()


def test_a_foreign_host_name_is_refused(server):
    for path in ("/models", "/chat/completions"):
        answer = httpx.get(server.url + path, headers={"Host": "evil.example:8000"})
        assert answer.status_code == 400 and "host" in answer.text
    assert httpx.get(f"{server.url}/models", headers={"Host": "localhost:1"}).status_code == 200


def test_images_beyond_the_limit_are_counted_together(server):
    image = packed(png((6000, 5000), "1"))
    both = shown(image)
    assert server.post(both).status_code == 200
    both["messages"] *= 2
    refused(server.post(both), "Image 2", "6000 x 5000 pixels; from 1 to 20,000,000 are allowed")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_client_leaves(server, stream):
    connection = server.begin({**FOREVER, "stream": stream})
    received = b""
    while stream and b"chat.completion.chunk" not in received:
        assert (part := connection.recv(10**6))
        received += part
    server.wait_for_requests(1)
    connection.close()
    server.wait_for_requests(0)
    assert server.ask()


def test_too_many_requests_are_refused_until_clients_leave(server):
    half = [server.begin(FOREVER, sent=5) for _ in range(2)]
    whole = [server.begin({**FOREVER, "stream": bool(number % 2)}) for number in range(MAX_REQUESTS - 2)]
    server.wait_for_requests(MAX_REQUESTS)
    answer = server.post(FOREVER)
    assert answer.status_code == 503 and "busy" in answer.json()["error"]["message"]
    for connection in [*half, *whole]:
        connection.close()
    server.wait_for_requests(0)
    assert server.ask()


def until_closed(connection):
    """All that a connection sends before it ends."""
    return b"".join(iter(lambda: connection.recv(10**4), b""))


def test_connections_without_a_request_are_closed(server):
    slow = [server.begin(FOREVER, sent=0) for _ in range(2)]
    address = slow[0].getpeername()
    begun = [socket.create_connection(address, timeout=100) for _ in range(3)]
    begun[1].sendall(b"POST /v1/chat")
    begun[2].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n")
    slow[1].close()
    answering = server.begin(FOREVER)
    refused, *unanswered, answered = (until_closed(connection) for connection in (slow[0], *begun))
    assert refused.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 30 seconds" in refused
    assert unanswered == [b"", b""] and answered.count(b"HTTP/1.1 ") == answered.count(b"HTTP/1.1 200 ") == 1
    assert server.requests == 1  # an answer may take longer
    answering.close()
    server.wait_for_requests(0)


def test_sigint_ends_the_server_during_a_long_prompt(checkpoint, tmp_path):
    with served(checkpoint, tmp_path) as server:
        connection = server.begin({"messages": [{"role": "user", "content": "b" * 900}] * 600})
        server.wait_for_requests(1)
        time.sleep(5)  # it has been prepared, and is being read
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == -signal.SIGINT
        connection.close()


def test_sigterm_ends_the_server_during_an_answer(checkpoint, tmp_path):
    with served(checkpoint, tmp_path) as server:
        connections = [server.begin({**FOREVER, "stream": stream}) for stream in (False, True)]
        server.wait_for_requests(2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == -signal.SIGTERM
        for connection in connections:
            connection.close()


class Web(BaseHTTPRequestHandler):
    """Keeps a list of who came."""

    def do_GET(self):
        self.server.visits.append(self.path)
        self.send_response(302 if self.path == "/moved.png" else 200)
        self.send_header("Location", "/red.png")
        self.end_headers()
        if self.path == "/never.png":
            self.server.over.wait()
        elif self.path == "/endless.png":
            while not self.server.over.is_set():
                self.wfile.write(bytes(2**20))
        else:
            self.wfile.write(png((16, 16)) if self.path == "/black.png" else b"no image")

    def log_message(self, *args):
        pass


@contextmanager
def website():
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as web:
        web.visits, web.over, web.daemon_threads = [], Event(), True
        Thread(target=web.serve_forever, daemon=True).start()
        yield web, f"http://127.0.0.1:{web.server_port}"
        web.over.set()
        web.shutdown()


def test_addresses_are_fetched_only_where_that_is_allowed(server, checkpoint, tmp_path):
    with website() as (web, address):
        for scheme in ("http", "HTTP"):
            url = f"{address.replace('http', scheme)}/black.png"
            refused(server.post(shown(url)), "fetches no URLs", "data:image/png;base64")
        assert web.visits == []
        with served(checkpoint, tmp_path, allow_urls=True) as fetching:
            black = fetching.post(shown(f"{address}/black.png")).json()["choices"]
            assert black == fetching.post(shown(packed(png((16, 16))))).json()["choices"]
            answers = {}

            def ask_for_what_never_comes():
                answers["never"] = fetching.post(shown(f"{address}/never.png"))

            waiting = Thread(target=ask_for_what_never_comes)
            waiting.start()
            fetching.wait_for_requests(1)
            assert fetching.ask() and waiting.is_alive()
            waiting.join()
            refused(answers["never"], "did not answer within 10 seconds")
            refused(fetching.post(shown(f"{address}/moved.png")), "/moved.png", "status 302")
            refused(fetching.post(shown(f"{address}/endless.png")), "/endless.png", "more than 20,971,520 bytes")
            refused(fetching.post(shown(f"{address}/text.png")), "Image 1")
            for broken in (
                "http://127.0.0.1:9/a.png",
                "http://",
                "http://[",
                "http://127.0.0.1:99999/",
                "http://\x00/",
            ):
                refused(fetching.post(shown(broken)), "cannot be fetched")
            refused(fetching.post(shown("/etc/hostname")), "data:")
            refused(fetching.post(shown("file:///etc/hostname")), "data:")
        assert web.visits == [f"/{name}.png" for name in ("black", "never", "moved", "endless", "text")]


def changed(file, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))
    return content


def of_the_configuration(folder):
    names = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer")
    changed(folder / "config.json", auto_map=dict.fromkeys(names, "theirs.Theirs"))


def of_the_tokenizer(folder):
    theirs = {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"], "AutoProcessor": "theirs.Theirs"}
    changed(folder / "tokenizer_config.json", auto_map=theirs, tokenizer_class="TheirTokenizer")


def of_the_processor(folder):
    processor = changed(
        folder / "processor_config.json", auto_map={"AutoProcessor": "theirs.Theirs"}, processor_class="TheirProcessor"
    )
    theirs = {"auto_map": {"AutoImageProcessor": "theirs.Theirs"}, "image_processor_type": "TheirImageProcessor"}
    changed(folder / "processor_config.json", image_processor={**processor["image_processor"], **theirs})


def of_generate(folder):
    (folder / "custom_generate").mkdir()
    shutil.copyfile(folder / "theirs.py", folder / "custom_generate" / "generate.py")


def with_code_of_theirs(checkpoint, folder, *places):
    shutil.copytree(checkpoint, folder / "model")
    theirs = f"open({str(folder / 'ran')!r}, 'w')\nclass Theirs: ...\ndef generate(model): ...\n"
    (folder / "model" / "theirs.py").write_text(theirs)
    for place in places:
        place(folder / "model")
    return folder / "model", folder / "ran"


@pytest.mark.parametrize("place", [of_the_tokenizer, of_the_processor, of_generate])
def test_a_checkpoint_that_names_other_code_is_refused_without_a_question(checkpoint, tmp_path, monkeypatch, place):
    folder, ran = with_code_of_theirs(checkpoint, tmp_path, place)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    with pytest.raises(ValueError, match=f"{folder} names code that this package has no use for") as refusal:
        serve(folder)
    assert not ran.exists() and "trust_remote_code" not in str(refusal.value)


def test_code_that_a_checkpoint_does_not_need_is_not_run(server):
    assert server.ask()
    folder = Path(httpx.get(f"{server.url}/models", timeout=300).json()["data"][0]["id"])
    assert (folder / "theirs.py").exists() and not (folder.parent / "ran").exists()
