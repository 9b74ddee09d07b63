"""`serve` in a process of its own, asked by the openai client."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys

import openai
import pytest
import tiny_parts as parts
import torch
from asking import generate, request
from hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.errors import install
from normalign_llava.serve import serve
from normalign_llava.serve.answering import Answer
from normalign_llava.serve.run import _listening


pytestmark = pytest.mark.slow


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
CONTEXT = 256


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


@pytest.fixture(scope="module")
def client(checkpoint, tmp_path_factory):
    with served(checkpoint, tmp_path_factory.mktemp("server")) as server:
        yield openai.OpenAI(base_url=server.url, api_key="none")


def ask(client, checkpoint, messages, **options):
    options = {"temperature": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(model=str(checkpoint), messages=messages, **options)


def test_answers_to_images_are_those_of_generate_whole_and_streamed(client, checkpoint):
    answers = []
    for image in IMAGES:
        expected, prompt, ids, _ = generate(checkpoint, "what is it", image)
        whole = ask(client, checkpoint, request("what is it", image))
        assert whole.choices[0].message.content == expected
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, len(ids))
        streamed = ask(client, checkpoint, request("what is it", image), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
        answers.append(expected)
    assert answers[0] != answers[1]  # the images arrive


def test_a_question_without_a_image_and_one_with_two(client, checkpoint):
    for images in ([], IMAGES):
        answer = ask(client, checkpoint, request("say it", *images))
        assert answer.choices[0].message.content == generate(checkpoint, "say it", *images)[0]


def test_an_answer_ends_with_the_context_however_many_tokens_are_asked_for(client, checkpoint):
    _, prompt, _, _ = generate(checkpoint, "say it")
    expected, _, ids, _ = generate(checkpoint, "say it", tokens=CONTEXT - prompt)
    assert prompt + len(ids) == CONTEXT
    for limit in ({"max_tokens": 10**9}, {"max_tokens": 1e9}, {"max_completion_tokens": 10**30}, {"max_tokens": None}):
        answer = ask(client, checkpoint, request("say it"), **limit)
        assert answer.choices[0].message.content == expected and answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == CONTEXT


def test_a_prompt_longer_than_the_context_is_refused(client, checkpoint):
    room = CONTEXT - generate(checkpoint, "", tokens=1)[1]
    assert ask(client, checkpoint, request("a" * (room - 1))).usage.total_tokens == CONTEXT
    for messages in (request("a" * room), request("a" * 10**6), request("what is it", *IMAGES * 33)):
        with pytest.raises(openai.BadRequestError, match="The prompt has .*context of 256, answer included. Shorten"):
            ask(client, checkpoint, messages)


def test_options_of_a_request_are_honoured(client, checkpoint):
    expected, prompt, _, _ = generate(checkpoint, "say it", tokens=40)
    stop = expected[12:15]
    cut = expected[: expected.index(stop)]
    for options in ({"stop": stop}, {"stop": ["no such text", stop]}):
        options["max_tokens"] = 40
        answer = ask(client, checkpoint, request("say it"), **options)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (cut, "stop")
        chunks = list(ask(client, checkpoint, request("say it"), stream=True, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut
        assert chunks[-1].choices[0].finish_reason == "stop"
    *chunks, last = ask(
        client, checkpoint, request("say it"), stream=True, max_tokens=40, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert last.choices == [] and last.usage.total_tokens == prompt + 40
    drawn = [
        ask(client, checkpoint, request("say it"), temperature=2, top_p=1, seed=seed, max_tokens=40)
        for seed in (1, 1, 2)
    ]
    one, same, other = (answer.choices[0].message.content for answer in drawn)
    assert one == same != other


TEXT = " häuser  日本 🙂🙂 a"
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def test_the_pieces_of_an_answer_are_its_text_though_characters_take_several_tokens():
    tokens = {
        "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)[0][0]
    }
    tokens["llama"] = ["▁" if byte == 32 else f"<0x{byte:02X}>" for byte in TEXT.encode()]
    for kind, decoder in (("byte level", decoders.ByteLevel()), ("llama", decoders.Sequence(LLAMA))):
        vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens[kind]))}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.decoder = decoder
        tokenizer.add_special_tokens(["<end>"])
        ids, end = [vocabulary[token] for token in tokens[kind]], tokenizer.token_to_id("<end>")
        for written in (
            ids,
            [end, *ids],
            [*ids[:1], end, end, *ids[1:]],
            [*ids, end],
            ids[:-3] if kind == "byte level" else ids,
        ):

            async def read(written=written, decode=tokenizer.decode, end=end):
                answer = Answer(3, [], lambda token: token == end, decode, asyncio.get_running_loop())
                for token in ([0, 0, 0], *([token] for token in written)):
                    answer.put(torch.tensor(token))
                answer.end()
                return [piece async for piece in answer]

            pieces = asyncio.run(read())
            assert "".join(pieces) == tokenizer.decode(written)
            assert len(pieces) > 10 and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


def test_the_served_model_is_listed_alone(client, checkpoint):
    assert [model.id for model in client.models.list()] == [str(checkpoint)]


def test_a_hub_id_is_served_at_its_revision_until_interrupted(checkpoint, tmp_path):
    with HubServer({"user/tiny": checkpoint}) as hub:
        commit = hub.repository("user/tiny").commit
        environment = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with served("user/tiny", tmp_path, environment, revision=commit) as server:
            client, name = openai.OpenAI(base_url=server.url, api_key="none"), f"user/tiny@{commit}"
            assert [model.id for model in client.models.list()] == [name]
            expected = generate(checkpoint, "what is it", IMAGES[0])[0]
            answer = ask(client, name, request("what is it", IMAGES[0]))
            assert answer.choices[0].message.content == expected
            # No code of the repository is fetched, let alone run.
            assert not [path for path in hub.requests if path.endswith(".py")]
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(10) == -signal.SIGINT


def test_what_is_no_checkpoint_is_refused_before_it_is_loaded(checkpoint, tmp_path):
    for kind, remedy in (("llava", "--from-llava"), ("llama", "transformers serve")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=f"model_type of .* is '{kind}', not 'normalign_llava'.*{remedy}"):
            serve(folder)
    with pytest.raises(ValueError, match="has no config.json"):
        serve(tmp_path)
    with pytest.raises(ValueError, match="no/such is no file or folder here"):
        serve("no/such")
    with pytest.raises(ValueError, match="'bnb-4bit' or 'bnb-8bit', got 'gptq'"):
        serve(checkpoint, quantization="gptq")
    silent = tmp_path / "silent"
    shutil.copytree(checkpoint, silent)
    (silent / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template.*--chat-template"):
        serve(silent)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(checkpoint, tmp_path):
    incomplete = tmp_path / "incomplete"
    shutil.copytree(checkpoint, incomplete)
    weights = load_file(incomplete / "model.safetensors")
    weights["unknown"] = weights.pop(next(iter(weights)))  # loading would say so
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port"):
            serve(incomplete, port=port)


def test_of_two_servers_begun_on_one_port_the_second_is_refused_at_once():
    with _listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port"):
            _listening("127.0.0.1", port)


def test_without_the_extra_the_error_names_it(checkpoint):
    code = """
import sys
sys.modules["uvicorn"] = None
from normalign_llava.serve import serve
from normalign_llava.serve.answering import Answer
serve(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode and "ImportError: " in done.stderr.splitlines()[-1]
    assert install("serve") in done.stderr
