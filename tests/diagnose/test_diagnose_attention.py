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


def ask(model, batch, **options):
    return attention_maps(model, batch, question="What is this?", **options)


def second_sequence(family, batch):
    """The second sequence of a family's batch, without padding."""
    is_token = batch["attention_mask"][1].bool()
    sequence = {}
    for name, value in batch.items():
        values = value[1:]
        if values.shape[:2] == (1, len(is_token)):
            values = values[:, is_token]
        sequence[name] = values
    if "image_grid_thw" in batch:
        first_patches = batch["image_grid_thw"][0].prod()
        sequence["pixel_values"] = batch["pixel_values"][first_patches:]
    elif family in ("idefics3", "smolvlm"):
        # The first sequence has two images, and the second is padded to two.
        for name in ("pixel_values", "pixel_attention_mask"):
            sequence[name] = sequence[name][:, :1]
    return sequence


def reference(model, batch, no_text=NO_TEXT):
    """Maps, image shares and entropies by layer, of an eager copy, with plain float64 sums."""
    eager_model = copy.deepcopy(model)
    eager_model.set_attn_implementation({"text_config": "eager"})
    with torch.no_grad():
        outputs = eager_model(**batch, output_attentions=True, use_cache=False)
    image_positions, asking_positions = positions_in(batch, no_text)
    maps = []
    image_shares = []
    entropies = []
    for attention in outputs.attentions:
        heads = attention[0].double().tolist()
        last_asking = asking_positions[-1]
        first_visual = image_positions[0]
        if not any(head[last_asking][first_visual] for head in heads):
            # The layer's sliding window ends within the image.
            continue
        weights = mean_weights(heads, asking_positions, image_positions)
        image_share = sum(weights)
        layer_map = [weight / image_share for weight in weights]
        image_shares.append(image_share)
        maps.append(layer_map)
        entropies.append(entropy(layer_map) / math.log(len(image_positions)))
    return maps, image_shares, entropies


def positions_in(batch, no_text):
    """Positions of visual tokens, and of the text that asks after the last of them."""
    token_ids = batch["input_ids"][0].tolist()
    attended = batch["attention_mask"][0].tolist()
    image_positions = []
    for position, token_id in enumerate(token_ids):
        if token_id == IMAGE:
            image_positions.append(position)
    asking_positions = []
    for position in range(image_positions[-1] + 1, len(token_ids)):
        if attended[position] and token_ids[position] not in no_text:
            asking_positions.append(position)
    return image_positions, asking_positions


def mean_weights(heads, asking_positions, image_positions):
    """The mean weight of each visual token over heads and asking tokens."""
    count = len(heads) * len(asking_positions)
    weights = []
    for image_position in image_positions:
        total = 0
        for head in heads:
            for asking_position in asking_positions:
                total += head[asking_position][image_position]
        weights.append(total / count)
    return weights


def entropy(shares):
    return -sum(share * math.log(share) for share in shares if share)


def assert_as_the_reference(measured, expected):
    expected_maps, expected_shares, expected_entropies = expected
    for layer_map, expected_map in zip(measured.maps, expected_maps, strict=True):
        assert sum(layer_map, []) == pytest.approx(expected_map, abs=1e-6)
    assert measured.image_share == pytest.approx(expected_shares, abs=1e-6)
    assert measured.entropy == pytest.approx(expected_entropies, abs=1e-6)


