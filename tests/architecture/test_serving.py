"""`transformers serve` on a checkpoint, in a process that cannot import the package, asked by the openai client."""

import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
import tiny
import tiny_parts as parts
from asking import data_url, generate, request
from paths import DOCS
from PIL import Image
from remote_code import BLOCK
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.train.collator import ConversationCollator


pytestmark = [pytest.mark.slow, pytest.mark.nightly]


PAGE = (DOCS / "serving.md").read_text()
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the page takes as given: `my-model` and `kite.png`. Texts begin with a first token."""
    root = tmp_path_factory.mktemp("serving")
    language = parts.language(root / "language", tied=False, chat_template="{{ bos_token }}" + parts.CHATML)
    tokenizer = AutoTokenizer.from_pretrained(language)
    tokenizer.bos_token, tokenizer.add_bos_token = "Z", True
    tokenizer.save_pretrained(language)
    build_checkpoint(parts.vision(root / "vision"), language, root / "built")
    model = AutoModelForImageTextToText.from_pretrained(root / "built")
    tiny.heeding(model).save_pretrained(root / "my-model")
    AutoProcessor.from_pretrained(root / "built").save_pretrained(root / "my-model")
    IMAGES[0].save(root / "kite.png")
    return root


@pytest.fixture(scope="module")
def url(folder):
    """The address of a server, begun by the page's command."""
    (command,) = re.findall(r"^transformers (serve my-model .*)$", PAGE, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "log"
    code = BLOCK + "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", code, *command.split(), "--device", "cpu", "--port", str(port)]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*words, "--host", "127.0.0.1"], env=environment, cwd=folder, stdout=file, stderr=file
        )
    try:
        while True:
            assert server.poll() is None, log.read_text()
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def ask(url, messages, **options):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    return client.chat.completions.create(
        model="my-model", messages=messages, max_tokens=8, temperature=0, **options
    )  # fmt: skip


def prompt_in_training(processor, text, *images) -> int:
    """Tokens before the answer, in a batch of training."""
    urls = [{"path": data_url(image)} for image in images]
    row = parse_row({"question": text, "answer": "A", "images": urls}) | {"source": "", "row": 0}
    batch = ConversationCollator(processor)([row])
    assert (batch["input_ids"] == processor.tokenizer.bos_token_id).sum() == 1
    return int((batch["labels"][0] >= 0).nonzero()[0])


def test_answers_are_those_of_generate(folder, url):
    answers, processor = [], AutoProcessor.from_pretrained(folder / "my-model")
    for images in ([], IMAGES[:1], IMAGES[1:], IMAGES):
        expected, prompt, ids, _ = generate(folder / "my-model", "what is it", *images)
        answer = ask(url, request("what is it", *images))
        assert answer.choices[0].message.content == expected
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(ids))
        assert prompt == prompt_in_training(processor, "what is it", *images)
        streamed = ask(url, request("what is it", *images), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == expected
        answers.append(expected)
    assert answers[1] != answers[2]  # the images arrive


def test_the_page_s_client_is_answered(folder, url):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = snippet.replace("http://localhost:8000", url)
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    expected, *_ = generate(folder / "my-model", "What is in the image?", IMAGES[0], tokens=64)
    assert process.stdout == f"{expected}\n", process.stderr
