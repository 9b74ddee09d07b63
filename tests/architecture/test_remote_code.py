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
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote")
    checkpoint = root / "my-model.v1.5"  # a dot, as in so many repository names
    language = parts.language(root / "language", tied=False)
    vision = parts.vision(root / "vision")
    build_checkpoint(vision, language, checkpoint)
    return checkpoint


IMAGES = [
    Image.linear_gradient("L").convert("RGB"),
    Image.new("RGB", (40, 30), "red"),
]
PROMPT = "<image> and <image>, which"
QUESTION = [{"type": "image"}, {"type": "text", "text": "what"}]
MESSAGES = [{"role": "user", "content": QUESTION}]
NORM_CLASSES = ["GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm"]

STRANGER = """
import json

import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    pipeline,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

checkpoint = sys.argv[1]
output_folder = sys.argv[2]
prompt = sys.argv[3]
messages = json.loads(sys.argv[4])

norm_classes = []
for name in ("GlobalWeightCompensatedLayerNorm", "GlobalWeightCompensatedRMSNorm"):
    norm_class = get_class_from_dynamic_module(f"modeling_normalign_llava.{name}", checkpoint)
    norm_classes.append(norm_class.__name__)

config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
base = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(checkpoint, trust_remote_code=True)
multimodal = AutoModelForMultimodalLM.from_pretrained(checkpoint, trust_remote_code=True)
causal = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)

image = Image.linear_gradient("L").convert("RGB")
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(images=[image], text=text, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
    causal_logits = causal(**inputs).logits
    hidden = base(**inputs).last_hidden_state
sequences = model.generate(**inputs, max_new_tokens=5, do_sample=False)
pipe = pipeline("image-text-to-text", model=checkpoint, trust_remote_code=True)
answers = pipe(
    images=[image],
    text=text,
    max_new_tokens=5,
    do_sample=False,
    return_full_text=False,
)
model.save_pretrained(output_folder)

own_objects = [config, base, model, multimodal, causal]
stranger = {
    "norm_classes": norm_classes,
    "modules": [type(x).__module__.split(".")[0] for x in own_objects],
    "classes": [type(x).__name__ for x in (*own_objects, processor)],
    "logits": logits[0, -1].tolist(),
    "causal_logits": causal_logits[0, -1].tolist(),
    "hidden": hidden[0, -1].tolist(),
    "ids": sequences[0].tolist(),
    "answer": answers[0]["generated_text"],
}
"""

