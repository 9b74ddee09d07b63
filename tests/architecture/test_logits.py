"""Logits that a language model scales or caps after its head: served as trained and by itself."""

import copy
import inspect

import pytest
import tiny
import tiny_parts as parts
import torch
import transformers
from datasets import Dataset
from packaging import version
from PIL import Image
from tiny_language_models import LATENT_ATTENTION
from torch.nn.functional import cross_entropy
from trl import SFTConfig, SFTTrainer

from normalign_llava.assembly.build import build_checkpoint


GRANITE = {"logits_scaling": 6.0, "embedding_multiplier": 12.0}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.25}),
    "cohere2": (transformers.Cohere2Config, {"logit_scale": 0.25}),
    "gemma2": (transformers.Gemma2Config, {"final_logit_softcapping": 0.5}),
    "gemma3": (transformers.Gemma3TextConfig, {"final_logit_softcapping": 0.5}),
    "granite": (transformers.GraniteConfig, GRANITE),
    "hyperclovax": (transformers.HyperCLOVAXConfig, {"logits_scaling": 3.0}),
    "minicpm3": (transformers.MiniCPM3Config, {"dim_model_base": 8, **LATENT_ATTENTION}),
    "recurrent_gemma": (
        transformers.RecurrentGemmaConfig,
        {"logits_soft_cap": 0.5, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    ),
    "nanochat": (transformers.NanoChatConfig, {"final_logit_softcapping": 0.5}),
}
"""The configuration's class and options for it."""


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    """The folder of a language model and of the checkpoint that was built of it."""
    is_older = version.parse(transformers.__version__) < version.parse("5.24")
    if request.param == "recurrent_gemma" and is_older:
        pytest.skip("in transformers 5.20 it returns no cache, and build refuses it")
    folder = tmp_path_factory.mktemp(request.param)
    config_class, options = FAMILIES[request.param]
    language = parts.language(folder / "language", cls=config_class, **options)
    vision = parts.vision(folder / "vision")
    build_checkpoint(vision, language, folder / "built")
    return folder


@pytest.fixture
def model(family_folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(family_folder / "built")


INPUT_IDS = torch.arange(5, 25)[None]


def next_token_loss(logits) -> torch.Tensor:
    return cross_entropy(logits[0, :-1], INPUT_IDS[0, 1:])


def test_logits_and_loss_on_text_are_the_language_models(family_folder, model):
    language_model = transformers.AutoModelForCausalLM.from_pretrained(family_folder / "language")
    with torch.no_grad():
        expected = language_model(input_ids=INPUT_IDS, labels=INPUT_IDS)
        output = model(input_ids=INPUT_IDS, labels=INPUT_IDS)
        last_logits = model(INPUT_IDS, logits_to_keep=1).logits

    # The vocabulary has grown, by rows that the language model does not have.
    row_count = language_model.get_input_embeddings().num_embeddings
    torch.testing.assert_close(
        output.logits[..., :row_count],
        expected.logits,
        rtol=1e-5,
        atol=1e-6,
    )
    torch.testing.assert_close(output.loss, next_token_loss(output.logits))
    torch.testing.assert_close(last_logits[:, -1], output.logits[:, -1])


@pytest.mark.parametrize("family_folder", ["llama", "gemma2", "granite"], indirect=True)
@pytest.mark.parametrize("after", [(), (0,)], ids=["last", "before logits_to_keep"])
def test_labels_by_position_are_labels_by_name(model, after):
    parameter_names = [*inspect.signature(model.forward).parameters]
    labels_index = parameter_names.index("labels")
    before_labels = [INPUT_IDS] + [None] * (labels_index - 1)
    with torch.no_grad():
        by_name = model(input_ids=INPUT_IDS, labels=INPUT_IDS)
        by_position = model(*before_labels, INPUT_IDS, *after)

    expected_loss = next_token_loss(by_name.logits)
    torch.testing.assert_close(by_name.loss, expected_loss)
    torch.testing.assert_close(by_position.loss, expected_loss)
    assert torch.equal(by_name.logits, by_position.logits)


@pytest.mark.parametrize("family_folder", ["llama", "gemma2", "granite"], indirect=True)
def test_logits_to_keep_may_be_given_by_position(model):
    parameter_names = [*inspect.signature(model.forward).parameters]
    labels_index = parameter_names.index("labels")
    with torch.no_grad():
        all_logits = model(input_ids=INPUT_IDS, labels=INPUT_IDS).logits
        kept_logits = model(INPUT_IDS, *[None] * labels_index, 1).logits
    torch.testing.assert_close(kept_logits, all_logits[:, -1:])


def test_the_loss_is_divided_by_the_tokens_of_all_batches():
    model = tiny.model()
    batch = tiny.inputs()
    labels = batch["input_ids"]
    with torch.no_grad():
        mean_loss = model(**batch, labels=labels).loss
        summed_loss = model(**batch, labels=labels, num_items_in_batch=1).loss
    predicted_count = labels.shape[1] - 1
    torch.testing.assert_close(summed_loss, mean_loss * predicted_count)


@pytest.mark.parametrize("family_folder", ["gemma2", "granite"], indirect=True)
def test_trls_loss_in_training_is_that_of_the_served_model(family_folder, model, tmp_path):
    served_model = copy.deepcopy(model).eval()
    messages = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "a kite"},
    ]
    row = {
        "images": [Image.linear_gradient("L").convert("RGB")],
        "messages": messages,
    }
    train_options = SFTConfig(
        str(tmp_path),
        max_length=None,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        report_to="none",
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model.eval(),
        train_options,
        train_dataset=Dataset.from_list([row, row]),
        processing_class=transformers.AutoProcessor.from_pretrained(family_folder / "built"),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        training_loss = trainer.compute_loss(trainer.model, dict(batch))
        expected = served_model(**batch).loss
    torch.testing.assert_close(training_loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch cannot compile Gemma 2")
def test_the_whole_model_compiles_into_one_graph():
    config_class, options = FAMILIES["gemma2"]
    model = tiny.model(text=tiny.text_config(cls=config_class, **options))
    batch = tiny.inputs()
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        expected = model(**batch, use_cache=False)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        output = compiled(**batch, use_cache=False)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)
