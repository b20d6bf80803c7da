"""Claims about forget gates; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.forget_gate.reference import forget_gate_reference
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"plain": {}, "damped": {"damping": 16.0}, "rated": {}, "first": {"layer": 1}, "last": {"layer": 4}}


def make_inputs(*size, options):
    g = torch.Generator().manual_seed(size[-1])
    inputs = {"x": 4 * torch.randn(*size, generator=g, dtype=torch.float64) - 2}
    if "layer" in OPTIONS[options]:
        inputs["logits"] = torch.randn(5, size[-1], generator=g, dtype=torch.float64)
    if options == "rated":
        heads = next(n for n in (5, 7, 1) if size[-1] % n == 0)
        inputs["bias"] = torch.randn(size[-1], generator=g, dtype=torch.float64)
        inputs["log_rate"] = torch.rand(heads, generator=g, dtype=torch.float64) - 0.5
    return inputs


@pytest.mark.parametrize("size", [(5, 7), (3, 70, 40), (2, 300)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_are_those_of_the_equations(backend, dtype, options, size):
    given = OPTIONS[options]
    op, reference = partial(forget_gate, backend=backend, **given), partial(forget_gate_reference, **given)
    keep = ("x",) if dtype == torch.float32 else ()
    keep = (*keep, "logits", "bias", "log_rate")
    assert_matches_reference(op, reference, make_inputs(*size, options=options), dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_neither_a_nor_its_complement_rounds_to_zero(backend):
    x = torch.tensor([[-80.0, -20.0, -1e-3, 1e-3, 20.0, 80.0]], device=DEVICE)
    log_a, rest = forget_gate(x, damping=8.0, backend=backend)
    exact = forget_gate_reference(x.double(), damping=8.0)
    torch.testing.assert_close(log_a.double(), exact[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(rest.double(), exact[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_rate_without_bound_has_finite_gradients(backend):
    x, bias = (torch.randn(*size, device=DEVICE, requires_grad=True) for size in ((3, 4), (4,)))
    log_rate = torch.tensor([1e3, 0.0], device=DEVICE, requires_grad=True)
    log_a, _ = forget_gate(x, bias=bias, log_rate=log_rate, complement=False, backend=backend)
    assert (log_a[:, :2] < -1e30).all()
    gradients = torch.autograd.grad(log_a.exp().sum(), [x, bias, log_rate])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[2][0] == 0 != gradients[2][1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bound_of_e_to_the_minus_70_has_exact_gradients(backend):
    """The README promises exact gradients for bounds down to this one."""
    x, logits = torch.full((2, 3), -70.0), torch.tensor([[70.0] * 3, [0.0] * 3, [0.0] * 3])
    found, gradients = [], []
    for op, dtype in ((partial(forget_gate, backend=backend), torch.float32), (forget_gate_reference, torch.float64)):
        leaves = [m.to(DEVICE, dtype, copy=True).requires_grad_() for m in (x, logits)]
        log_a, _ = op(*leaves, layer=1)
        found.append(log_a.double())
        gradients.append([m.double() for m in torch.autograd.grad(1e5 * log_a.sum(), leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1.0)
