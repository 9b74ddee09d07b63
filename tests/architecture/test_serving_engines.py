"""What vLLM and SGLang ask of a checkpoint, read from their sources; vLLM itself is tried if `VLLM_PYTHON` has it.

Read were vLLM 0.33.0 (`vllm/model_executor/models/transformers/`, `registry.py`) and SGLang 0.5.23
(`srt/models/transformers.py`, `srt/multimodal/processors/transformers_auto.py`). An engine loads the published folder
with `trust_remote_code`; so does `ENGINE`, in a process that cannot import the package.
"""

import json
import os
import subprocess

import pytest
import tiny_parts as parts
import torch
from asking import generate, request
from PIL import Image
from remote_code import run_blocked
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
PROMPT = "<image> and <image>, which"

# Builds the base class from the configuration, fills it from the file, and runs it, as both engines do: attention of
# their own in the decoder alone, one row without padding or cache, embeddings and images merged outside the model.
ENGINE = """
import json, torch
from glob import glob
from PIL import Image
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoProcessor
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward

folder, prompt = sys.argv[1:3]
calls = []
def attention(module, query, key, value, attention_mask, **kwargs):
    calls.append([module.layer_idx, module.is_causal, kwargs.pop("forward_batch"), type(module.scaling).__name__])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
AttentionInterface.register("engine", attention)

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
models = [get_class_from_dynamic_module(config.auto_map[key], folder) for key in list(config.auto_map)[1:]]
config.get_text_config()._attn_implementation = "engine"
with torch.device("meta"):
    half = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
base = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
weights = {name: value for file in glob(folder + "/*.safetensors") for name, value in load_file(file).items()}
head = weights.pop("lm_head.weight")
base.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})

processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
images = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
inputs = processor(images=images, text=prompt, return_tensors="pt", return_text_replacement_offsets=True)
ids = inputs["input_ids"]
with torch.no_grad():
    features = torch.cat(list(base.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output))
    embeddings = base.get_input_embeddings()(ids)
    embeddings[ids == config.image_token_id] = features
    hidden = base(
        input_ids=None, inputs_embeds=embeddings, position_ids=torch.arange(ids.shape[1])[None], use_cache=False,
        return_dict=False, forward_batch="a batch",
    )[0][0]
print(json.dumps({
    "auto_map": list(config.auto_map),
    "compatible": [x.is_backend_compatible() and x._supports_attention_backend for x in models],
    "base": [type(base).__name__, type(base).__module__.split(".")[0]],
    "parameters_in_float32": [n for n, p in half.named_parameters() if p.dtype == torch.float32],
    "kept_in_float32": sorted(half._keep_in_fp32_modules_strict),
    "parts": [base.get_encoder(modality="image") is base.vision_tower, base.get_decoder() is base.language_model],
    "plan": sorted(base.tp_plan),
    "image_token": [processor.image_token, processor.image_token_id, config.image_token_id],
    "calls": calls,
    "replacements": [[x["type"], processor.tokenizer.encode(x["replacement"])]
                     for x in inputs["text_replacement_offsets"][0]],
    "ids": ids[0].tolist(),
    "logits": (hidden @ head.T).tolist(),
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("engines")
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language", tied=False), root / "model")
    return root / "model"


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    return run_blocked(tmp_path_factory.mktemp("engine"), ENGINE, checkpoint, PROMPT)


def test_an_engine_finds_classes_attention_float32_norm_and_placeholders(checkpoint, engine):
    # In this order, since SGLang takes the first that is no configuration.
    assert engine["auto_map"][:3] == ["AutoConfig", "AutoModel", "AutoModelForImageTextToText"]
    assert engine["base"] == ["NormAlignLlavaModel", "transformers_modules"]
    assert all(engine["compatible"]) and all(engine["parts"])
    assert {f"language_model.layers.*.{name}" for name in ("self_attn.q_proj", "mlp.down_proj")} <= {*engine["plan"]}
    layers = AutoConfig.from_pretrained(checkpoint).text_config.num_hidden_layers
    assert engine["calls"] == [[layer, True, "a batch", "float"] for layer in range(layers)]
    assert engine["parameters_in_float32"] == [f"multi_modal_projector.norm.{name}" for name in ("weight", "bias")]
    assert engine["kept_in_float32"] == ["multi_modal_projector.norm"]  # what vLLM widens again
    token, token_id, configured = engine["image_token"]
    assert token == "<image>" and token_id == configured
    assert engine["replacements"] == [["image", [token_id] * parts.FEATURES["clip"]]] * 2
    assert engine["ids"].count(token_id) == 2 * parts.FEATURES["clip"]


def test_merged_embeddings_and_positions_give_the_model_s_own_logits(checkpoint, engine):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    with torch.no_grad():
        inputs = processor(images=IMAGES, text=PROMPT, return_tensors="pt")
        expected = model(**inputs).logits[0]
    assert engine["ids"] == inputs["input_ids"][0].tolist()
    torch.testing.assert_close(torch.tensor(engine["logits"]), expected, rtol=1e-5, atol=1e-5)


VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, asked = sys.argv[1], json.load(open(sys.argv[2]))
    llm = LLM(model, trust_remote_code=True, model_impl="transformers", dtype="float32", enforce_eager=True,
              max_model_len=128, limit_mm_per_prompt={"image": 2})
    answers = [x.outputs[0] for x in llm.chat(asked, SamplingParams(temperature=0, max_tokens=8, logprobs=1))]
    pairs = [list(zip(x.token_ids, x.logprobs)) for x in answers]
    print(json.dumps([[[token for token, _ in x], [found[token].logprob for token, found in x]] for x in pairs]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM")
@pytest.mark.parametrize("kind, norm", [("siglip", "layer_norm"), ("registers", "rms_norm")])
def test_vllm_answers_as_transformers(tmp_path, kind, norm):
    language = parts.language(
        tmp_path / "l", tied=kind == "siglip", hidden_size=64, num_key_value_heads=2, head_dim=32
    )  # of the sizes that vLLM's attention has
    build_checkpoint(parts.vision(tmp_path / "v", kind), language, tmp_path / "model", norm=norm)
    (tmp_path / "ask.py").write_text(VLLM)
    asked = [request("what is it", *images) for images in (IMAGES[:1], [], IMAGES)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], tmp_path / "ask.py", tmp_path / "model", tmp_path / "asked.json"],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    answers = json.loads([line for line in done.stdout.splitlines() if line.startswith("[[")][-1])
    for images, (ids, logprobs) in zip((IMAGES[:1], [], IMAGES), answers, strict=True):
        _, _, expected_ids, expected_logprobs = generate(tmp_path / "model", "what is it", *images)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