# Builds the base class from the configuration, fills it from the file, and runs it, as both engines
# do: attention of their own only in the decoder, one row without padding or cache, embeddings and
# images merged outside the model.
ENGINE = """
from glob import glob

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

calls = []

def attention(module, query, key, value, attention_mask, **options):
    batch = options.pop("forward_batch")
    calls.append([module.layer_idx, module.is_causal, batch, type(module.scaling).__name__])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

AttentionInterface.register("engine", attention)

config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
compatible = []
for key in list(config.auto_map)[1:]:
    model_class = get_class_from_dynamic_module(config.auto_map[key], checkpoint)
    compatible.append(model_class.is_backend_compatible())
    compatible.append(model_class._supports_attention_backend)

config.get_text_config()._attn_implementation = "engine"
with torch.device("meta"):
    half = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
base = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
weights = {}
for file in glob(checkpoint + "/*.safetensors"):
    weights |= load_file(file)
head = weights.pop("lm_head.weight")
base.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})

processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
inputs = processor(
    images=[Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")],
    text=prompt,
    return_tensors="pt",
    return_text_replacement_offsets=True,
)
ids = inputs["input_ids"]
with torch.no_grad():
    features = base.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
    embeddings = base.get_input_embeddings()(ids)
    embeddings[ids == config.image_token_id] = torch.cat(list(features))
    outputs = base(
        inputs_embeds=embeddings,
        position_ids=torch.arange(ids.shape[1])[None],
        input_ids=None,
        use_cache=False,
        return_dict=False,
        forward_batch="a batch",
    )
    hidden = outputs[0][0]

replacements = []
for part in inputs["text_replacement_offsets"][0]:
    replacements.append([part["type"], processor.tokenizer.encode(part["replacement"])])

engine = {
    "auto_map": list(config.auto_map),
    "compatible": compatible,
    "base_class": type(base).__name__,
    "base_module": type(base).__module__.split(".")[0],
    "parameters_in_float32": [n for n, p in half.named_parameters() if p.dtype == torch.float32],
    "kept_in_float32": sorted(half._keep_in_fp32_modules_strict),
    "finds_encoder": base.get_encoder(modality="image") is base.vision_tower,
    "finds_decoder": base.get_decoder() is base.language_model,
    "tensor_parallel_plan": sorted(base.tp_plan),
    "image_token": processor.image_token,
    "image_token_id": processor.image_token_id,
    "configured_image_token_id": config.image_token_id,
    "calls": calls,
    "replacements": replacements,
    "ids": ids[0].tolist(),
    "logits": (hidden @ head.T).tolist(),
}
print(json.dumps([stranger, engine]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory, checkpoint):
    """What a stranger and an engine get; the stranger saves `again/` beside the checkpoint."""
    return run_blocked(
        tmp_path_factory.mktemp("stranger"),
        STRANGER + ENGINE,
        checkpoint,
        checkpoint.with_name("again"),
        PROMPT,
        json.dumps(MESSAGES),
    )


@pytest.fixture(scope="module")
def stranger(results):
    return results[0]


@pytest.fixture(scope="module")
def engine(results):
    return results[1]


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForImageTextToText.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


def test_a_stranger_gets_classes_from_the_two_files(stranger):
    assert stranger["modules"] == ["transformers_modules"] * 5
    assert stranger["classes"] == [
        "NormAlignLlavaConfig",
        "NormAlignLlavaModel",
        "NormAlignLlavaForConditionalGeneration",
        "NormAlignLlavaForConditionalGeneration",
        "NormAlignLlavaForConditionalGeneration",
        "LlavaProcessor",
    ]
    assert stranger["norm_classes"] == NORM_CLASSES


def test_a_stranger_gets_what_the_installed_package_gives(stranger, model, processor):
    assert type(model).__module__ == "normalign_llava.modeling_normalign_llava"
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    inputs = processor(images=IMAGES[:1], text=text, return_tensors="pt")
    with torch.no_grad():
        expected_logits = model(**inputs).logits
        expected_hidden = model.model(**inputs).last_hidden_state
    assert stranger["logits"] == expected_logits[0, -1].tolist()
    assert stranger["causal_logits"] == expected_logits[0, -1].tolist()
    assert stranger["hidden"] == expected_hidden[0, -1].tolist()

    expected_ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert stranger["ids"] == expected_ids[0].tolist()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    answers = pipe(
        images=IMAGES[:1],
        text=text,
        return_full_text=False,
        max_new_tokens=5,
        do_sample=False,
    )
    assert stranger["answer"] == answers[0]["generated_text"]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(
    "file_name",
    [
        "configuration_normalign_llava.py",
        "modeling_normalign_llava.py",
        "config.json",
    ],
)
def test_what_a_stranger_saves_is_again_a_complete_checkpoint(checkpoint, file_name):
    saved_file = checkpoint.with_name("again") / file_name
    assert saved_file.read_text() == (checkpoint / file_name).read_text()


def test_an_engine_finds_the_classes(engine):
    # In this order, since SGLang takes the first that is no configuration.
    expected = ["AutoConfig", "AutoModel", "AutoModelForImageTextToText"]
    assert engine["auto_map"][:3] == expected
    assert engine["base_class"] == "NormAlignLlavaModel"
    assert engine["base_module"] == "transformers_modules"
    assert all(engine["compatible"])


def test_an_engine_finds_encoder_decoder_and_attention(engine, model):
    assert engine["finds_encoder"]
    assert engine["finds_decoder"]
    assert "language_model.layers.*.self_attn.q_proj" in engine["tensor_parallel_plan"]
    assert "language_model.layers.*.mlp.down_proj" in engine["tensor_parallel_plan"]
    layer_count = model.config.text_config.num_hidden_layers
    expected_calls = [[layer, True, "a batch", "float"] for layer in range(layer_count)]
    assert engine["calls"] == expected_calls


def test_an_engine_keeps_the_norm_in_float32(engine):
    norm = "multi_modal_projector.norm"
    assert engine["parameters_in_float32"] == [f"{norm}.weight", f"{norm}.bias"]
    assert engine["kept_in_float32"] == [norm]  # what vLLM widens again


def test_an_engine_finds_placeholders(engine):
    token_id = engine["image_token_id"]
    feature_count = parts.FEATURES["clip"]
    assert engine["image_token"] == "<image>"
    assert token_id == engine["configured_image_token_id"]
    assert engine["replacements"] == [["image", [token_id] * feature_count]] * 2
    assert engine["ids"].count(token_id) == 2 * feature_count


def test_an_engine_s_logits_are_the_model_s(engine, model, processor):
    inputs = processor(images=IMAGES, text=PROMPT, return_tensors="pt")
    assert engine["ids"] == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        expected = model(**inputs).logits[0]
    logits = torch.tensor(engine["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
