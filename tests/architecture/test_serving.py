"""A checkpoint served in a process that cannot import the package: by transformers, asked by the
openai client, and by vLLM, if `VLLM_PYTHON` has it; as an engine does, see test_remote_code.py."""

import json
import os
import re
import subprocess
import sys

import pytest
import tiny
import tiny_parts as parts
from asking import generate, request
from paths import DOCS
from PIL import Image
from served import served
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PAGE = (DOCS / "serving.md").read_text()
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the page takes as given: `my-model` and `kite.png`."""
    root = tmp_path_factory.mktemp("serving")
    language = parts.language(root / "language", tied=False)
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
    with served(folder, command.split()) as address:
        yield address


def ask(url, messages, **options):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    options |= dict(model="my-model", max_tokens=8, temperature=0)
    return client.chat.completions.create(messages=messages, **options)


def test_answers_are_those_of_generate(folder, url):
    answers = []
    for images in ([], IMAGES[:1], IMAGES[1:], IMAGES):
        expected, prompt, ids, _ = generate(folder / "my-model", "what is it", *images)
        answer = ask(url, request("what is it", *images))
        assert answer.choices[0].message.content == expected
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(ids))
        streamed = ask(url, request("what is it", *images), stream=True)
        deltas = [chunk.choices[0].delta.content for chunk in streamed if chunk.choices]
        assert "".join(filter(None, deltas)) == expected
        answers.append(expected)
    assert answers[1] != answers[2]  # the images arrive


def test_the_page_s_client_is_answered(folder, url):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = snippet.replace("http://localhost:8000", url)
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    expected, *_ = generate(folder / "my-model", "What is in the image?", IMAGES[0], tokens=64)
    assert process.stdout == f"{expected}\n", process.stderr


VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, asked = sys.argv[1], json.load(open(sys.argv[2]))
    how = dict(dtype="float32", enforce_eager=True, max_model_len=128, trust_remote_code=True)
    llm = LLM(model, model_impl="transformers", limit_mm_per_prompt={"image": 2}, **how)
    answers = []
    for said in llm.chat(asked, SamplingParams(temperature=0, max_tokens=8, logprobs=1)):
        tokens, options = said.outputs[0].token_ids, said.outputs[0].logprobs
        logprobs = [option[token].logprob for token, option in zip(tokens, options)]
        answers.append([list(tokens), logprobs])
    print(json.dumps(answers))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON is not set")
@pytest.mark.parametrize("kind, norm", [("siglip", "layer_norm"), ("registers", "rms_norm")])
def test_vllm_answers_as_transformers(tmp_path, kind, norm):
    sizes = dict(hidden_size=64, num_key_value_heads=2, head_dim=32)  # that vLLM's attention has
    language = parts.language(tmp_path / "l", tied=kind == "siglip", **sizes)
    build_checkpoint(parts.vision(tmp_path / "v", kind), language, tmp_path / "model", norm=norm)
    (tmp_path / "ask.py").write_text(VLLM)
    asked = [request("what is it", *images) for images in (IMAGES[:1], [], IMAGES)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    command = [os.environ["VLLM_PYTHON"], "ask.py", "model", "asked.json"]
    how = dict(capture_output=True, text=True, env=environment)
    process = subprocess.run(command, cwd=tmp_path, **how)
    assert process.returncode == 0, process.stderr[-5000:]
    lines = [line for line in process.stdout.splitlines() if line.startswith("[[")]
    answers = json.loads(lines[-1])
    for images, (ids, logprobs) in zip((IMAGES[:1], [], IMAGES), answers, strict=True):
        _, _, expected_ids, expected_logprobs = generate(tmp_path / "model", "what is it", *images)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
