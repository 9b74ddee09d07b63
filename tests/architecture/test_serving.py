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
from adapters import make_adapter
from asking import generate, request
from paths import DOCS
from PIL import Image
from served import served
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.checkpoint.weights import save_model


pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PAGE = (DOCS / "serving.md").read_text()
IMAGES = [
    Image.linear_gradient("L").convert("RGB"),
    Image.new("RGB", (20, 30), "red"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the page takes as given: `my-model` and `kite.png`."""
    root = tmp_path_factory.mktemp("serving")
    language = parts.language(root / "language", tied=False)
    vision = parts.vision(root / "vision")
    build_checkpoint(vision, language, root / "built")
    model = AutoModelForImageTextToText.from_pretrained(root / "built")
    tiny.heeding(model).save_pretrained(root / "my-model")
    AutoProcessor.from_pretrained(root / "built").save_pretrained(root / "my-model")
    IMAGES[0].save(root / "kite.png")
    return root


@pytest.fixture(scope="module")
def server_url(folder):
    """The address of a server that the page's command has started."""
    (command,) = re.findall(r"^transformers (serve my-model .*)$", PAGE, re.MULTILINE)
    with served(folder, command.split()) as address:
        yield address


def ask(server_url, messages, **options):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server_url}/v1", api_key="none")
    return client.chat.completions.create(
        model="my-model",
        messages=messages,
        max_tokens=8,
        temperature=0,
        **options,
    )


IMAGE_COUNTS = {
    "none": [],
    "the first": IMAGES[:1],
    "the second": IMAGES[1:],
    "both": IMAGES,
}
every_image_count = pytest.mark.parametrize("images", IMAGE_COUNTS.values(), ids=IMAGE_COUNTS)


@every_image_count
def test_answers_are_those_of_generate(folder, server_url, images):
    answer, prompt_length, answer_ids, _ = generate(folder / "my-model", "what is it", *images)
    completion = ask(server_url, request("what is it", *images))
    assert completion.choices[0].message.content == answer
    assert completion.usage.prompt_tokens == prompt_length
    assert completion.usage.completion_tokens == len(answer_ids)


@every_image_count
def test_streamed_answers_are_those_of_generate(folder, server_url, images):
    expected, *_ = generate(folder / "my-model", "what is it", *images)
    answer = ""
    for chunk in ask(server_url, request("what is it", *images), stream=True):
        if chunk.choices:
            answer += chunk.choices[0].delta.content or ""
    assert answer == expected


def test_answers_about_different_images_differ(folder):
    """So images matter to the answers that are compared here."""
    answers = []
    for image in IMAGES:
        answer, *_ = generate(folder / "my-model", "what is it", image)
        answers.append(answer)
    assert answers[0] != answers[1]


def test_the_page_s_client_is_answered(folder, server_url):
    (snippet,) = re.findall(r"```python\n([^`]*OpenAI.*?)```", PAGE, re.DOTALL)
    code = snippet.replace("http://localhost:8000", server_url)
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    expected, *_ = generate(
        folder / "my-model",
        "What is in the image?",
        IMAGES[0],
        tokens=64,
    )
    assert process.stdout == f"{expected}\n", process.stderr


VLLM = """
import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main():
    model_folder = sys.argv[1]
    with open(sys.argv[2]) as file:
        conversations = json.load(file)
    options = {}
    adapter = None
    if len(sys.argv) > 3:
        options = {"enable_lora": True, "max_lora_rank": 8}
        adapter = LoRARequest("adapter", 1, sys.argv[3])
    llm = LLM(
        model_folder,
        model_impl="transformers",
        limit_mm_per_prompt={"image": 2},
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        gpu_memory_utilization=0.3,  # of the memory of a CPU: other programs have some too
        trust_remote_code=True,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    answers = []
    for result in llm.chat(conversations, sampling, lora_request=adapter):
        output = result.outputs[0]
        log_probabilities = []
        for token_id, candidates in zip(output.token_ids, output.logprobs):
            log_probabilities.append(candidates[token_id].logprob)
        answers.append([list(output.token_ids), log_probabilities])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
"""


needs_vllm = pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON is not set")
ASKED_IMAGES = [IMAGES[:1], [], IMAGES]


def build_for_vllm(folder, vision="siglip", norm="layer_norm", tied=True):
    """Builds a checkpoint of sizes that vLLM's attention supports."""
    language = parts.language(
        folder / "language",
        tied=tied,
        hidden_size=64,
        num_key_value_heads=2,
        head_dim=32,
    )
    encoder = parts.vision(folder / "vision", vision)
    build_checkpoint(encoder, language, folder / "model", norm=norm)
    return folder / "model"


def ask_vllm(folder, *adapter):
    """The answers of `model` in a folder: ids and their log-probabilities."""
    conversations = [request("what is it", *images) for images in ASKED_IMAGES]
    (folder / "asked.json").write_text(json.dumps(conversations))
    (folder / "ask.py").write_text(VLLM)
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.run(
        [os.environ["VLLM_PYTHON"], "ask.py", "model", "asked.json", *map(str, adapter)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
    answer_lines = [line for line in process.stdout.splitlines() if line.startswith("[[")]
    return json.loads(answer_lines[-1])


def assert_answers_are_of(model_folder, answers):
    for images, answer in zip(ASKED_IMAGES, answers, strict=True):
        answer_ids, log_probabilities = answer
        _, _, expected_ids, expected = generate(model_folder, "what is it", *images)
        assert answer_ids == expected_ids
        assert log_probabilities == pytest.approx(expected, abs=1e-4)


@needs_vllm
@pytest.mark.parametrize(
    ("vision", "norm", "tied"),
    [
        ("siglip", "layer_norm", True),
        ("registers", "rms_norm", False),
    ],
)
def test_vllm_answers_as_transformers(tmp_path, vision, norm, tied):
    model_folder = build_for_vllm(tmp_path, vision, norm, tied)
    answers = ask_vllm(tmp_path)
    assert_answers_are_of(model_folder, answers)


@needs_vllm
def test_vllm_answers_as_peft_with_an_adapter_on_the_language_model(tmp_path):
    model_folder = build_for_vllm(tmp_path, tied=False)
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    save_model(tiny.heeding(model), model_folder)
    adapter_folder = tmp_path / "adapter"
    make_adapter(model_folder, adapter_folder, modules_to_save=None)
    AutoProcessor.from_pretrained(model_folder).save_pretrained(adapter_folder)

    answers = ask_vllm(tmp_path, adapter_folder)
    assert_answers_are_of(adapter_folder, answers)
    plain_answer, *_ = generate(model_folder, "what is it", *IMAGES)
    adapted_answer, *_ = generate(adapter_folder, "what is it", *IMAGES)
    assert adapted_answer != plain_answer
