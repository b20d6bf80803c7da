"""Claims about WKV; the accuracy rule is that of `suite.laws.accuracy`."""

import pytest
import torch

from subquad.kernels.wkv import empty_state, wkv
from subquad.kernels.wkv.reference import wkv_reference
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEP = ("log_decay", "bonus", "initial_state")
SEGMENTS = {"steps": 2, "min_segment": 1, "busy_warps": 100_000}


def make_inputs(batch, length, width, *, initial_state=True):
    g = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "k": 2 * randn(batch, length, width),
        "v": randn(batch, length, width),
        "log_decay": -torch.exp(randn(width) - 1),
        "bonus": randn(width),
    }
    if initial_state:
        inputs["initial_state"] = torch.stack(
            [randn(batch, width), 1 + torch.rand(batch, width, generator=g), randn(batch, width)], 1
        )
    return inputs


def kernel(**changes):
    impl = pytest.importorskip("subquad.kernels.wkv.triton")
    tuning = impl.Tuning(**{"steps": 4, **changes})

    def op(initial_state=None, **inputs):
        return impl.wkv_triton(**inputs, initial_state=initial_state, return_final_state=True, tuning=tuning)

    return op


def test_the_recurrence_is_the_weighted_mean():
    """The sums of the paper's equation 16, written out."""
    inputs = make_inputs(1, 6, 3, initial_state=False)
    k, v, w, u = (inputs[name] for name in ("k", "v", "log_decay", "bonus"))
    for t in range(6):
        lags = torch.arange(t - 1, -1, -1, dtype=torch.float64)[:, None]
        weights = torch.cat([(lags * w + k[0, :t]).exp(), (u + k[0, t]).exp()[None]])
        expected = (weights * v[0, : t + 1]).sum(0) / weights.sum(0)
        torch.testing.assert_close(wkv(**inputs)[0, t], expected)


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_keys_of_any_size_neither_overflow_nor_vanish(scale):
    inputs = {name: x.float() for name, x in make_inputs(2, 50, 4, initial_state=False).items()}
    inputs["k"] = (scale * inputs["k"]).requires_grad_()
    y = wkv(**inputs)
    (gradient,) = torch.autograd.grad(y.sum(), inputs["k"])
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()
    assert y.abs().max() <= inputs["v"].abs().max() * (1 + 1e-6)


@pytest.mark.parametrize(
    ("length", "dtype", "changes"),
    [
        (5, torch.float32, SEGMENTS),
        (5, torch.bfloat16, {}),
        pytest.param(1, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(23, torch.float32, SEGMENTS, marks=pytest.mark.slow),
        pytest.param(23, torch.bfloat16, SEGMENTS, marks=pytest.mark.slow),
        pytest.param(65, torch.float16, {}, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_the_recurrence(length, dtype, changes):
    op, inputs = kernel(**changes), make_inputs(2, length, 5)
    assert_matches_reference(op, wkv_reference, inputs, dtype=dtype, keep=KEEP, device=DEVICE)


def test_roundings_of_a_scale_do_not_add_up_over_every_step():
    """Nothing is written behind the first key, so that its scale decays 400 times; it stays between 2 and 4."""
    length, width, steps = 401, 16, 8
    k, v = torch.full((1, length, width), -1e4, device=DEVICE), torch.zeros(1, length, width, device=DEVICE)
    k[:, 0] = 4
    w = -torch.linspace(1, 2, width, device=DEVICE) / length
    _, state = kernel(steps=steps, min_segment=length)(k=k, v=v, log_decay=w, bonus=torch.zeros_like(w))
    error = (state[0, 2].double() - (4 + (length - 1) * w.double())).abs().max()
    # half of the last digit, once for `steps` steps, and in the groups of the first key and of the last step
    assert error <= (length / steps + 2 * steps) * 2**-23


def test_the_empty_state_changes_nothing():
    inputs = make_inputs(2, 8, 5, initial_state=False)
    state = empty_state(2, 5, dtype=torch.float64)
    assert torch.equal(wkv(**inputs, initial_state=state), wkv(**inputs))
