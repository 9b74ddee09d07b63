# SPDX-License-Identifier: Apache-2.0
"""The critical norm: its formula against random vectors, its measurement against hidden states."""

import math
import re
from statistics import fmean
from types import SimpleNamespace

import pytest
import tiny_parts
import torch
from transformers import AutoModel, AutoTokenizer, Gemma2Config, GraniteConfig, LlamaConfig

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.gain import embedding_statistics
from normalign_llava.diagnose import critical
from normalign_llava.diagnose.critical import Updates, measure_model_updates, measure_updates
from normalign_llava.models import ModelOptions


TEXTS = ("hello there, how are you", "the answer is no", "one")
SIZES = [40.0, 12.0, 25.0, 300.0]
ANGLES = [1.6, 1.2, 1.9, 0.4]
# Updates so large that the critical norm is far above every norm.
WITHOUT_CRITICAL_NORM = Updates(1e-6, [1e6, 1e6], [1.5, 1.5])


def angle_between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Kahan's formula keeps its precision near 0 and pi."""
    first = first / first.norm()
    second = second / second.norm()
    return 2 * torch.atan2((first - second).norm(), (first + second).norm())


def random_update(state, size, angle, generator):
    """An update of this size, at this angle to the state, in a random plane."""
    along = state / state.norm()
    across = torch.randn(64, generator=generator, dtype=torch.float64)
    across -= (across @ along) * along
    across /= across.norm()
    return size * (math.cos(angle) * along + math.sin(angle) * across)


@pytest.mark.parametrize("norm", [0.7, 50.0])
def test_rotation_is_as_of_a_state_to_which_such_updates_are_added(norm):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(64, generator=generator, dtype=torch.float64)
    state *= norm / state.norm()
    expected_rotation = []
    for size, angle in zip(SIZES, ANGLES, strict=True):
        update = random_update(state, size, angle, generator)
        next_state = state + update
        expected_rotation.append(angle_between(state, next_state).item())
        state = next_state
    rotation = Updates(3.0, SIZES, ANGLES).rotation(norm)
    assert rotation == pytest.approx(expected_rotation, abs=1e-9)


def test_relative_rotation_leaves_out_the_last_layer():
    updates = Updates(3.0, SIZES, ANGLES)
    rotation = sum(updates.rotation(90.0)[:3])
    rotation_of_text = sum(updates.rotation(3.0)[:3])
    expected = rotation / rotation_of_text
    assert updates.relative_rotation(90.0) == pytest.approx(expected, rel=1e-12)


def test_at_the_critical_norm_rotation_has_fallen_to_that_share():
    updates = Updates(3.0, SIZES, ANGLES)
    critical_norm = updates.critical_norm(0.5)
    assert updates.relative_rotation(critical_norm) == pytest.approx(0.5, abs=1e-5)
    assert updates.relative_rotation(critical_norm * 0.99) > 0.5


def test_a_critical_norm_far_above_every_norm_is_none():
    assert WITHOUT_CRITICAL_NORM.critical_norm(0.5) is None


def test_a_critical_norm_may_be_thousands_of_n_text():
    updates = Updates(1.0, [1e4, 1e4], [1.5, 1.5])
    critical_norm = updates.critical_norm(0.5)
    assert updates.relative_rotation(critical_norm) == pytest.approx(0.5, abs=1e-4)
    assert critical_norm > 1e3


@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (1.72, 1.7199999999999998),
        (4.93, 4.9300000000000015),
        (0.7, 0.7),
    ],
)
def test_an_update_against_a_state_of_its_own_size_leaves_nothing(norm, size):
    """They differ by rounding, by which the square of what is left is below 0."""
    updates = Updates(1.0, [size, 1.0], [math.pi, 1.0])
    first_rotation, second_rotation = updates.rotation(norm)
    assert math.isfinite(first_rotation)
    assert second_rotation == pytest.approx(1.0, abs=1e-6)


def test_a_revision_and_trust_are_passed_on(monkeypatch):
    calls = []

    def resolve(model, options, *, revision):
        calls.append((model, revision, options))
        checkpoint = SimpleNamespace(name="there", revision="c" * 40)
        return SimpleNamespace(checkpoint=checkpoint)

    def statistics(model, **options):
        calls.append((model, options))
        raise ValueError("so far")

    monkeypatch.setattr(critical, "resolve_model", resolve)
    monkeypatch.setattr(critical, "embedding_statistics", statistics)
    with pytest.raises(ValueError, match="so far"):
        measure_model_updates("bea/m", "trial")
    assert calls == [
        ("bea/m", "trial", ModelOptions(trust_remote_code=False)),
        ("there", {"top": 0, "revision": "c" * 40}),
    ]


