"""Logits that a language model scales or caps after its head: served as trained and by itself."""

import copy
import inspect

import pytest
import tiny
import tiny_parts as parts
import torch
import transformers
from datasets import Dataset
from PIL import Image
from trl import SFTConfig, SFTTrainer

from normalign_llava.assembly.build import build_checkpoint


LATENT = dict(num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
LATENT |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8)
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "cohere": (transformers.CohereConfig, dict(logit_scale=0.25)),
    "cohere2": (transformers.Cohere2Config, dict(logit_scale=0.25)),
    "gemma2": (transformers.Gemma2Config, dict(final_logit_softcapping=0.5)),
    "gemma3": (transformers.Gemma3TextConfig, dict(final_logit_softcapping=0.5)),
    "granite": (transformers.GraniteConfig, dict(logits_scaling=6.0, embedding_multiplier=12.0)),
    "hyperclovax": (transformers.HyperCLOVAXConfig, dict(logits_scaling=3.0)),
    "minicpm3": (transformers.MiniCPM3Config, dict(dim_model_base=8, **LATENT)),
    "recurrent_gemma": (
        transformers.RecurrentGemmaConfig,
        dict(logits_soft_cap=0.5, lru_width=32, block_types=["recurrent", "attention"]),
    ),
    "nanochat": (transformers.NanoChatConfig, dict(final_logit_softcapping=0.5)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A language model's folder, and the checkpoint that was built of it."""
    root = tmp_path_factory.mktemp(request.param)
    cls, extra = FAMILIES[request.param]
    language = parts.language(root / "language", cls=cls, **extra)
    build_checkpoint(parts.vision(root / "vision"), language, root / "built")
    return language, root / "built"


IDS = torch.arange(5, 25)[None]
IMAGE = Image.linear_gradient("L").convert("RGB")


def test_logits_and_loss_on_text_are_the_language_models(family):
    language, checkpoint = family
    theirs = transformers.AutoModelForCausalLM.from_pretrained(language)
    ours = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    rows = theirs.get_input_embeddings().num_embeddings
    with torch.no_grad():
        expected = theirs(input_ids=IDS, labels=IDS)
        got = ours(input_ids=IDS, labels=IDS)
        torch.testing.assert_close(got.logits[..., :rows], expected.logits, rtol=1e-5, atol=1e-6)
        # The vocabulary has grown, by rows that the language model does not have.
        loss = torch.nn.functional.cross_entropy(got.logits[0, :-1], IDS[0, 1:])
        torch.testing.assert_close(got.loss, loss)
        torch.testing.assert_close(ours(IDS, logits_to_keep=1).logits[:, -1], got.logits[:, -1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"], indirect=True)
@pytest.mark.parametrize("after", [(), (0,)], ids=["last", "before logits_to_keep"])
def test_labels_by_position_are_labels_by_name(family, after):
    _, checkpoint = family
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    place = [*inspect.signature(model.forward).parameters].index("labels")
    with torch.no_grad():
        named = model(input_ids=IDS, labels=IDS)
        by_position = model(IDS, *[None] * (place - 1), IDS, *after)
        kept = model(IDS, *[None] * place, 1).logits
        loss = torch.nn.functional.cross_entropy(named.logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close((named.loss, by_position.loss), (loss, loss))
    assert torch.equal(named.logits, by_position.logits)
    torch.testing.assert_close(kept, named.logits[:, -1:])


def test_the_loss_is_divided_by_the_tokens_of_all_batches():
    model = tiny.model()
    batch = tiny.inputs()
    labels = batch["input_ids"]
    with torch.no_grad():
        mean = model(**batch, labels=labels).loss
        summed = model(**batch, labels=labels, num_items_in_batch=1).loss
    torch.testing.assert_close(summed, mean * (labels.shape[1] - 1))


@pytest.mark.parametrize("family", ["gemma2", "granite"], indirect=True)
def test_trls_loss_in_training_is_that_of_the_served_model(family, tmp_path):
    _, checkpoint = family
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    served = copy.deepcopy(model).eval()
    how = dict(per_device_train_batch_size=2, report_to="none", gradient_checkpointing=False)
    arguments = SFTConfig(str(tmp_path), max_length=None, use_cpu=True, bf16=False, **how)
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a kite"}]
    data = Dataset.from_list([{"images": [IMAGE], "messages": turns}] * 2)
    trainer = SFTTrainer(model.eval(), arguments, train_dataset=data, processing_class=processor)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        trained = trainer.compute_loss(trainer.model, dict(batch))
        expected = served(**batch).loss
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch cannot compile Gemma 2")
def test_the_whole_model_compiles_into_one_graph():
    cls, extra = FAMILIES["gemma2"]
    model = tiny.model(text=tiny.text_config(cls=cls, **extra))
    batch = tiny.inputs()
    with torch.no_grad():
        expected = model(**batch, labels=batch["input_ids"], use_cache=False)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        result = compiled(**batch, labels=batch["input_ids"], use_cache=False)
    torch.testing.assert_close((result.loss, result.logits), (expected.loss, expected.logits))
