"""Batches without padding: the same losses and gradients as padded ones, and no row that sees another."""

import pytest
import torch
import training
from torch.nn import functional
from transformers import AutoConfig, AutoProcessor

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.packing import PackedAttentionCheck


pytestmark = pytest.mark.slow


IMAGES = [1, 0, 2, 1]
"""Images in each row of the batch."""


def batches(checkpoint, rows):
    """The same rows padded, and without padding."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    return [ConversationCollator(processor, padding_free=free)(list(rows)) for free in (False, True)]


def losses(model, batch):
    """The sum of the loss over each row, `(rows,)`."""
    labels, positions = batch.pop("labels"), batch.get("position_ids")
    logits = model(**batch, use_cache=False).logits
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    if positions is None:
        return each.view(len(labels), -1).sum(1)
    rows = (positions[0] == 0).cumsum(0) - 1  # of each token
    return torch.zeros(rows[-1] + 1).index_add(0, rows, functional.pad(each, (1, 0)))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(model, padded, free):
    expected, found = losses(model, padded), None
    expected.sum().backward()
    wanted = gradients(model)
    found = losses(model, free)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    got = gradients(model)
    assert got.keys() == wanted.keys()
    least = 1e-3 * max(gradient.norm() for gradient in wanted.values())  # of a key's bias it is 0 but for rounding
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), least), name


def loaded(checkpoint, attention="sdpa"):
    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, attn_implementation={"text_config": attention}
    )


@pytest.mark.parametrize("attention, images", [("sdpa", IMAGES), ("eager", IMAGES), ("sdpa", [0, 0, 0])])
def test_losses_and_gradients_are_those_of_the_padded_batch(checkpoint, attention, images):
    rows = training.rows(len(images), images=lambda number: images[number])
    assert_same(loaded(checkpoint, attention), *batches(checkpoint, rows))


def test_flex_attention_keeps_rows_apart(checkpoint):
    padded, free = batches(checkpoint, training.rows(len(IMAGES), images=lambda number: IMAGES[number]))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # on a CPU it has no backward
        expected = losses(loaded(checkpoint), padded)
        found = losses(loaded(checkpoint, "flex_attention"), dict(free))
        free["position_ids"] = torch.arange(free["input_ids"].shape[1])[None]
        mixed = losses(loaded(checkpoint, "flex_attention"), free)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (mixed - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "train_sampling_strategy": "group_by_length"},
        {"use_peft": True, "lora_r": 2, "lora_dropout": 0.0, "load_in_4bit": True},
    ],
)
def test_a_run_ends_as_with_padding(tmp_path, checkpoint, options):
    data = training.rows(12, images=lambda number: number % 3)
    # AdamW would divide gradients that are 0 but for rounding by their own size.
    options = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        **options,
    }
    ends = []
    for free in (False, True):
        held_out = training.rows(5, images=lambda number: number % 2)
        torch.manual_seed(0)  # for adapters
        trainer = training.trainer(
            tmp_path / str(free), checkpoint, data, held_out=held_out, padding_free=free, probe_steps=[0], **options
        )
        trainer.train()
        logs = {key: [line[key] for line in trainer.state.log_history if key in line] for key in ("loss", "eval_loss")}
        ends.append((logs, training.weights(trainer.model)))
    (padded, expected), (free, found) = ends
    for key, values in padded.items():
        assert len(values) and free[key] == pytest.approx(values, rel=1e-5), key
    for name, value in expected.items():
        off = (found[name].double() - value.double()).norm()  # of 4-bit layers, bytes
        assert off <= 1e-5 * value.double().norm() + 1e-7, name


def model_of(kind, **settings):
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, **settings}
    vision = AutoConfig.for_model("clip_vision_model", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    config = NormAlignLlavaConfig(vision_config=vision, text_config=AutoConfig.for_model(kind, **text),
                                  image_token_index=60, text_embedding_norm=1.0)  # fmt: skip
    torch.manual_seed(1)
    return NormAlignLlavaForConditionalGeneration(config)


@pytest.mark.parametrize(
    "kind, settings, apart",
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 4}, True),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 64}, None),
    ],
)
def test_a_language_model_that_mixes_rows_is_refused_by_its_name(tmp_path, kind, settings, apart):
    model, args = model_of(kind, **settings), training.arguments(tmp_path)
    if apart:
        return PackedAttentionCheck().on_train_begin(args, None, None, model=model)
    with pytest.raises(ValueError, match=rf"padding_free .* \({kind}\)"):
        PackedAttentionCheck().on_train_begin(args, None, None, model=model)
