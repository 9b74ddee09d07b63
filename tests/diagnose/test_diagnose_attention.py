# SPDX-License-Identifier: Apache-2.0
"""Attention maps against `output_attentions` and plain float64 loops; models left as they were."""

import copy
import math

import pytest
import tiny
import torch
from transformers import MistralConfig, PreTrainedModel, Qwen2Config
from vlm_families import BOS, END, EOS, FAMILIES, IMAGE, INDICATORS, LAYERS, PAD, START, make

from normalign_llava.diagnose.measure.attention import (
    attention_maps,
    bottom_bias,
    image_grid,
    relative_entropy,
)


NO_TEXT = {PAD, BOS, EOS, START, END, IMAGE, *INDICATORS}


def ask(model, batch, **kwargs):
    return attention_maps(model, batch, question="What is this?", **kwargs)


def alone(name, batch):
    """The second sequence of a family's batch, without padding."""
    kept = batch["attention_mask"][1].bool()
    pixels = batch["pixel_values"]
    one = {key: value[1:] for key, value in batch.items()}
    one |= {key: value[:, kept] for key, value in one.items() if value.shape[:2] == (1, len(kept))}
    if "image_grid_thw" in batch:
        one["pixel_values"] = pixels[batch["image_grid_thw"][0].prod() :]
    elif name in ("idefics3", "smolvlm"):  # the first has two images
        one |= {key: one[key][:, :1] for key in ("pixel_values", "pixel_attention_mask")}
    return one