def expected_grid(family, batch):
    """Tiles and newlines form no grid; two by two patches of an image grid are one token."""
    if "image_sizes" in batch or family == "ovis2":
        return None
    if "image_grid_thw" in batch:
        return (2, 3)
    return (2, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_the_ones_that_the_model_returns(family):
    model, batch = make(family)
    sequence = second_sequence(family, batch)
    measured = ask(model, sequence, special_ids=[START, END])
    assert_as_the_reference(measured, reference(model, sequence))
    # Gemma 3 has layers whose window ends within the image.
    if family != "gemma3":
        assert measured.layers == list(range(1, LAYERS + 1))

    grid = expected_grid(family, sequence)
    assert measured.grid == grid
    if grid is None:
        assert measured.bottom_bias is None
        for layer_map in measured.maps:
            assert len(layer_map) == 1
    else:
        expected_bias = []
        for layer_map in measured.maps:
            assert (len(layer_map), len(layer_map[0])) == grid
            # The bottom third of two rows is two thirds of the lower one.
            expected_bias.append(2 * sum(layer_map[1]))
        assert measured.bottom_bias == pytest.approx(expected_bias)


@pytest.fixture
def qwen():
    model, batch = make("qwen2_5_vl")
    return model, second_sequence("qwen2_5_vl", batch)


def attention_implementations(model):
    implementations = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            implementations[id(module.config)] = module.config._attn_implementation
    return implementations


def hook_count(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_only_the_decoder_is_switched_to_eager_attention(qwen):
    model, sequence = qwen
    decoder = model.get_decoder()
    before = attention_implementations(model)
    during = []

    def keep_implementations(module, inputs, output):
        during.append(attention_implementations(model))

    with decoder.layers[0].register_forward_hook(keep_implementations):
        ask(model, sequence)
    decoder_config = id(decoder.config)
    assert before[decoder_config] != "eager"
    assert during == [{**before, decoder_config: "eager"}]
    assert attention_implementations(model) == before


def test_the_model_stays_as_it_was_after_an_error(qwen):
    model, sequence = qwen
    implementations = attention_implementations(model)
    hooks_before = hook_count(model)
    model.train()

    def fail(module, inputs, output):
        raise ZeroDivisionError

    with model.get_decoder().norm.register_forward_hook(fail), pytest.raises(ZeroDivisionError):
        ask(model, sequence)
    assert attention_implementations(model) == implementations
    for module in model.modules():
        assert module.training
    assert hook_count(model) == hooks_before


def test_the_bottom_third_of_four_rows_is_a_row_and_a_third():
    biases = []
    for column in torch.eye(4, dtype=torch.float64):
        biases.append(bottom_bias(column[:, None]))
    assert biases == pytest.approx([0, 0, 1, 3], abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "token_count", "grid"),
    [
        pytest.param((1, 3, 336, 336), 576, (24, 24), id="square"),
        pytest.param((1, 3, 336, 336), 577, None, id="square with a class token"),
        # A square number of tokens does not make a square.
        pytest.param((1, 3, 32, 128), 16, (2, 8), id="wide"),
        pytest.param((1, 3, 32, 16), 8, (4, 2), id="tall"),
        pytest.param((1, 3, 16, 640), 4, None, id="flat"),
        pytest.param((3, 8, 8), 4, None, id="without a batch"),
        # A row of nine is no grid of an image four times as wide.
        pytest.param((1, 3, 32, 128), 9, None, id="wide with a row of tokens"),
        pytest.param((4, 3, 16, 16), 16, None, id="several images"),
        pytest.param((1, 4, 3, 16, 16), 16, None, id="tiles"),
    ],
)
def test_the_grid_of_an_image_has_its_proportions(shape, token_count, grid):
    batch = {"pixel_values": torch.zeros(shape)}
    assert image_grid(batch, token_count) == grid


def test_without_an_image_there_is_no_grid():
    assert image_grid({}, 4) is None


@pytest.mark.parametrize(
    ("grids", "token_count", "expected"),
    [
        pytest.param([[1, 8, 4]], 8, (4, 2), id="one image"),
        pytest.param([[1, 4, 4]] * 4, 16, None, id="several images"),
        pytest.param([[4, 4, 4]], 16, None, id="frames"),
    ],
)
def test_the_grid_of_patches_is_of_one_image(grids, token_count, expected):
    """Several images and frames form no grid, even of a square number of tokens."""
    batch = {"image_grid_thw": torch.tensor(grids)}
    assert image_grid(batch, token_count) == expected


@pytest.mark.parametrize("family", ["aria", "idefics2"])
def test_learned_queries_form_no_grid(family):
    model = tiny.llava()
    batch = tiny.inputs()
    assert ask(model, batch).grid == (2, 2)

    # Visual tokens of these families are learned queries.
    model.config.model_type = family
    measured = ask(model, batch)
    assert measured.grid is None
    assert measured.bottom_bias is None
    assert len(measured.maps) == 2
    for layer_map in measured.maps:
        (only_row,) = layer_map
        assert len(only_row) == 4


def test_a_single_visual_token_has_even_attention():
    assert relative_entropy(torch.ones(1, 1, dtype=torch.float64)) == 1.0


def test_several_images_are_taken_together():
    model = tiny.model()
    batch = tiny.inputs(images=3)
    # Words between two images do not ask.
    token_ids = batch["input_ids"]
    words_within = [token_ids[:, :5], token_ids[:, -2:], token_ids[:, 5:-2]]
    batch["input_ids"] = torch.cat(words_within, dim=1)
    measured = ask(model, batch)
    assert measured.grid is None
    assert measured.bottom_bias is None
    assert_as_the_reference(measured, reference(model, batch))


@pytest.mark.parametrize("padding", [(3, 0), (0, 3)])
def test_padding_and_special_tokens_do_not_ask(padding):
    model = tiny.model()
    batch = tiny.inputs(text=6)
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.nn.functional.pad(batch[name], padding)
    special_ids = {batch["input_ids"][0, -4].item()}
    measured = ask(model, batch, special_ids=special_ids)
    expected = reference(model, batch, NO_TEXT | special_ids)
    assert_as_the_reference(measured, expected)


@pytest.mark.parametrize(("window", "layers"), [(8, [1]), (9, [1, 2])])
def test_layers_whose_window_ends_within_the_image_are_left_out(window, layers):
    text_config = tiny.text_config(
        cls=Qwen2Config,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"],
    )
    model = tiny.model(text=text_config)
    # The image is at 1 to 4, text at 5 to 9.
    batch = tiny.inputs()
    measured = ask(model, batch)
    assert measured.layers == layers
    assert_as_the_reference(measured, reference(model, batch))


@pytest.mark.parametrize(
    "make_weights",
    [
        pytest.param(lambda weights: None, id="none, as of linear attention"),
        pytest.param(lambda weights: torch.full_like(weights, math.nan), id="nan"),
    ],
)
def test_a_layer_without_a_map_or_with_nan_in_it_is_left_out(make_weights):
    model = tiny.model()
    first_attention = model.get_decoder().layers[0].self_attn
    original_forward = first_attention.forward

    def forward(*args, **kwargs):
        output, weights = original_forward(*args, **kwargs)
        return output, make_weights(weights)

    first_attention.forward = forward
    assert ask(model, tiny.inputs()).layers == [2]


def without_question(batch):
    """The first five tokens: the image and nothing after it."""
    cut = {name: batch[name][:, :5] for name in ("input_ids", "attention_mask")}
    return batch | cut


def test_a_batch_without_an_image_is_refused():
    with pytest.raises(ValueError, match="No text comes after an image"):
        ask(tiny.model(), tiny.inputs(images=0))


def test_a_batch_without_a_question_after_the_image_is_refused():
    with pytest.raises(ValueError, match="No text comes after an image.*question after"):
        ask(tiny.model(), without_question(tiny.inputs()))


def test_a_model_whose_windows_all_end_within_the_image_is_refused():
    text_config = tiny.text_config(cls=MistralConfig, sliding_window=8)
    with pytest.raises(ValueError, match="None of the 2 layers of MistralModel has an attention"):
        ask(tiny.model(text=text_config), tiny.inputs())


def test_several_sequences_are_refused():
    two_sequences = {name: torch.cat([value, value]) for name, value in tiny.inputs().items()}
    with pytest.raises(ValueError, match="The batch has 2 sequences"):
        ask(tiny.model(), two_sequences)
