"""The norm against its references: torch's functions forward, the paper's hook form backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune

from normalign_llava import modeling_normalign_llava as modeling


NORMS = [modeling.GlobalWeightCompensatedLayerNorm, modeling.GlobalWeightCompensatedRMSNorm]


def make_norm(cls, d, gain=0.0134, dtype=torch.float64, mixed_signs=False, **kwargs):
    norm = cls(d, **kwargs).to(dtype)
    with torch.no_grad():
        values = torch.randn(d, dtype=torch.float64) * 0.3 + 1.0
        values = values * torch.randn(d).sign() if mixed_signs else values
        norm.weight.copy_(values * gain)
        if issubclass(cls, torch.nn.LayerNorm):
            norm.bias.normal_()
    return norm


def hook_form(norm, x, floor):
    """The paper's form: normalise, scale the gradient at x_hat in a hook, apply gain and bias."""
    if isinstance(norm, torch.nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x_hat = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    s = max(norm.weight.detach().abs().mean().item(), floor)
    if x_hat.requires_grad:
        x_hat.register_hook(lambda grad: grad / s)
    return norm.weight * x_hat + (norm.bias if isinstance(norm, torch.nn.LayerNorm) else 0.0)


def gradients(function, norm, x, upstream):
    x = x.detach().requires_grad_()
    norm.zero_grad()
    (function(x) * upstream).sum().backward()
    return [x.grad, *(p.grad for p in norm.parameters())]


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("shape", [(2, 6, 1), (2, 576), (5, 16), (2, 3, 5, 16), (2, 0, 16), (16,)])
@pytest.mark.parametrize("gain", [1e-5, 0.0134, 7.0])
@pytest.mark.parametrize("mixed_signs", [False, True])
def test_gradients_equal_the_hook_form_in_float64(cls, shape, gain, mixed_signs):
    torch.manual_seed(0)
    norm = make_norm(cls, shape[-1], gain, mixed_signs=mixed_signs)
    x = torch.randn(shape, dtype=torch.float64)
    upstream = torch.randn(shape, dtype=torch.float64)
    ours = gradients(norm, norm, x, upstream)
    paper = gradients(lambda v: hook_form(norm, v, 1e-3), norm, x, upstream)
    for got, expected in zip(ours, paper, strict=True):
        assert got.shape == expected.shape
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10 * max(1.0, largest))


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_lower_precision_follow_float64(cls, x_dtype, gain_dtype):
    torch.manual_seed(0)
    norm = make_norm(cls, 576, dtype=gain_dtype)
    x = torch.randn(12, 576).to(x_dtype)
    upstream = torch.randn(12, 576).to(x_dtype)
    ours = gradients(norm, norm, x, upstream)
    assert [g.dtype for g in ours] == [x_dtype] + [gain_dtype] * (len(ours) - 1)
    wide = copy.deepcopy(norm).double()
    expected = gradients(lambda v: hook_form(wide, v, 1e-3), wide, x.double(), upstream.double())
    tolerance = max(TOLERANCE[x_dtype], TOLERANCE[gain_dtype])
    if cls is modeling.GlobalWeightCompensatedRMSNorm:  # computed in float32, then rounded
        widest_step = max(torch.finfo(dtype).eps for dtype in (x_dtype, gain_dtype))
        tolerance = max(0.4 * widest_step, 1e-6)
    for got, reference in zip(ours, expected, strict=True):
        assert (got.double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("cls", NORMS)
def test_gradients_under_autocast(cls):
    torch.manual_seed(0)
    norm = make_norm(cls, 64, dtype=torch.float32)
    linear = torch.nn.Linear(64, 64)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projected = linear(x)
        assert projected.dtype == torch.bfloat16
        projected.retain_grad()
        out = norm(projected)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    wide = copy.deepcopy(norm).double()
    leaf = projected.detach().double().requires_grad_()
    hook_form(wide, leaf, 1e-3).square().sum().backward()
    assert (projected.grad.double() - leaf.grad).norm() <= 2e-2 * leaf.grad.norm()


DTYPES = [(dtype, dtype) for dtype in (torch.float64, *TOLERANCE)]
DTYPES += [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]


def plain(norm, x):
    """torch's own function on the same numbers; half precision goes through the gain's dtype."""
    wide = x.to(norm.weight.dtype if x.dtype in (torch.bfloat16, torch.float16) else x.dtype)
    shape = norm.normalized_shape
    gain = norm.weight
    if isinstance(norm, torch.nn.LayerNorm):
        return F.layer_norm(wide, shape, gain, norm.bias, norm.eps).to(x.dtype)
    return F.rms_norm(wide, shape, gain, norm.eps).to(x.dtype)


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("compensate", [True, False])
@pytest.mark.parametrize("x_dtype, gain_dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_is_torchs_bit_for_bit(cls, compensate, x_dtype, gain_dtype, requires_grad):
    torch.manual_seed(0)
    norm = make_norm(cls, 1152, dtype=gain_dtype, compensate=compensate)
    x = (torch.randn(9, 1152) * 40).to(x_dtype).requires_grad_(requires_grad)
    assert torch.equal(norm(x), plain(norm, x))


@pytest.mark.parametrize("cls", NORMS)
def test_without_compensation_gradients_are_torchs_exactly(cls):
    torch.manual_seed(0)
    norm = make_norm(cls, 576, dtype=torch.float32, compensate=False)
    x = torch.randn(7, 576)
    upstream = torch.randn(7, 576)
    ours = gradients(norm, norm, x, upstream)
    expected = gradients(lambda v: plain(norm, v), norm, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_compiles_into_one_graph(cls, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    norm = make_norm(cls, 24, dtype=torch.float32)
    x = torch.randn(5, 24)
    upstream = torch.randn(5, 24)
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), norm(x))
    ours = gradients(compiled, norm, x, upstream)
    for got, reference in zip(ours, gradients(norm, norm, x, upstream), strict=True):
        torch.testing.assert_close(got, reference)


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize("gain", [1e-5, 0.02, 7.0])
def test_gradients_are_true_in_evaluation_mode(cls, gain):
    """Against finite differences, for the input, gain and bias."""
    torch.manual_seed(0)
    norm = make_norm(cls, 16, gain).eval()
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in norm.named_parameters()]

    def call(x, *values):
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *norm.parameters()), atol=1e-8)
    assert torch.autograd.gradgradcheck(call, (x, *norm.parameters()), atol=1e-8)
    in_training = gradients(norm.train(), norm, x, torch.ones_like(x))[0]
    true = gradients(norm.eval(), norm, x, torch.ones_like(x))[0]
    s = max(norm.weight.detach().abs().mean().item(), 1e-3)
    torch.testing.assert_close(in_training, true / s)


@pytest.mark.parametrize("cls", NORMS)
def test_a_gain_of_low_precision_is_told_of_if_it_is_trained(cls, caplog):
    def told(norm, mode=True):
        modeling.logger.warning_once.cache_clear()
        caplog.clear()
        assert norm.train(mode) is norm and norm.training == mode
        return [text for text in caplog.messages if "is trained in" in text]

    for dtype in (torch.bfloat16, torch.float16):
        (line,) = told(cls(8).to(dtype))
        assert str(dtype) in line
        assert not told(cls(8).to(dtype), mode=False)
        assert not told(cls(8).to(dtype).requires_grad_(False))
    assert not told(cls(8)) and not told(cls(8).double())
