"""What the demo measures and draws: against a plain forward in float64, and against what diagnose finds."""

import threading

import numpy as np
import pytest
import space_parts
import torch
from transformers import Gemma2Config, MistralConfig

from normalign_llava.diagnose.measure.attention import attention_maps
from normalign_llava.diagnose.measure.positions import tokenizer_ids
from normalign_llava.hub_cards.space import demo
from normalign_llava.hub_cards.space.demo.figures import attention, draw_map, summary
from normalign_llava.hub_cards.space.demo.measuring import Measured, Meter
from normalign_llava.hub_cards.space.demo.model import stream


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return space_parts.checkpoint(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return demo.load(str(checkpoint))


def test_what_is_measured_is_what_a_plain_forward_in_float64_gives(checkpoint):
    model, processor = demo.load(str(checkpoint))
    inputs = space_parts.prompt(processor, space_parts.noise((16, 16)), "what is it")
    answer = processor.tokenizer("a cat<|im_end|>", add_special_tokens=False)["input_ids"]
    measured = Meter(model, processor).measure(inputs, answer)

    reference, _ = demo.load(str(checkpoint))
    reference.double()
    ids = inputs["input_ids"][0].tolist() + answer
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    visual = [place for place, word in enumerate(words) if word == "<image>"]
    text = [place for place, word in enumerate(words) if word not in ("<image>", "<|im_start|>", "<|im_end|>")]
    asking = [place for place in text if place > visual[-1]]
    assert len(visual) == 4 and words[asking[-1]] == "t" and 0 < len(text) - len(asking) < len(asking)
    before_final_norm = []
    reference.get_decoder().norm.register_forward_pre_hook(lambda module, args: before_final_norm.append(args[0]))
    with torch.no_grad():
        output = reference(
            input_ids=torch.tensor([ids]),
            pixel_values=inputs["pixel_values"].double(),
            output_attentions=True,
            output_hidden_states=True,
        )
    states = [*output.hidden_states[:-1], *before_final_norm]
    assert len(states) == 3
    for kind, places in (("visual", visual), ("text", text)):
        expected = [
            sum(sum(v**2 for v in state[0, p].tolist()) ** 0.5 for p in places) / len(places) for state in states
        ]
        assert measured.norms[kind] == pytest.approx(expected, rel=1e-5)
    assert list(measured.shares) == [1, 2]
    for layer, maps in enumerate(output.attentions, 1):
        heads = maps[0].tolist()
        expected = [
            sum(head[row][column] for head in heads for row in asking) / (len(heads) * len(asking))
            for column in visual
        ]
        assert measured.shares[layer].tolist() == pytest.approx(expected, rel=1e-5)
    assert measured.grid == (2, 2)
    assert measured.vocabulary == model.config.text_embedding_norm
    line = summary(measured)
    assert f"{measured.norms['visual'][0]:#.3g}" in line and f"{measured.norms['text'][0]:#.3g}" in line
    assert f"{measured.norms['visual'][0] / measured.norms['text'][0]:#.3g}" in line


def test_a_measurement_sees_no_pass_of_another_thread(loaded):
    model, processor = demo.load(loaded[0].name_or_path)
    meter = Meter(model, processor)
    inputs = space_parts.prompt(processor, space_parts.noise((16, 16)), "what is it")
    alone = meter.measure(inputs, [5, 6])
    other_inputs = space_parts.prompt(processor, space_parts.noise((16, 16)), "is there anything else in the image")
    stop, ended = threading.Event(), []

    def disturb():
        while not stop.is_set():
            ended.append(list(stream(model, other_inputs, 8)))

    others = [threading.Thread(target=disturb) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(20):
            again = meter.measure(inputs, [5, 6])
            assert again.norms == alone.norms
            assert {k: v.tolist() for k, v in again.shares.items()} == {k: v.tolist() for k, v in alone.shares.items()}
    finally:
        stop.set()
        for other in others:
            other.join()
    assert len(ended) > 3 and all(answer == ended[0] for answer in ended)


def test_the_map_of_a_layer_and_of_all():
    shares = {1: np.array([0.1, 0.1, 0.0, 0.2]), 3: np.array([0.0, 0.0, 0.6, 0.2])}
    measured = Measured(np.zeros((16, 16, 3)), (2, 2), shares=shares)
    title, found = attention(measured, 3)
    assert title == "Layer 3: 80.0% of the text's attention is on the image"
    assert found.tolist() == pytest.approx([0, 0, 0.75, 0.25])
    title, found = attention(measured, 0)
    assert title == "Mean over layers: 60.0% of the text's attention is on the image"
    assert found.tolist() == pytest.approx([0.125, 0.125, 0.375, 0.375])
    assert attention(measured, 2) == ("Layer 2: no attention map reaches the whole image", None)
    assert draw_map(measured, "none", None).size == draw_map(measured, "one", found).size


def test_the_image_is_shown_as_the_encoder_receives_it(loaded):
    model, processor = loaded
    image = space_parts.noise((16, 32))  # the middle is what is left of it
    measured = Meter(*demo.load(model.name_or_path)).measure(space_parts.prompt(processor, image, "?"), [])
    assert np.abs(measured.image * 255 - np.asarray(image.crop((0, 8, 16, 24)))).max() < 0.5


@pytest.mark.parametrize(
    ("cls", "window", "layers"),
    [
        (Gemma2Config, 6, [2]),  # every other layer has the window
        (MistralConfig, 6, []),  # every layer has it
        (MistralConfig, 200, [1, 2]),
    ],
)
def test_layers_and_shares_are_those_of_diagnose(tmp_path, cls, window, layers):
    model, processor = demo.load(str(space_parts.checkpoint(tmp_path, cls=cls, sliding_window=window)))
    inputs = space_parts.prompt(processor, space_parts.noise((16, 16)), "what is it, and where does it stand")
    measured = Meter(model, processor).measure(inputs, [])
    assert list(measured.shares) == layers
    if not layers:
        assert attention(measured, 0) == ("Mean over layers: no attention map reaches the whole image", None)
        return
    special = tokenizer_ids(processor.tokenizer)
    expected = attention_maps(model, dict(inputs), question="?", special_ids=special)
    assert expected.layers == layers
    assert [row.sum() for row in measured.shares.values()] == pytest.approx(expected.image_share, rel=1e-5)
    maps = [(row / row.sum()).reshape(measured.grid).tolist() for row in measured.shares.values()]
    assert maps == [[pytest.approx(row, rel=1e-5) for row in rows] for rows in expected.maps]


def test_the_map_lies_on_the_image_as_the_tokens_do():
    def centre(row, column):
        shares = np.full(6, 0.01)
        shares[3 * row + column] = 0.95
        drawn = draw_map(Measured(np.zeros((20, 30, 3)), (2, 3)), "", shares).convert("RGB")
        brightest = 0.7 * np.array([252, 253, 191])  # the end of the colour map, over black
        y, x = (np.abs(np.asarray(drawn) - brightest).max(-1) < 6).nonzero()
        assert len(y) > 1000
        return np.array([x.mean(), y.mean()])

    origin = centre(0, 0)
    right, down = centre(0, 2) - origin, centre(1, 0) - origin
    assert right == pytest.approx([2 * down[1], 0], abs=2) and down == pytest.approx([0, right[0] / 2], abs=2)
    assert right[0] > 100
    assert centre(1, 1) == pytest.approx(origin + right / 2 + down, abs=2)


def test_an_answer_ends_where_the_context_does(loaded):
    model, processor = loaded
    context = model.config.get_text_config().max_position_embeddings
    inputs = space_parts.prompt(processor, space_parts.noise((16, 16)), "what is it? " * 36)
    room = context - inputs["input_ids"].shape[1]
    assert 5 < room < 60
    model.generation_config.eos_token_id, before = None, model.generation_config.eos_token_id
    try:
        assert len(list(stream(model, inputs, 100))) == room
        assert len(list(stream(model, inputs, 5))) == 5
    finally:
        model.generation_config.eos_token_id = before
