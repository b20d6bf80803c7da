"""Claims about the selective scan; the accuracy rule is that of `suite.accuracy`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernels.selective_scan.chunked as chunked
from kernels.selective_scan import selective_scan, selective_scan_step
from kernels.selective_scan.reference import selective_scan_reference
from suite.accuracy import assert_matches_reference

LENGTHS = (1, 2, 63, 64, 65, 500)
WIDE = ("A", "D", "dt_bias", "initial_state")


def make_inputs(batch, length, width, state, *, complex_=False, constant=False, extras=True, initial_state=True):
    g = torch.Generator().manual_seed(length + 7 * state)
    real, kind = torch.float64, torch.complex128 if complex_ else torch.float64

    def randn(*shape, dtype=real):
        return torch.randn(*shape, generator=g, dtype=dtype)

    A = -0.1 - torch.rand(width, state, generator=g, dtype=real)
    maps = (width, state) if constant else (batch, length, state)
    inputs = {
        "x": randn(batch, length, width),
        "dt": randn(batch, length, width),
        "A": torch.complex(A, randn(width, state)) if complex_ else A,
        "B": randn(*maps, dtype=kind),
        "C": randn(*maps, dtype=kind) / state**0.5,
        "dt_softplus": True,
    }
    if extras:
        inputs |= {"D": randn(width), "z": randn(batch, length, width) + 1, "dt_bias": randn(width) - 1}
    if initial_state:
        inputs["initial_state"] = randn(batch, width, state, dtype=kind)
    return inputs


@pytest.fixture(params=["host", "device"])
def schedule(request, monkeypatch):
    """The host's schedule in small segments, and the accelerator's: several segments of several blocks."""
    if request.param == "host":
        monkeypatch.setattr(chunked, "_segments", lambda length, numbers, on_host: (min(length, 23), min(length, 23)))
    else:
        original = chunked._segments
        monkeypatch.setattr(chunked, "_SEGMENT_NUMBERS_DEVICE", 1 << 12)
        monkeypatch.setattr(chunked, "_segments", lambda length, numbers, on_host: original(length, numbers, False))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_and_blocks_equal_the_recurrence(length, dtype, schedule):
    inputs = make_inputs(2, length, 6, 5)
    assert_matches_reference(
        partial(selective_scan, return_final_state=True), selective_scan_reference, inputs, dtype=dtype, keep=WIDE
    )


@pytest.mark.parametrize("length", [1, 65, 200])
@pytest.mark.parametrize(("complex_", "constant"), [(True, False), (True, True), (False, True)])
def test_complex_and_constant_maps_equal_the_recurrence(length, complex_, constant, schedule):
    inputs = make_inputs(2, length, 6, 5, complex_=complex_, constant=constant, extras=False)
    assert_matches_reference(partial(selective_scan, return_final_state=True), selective_scan_reference, inputs)


def test_without_options_equals_the_recurrence():
    inputs = make_inputs(2, 40, 6, 5, extras=False, initial_state=False)
    assert_matches_reference(partial(selective_scan, return_final_state=True), selective_scan_reference, inputs)


@pytest.mark.parametrize("complex_", [False, True])
def test_gradients_agree_with_finite_differences(complex_, schedule):
    inputs = make_inputs(1, 25, 2, 2, complex_=complex_)
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    leaves = [inputs[name].requires_grad_() for name in names]

    def op(function, *tensors):
        arguments = dict(zip(names, tensors, strict=True))
        return function(**arguments, dt_softplus=True)

    assert torch.autograd.gradcheck(partial(op, partial(selective_scan, return_final_state=True)), leaves)
    if not complex_:
        assert torch.autograd.gradcheck(partial(op, selective_scan_reference), leaves)


@pytest.mark.parametrize("split", [1, 40, 64])
def test_passing_the_state_equals_the_whole(split, schedule):
    inputs = make_inputs(2, 65, 6, 5)
    whole, final = selective_scan(**inputs, return_final_state=True)
    in_time = ("x", "dt", "B", "C", "z")
    first = {name: value[:, :split] if name in in_time else value for name, value in inputs.items()}
    second = {name: value[:, split:] if name in in_time else value for name, value in inputs.items()}
    y_first, state = selective_scan(**first, return_final_state=True)
    y_second, state = selective_scan(**(second | {"initial_state": state}), return_final_state=True)
    torch.testing.assert_close(torch.cat([y_first, y_second], 1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("constant", [False, True])
def test_steps_equal_the_whole(constant):
    inputs = make_inputs(3, 20, 6, 5, constant=constant)
    whole, final = selective_scan(**inputs, return_final_state=True)
    state = inputs["initial_state"].clone()
    for t in range(20):
        in_time = {name: inputs[name][:, t] for name in ("x", "dt", "z")}
        maps = {name: inputs[name][None] if constant else inputs[name][:, t] for name in ("B", "C")}
        rest = {name: inputs[name] for name in ("A", "D", "dt_bias", "dt_softplus")}
        y = selective_scan_step(**in_time, **maps, **rest, state=state)
        torch.testing.assert_close(y, whole[:, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_future_inputs_cannot_change_the_past(schedule):
    inputs = make_inputs(2, 70, 6, 5)
    whole = selective_scan(**inputs)
    for name in ("x", "dt", "B", "C", "z"):
        changed = inputs[name].clone()
        changed[:, 50:] += 1
        y = selective_scan(**(inputs | {name: changed}))
        assert torch.equal(y[:, :50], whole[:, :50])
        assert not torch.equal(y[:, 50:], whole[:, 50:])


def test_forgetting_everything_at_once_neither_overflows_nor_loses_the_present(schedule):
    inputs = make_inputs(1, 80, 4, 3, extras=False)
    inputs = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()} | {"dt_softplus": False}
    inputs["dt"] = torch.full_like(inputs["x"], 1e4).requires_grad_()
    y = selective_scan(**inputs)
    expected = inputs["dt"] * inputs["x"] * (inputs["B"] * inputs["C"]).sum(-1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-2)
    y.sum().backward()
    assert torch.isfinite(inputs["dt"].grad).all()


def test_backward_keeps_far_less_than_the_states_of_all_times():
    batch, length, width, state = 4, 512, 64, 16
    x, dt = torch.randn(2, batch, length, width, requires_grad=True).unbind(0)
    B, C = torch.randn(2, batch, length, state).unbind(0)
    A = -torch.rand(width, state).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selective_scan(x, dt, A, B, C, dt_softplus=True)
    assert 0 < sum(kept.values()) < batch * length * width * state / 2


def test_states_and_decays_stay_float32_under_autocast():
    inputs = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in make_inputs(2, 30, 6, 5).items()}
    plain, state = selective_scan(**inputs, return_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cast_state = selective_scan(**inputs, return_final_state=True)
    assert torch.equal(y, plain)
    assert torch.equal(cast_state, state)


def test_wrong_arguments_are_named():
    inputs = make_inputs(2, 8, 6, 5)
    with pytest.raises(ValueError, match=r"selective_scan: C must be \[2, 8, 5\] or \[6, 5\]"):
        selective_scan(**(inputs | {"C": torch.zeros(2, 8, 4)}))
    with pytest.raises(ValueError, match="no Triton path yet"):
        selective_scan(**inputs, backend="triton")
