# SPDX-License-Identifier: Apache-2.0
"""The critical norm: its formula against random vectors, its measurement against hidden states."""

import math
import re
from functools import partial
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


TEXTS = ("hello there, how are you", "the answer is no", "one")
SIZES = [40.0, 12.0, 25.0, 300.0]
ANGLES = [1.6, 1.2, 1.9, 0.4]


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Kahan's formula, which keeps its precision near 0 and pi."""
    first = first / first.norm()
    second = second / second.norm()
    return 2 * torch.atan2((first - second).norm(), (first + second).norm())


@pytest.mark.parametrize("norm", [0.7, 50.0])
def test_rotation_is_that_of_a_state_to_which_such_updates_are_added(norm):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(64, generator=generator, dtype=torch.float64)
    state *= norm / state.norm()
    rotated = []
    for size, phi in zip(SIZES, ANGLES, strict=True):
        along = state / state.norm()
        across = torch.randn(64, generator=generator, dtype=torch.float64)
        across -= (across @ along) * along
        after = state + size * (math.cos(phi) * along + math.sin(phi) * across / across.norm())
        rotated.append(angle(state, after).item())
        state = after
    assert Updates(3.0, SIZES, ANGLES).rotation(norm) == pytest.approx(rotated, abs=1e-9)


def test_at_the_critical_norm_rotation_has_fallen_to_that_share():
    updates = Updates(3.0, SIZES, ANGLES)
    expected = sum(updates.rotation(90.0)[:3]) / sum(updates.rotation(3.0)[:3])  # not the last
    assert updates.relative_rotation(90.0) == pytest.approx(expected, rel=1e-12)
    norm = updates.critical_norm(0.5)
    assert updates.relative_rotation(norm) == pytest.approx(0.5, abs=1e-5)
    assert updates.relative_rotation(norm * 0.99) > 0.5
    assert Updates(1e-6, [1e6, 1e6], [1.5, 1.5]).critical_norm(0.5) is None  # far above every norm


def test_a_critical_norm_may_be_thousands_of_n_text():
    updates = Updates(1.0, [1e4, 1e4], [1.5, 1.5])
    assert updates.relative_rotation(updates.critical_norm(0.5)) == pytest.approx(0.5, abs=1e-4)
    assert updates.critical_norm(0.5) > 1e3


def test_an_update_against_a_state_of_its_own_size_leaves_nothing():
    """They differ by rounding, by which the square of what is left is below 0."""
    for norm, size in ((1.72, 1.7199999999999998), (4.93, 4.9300000000000015), (0.7, 0.7)):
        first, second = Updates(1.0, [size, 1.0], [math.pi, 1.0]).rotation(norm)
        assert math.isfinite(first) and second == pytest.approx(1.0, abs=1e-6)


def test_a_revision_and_trust_are_passed_on(monkeypatch):
    got = []

    def resolve(model, revision, **options):
        got.append((model, revision, options))
        known = {"name": "there", "revision": "c" * 40}
        return SimpleNamespace(checkpoint=SimpleNamespace(**known))

    def statistics(name, **options):
        got.append((name, options))
        raise ValueError("so far")

    monkeypatch.setattr(critical, "resolve_model", resolve)
    monkeypatch.setattr(critical, "embedding_statistics", statistics)
    with pytest.raises(ValueError, match="so far"):
        measure_model_updates("bea/m", "trial")
    assert got == [
        ("bea/m", "trial", {"trust_remote_code": False}),
        ("there", {"top": 0, "revision": "c" * 40}),
    ]


def test_a_single_layer_counts_although_it_is_the_last():
    updates = Updates(3.0, SIZES[:1], ANGLES[:1])
    (at_90,) = updates.rotation(90.0)
    (of_text,) = updates.rotation(3.0)
    assert updates.relative_rotation(90.0) == pytest.approx(at_90 / of_text)


def test_the_table_has_the_norms_at_two_shares_and_none_where_there_is_none():
    updates = Updates(3.0, SIZES, ANGLES)
    _, numbers = updates.table("tiny").columns
    n_text, update, *norms = numbers.cells
    assert (float(n_text), float(update)) == (3.0, SIZES[0])
    for cell, share in zip(norms, (0.9, 0.5), strict=True):
        norm, in_n_text = map(float, re.findall(r"[\d.]+", cell))
        assert updates.relative_rotation(norm) == pytest.approx(share, abs=0.01)
        assert in_n_text == pytest.approx(norm / 3, rel=0.01)
    _, numbers = Updates(1e-6, [1e6, 1e6], [1.5, 1.5]).table("tiny").columns
    assert list(numbers.cells)[2:] == ["none", "none"]


def test_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter"):
        measure_model_updates(str(tmp_path))


@pytest.mark.parametrize("cls", [LlamaConfig, Gemma2Config, GraniteConfig])
def test_updates_are_differences_of_hidden_states(tmp_path, cls):
    tiny_parts.language(tmp_path / "language", cls=cls)
    model = AutoModel.from_pretrained(tmp_path / "language", dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "language")
    measured = measure_updates(model, tokenizer, 1.0, TEXTS)
    sizes, angles = ([[] for _ in measured.sizes] for _ in range(2))

    def compare(number, layer, args, after):
        for state, update in zip(args[0][0][1:], (after - args[0])[0][1:], strict=True):
            sizes[number].append(update.norm().log().item())
            angles[number].append(angle(state, update).item())

    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(partial(compare, number))
    with torch.no_grad():
        for text in TEXTS:
            model(**tokenizer(text, return_tensors="pt"))
    assert measured.sizes == pytest.approx([math.exp(fmean(logs)) for logs in sizes], rel=1e-9)
    assert measured.angles == pytest.approx(list(map(fmean, angles)), rel=1e-9)
    if cls is LlamaConfig:  # a layer that changes nothing turns nothing
        last = model.layers[-1]
        for weight in (last.self_attn.o_proj.weight, last.mlp.down_proj.weight):
            weight.data.zero_()
        after = measure_updates(model, tokenizer, 1.0, TEXTS)
        assert after.sizes == [*measured.sizes[:-1], 0.0]
        assert after.angles == [*measured.angles[:-1], 0.0]
        assert after.rotation(2.0) == [*measured.rotation(2.0)[:-1], 0.0]


def test_a_language_model_alone_and_in_a_vlm_measure_the_same(tmp_path):
    tiny_parts.language(tmp_path / "language")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "language")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(tmp_path / "language")
    tiny_parts.vision(tmp_path / "vision")
    build_checkpoint(str(tmp_path / "vision"), str(tmp_path / "language"), tmp_path / "built")
    alone, within = (
        measure_model_updates(str(tmp_path / folder)) for folder in ("language", "built")
    )
    assert alone.n_text == embedding_statistics(str(tmp_path / "language")).n_text
    assert within.n_text == pytest.approx(alone.n_text, rel=1e-6)
    assert within.sizes == pytest.approx(alone.sizes, rel=1e-5)
    assert within.angles == pytest.approx(alone.angles, rel=1e-5)
