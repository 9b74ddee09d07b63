"""The two code files that travel with a checkpoint, in a process that cannot import the package.

It does what people do, and what vLLM 0.33.0 (`vllm/model_executor/models/transformers/`,
`registry.py`) and SGLang 0.5.23 (`srt/models/transformers.py`,
`srt/multimodal/processors/transformers_auto.py`) do, by their sources.
"""

import json

import pytest
import tiny_parts as parts
import torch
from PIL import Image
from remote_code import run_blocked
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, pipeline

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote")
    folder = root / "my-model.v1.5"  # a dot, as in so many repository names
    language = parts.language(root / "language", tied=False)
    build_checkpoint(parts.vision(root / "vision"), language, folder)
    return folder


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
PROMPT = "<image> and <image>, which"
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]

STRANGER = """
import json, torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoProcessor, pipeline
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module as get
folder, again, prompt = sys.argv[1:4]
messages = json.loads(sys.argv[4])
names = ["GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm"]
found = [get("modeling_normalign_llava." + name, folder).__name__ for name in names]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
multimodal = AutoModelForMultimodalLM.from_pretrained(folder, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
image = Image.linear_gradient("L").convert("RGB")
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(images=[image], text=text, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
    hidden = base(**inputs).last_hidden_state
pipe = pipeline("image-text-to-text", model=folder, trust_remote_code=True)
said = pipe(images=[image], text=text, max_new_tokens=5, do_sample=False, return_full_text=False)
model.save_pretrained(again)
stranger = {
    "found": found,
    "modules": [type(x).__module__.split(".")[0] for x in (config, base, model, multimodal)],
    "names": [type(x).__name__ for x in (config, base, model, multimodal, processor)],
    "logits": logits[0, -1].tolist(),
    "hidden": hidden[0, -1].tolist(),
    "ids": model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist(),
    "said": said[0]["generated_text"],
}
"""

# Builds the base class from the configuration, fills it from the file, and runs it, as both engines
# do: attention of their own in the decoder alone, one row without padding or cache, embeddings and
# images merged outside the model.
ENGINE = """
from glob import glob
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

calls = []
def attention(module, query, key, value, attention_mask, **kwargs):
    batch, scaling = kwargs.pop("forward_batch"), type(module.scaling).__name__
    calls.append([module.layer_idx, module.is_causal, batch, scaling])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
AttentionInterface.register("engine", attention)

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
models = [get(config.auto_map[key], folder) for key in list(config.auto_map)[1:]]
config.get_text_config()._attn_implementation = "engine"
with torch.device("meta"):
    half = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
base = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
weights = {}
for file in glob(folder + "/*.safetensors"):
    weights |= load_file(file)
head = weights.pop("lm_head.weight")
base.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})

processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
images = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
how = dict(return_tensors="pt", return_text_replacement_offsets=True)
inputs = processor(images=images, text=prompt, **how)
ids = inputs["input_ids"]
with torch.no_grad():
    features = base.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
    features = torch.cat(list(features))
    embeddings = base.get_input_embeddings()(ids)
    embeddings[ids == config.image_token_id] = features
    hidden = base(
        inputs_embeds=embeddings, position_ids=torch.arange(ids.shape[1])[None],
        input_ids=None, use_cache=False, return_dict=False, forward_batch="a batch",
    )[0][0]
engine = {
    "auto_map": list(config.auto_map),
    "compatible": [x.is_backend_compatible() and x._supports_attention_backend for x in models],
    "base": [type(base).__name__, type(base).__module__.split(".")[0]],
    "parameters_in_float32": [n for n, p in half.named_parameters() if p.dtype == torch.float32],
    "kept_in_float32": sorted(half._keep_in_fp32_modules_strict),
    "encoder": base.get_encoder(modality="image") is base.vision_tower,
    "decoder": base.get_decoder() is base.language_model,
    "plan": sorted(base.tp_plan),
    "image_token": [processor.image_token, processor.image_token_id, config.image_token_id],
    "calls": calls,
    "replacements": [[x["type"], processor.tokenizer.encode(x["replacement"])]
                     for x in inputs["text_replacement_offsets"][0]],
    "ids": ids[0].tolist(),
    "logits": (hidden @ head.T).tolist(),
}
print(json.dumps([stranger, engine]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint):
    """What a stranger and an engine get; the stranger saves `again/` beside the checkpoint."""
    words = [checkpoint, checkpoint.with_name("again"), PROMPT, json.dumps(MESSAGES)]
    return run_blocked(tmp_path_factory.mktemp("stranger"), STRANGER + ENGINE, *words)


def test_a_stranger_gets_what_the_installed_package_gives(checkpoint, run):
    got, _ = run
    assert got["modules"] == ["transformers_modules"] * 4
    heads = ["NormAlignLlavaForConditionalGeneration"] * 2
    assert got["names"] == ["NormAlignLlavaConfig", "NormAlignLlavaModel", *heads, "LlavaProcessor"]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert type(model).__module__ == "normalign_llava.modeling_normalign_llava"
    processor = AutoProcessor.from_pretrained(checkpoint)
    image = Image.linear_gradient("L").convert("RGB")
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    inputs = processor(images=[image], text=text, return_tensors="pt")
    with torch.no_grad():
        assert got["logits"] == model(**inputs).logits[0, -1].tolist()
        assert got["hidden"] == model.model(**inputs).last_hidden_state[0, -1].tolist()
    how = dict(max_new_tokens=5, do_sample=False)
    assert got["ids"] == model.generate(**inputs, **how)[0].tolist()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    said = pipe(images=[image], text=text, return_full_text=False, **how)
    assert got["said"] == said[0]["generated_text"]
    # What the stranger saves is again a complete checkpoint.
    again = checkpoint.with_name("again")
    for name in ("configuration_normalign_llava.py", "modeling_normalign_llava.py", "config.json"):
        assert (again / name).read_text() == (checkpoint / name).read_text()
    # From the two files alone.
    assert got["found"] == ["GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm"]


def test_an_engine_finds_classes_attention_float32_norm_and_placeholders(checkpoint, run):
    _, engine = run
    # In this order, since SGLang takes the first that is no configuration.
    assert engine["auto_map"][:3] == ["AutoConfig", "AutoModel", "AutoModelForImageTextToText"]
    assert engine["base"] == ["NormAlignLlavaModel", "transformers_modules"]
    assert all(engine["compatible"]) and engine["encoder"] and engine["decoder"]
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        assert f"language_model.layers.*.{name}" in engine["plan"]
    layers = AutoConfig.from_pretrained(checkpoint).text_config.num_hidden_layers
    assert engine["calls"] == [[layer, True, "a batch", "float"] for layer in range(layers)]
    norm = "multi_modal_projector.norm"
    assert engine["parameters_in_float32"] == [f"{norm}.weight", f"{norm}.bias"]
    assert engine["kept_in_float32"] == [norm]  # what vLLM widens again
    token, token_id, configured = engine["image_token"]
    assert token == "<image>" and token_id == configured
    assert engine["replacements"] == [["image", [token_id] * parts.FEATURES["clip"]]] * 2
    assert engine["ids"].count(token_id) == 2 * parts.FEATURES["clip"]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    with torch.no_grad():
        inputs = processor(images=IMAGES, text=PROMPT, return_tensors="pt")
        expected = model(**inputs).logits[0]
    assert engine["ids"] == inputs["input_ids"][0].tolist()
    torch.testing.assert_close(torch.tensor(engine["logits"]), expected, rtol=1e-5, atol=1e-5)
