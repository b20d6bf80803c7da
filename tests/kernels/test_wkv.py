"""Claims about WKV; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

from kernels.wkv import empty_state, wkv, wkv_step
from kernels.wkv.chunked import wkv_chunked
from kernels.wkv.reference import wkv_reference
from suite.laws.accuracy import assert_close, assert_matches_reference

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
    impl = pytest.importorskip("kernels.wkv.triton")
    tuning = impl.Tuning(**{"steps": 4, **changes})

    def op(initial_state=None, **inputs):
        return impl.wkv_triton(**inputs, initial_state=initial_state, return_final_state=True, tuning=tuning)

    return op


def single(inputs):
    """Tensors in float32 on the device."""
    return {name: value.to(DEVICE, torch.float32) for name, value in inputs.items()}


@pytest.mark.parametrize("length", [1, 2, 9, 63, 64, 65, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_equal_the_recurrence(length, dtype):
    assert_matches_reference(wkv_chunked, wkv_reference, make_inputs(2, length, 5), dtype=dtype, keep=KEEP)


def test_without_a_state_equals_the_recurrence():
    inputs = make_inputs(2, 40, 5, initial_state=False)
    assert_matches_reference(partial(wkv, return_final_state=True), wkv_reference, inputs)


def test_the_recurrence_is_the_weighted_mean():
    """The sums of the paper's equation 16, written out."""
    inputs = make_inputs(1, 6, 3, initial_state=False)
    k, v, w, u = (inputs[name] for name in ("k", "v", "log_decay", "bonus"))
    for t in range(6):
        lags = torch.arange(t - 1, -1, -1, dtype=torch.float64)[:, None]
        weights = torch.cat([(lags * w + k[0, :t]).exp(), (u + k[0, t]).exp()[None]])
        expected = (weights * v[0, : t + 1]).sum(0) / weights.sum(0)
        torch.testing.assert_close(wkv(**inputs)[0, t], expected)


@pytest.mark.parametrize("op", [wkv_reference, wkv_chunked])
def test_gradients_agree_with_finite_differences(op):
    inputs = make_inputs(2, 7, 2)
    state = inputs.pop("initial_state")
    names, leaves = list(inputs), [x.requires_grad_() for x in inputs.values()]

    def y(sums, *tensors):
        # the scale of a state is a constant
        arguments = dict(zip(names, tensors, strict=True))
        return op(**arguments, initial_state=torch.cat([sums, state[:, 2:]], 1))[0]

    assert torch.autograd.gradcheck(y, (state[:, :2].clone().requires_grad_(), *leaves))


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_keys_of_any_size_neither_overflow_nor_vanish(scale):
    inputs = {name: x.float() for name, x in make_inputs(2, 50, 4, initial_state=False).items()}
    inputs["k"] = (scale * inputs["k"]).requires_grad_()
    y = wkv(**inputs)
    (gradient,) = torch.autograd.grad(y.sum(), inputs["k"])
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()
    assert y.abs().max() <= inputs["v"].abs().max() * (1 + 1e-6)


@pytest.mark.parametrize("split", [1, 40, 64])
def test_passing_the_state_equals_the_whole(split):
    inputs = make_inputs(2, 65, 5)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    whole, final = wkv(**leaves, return_final_state=True)
    rest = {name: leaves[name] for name in ("log_decay", "bonus")}
    y_first, state = wkv(
        leaves["k"][:, :split], leaves["v"][:, :split], **rest, initial_state=leaves["initial_state"],
        return_final_state=True,
    )  # fmt: skip
    y_second, state = wkv(
        leaves["k"][:, split:], leaves["v"][:, split:], **rest, initial_state=state, return_final_state=True
    )
    y = torch.cat([y_first, y_second], 1)
    torch.testing.assert_close(y, whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)
    tensors = list(leaves.values())
    gradients = [torch.autograd.grad(m.square().sum(), tensors) for m in (y, whole)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_steps_equal_the_whole(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs(3, 8, 40)
    exact, final = wkv_reference(**inputs)
    inputs = single(inputs)
    # the state is updated in place and may have strides of its own
    state = inputs.pop("initial_state").transpose(1, 2).contiguous().transpose(1, 2)
    k, v = inputs.pop("k"), inputs.pop("v")
    for t in range(8):
        y = wkv_step(k[:, t], v[:, t], **inputs, state=state, backend=backend)
        assert_close(y, exact[:, t], torch.float32, plain=exact[:, t].float(), what=f"step {t}")
    assert_close(state, final, torch.float32)


def test_future_inputs_cannot_change_the_past():
    inputs = make_inputs(2, 70, 5)
    whole = wkv(**inputs)
    for name in ("k", "v"):
        changed = inputs[name].clone()
        changed[:, 50:] += 1
        y = wkv(**(inputs | {name: changed}))
        assert torch.equal(y[:, :50], whole[:, :50])
        assert not torch.equal(y[:, 50:], whole[:, 50:])


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


@pytest.mark.slow
def test_the_kernel_takes_any_view():
    op = kernel()

    def on_views(k, v, **rest):
        k, v = torch.cat([k, v], -1).chunk(2, -1)
        return op(k=k.transpose(1, 2).contiguous().transpose(1, 2), v=v, **rest)

    inputs = make_inputs(2, 7, 5, initial_state=False)
    assert_matches_reference(on_views, wkv_reference, inputs, keep=KEEP, device=DEVICE)


def test_wrong_arguments_are_named():
    inputs = make_inputs(2, 8, 5)
    with pytest.raises(ValueError, match=r"wkv: bonus must be \[5\] to go with k, got \[4\]"):
        wkv(**(inputs | {"bonus": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"wkv: initial_state must be \[2, 3, 5\]"):
        wkv(**(inputs | {"initial_state": torch.zeros(2, 5)}))
    with pytest.raises(ValueError, match=r"wkv: k must be \[batch, length, width\] with length >= 1"):
        wkv(inputs["k"][:, :0], inputs["v"][:, :0], inputs["log_decay"], inputs["bonus"])
    with pytest.raises(ValueError, match=r"wkv_step: state must be \[2, 3, 5\]"):
        wkv_step(inputs["k"][:, 0], inputs["v"][:, 0], inputs["log_decay"], inputs["bonus"], torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"got torch.float64; use backend="):
        wkv(**inputs, backend="triton")


def test_the_empty_state_changes_nothing():
    inputs = make_inputs(2, 8, 5, initial_state=False)
    state = empty_state(2, 5, dtype=torch.float64)
    assert torch.equal(wkv(**inputs, initial_state=state), wkv(**inputs))
