"""Claims about forget gates; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.forget_gate.reference import forget_gate_reference
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"plain": {}, "damped": {"damping": 16.0}, "first": {"layer": 1}, "last": {"layer": 4}}


def make_inputs(*size, bounded):
    g = torch.Generator().manual_seed(size[-1])
    x = 4 * torch.randn(*size, generator=g, dtype=torch.float64) - 2
    return {"x": x} | ({"logits": torch.randn(5, size[-1], generator=g, dtype=torch.float64)} if bounded else {})


@pytest.mark.parametrize("size", [(5, 7), (3, 70, 40), (2, 300)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_are_those_of_the_equations(backend, dtype, options, size):
    given = OPTIONS[options]
    op, reference = partial(forget_gate, backend=backend, **given), partial(forget_gate_reference, **given)
    inputs = make_inputs(*size, bounded="layer" in given)
    keep = ("x", "logits") if dtype == torch.float32 else ("logits",)
    assert_matches_reference(
        op, reference, inputs, dtype=dtype, keep=keep, device=DEVICE, grad=backend == "torch" and dtype == torch.float32
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_neither_a_nor_its_complement_rounds_to_zero(backend):
    x = torch.tensor([[-80.0, -20.0, -1e-3, 1e-3, 20.0, 80.0]], device=DEVICE)
    log_a, rest = forget_gate(x, damping=8.0, backend=backend)
    exact = forget_gate_reference(x.double(), damping=8.0)
    torch.testing.assert_close(log_a.double(), exact[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(rest.double(), exact[1], rtol=1e-6, atol=0.0)
