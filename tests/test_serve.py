"""`serve` in a process of its own, asked by the openai client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import tiny_parts as parts
import torch
from asking import generate, request
from hub_server import HubServer
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.build import build_checkpoint
from normalign_llava.serve import serve


openai = pytest.importorskip("openai")

PICTURES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
SERVE = """
import sys
from normalign_llava.serve import serve
checkpoint, revision = sys.argv[1:]
serve(checkpoint, port=0, device="cpu", revision=revision or None)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("serve")
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language", tied=False), root / "built")
    model = AutoModelForImageTextToText.from_pretrained(root / "built")
    with torch.no_grad():  # at its initial scale so small a decoder says the same of everything
        for parameter in model.model.language_model.layers.parameters():
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(root / "model")
    AutoProcessor.from_pretrained(root / "built").save_pretrained(root / "model")
    return root / "model"


@contextmanager
def served(checkpoint, folder, environment=None, revision=""):
    """Yields a client of a server's process, and the process."""
    environment = {**os.environ, "HF_HOME": str(folder / "home"), **(environment or {"HF_HUB_OFFLINE": "1"})}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(checkpoint), revision],
            env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving "), (folder / "log").read_text()
        yield openai.OpenAI(base_url=line.split()[-1], api_key="none"), process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def client(checkpoint, tmp_path_factory):
    with served(checkpoint, tmp_path_factory.mktemp("server")) as (client, _):
        yield client


def ask(client, checkpoint, messages, **options):
    options = {"temperature": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(model=str(checkpoint), messages=messages, **options)


def test_answers_to_pictures_are_those_of_generate_whole_and_streamed(client, checkpoint):
    answers = []
    for picture in PICTURES:
        expected, prompt, ids, _ = generate(checkpoint, "what is it", picture)
        whole = ask(client, checkpoint, request("what is it", picture))
        assert whole.choices[0].message.content == expected
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, len(ids))
        streamed = ask(client, checkpoint, request("what is it", picture), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
        answers.append(expected)
    assert answers[0] != answers[1]  # the pictures arrive


def test_a_question_without_a_picture_and_one_with_two(client, checkpoint):
    for pictures in ([], PICTURES):
        answer = ask(client, checkpoint, request("say it", *pictures))
        assert answer.choices[0].message.content == generate(checkpoint, "say it", *pictures)[0]


def test_wrong_requests_are_answered_with_an_error_and_the_server_goes_on(client, checkpoint):
    broken = request("what is it", PICTURES[0])
    broken[0]["content"][0]["image_url"]["url"] = "data:image/png;base64," + "A" * 4000
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match="Incorrect image source.* cannot identify image file"
        ) as raised:
            ask(client, checkpoint, broken, stream=stream)
        assert len(str(raised.value)) < 500
    broken[0]["content"][0]["image_url"] = {}
    with pytest.raises(openai.InternalServerError, match="KeyError: 'url'"):
        ask(client, checkpoint, broken)
    broken[0]["content"][0]["image_url"] = {"url": "http://127.0.0.1:9/picture.png"}
    with pytest.raises(openai.BadRequestError, match="refused"):
        ask(client, checkpoint, broken)
    with pytest.raises(openai.BadRequestError):
        ask(client, "another/model", request("what is it"))
    assert ask(client, checkpoint, request("what is it", PICTURES[0])).choices[0].message.content


def test_the_served_model_is_listed_alone(client, checkpoint):
    assert [model.id for model in client.models.list()] == [str(checkpoint)]


def test_a_hub_id_is_served_at_its_revision_until_interrupted(checkpoint, tmp_path):
    with HubServer({"user/tiny": checkpoint}) as hub:
        commit = hub.repository("user/tiny").commit
        environment = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with served("user/tiny", tmp_path, environment, revision=commit) as (client, process):
            name = f"user/tiny@{commit}"
            assert [model.id for model in client.models.list()] == [name]
            expected = generate(checkpoint, "what is it", PICTURES[0])[0]
            answer = ask(client, name, request("what is it", PICTURES[0]))
            assert answer.choices[0].message.content == expected
            # No code of the repository is fetched, let alone run.
            assert not [path for path in hub.requests if path.endswith(".py")]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_what_is_no_checkpoint_is_refused_before_it_is_loaded(checkpoint, tmp_path):
    for kind, remedy in (("llava", "--from-llava"), ("llama", "transformers serve")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=f"model_type of .* is '{kind}', not 'normalign_llava'.*{remedy}"):
            serve(folder)
    with pytest.raises(ValueError, match="is None.*normalign merge"):
        serve(tmp_path)
    with pytest.raises(OSError, match="no/such is no folder here"):
        serve("no/such")
    with pytest.raises(ValueError, match="'@'.*--revision"):
        serve("user/model@v1")
    silent = tmp_path / "silent"
    shutil.copytree(checkpoint, silent)
    (silent / "chat_template.jinja").unlink()
    (silent / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no chat template.*--chat-template"):
        serve(silent)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(checkpoint, tmp_path):
    empty = tmp_path / "empty"
    shutil.copytree(checkpoint, empty)
    (empty / "model.safetensors").unlink()  # loading would say so
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be listened on.*--port"):
            serve(empty, port=port)


def test_without_the_extra_the_error_names_it(checkpoint):
    code = """
import sys
sys.modules["uvicorn"] = None
from normalign_llava.serve import serve
serve(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode and "ImportError: " in done.stderr.splitlines()[-1]
    assert "pip install 'normalign-llava[serve]'" in done.stderr