def reference(model, batch, no_text=NO_TEXT):
    """Maps, image shares and entropies by layer, of an eager copy, with plain float64 sums."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation({"text_config": "eager"})
    with torch.no_grad():
        attentions = eager(**batch, output_attentions=True, use_cache=False).attentions
    ids = batch["input_ids"][0].tolist()
    attended = batch["attention_mask"][0].tolist()
    visual = [i for i, token in enumerate(ids) if token == IMAGE]
    asking = [i for i in range(visual[-1] + 1, len(ids)) if attended[i] and ids[i] not in no_text]
    maps = []
    shares = []
    entropies = []
    for attention in attentions:
        heads = attention[0].double().tolist()
        if not any(head[asking[-1]][visual[0]] for head in heads):
            continue  # its sliding window ends within the image
        count = len(heads) * len(asking)
        seen = [sum(head[q][v] for head in heads for q in asking) / count for v in visual]
        shares.append(sum(seen))
        maps.append([value / sum(seen) for value in seen])
        entropies.append(-sum(p * math.log(p) for p in maps[-1] if p) / math.log(len(visual)))
    return maps, shares, entropies


def assert_as_the_reference(measured, expected):
    maps, shares, entropies = expected
    for rows, values in zip(measured.maps, maps, strict=True):
        assert sum(rows, []) == pytest.approx(values, abs=1e-6)
    assert measured.image_share == pytest.approx(shares, abs=1e-6)
    assert measured.entropy == pytest.approx(entropies, abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_those_that_the_model_returns(name):
    model, batch = make(name)
    batch = alone(name, batch)
    measured = ask(model, batch, special_ids=[START, END])
    assert_as_the_reference(measured, reference(model, batch))
    assert name == "gemma3" or measured.layers == list(range(1, LAYERS + 1))
    # Two by two patches of an image grid are one token; tiles and newlines form no grid.
    has_grid = "image_sizes" not in batch and name != "ovis2"
    grid = ((2, 3) if "image_grid_thw" in batch else (2, 2)) if has_grid else None
    assert measured.grid == grid
    if grid is None:
        assert measured.bottom_bias is None and all(len(rows) == 1 for rows in measured.maps)
    else:  # the bottom third of two rows is two thirds of the lower one
        assert all((len(rows), len(rows[0])) == grid for rows in measured.maps)
        assert measured.bottom_bias == pytest.approx([2 * sum(rows[1]) for rows in measured.maps])


def test_only_the_decoder_is_switched_and_the_model_stays_as_it_was():
    model, batch = make("qwen2_5_vl")
    batch = alone("qwen2_5_vl", batch)
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    decoder = model.get_decoder()
    during = []

    def state():
        return {key: config._attn_implementation for key, config in configs.items()}

    before = state()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    with decoder.layers[0].register_forward_hook(lambda *call: during.append(state())):
        ask(model, batch)
    changed = id(decoder.config)
    assert before[changed] != "eager" and during == [{**before, changed: "eager"}]
    model.train()
    with pytest.raises(ZeroDivisionError), decoder.norm.register_forward_hook(lambda *call: 1 / 0):
        ask(model, batch)
    assert state() == before and all(module.training for module in model.modules())
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_the_grid_of_an_image_and_its_bottom_third():
    weights = [bottom_bias(row[:, None]) for row in torch.eye(4, dtype=torch.float64)]
    assert weights == pytest.approx([0, 0, 1, 3], abs=1e-12)  # a row and a third of it
    square, wide = ({"pixel_values": torch.zeros(1, 3, *size)} for size in ((336, 336), (32, 128)))
    assert image_grid(square, 576) == (24, 24) and image_grid(square, 577) is None  # a class token
    assert image_grid(wide, 16) == (2, 8)  # a square number of tokens, not a square
    tall = {"pixel_values": torch.zeros(1, 3, 32, 16)}
    assert image_grid(tall, 8) == (4, 2) and image_grid({}, 4) is None
    flat = {"pixel_values": torch.zeros(1, 3, 16, 640)}
    assert (
        image_grid(flat, 4) is None
        and image_grid({"pixel_values": torch.zeros(3, 8, 8)}, 4) is None
    )
    assert image_grid(wide, 9) is None  # a row of nine is no grid of an image four times as wide
    assert image_grid({"image_grid_thw": torch.tensor([[1, 8, 4]])}, 8) == (4, 2)


def test_several_images_tiles_and_frames_form_no_grid_even_of_a_square_number():
    for shape in ((4, 3, 16, 16), (1, 4, 3, 16, 16)):
        assert image_grid({"pixel_values": torch.zeros(shape)}, 16) is None
    for grids in ([[1, 4, 4]] * 4, [[4, 4, 4]]):
        assert image_grid({"image_grid_thw": torch.tensor(grids)}, 16) is None


@pytest.mark.parametrize("family", ["aria", "idefics2"])
def test_learned_queries_form_no_grid(family):
    model = tiny.llava()
    batch = tiny.inputs()
    assert ask(model, batch).grid == (2, 2)
    model.config.model_type = family  # whose visual tokens are learned queries
    measured = ask(model, batch)
    assert measured.grid is measured.bottom_bias is None
    assert [(len(rows), len(rows[0])) for rows in measured.maps] == [(1, 4)] * 2


def test_a_single_visual_token_has_even_attention():
    assert relative_entropy(torch.ones(1, 1, dtype=torch.float64)) == 1.0


def test_several_images_are_taken_together():
    model = tiny.model()
    batch = tiny.inputs(images=3)
    ids = batch["input_ids"]  # of which words between two images do not ask
    batch["input_ids"] = torch.cat([ids[:, :5], ids[:, -2:], ids[:, 5:-2]], dim=1)
    measured = ask(model, batch)
    assert measured.grid is measured.bottom_bias is None
    assert_as_the_reference(measured, reference(model, batch))


@pytest.mark.parametrize("padding", [(3, 0), (0, 3)])
def test_padding_and_special_tokens_do_not_ask(padding):
    model = tiny.model()
    batch = tiny.inputs(text=6)
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.nn.functional.pad(batch[name], padding)
    special = {batch["input_ids"][0, -4].item()}
    expected = reference(model, batch, NO_TEXT | special)
    assert_as_the_reference(ask(model, batch, special_ids=special), expected)


@pytest.mark.parametrize(("window", "layers"), [(8, [1]), (9, [1, 2])])
def test_layers_whose_window_ends_within_the_image_are_left_out(window, layers):
    options = dict(sliding_window=window, layer_types=["full_attention", "sliding_attention"])
    text = tiny.text_config(cls=Qwen2Config, use_sliding_window=True, **options)
    model = tiny.model(text=text)
    batch = tiny.inputs()  # the image at 1 to 4, text at 5 to 9
    measured = ask(model, batch)
    assert measured.layers == layers
    assert_as_the_reference(measured, reference(model, batch))


@pytest.mark.parametrize("spoiled", [None, math.nan])
def test_a_layer_without_a_map_or_with_nan_in_it_is_left_out(spoiled):
    """The first is as of linear attention."""
    model = tiny.model()
    first = model.get_decoder().layers[0].self_attn
    attend = first.forward

    def forward(*args, **kwargs):
        output, shares = attend(*args, **kwargs)
        return output, None if spoiled is None else torch.full_like(shares, spoiled)

    first.forward = forward
    assert ask(model, tiny.inputs()).layers == [2]


def test_errors_say_what_to_do():
    batch = tiny.inputs()
    with pytest.raises(ValueError, match="No text comes after an image"):
        ask(tiny.model(), tiny.inputs(images=0))
    last = batch | {name: batch[name][:, :5] for name in ("input_ids", "attention_mask")}
    short = tiny.model(text=tiny.text_config(cls=MistralConfig, sliding_window=8))
    with pytest.raises(ValueError, match="None of the 2 layers of MistralModel has an attention"):
        ask(short, batch)
    two = {name: torch.cat([value, value]) for name, value in batch.items()}
    with pytest.raises(ValueError, match="The batch has 2 sequences"):
        ask(tiny.model(), two)
    with pytest.raises(ValueError, match="No text comes after an image.*question after"):
        ask(tiny.model(), last)
