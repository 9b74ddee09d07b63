import math

import pytest
import torch

from normalign_llava.export.mmproj import project_for_llama_cpp
from normalign_llava.export.projector import Projector, projector_tensors


TOWER_EPS = 1e-6


def projector(norm=True, eps=1e-5):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Projector(
        weight_1=random(6, 4),
        bias_1=random(6),
        weight_2=random(5, 6),
        bias_2=random(5),
        gain=random(5) if norm else None,
        norm_bias=random(5) if norm else None,
        eps=eps,
    )


def layer_norm(values, gain, bias, eps):
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    root = math.sqrt(variance + eps)
    return [
        (value - mean) / root * weight + shift
        for value, weight, shift in zip(values, gain, bias, strict=True)
    ]


def linear(values, weight, bias):
    rows = zip(weight.tolist(), bias.tolist(), strict=True)
    return [sum(map(math.prod, zip(row, values, strict=True))) + shift for row, shift in rows]


def gelu_with_tanh(value):
    inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
    return value / 2 * (1 + math.tanh(inner))


def by_llama_cpp(tensors, features):
    """Linear, LayerNorm, GELU, Linear, LayerNorm, number by number."""
    hidden = linear(features, tensors["mm.0.weight"], tensors["mm.0.bias"])
    first_gain = tensors["mm.1.weight"].tolist()
    hidden = layer_norm(hidden, first_gain, tensors["mm.1.bias"].tolist(), TOWER_EPS)
    hidden = [gelu_with_tanh(value) for value in hidden]
    tokens = linear(hidden, tensors["mm.3.weight"], tensors["mm.3.bias"])
    gain = tensors["mm.4.weight"].tolist()
    return layer_norm(tokens, gain, tensors["mm.4.bias"].tolist(), TOWER_EPS)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_llama_cpps_two_norms_compute_what_one_norm_does(eps):
    ours = projector(eps=eps)
    features = [0.3, -1.2, 0.8, 0.1]
    hidden = linear(features, ours.weight_1, ours.bias_1)
    tokens = linear([gelu_with_tanh(value) for value in hidden], ours.weight_2, ours.bias_2)
    expected = layer_norm(tokens, ours.gain.tolist(), ours.norm_bias.tolist(), eps)
    length = math.sqrt(sum(value**2 for value in hidden))
    tensors = projector_tensors(ours, TOWER_EPS, largest_hidden=length)
    assert by_llama_cpp(tensors, features) == pytest.approx(expected, abs=1e-5)


def test_features_ten_times_as_large_as_the_samples_are_computed_too():
    """The factor at GELU is 1 - |h|^2 / (2 C^2), so 1 - 5e-5 for them."""
    ours = projector()
    features = [3.0, -12.0, 8.0, 1.0]
    hidden = linear(features, ours.weight_1, ours.bias_1)
    length = math.sqrt(sum(value**2 for value in hidden))
    tensors = projector_tensors(ours, TOWER_EPS, largest_hidden=length / 10)
    shrunk = [value * (1 - 5e-5) for value in hidden]
    tokens = linear([gelu_with_tanh(value) for value in shrunk], ours.weight_2, ours.bias_2)
    expected = layer_norm(tokens, ours.gain.tolist(), ours.norm_bias.tolist(), ours.eps)
    assert by_llama_cpp(tensors, features) == pytest.approx(expected, abs=1e-6)


def test_a_projector_without_a_norm_has_two_linear_layers():
    tensors = projector_tensors(projector(norm=False), TOWER_EPS, largest_hidden=1.0)
    assert tensors.keys() == {"mm.0.weight", "mm.0.bias", "mm.2.weight", "mm.2.bias"}


@pytest.mark.parametrize("norm", [False, True])
def test_the_difference_is_that_of_the_two_gelus(norm):
    ours = projector(norm)
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).double()
    tensors, difference = project_for_llama_cpp(ours, features, TOWER_EPS)
    assert 1e-6 < difference < 1e-3
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_weights_that_are_not_finite_are_refused():
    ours = projector()
    ours.weight_1[0, 0] = math.nan
    with pytest.raises(ValueError, match="would differ by nan"):
        project_for_llama_cpp(ours, torch.ones(2, 4).double(), TOWER_EPS)
