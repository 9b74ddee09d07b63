"""The norm against its references: torch's functions forward, the paper's hook form backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune

from normalign_llava import modeling_normalign_llava as modeling


NORMS = [
    modeling.GlobalWeightCompensatedLayerNorm,
    modeling.GlobalWeightCompensatedRMSNorm,
]
GAIN_FLOOR = 1e-3

every_norm = pytest.mark.parametrize("norm_class", NORMS)


def make_norm(
    norm_class,
    width,
    gain=0.0134,
    dtype=torch.float64,
    mixed_signs=False,
    **options,
):
    norm = norm_class(width, **options).to(dtype)
    relative_gain = torch.randn(width, dtype=torch.float64) * 0.3 + 1.0
    if mixed_signs:
        relative_gain = relative_gain * torch.randn(width).sign()
    with torch.no_grad():
        norm.weight.copy_(relative_gain * gain)
        if issubclass(norm_class, torch.nn.LayerNorm):
            norm.bias.normal_()
    return norm


def mean_absolute_gain(norm, floor=GAIN_FLOOR) -> float:
    mean = norm.weight.detach().abs().mean().item()
    return max(mean, floor)


def hook_form(norm, features):
    """The paper's form: normalise, scale the gradient at x_hat in a hook, apply gain and bias."""
    has_bias = isinstance(norm, torch.nn.LayerNorm)
    if has_bias:
        features = features - features.mean(-1, keepdim=True)
    mean_square = features.pow(2).mean(-1, keepdim=True)
    normalised = features / torch.sqrt(mean_square + norm.eps)
    scale = mean_absolute_gain(norm)
    if normalised.requires_grad:
        normalised.register_hook(lambda gradient: gradient / scale)
    output = norm.weight * normalised
    if has_bias:
        output = output + norm.bias
    return output


def gradients(function, norm, features, upstream):
    """The gradients at the features, the gain and, if the norm has one, the bias."""
    features = features.detach().requires_grad_()
    norm.zero_grad()
    weighted_sum = (function(features) * upstream).sum()
    weighted_sum.backward()
    of_parameters = [parameter.grad for parameter in norm.parameters()]
    return [features.grad, *of_parameters]


def hook_form_gradients(norm, features, upstream):
    return gradients(lambda values: hook_form(norm, values), norm, features, upstream)


@every_norm
@pytest.mark.parametrize("shape", [(2, 6, 1), (2, 576), (5, 16), (2, 3, 5, 16), (2, 0, 16), (16,)])
@pytest.mark.parametrize("gain", [1e-5, 0.0134, 7.0])
@pytest.mark.parametrize("mixed_signs", [False, True])
def test_gradients_equal_the_hook_form_in_float64(norm_class, shape, gain, mixed_signs):
    torch.manual_seed(0)
    width = shape[-1]
    norm = make_norm(norm_class, width, gain, mixed_signs=mixed_signs)
    features = torch.randn(shape, dtype=torch.float64)
    upstream = torch.randn(shape, dtype=torch.float64)

    actual_gradients = gradients(norm, norm, features, upstream)
    expected_gradients = hook_form_gradients(norm, features, upstream)
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        assert actual.shape == expected.shape
        largest = 1.0
        if expected.numel():
            largest = max(largest, expected.abs().max().item())
        torch.testing.assert_close(
            actual,
            expected,
            rtol=1e-10,
            atol=1e-10 * largest,
        )


