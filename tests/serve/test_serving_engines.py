"""What the Transformers backends of vLLM and SGLang ask of a checkpoint, each by a test; and vLLM itself where it is.

The requirements were read from vLLM 0.33.0 (`model_executor/models/transformers/`, `registry.py`) and SGLang 0.5.23
(`srt/models/transformers.py`, `srt/multimodal/processors/transformers_auto.py`). An engine loads the published folder
with `trust_remote_code`; so does `ENGINE`, in a process that cannot import the package. To try vLLM itself, name a
Python that has it: `VLLM_PYTHON=/path/to/python pytest tests/test_serving_engines.py`.
"""

import json
import os
import subprocess

import pytest
import tiny
import tiny_parts as parts
import torch
from asking import generate, request
from PIL import Image
from remote_code import run_blocked
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
PROMPT = "<image> and <image>, which"

# Builds the base class from the configuration, fills it from the file, and runs it, as both engines do: attention of
# their own in the decoder alone, one row without padding or cache, embeddings and images merged outside the model.
ENGINE = """
import inspect, json, torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoProcessor, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward

folder, prompt = sys.argv[1:3]
calls = []
def attention(module, query, key, value, attention_mask, **kwargs):
    calls.append([module.layer_idx, module.is_causal, kwargs.pop("forward_batch"), module.scaling])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
AttentionInterface.register("engine", attention)

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
classes = {key: get_class_from_dynamic_module(value, folder) for key, value in config.auto_map.items()}
models = {key: value for key, value in classes.items() if key != "AutoConfig"}
text = config.get_text_config()
text._attn_implementation = "engine"
with torch.device("meta"):
    half = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
base = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
weights = load_file(folder + "/model.safetensors")
head = weights.pop("lm_head.weight")
names = {"file": sorted(weights), "module": sorted("model." + name for name in base.state_dict())}
base.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})

processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
images = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
inputs = processor(images=images, text=prompt, return_tensors="pt", return_text_replacement_offsets=True)
ids = inputs["input_ids"]
with torch.no_grad():
    features = torch.cat(list(base.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output))
    embeddings = base.get_input_embeddings()(ids)
    embeddings[ids == config.image_token_id] = features
    hidden = base(
        input_ids=None, inputs_embeds=embeddings, position_ids=torch.arange(ids.shape[1])[None], use_cache=False,
        return_dict=False, forward_batch="a batch",
    )[0][0]
print(json.dumps({
    "auto_map": list(config.auto_map),
    "compatible": [x.is_backend_compatible() and x._supports_attention_backend for x in models.values()],
    "models": [issubclass(x, PreTrainedModel) for x in models.values()],
    "base": [type(base).__name__, type(base).__module__.split(".")[0], hasattr(base, "lm_head")],
    "names": names,
    "parameters_in_float32": [n for n, p in half.named_parameters() if p.dtype == torch.float32],
    "kept_in_float32": sorted(half._keep_in_fp32_modules_strict),
    "encoder": [type(base.get_encoder(modality="image")).__name__, type(base.vision_tower).__name__],
    "decoder": [base.get_decoder() is base.language_model, len(base.language_model.layers)],
    "plan": sorted(base.tp_plan),
    "signature": list(inspect.signature(base.get_image_features).parameters)[0],
    "text": [text.vocab_size, text.hidden_size, text.num_hidden_layers, text.num_attention_heads],
    "tied": [config.tie_word_embeddings, text.tie_word_embeddings],
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


def test_auto_map_names_configuration_base_class_and_model_in_the_order_engines_read(engine):
    assert engine["auto_map"] == ["AutoConfig", "AutoModel", "AutoModelForImageTextToText"]
    assert engine["models"] == [True, True]
    assert engine["base"] == ["NormAlignLlavaModel", "transformers_modules", False]


def test_names_in_the_file_are_the_base_classs_behind_model(engine):
    assert engine["names"]["file"] == engine["names"]["module"]


def test_every_model_class_supports_an_attention_backend(engine):
    assert engine["compatible"] == [True, True]


def test_the_engines_attention_is_called_for_each_decoder_layer_and_no_other(engine):
    layers = engine["decoder"][1]
    assert [call[0] for call in engine["calls"]] == list(range(layers))
    assert all(is_causal for _, is_causal, _, _ in engine["calls"])
    assert all(isinstance(scaling, float) for *_, scaling in engine["calls"])


def test_keyword_arguments_of_the_base_class_reach_the_attention(engine):
    assert [call[2] for call in engine["calls"]] == ["a batch"] * engine["decoder"][1]


def test_merged_embeddings_and_positions_give_the_models_own_logits(checkpoint, engine):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    with torch.no_grad():
        inputs = processor(images=IMAGES, text=PROMPT, return_tensors="pt")
        expected = model(**inputs).logits[0]
    assert engine["ids"] == inputs["input_ids"][0].tolist()
    torch.testing.assert_close(torch.tensor(engine["logits"]), expected, rtol=1e-5, atol=1e-5)


def test_encoder_decoder_and_a_plan_for_tensor_parallelism_are_found(engine):
    assert engine["encoder"][0] == engine["encoder"][1] == "CLIPVisionModel"
    assert engine["decoder"][0]
    assert "language_model.layers.*.self_attn.q_proj" in engine["plan"]
    assert "language_model.layers.*.mlp.down_proj" in engine["plan"]


def test_the_text_configuration_says_what_the_engine_builds_from(checkpoint, engine):
    config = AutoConfig.from_pretrained(checkpoint)
    text = config.text_config
    assert engine["text"] == [text.vocab_size, text.hidden_size, text.num_hidden_layers, text.num_attention_heads]
    assert engine["tied"] == [False, False]  # either true ties the engine's head
    logits = torch.tensor(engine["logits"])
    assert logits.shape == (len(engine["ids"]), text.vocab_size)


def test_a_tied_checkpoint_says_so_where_engines_look_and_has_no_head_of_its_own(tmp_path):
    build_checkpoint(parts.vision(tmp_path / "v"), parts.language(tmp_path / "l", tied=True), tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.tie_word_embeddings and config.text_config.tie_word_embeddings
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_gain_and_bias_stay_float32_in_a_half_precision_engine(engine):
    assert engine["parameters_in_float32"] == [f"multi_modal_projector.norm.{name}" for name in ("weight", "bias")]
    assert engine["kept_in_float32"] == ["multi_modal_projector.norm"]  # what vLLM widens again


@pytest.mark.parametrize("everything", [False, True], ids=["as loaded", "after model.to(bfloat16)"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_norm_is_right_in_bfloat16(norm, everything):
    reference = tiny.model(projector_norm=norm)
    module = reference.model.multi_modal_projector.norm
    with torch.no_grad():  # a gain as small as a 7B model's, which bfloat16 rounds
        module.weight.copy_(0.0134 * torch.linspace(0.8, 1.2, len(module.weight)))
    half = tiny.model(projector_norm=norm)
    half.load_state_dict(reference.state_dict())
    half.to(torch.bfloat16)
    if not everything:
        half.model.multi_modal_projector.norm.load_state_dict(module.state_dict(), assign=True)
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.cat(list(reference.model.get_image_features(pixels).pooler_output))
        found = torch.cat(list(half.model.get_image_features(pixels.to(torch.bfloat16)).pooler_output))
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.02  # five roundings of 2**-9 and what the tower makes of them
    norms = found.float().norm(dim=-1) / expected.norm(dim=-1)
    assert (norms - 1).abs().max() < 0.01


def test_get_image_features_is_called_by_the_name_pixel_values(engine):
    assert engine["signature"] == "pixel_values"


def test_the_processor_says_what_each_placeholder_expands_to(engine):
    token, ours, models = engine["image_token"]
    assert token == "<image>" and ours == models
    assert engine["replacements"] == [["image", [ours] * parts.FEATURES["clip"]]] * 2
    assert engine["ids"].count(ours) == 2 * parts.FEATURES["clip"]


@pytest.mark.parametrize("kind", parts.ENCODERS)
def test_as_many_features_as_the_processor_counts_placeholders(tmp_path, kind):
    build_checkpoint(parts.vision(tmp_path / "v", kind), parts.language(tmp_path / "l"), tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").model
    sizes = [(image.height, image.width) for image in IMAGES]
    counted = processor._get_num_multimodal_tokens(image_sizes=sizes)
    assert list(counted["num_image_tokens"]) == [parts.FEATURES[kind]] * 2
    assert list(counted["num_image_patches"]) == [1, 1]  # rows of pixel_values for each image
    inputs = processor(images=IMAGES, text=PROMPT, return_tensors="pt")
    assert len(inputs["pixel_values"]) == 2
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
    assert [len(feature) for feature in features] == list(counted["num_image_tokens"])


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
    asked = [request("what is it", *images) for images in (IMAGES[:1], IMAGES[1:], [], IMAGES)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], tmp_path / "ask.py", tmp_path / "model", tmp_path / "asked.json"],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    answers = json.loads([line for line in done.stdout.splitlines() if line.startswith("[[")][-1])
    for images, (ids, logprobs) in zip((IMAGES[:1], IMAGES[1:], [], IMAGES), answers, strict=True):
        _, _, expected_ids, expected_logprobs = generate(tmp_path / "model", "what is it", *images)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
