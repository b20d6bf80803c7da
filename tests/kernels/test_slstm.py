"""Claims about sLSTM; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

from kernels.slstm import empty_state, slstm, slstm_step
from kernels.slstm.reference import slstm_reference
from suite.laws.accuracy import assert_close, assert_matches_reference

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_pytorch_equals_the_recurrence(dtype):
    assert_matches_reference(TORCH, slstm_reference, make_inputs(2, 20, 2, 5), dtype=dtype, keep=KEEP)


def test_gradients_agree_with_finite_differences():
    inputs = make_inputs(2, 5, 2, 2)
    state = inputs.pop("initial_state")
    names, leaves = list(inputs), [x.requires_grad_() for x in inputs.values()]

    def outputs(sums, *tensors):
        # the scale of a state is a constant
        arguments = dict(zip(names, tensors, strict=True))
        return slstm_reference(**arguments, initial_state=torch.cat([sums, state[:, 3:]], 1))[0]

    assert torch.autograd.gradcheck(outputs, (state[:, :3].clone().requires_grad_(), *leaves))


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


@pytest.mark.parametrize("split", [1, 7])
def test_passing_the_state_equals_the_whole(split):
    inputs = make_inputs(2, 9, 2, 3)
    x, state = inputs["x"], inputs["initial_state"]
    whole, final = slstm(**inputs, return_final_state=True)
    weights = inputs["recurrent"], inputs["bias"]
    first, state = slstm(x[:, :split], *weights, initial_state=state, return_final_state=True)
    second, state = slstm(x[:, split:], *weights, initial_state=state, return_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_steps_equal_the_whole(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs(3, 6, 2, 5)
    exact, final = slstm_reference(**inputs)
    inputs = {name: value.to(DEVICE, torch.float32) for name, value in inputs.items()}
    # the state is updated in place and may have strides of its own
    state = inputs.pop("initial_state").transpose(1, 3).contiguous().transpose(1, 3)
    for t in range(6):
        y = slstm_step(inputs["x"][:, t], inputs["recurrent"], inputs["bias"], state, backend=backend)
        assert_close(y, exact[:, t], torch.float32, plain=exact[:, t].float(), what=f"step {t}")
    assert_close(state, final, torch.float32)


def test_future_inputs_cannot_change_the_past():
    inputs = make_inputs(2, 12, 2, 3)
    whole = slstm(**inputs)
    changed = inputs["x"].clone()
    changed[:, 8:] += 1
    y = slstm(**(inputs | {"x": changed}))
    assert torch.equal(y[:, :8], whole[:, :8])
    assert not torch.equal(y[:, 8:], whole[:, 8:])


def test_heads_do_not_mix():
    inputs = make_inputs(2, 8, 2, 3, initial_state=False)
    changed = inputs["x"].clone()
    changed[:, :, :, 1] += 1
    y, other = slstm(**inputs), slstm(**(inputs | {"x": changed}))
    assert torch.equal(y[:, :, 0], other[:, :, 0])
    assert not torch.equal(y[:, :, 1], other[:, :, 1])


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


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((3, 5, 2, 7), torch.float32),
        ((3, 5, 2, 7), torch.bfloat16),
        pytest.param((1, 1, 1, 16), torch.float32, marks=pytest.mark.slow),
        pytest.param((17, 9, 2, 20), torch.float32, marks=pytest.mark.slow),
        pytest.param((17, 9, 1, 33), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((2, 9, 1, 16), torch.float16, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_the_recurrence(sizes, dtype):
    pytest.importorskip("triton")
    for initial_state in (True, False):
        inputs = make_inputs(*sizes, initial_state=initial_state)
        assert_matches_reference(TRITON, slstm_reference, inputs, dtype=dtype, keep=KEEP, device=DEVICE)


def test_the_gradient_of_the_matrices_is_a_sum_over_chunks(monkeypatch):
    """153 positions in chunks of 64, which begin and end within a row."""
    triton = pytest.importorskip("kernels.slstm.triton", reason="needs triton")
    monkeypatch.setattr(triton, "CHUNK", 64)
    assert_matches_reference(TRITON, slstm_reference, make_inputs(17, 9, 2, 5), keep=KEEP, device=DEVICE)


def test_the_kernel_takes_any_view():
    pytest.importorskip("triton")

    def on_views(x, recurrent):
        return TRITON(x=x.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0), recurrent=recurrent.mT.clone().mT)

    inputs = make_inputs(2, 4, 2, 5, initial_state=False)
    del inputs["bias"]
    assert_matches_reference(on_views, slstm_reference, inputs, keep=KEEP, device=DEVICE)


def test_wrong_arguments_are_named():
    inputs = make_inputs(2, 8, 2, 5)
    with pytest.raises(ValueError, match=r"slstm: recurrent must be \[4, 2, 5, 5\] to go with x, got \[4, 2, 5, 4\]"):
        slstm(**(inputs | {"recurrent": torch.zeros(4, 2, 5, 4)}))
    with pytest.raises(ValueError, match=r"slstm: bias must be \[4, 2, 5\] to go with x, got \[4, 10\]"):
        slstm(**(inputs | {"bias": torch.zeros(4, 10)}))
    with pytest.raises(ValueError, match=r"slstm: initial_state must be \[2, 4, 2, 5\]"):
        slstm(**(inputs | {"initial_state": torch.zeros(2, 3, 2, 5)}))
    with pytest.raises(ValueError, match=r"slstm: x must be \[batch, length >= 1, 4, heads, K\]"):
        slstm(inputs["x"][:, :0], inputs["recurrent"])
    with pytest.raises(ValueError, match=r"slstm_step: state must be \[2, 4, 2, 5\]"):
        slstm_step(inputs["x"][:, 0], inputs["recurrent"], None, torch.zeros(2, 3, 2, 5))
    with pytest.raises(ValueError, match=r"got torch.float64; use backend="):
        slstm(**inputs, backend="triton")
    with pytest.raises(ValueError, match=r"takes K up to 64, got K=65"):
        slstm(torch.zeros(1, 2, 4, 1, 65), torch.zeros(4, 1, 65, 65), backend="triton")