def test_a_single_layer_counts_although_it_is_the_last():
    updates = Updates(3.0, SIZES[:1], ANGLES[:1])
    (rotation,) = updates.rotation(90.0)
    (rotation_of_text,) = updates.rotation(3.0)
    assert updates.relative_rotation(90.0) == pytest.approx(rotation / rotation_of_text)


def table_cells(updates):
    """The values of a table's rows: N_text, the first update, the norms at two shares."""
    _, value_column = updates.table("tiny").columns
    return list(value_column.cells)


def test_the_table_begins_with_n_text_and_the_first_update():
    n_text, first_update, *_ = table_cells(Updates(3.0, SIZES, ANGLES))
    assert float(n_text) == 3.0
    assert float(first_update) == SIZES[0]


def test_the_table_has_the_norms_at_two_shares():
    updates = Updates(3.0, SIZES, ANGLES)
    _, _, *norm_cells = table_cells(updates)
    for cell, share in zip(norm_cells, (0.9, 0.5), strict=True):
        norm_text, ratio_text = re.findall(r"[\d.]+", cell)
        norm = float(norm_text)
        assert updates.relative_rotation(norm) == pytest.approx(share, abs=0.01)
        assert float(ratio_text) == pytest.approx(norm / 3, rel=0.01)


def test_the_table_says_none_where_there_is_no_critical_norm():
    assert table_cells(WITHOUT_CRITICAL_NORM)[2:] == ["none", "none"]


def test_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter"):
        measure_model_updates(str(tmp_path))


def load_language_model(folder, config_class):
    tiny_parts.language(folder, cls=config_class)
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    return model, AutoTokenizer.from_pretrained(folder)


class UpdateRecorder:
    """Keeps log sizes and angles of a layer's updates, except of a text's first token."""

    def __init__(self, layer):
        self.log_sizes = []
        self.angles = []
        layer.register_forward_hook(self.keep)

    def keep(self, layer, arguments, output):
        states = arguments[0][0]
        updates = output[0] - states
        for state, update in zip(states[1:], updates[1:], strict=True):
            self.log_sizes.append(update.norm().log().item())
            self.angles.append(angle_between(state, update).item())


@pytest.mark.parametrize("config_class", [LlamaConfig, Gemma2Config, GraniteConfig])
def test_updates_are_differences_of_hidden_states(tmp_path, config_class):
    model, tokenizer = load_language_model(tmp_path / "language", config_class)
    measured = measure_updates(model, tokenizer, 1.0, TEXTS)

    recorders = [UpdateRecorder(layer) for layer in model.layers]
    with torch.no_grad():
        for text in TEXTS:
            model(**tokenizer(text, return_tensors="pt"))
    expected_sizes = [math.exp(fmean(recorder.log_sizes)) for recorder in recorders]
    expected_angles = [fmean(recorder.angles) for recorder in recorders]
    assert measured.sizes == pytest.approx(expected_sizes, rel=1e-9)
    assert measured.angles == pytest.approx(expected_angles, rel=1e-9)


def test_a_layer_that_changes_nothing_turns_nothing(tmp_path):
    model, tokenizer = load_language_model(tmp_path / "language", LlamaConfig)
    before = measure_updates(model, tokenizer, 1.0, TEXTS)
    last_layer = model.layers[-1]
    last_layer.self_attn.o_proj.weight.data.zero_()
    last_layer.mlp.down_proj.weight.data.zero_()

    after = measure_updates(model, tokenizer, 1.0, TEXTS)
    assert after.sizes == [*before.sizes[:-1], 0.0]
    assert after.angles == [*before.angles[:-1], 0.0]
    assert after.rotation(2.0) == [*before.rotation(2.0)[:-1], 0.0]


def test_a_language_model_by_itself_and_in_a_vlm_measure_the_same(tmp_path):
    language_folder = str(tiny_parts.language(tmp_path / "language"))
    tokenizer = AutoTokenizer.from_pretrained(language_folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(language_folder)
    vision_folder = str(tiny_parts.vision(tmp_path / "vision"))
    build_checkpoint(vision_folder, language_folder, tmp_path / "built")

    of_language = measure_model_updates(language_folder)
    of_vlm = measure_model_updates(str(tmp_path / "built"))
    assert of_language.n_text == embedding_statistics(language_folder).n_text
    assert of_vlm.n_text == pytest.approx(of_language.n_text, rel=1e-6)
    assert of_vlm.sizes == pytest.approx(of_language.sizes, rel=1e-5)
    assert of_vlm.angles == pytest.approx(of_language.angles, rel=1e-5)
