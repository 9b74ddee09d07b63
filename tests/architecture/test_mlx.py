"""`examples/mlx_model.py` in MLX-VLM, if `MLX_PYTHON` is a Python that has it."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
import tiny
import tiny_parts as parts
from asking import generate
from paths import DOCS, ROOT
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlamaConfig, Qwen2Config

from normalign_llava.assembly.build import build_checkpoint


pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif("MLX_PYTHON" not in os.environ, reason="MLX_PYTHON is not set"),
]

PAGE = (DOCS / "serving.md").read_text()
ASK = """
import json

from mlx_vlm import load, stream_generate

model, processor = load("model", trust_remote_code=True)
answers = []
for image_names in (["one.png"], ["one.png", "two.png"], []):
    content = [{"type": "image"} for _ in image_names]
    content.append({"type": "text", "text": "what is it"})
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = []
    log_probabilities = []
    for step in stream_generate(
        model, processor, prompt, image=image_names or None, max_tokens=8, temperature=0.0
    ):
        if len(ids) < step.generation_tokens:
            ids.append(int(step.token))
            log_probabilities.append(step.logprobs[int(step.token)].item())
    answers.append([ids, log_probabilities])
print(json.dumps(answers))
"""


ROTARY = {"rope_type": "default", "rope_theta": 500.0}
SCALED_ROTARY = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


def make_model(folder, vision, text_class, tied, options, rotary=ROTARY):
    """A checkpoint in which earlier text matters. `options` are of `build_checkpoint`."""
    language = parts.language(
        folder / "language",
        tied=tied,
        cls=text_class,
        rope_parameters=rotary,
    )
    encoder = parts.vision(folder / "vision", vision)
    build_checkpoint(encoder, language, folder / "built", **options)
    model = AutoModelForImageTextToText.from_pretrained(folder / "built")
    tiny.heeding(model).save_pretrained(folder / "model")
    AutoProcessor.from_pretrained(folder / "built").save_pretrained(folder / "model")


def name_model_file(model_folder):
    """Does by hand what the page says."""
    shutil.copyfile(ROOT / "examples" / "mlx_model.py", model_folder / "mlx_model.py")
    config = json.loads((model_folder / "config.json").read_text())
    config["model_file"] = "mlx_model.py"
    (model_folder / "config.json").write_text(json.dumps(config))


def run_in_mlx(folder, *words):
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [os.environ["MLX_PYTHON"], *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("vision", "text_class", "tied", "options"),
    [
        ("siglip", LlamaConfig, True, {}),
        ("clip", Qwen2Config, False, {"norm": "rms_norm"}),
        ("clip", LlamaConfig, False, {"arm": "none"}),
    ],
)
def test_mlx_answers_as_transformers(tmp_path, vision, text_class, tied, options):
    make_model(tmp_path, vision, text_class, tied, options)
    images = {
        "one.png": Image.linear_gradient("L").convert("RGB").resize((16, 16)),
        "two.png": Image.new("RGB", (16, 16), "red"),
    }
    for image_name, image in images.items():
        image.save(tmp_path / image_name)
    asked_images = [[images["one.png"]], list(images.values()), []]
    expected_answers = []
    for asked in asked_images:
        expected_answers.append(generate(tmp_path / "model", "what is it", *asked))
    name_model_file(tmp_path / "model")

    process = run_in_mlx(tmp_path, "-c", ASK)
    assert process.returncode == 0, process.stderr[-5000:]
    answers = json.loads(process.stdout.splitlines()[-1])
    for answer, expected in zip(answers, expected_answers, strict=True):
        ids, log_probabilities = answer
        _, _, expected_ids, expected_log_probabilities = expected
        assert ids == expected_ids
        assert log_probabilities == pytest.approx(expected_log_probabilities, abs=1e-3)

    (command,) = re.findall(r"^python -m (mlx_vlm.generate .*)$", PAGE, re.MULTILINE)
    command = command.replace("my-model", "model").replace("kite.png", "one.png")
    words = [*shlex.split(command), "--max-tokens", "8", "--temperature", "0"]
    printed = run_in_mlx(tmp_path, "-m", *words)
    expected, *_ = generate(tmp_path / "model", "What is it?", images["one.png"])
    assert expected in printed.stdout, printed.stderr[-3000:]


@pytest.mark.parametrize(
    ("vision", "rotary", "message"),
    [
        ("dinov2", ROTARY, "Unsupported model type: dinov2"),
        ("clip", SCALED_ROTARY, "MLX-VLM's LLaVA lacks these rotary angles"),
    ],
)
def test_mlx_refuses_what_its_llava_lacks(tmp_path, vision, rotary, message):
    make_model(tmp_path, vision, LlamaConfig, False, {}, rotary)
    name_model_file(tmp_path / "model")
    process = run_in_mlx(tmp_path, "-c", ASK)
    assert process.returncode != 0
    assert message in process.stderr
