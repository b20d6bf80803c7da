"""Claims about sLSTM; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

from subquad.kernels.slstm import empty_state, slstm
from subquad.kernels.slstm.reference import slstm_reference
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEP = ("recurrent", "bias", "initial_state")
TORCH = partial(slstm, return_final_state=True, backend="torch")
TRITON = partial(slstm, return_final_state=True, backend="triton")


def make_inputs(batch, length, heads, width, *, initial_state=True):
    g = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "x": randn(batch, length, 4, heads, width),
        "recurrent": randn(4, heads, width, width) / width**0.5,
        "bias": randn(4, heads, width),
    }
    if initial_state:
        n = 1 + torch.rand(batch, heads, width, generator=g, dtype=torch.float64)
        h, c, m = randn(3, batch, heads, width).unbind(0)
        inputs["initial_state"] = torch.stack([torch.tanh(h), c, n, m], 1)
    return inputs


def test_the_recurrence_is_that_of_the_paper():
    """Equations 8 to 14 of the paper, without a stabiliser and one channel at a time."""
    inputs = make_inputs(1, 6, 2, 3, initial_state=False)
    r, x = inputs["recurrent"], inputs["x"] + inputs["bias"]
    expected, _ = slstm_reference(**inputs)
    h = torch.zeros(2, 3, dtype=torch.float64)
    c, n = torch.zeros_like(h), torch.zeros_like(h)
    for t in range(6):
        last = h.clone()
        for head in range(2):
            for k in range(3):
                i, f, z, o = (x[0, t, gate, head, k] + last[head] @ r[gate, head, :, k] for gate in range(4))
                c[head, k] = torch.sigmoid(f) * c[head, k] + torch.exp(i) * torch.tanh(z)
                n[head, k] = torch.sigmoid(f) * n[head, k] + torch.exp(i)
                h[head, k] = torch.sigmoid(o) * c[head, k] / n[head, k]
        torch.testing.assert_close(expected[0, t], h)


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_gates_of_any_size_stay_finite(scale):
    inputs = {name: x.float() for name, x in make_inputs(2, 30, 2, 4, initial_state=False).items()}
    inputs["x"] = (scale * inputs["x"]).requires_grad_()
    y = slstm(**inputs)
    (gradient,) = torch.autograd.grad(y.sum(), inputs["x"])
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()
    # a weighted mean of hyperbolic tangents, times a sigmoid
    assert y.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_closed_input_gate_and_an_open_forget_gate_change_nothing(backend):
    """Padding in front of a row is written so."""
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs(2, 4, 2, 3, initial_state=False)
    inputs = {name: value.to(DEVICE, torch.float32) for name, value in inputs.items()}
    padded = torch.cat([inputs["x"][:, :3], inputs["x"]], 1)
    padded[:, :3, 0], padded[:, :3, 1] = -torch.inf, torch.inf
    for start in (None, empty_state(2, 2, 3, device=DEVICE)):
        y, final = TORCH(**(inputs | {"x": padded}), initial_state=start, backend=backend)
        expected = slstm(**inputs, return_final_state=True, backend=backend)
        assert not y[:, :3].any()
        torch.testing.assert_close((y[:, 3:], final), expected)


def test_the_gradient_of_the_matrices_is_a_sum_over_chunks(monkeypatch):
    """153 positions in chunks of 64, which begin and end within a row."""
    triton = pytest.importorskip("subquad.kernels.slstm.triton", reason="needs triton")
    monkeypatch.setattr(triton, "CHUNK", 64)
    assert_matches_reference(TRITON, slstm_reference, make_inputs(17, 9, 2, 5), keep=KEEP, device=DEVICE)