TOLERANCE = {
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


@every_norm
@pytest.mark.parametrize("feature_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_lower_precision_follow_float64(norm_class, feature_dtype, gain_dtype):
    torch.manual_seed(0)
    norm = make_norm(norm_class, 576, dtype=gain_dtype)
    features = torch.randn(12, 576).to(feature_dtype)
    upstream = torch.randn(12, 576).to(feature_dtype)

    actual_gradients = gradients(norm, norm, features, upstream)
    parameter_count = len(actual_gradients) - 1
    expected_dtypes = [feature_dtype] + [gain_dtype] * parameter_count
    assert [gradient.dtype for gradient in actual_gradients] == expected_dtypes

    if norm_class is modeling.GlobalWeightCompensatedRMSNorm:
        # It is computed in float32, then rounded.
        widest_step = max(torch.finfo(feature_dtype).eps, torch.finfo(gain_dtype).eps)
        tolerance = max(0.4 * widest_step, 1e-6)
    else:
        tolerance = max(TOLERANCE[feature_dtype], TOLERANCE[gain_dtype])

    float64_norm = copy.deepcopy(norm).double()
    expected_gradients = hook_form_gradients(float64_norm, features.double(), upstream.double())
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@every_norm
def test_gradients_under_autocast(norm_class):
    torch.manual_seed(0)
    norm = make_norm(norm_class, 64, dtype=torch.float32)
    linear = torch.nn.Linear(64, 64)
    features = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projected = linear(features)
        assert projected.dtype == torch.bfloat16
        projected.retain_grad()
        output = norm(projected)
        output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert norm.weight.grad.dtype == torch.float32

    float64_norm = copy.deepcopy(norm).double()
    leaf = projected.detach().double().requires_grad_()
    hook_form(float64_norm, leaf).square().sum().backward()
    difference = projected.grad.double() - leaf.grad
    assert difference.norm() <= 2e-2 * leaf.grad.norm()


def torch_norm(norm, features):
    """torch's own function on the same numbers; half precision goes through the gain's dtype."""
    computed_in = features.dtype
    if features.dtype in (torch.bfloat16, torch.float16):
        computed_in = norm.weight.dtype
    inputs = features.to(computed_in)

    if isinstance(norm, torch.nn.LayerNorm):
        output = F.layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    else:
        output = F.rms_norm(inputs, norm.normalized_shape, norm.weight, norm.eps)
    return output.to(features.dtype)


@every_norm
@pytest.mark.parametrize("compensate", [True, False])
@pytest.mark.parametrize(
    ("feature_dtype", "gain_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_is_torchs_bit_for_bit(
    norm_class,
    compensate,
    feature_dtype,
    gain_dtype,
    requires_grad,
):
    torch.manual_seed(0)
    norm = make_norm(
        norm_class,
        1152,
        dtype=gain_dtype,
        compensate=compensate,
    )
    features = torch.randn(9, 1152) * 40
    features = features.to(feature_dtype).requires_grad_(requires_grad)
    assert torch.equal(norm(features), torch_norm(norm, features))


@every_norm
def test_without_compensation_gradients_are_torchs_exactly(norm_class):
    torch.manual_seed(0)
    norm = make_norm(
        norm_class,
        576,
        dtype=torch.float32,
        compensate=False,
    )
    features = torch.randn(7, 576)
    upstream = torch.randn(7, 576)

    def torch_function(values):
        return torch_norm(norm, values)

    actual_gradients = gradients(norm, norm, features, upstream)
    expected_gradients = gradients(torch_function, norm, features, upstream)
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        assert torch.equal(actual, expected)


@every_norm
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiles_into_one_graph(norm_class, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    norm = make_norm(norm_class, 24, dtype=torch.float32)
    features = torch.randn(5, 24)
    upstream = torch.randn(5, 24)

    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(features), norm(features))

    actual_gradients = gradients(compiled, norm, features, upstream)
    expected_gradients = gradients(norm, norm, features, upstream)
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected)


several_gains = pytest.mark.parametrize("gain", [1e-5, 0.02, 7.0])


@every_norm
@several_gains
def test_gradients_are_true_in_evaluation_mode(norm_class, gain):
    """Against finite differences, for the input, gain and bias."""
    torch.manual_seed(0)
    norm = make_norm(norm_class, 16, gain).eval()
    features = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    parameter_names = [name for name, _ in norm.named_parameters()]

    def call(features, *values):
        parameters = dict(zip(parameter_names, values, strict=True))
        return torch.func.functional_call(norm, parameters, (features,))

    inputs = (features, *norm.parameters())
    assert torch.autograd.gradcheck(call, inputs, atol=1e-8)
    assert torch.autograd.gradgradcheck(call, inputs, atol=1e-8)


@every_norm
@several_gains
def test_gradients_in_training_are_true_ones_divided_by_the_mean_gain(norm_class, gain):
    torch.manual_seed(0)
    norm = make_norm(norm_class, 16, gain)
    features = torch.randn(3, 16, dtype=torch.float64)
    upstream = torch.ones_like(features)

    norm.train()
    in_training = gradients(norm, norm, features, upstream)[0]
    norm.eval()
    true_gradient = gradients(norm, norm, features, upstream)[0]
    torch.testing.assert_close(in_training, true_gradient / mean_absolute_gain(norm))


@pytest.fixture
def precision_warnings(caplog):
    """Sets the mode of a norm and returns what it then warns of."""

    def set_mode(norm, training=True) -> list[str]:
        modeling.logger.warning_once.cache_clear()
        caplog.clear()
        assert norm.train(training) is norm
        assert norm.training == training
        return [message for message in caplog.messages if "is trained in" in message]

    return set_mode


@every_norm
def test_a_gain_of_low_precision_is_warned_of_if_it_is_trained(norm_class, precision_warnings):
    for dtype in (torch.bfloat16, torch.float16):
        (warning,) = precision_warnings(norm_class(8).to(dtype))
        assert str(dtype) in warning
        assert not precision_warnings(norm_class(8).to(dtype), training=False)
        frozen_norm = norm_class(8).to(dtype).requires_grad_(False)
        assert not precision_warnings(frozen_norm)


@every_norm
def test_a_gain_of_full_precision_is_not_warned_of(norm_class, precision_warnings):
    assert not precision_warnings(norm_class(8))
    assert not precision_warnings(norm_class(8).double())
