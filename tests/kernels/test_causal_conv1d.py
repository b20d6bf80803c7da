"""Claims about the short causal convolution; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_heads, causal_conv1d_step
from subquad.kernels.causal_conv1d.reference import causal_conv1d_reference
from subquad.kernels.causal_conv1d.triton import causal_conv1d_triton
from subquad.kernels.causal_conv1d.triton.plan import TUNING, Tuning
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = partial(causal_conv1d, return_final_state=True, backend="torch")
TRITON = partial(causal_conv1d, return_final_state=True, backend="triton")

slow = partial(pytest.param, marks=pytest.mark.slow)


def small_tiles(tiles):
    """The same table with tiles of 64 steps and two channels, and two tiles a program."""
    return {key: tile._replace(block_d=2, groups=64 // tile.steps, tiles=2) for key, tile in tiles.items()}


SMALL_TILES = Tuning(small_tiles(TUNING.forward), small_tiles(TUNING.backward))


def in_small_tiles(
    x, weight, *, bias=None, activation=None, initial_state=None, return_final_state=True, time_last=False
):
    """The kernels with small tiles, so that short inputs have several."""
    options = (activation, initial_state, return_final_state, time_last)
    return causal_conv1d_triton(x, weight, bias, *options, tuning=SMALL_TILES)


def make_inputs(length, taps=4, *, width=6, bias=True, initial_state=True, activation="silu"):
    g = torch.Generator().manual_seed(length)
    inputs = {
        "x": torch.randn(2, length, width, generator=g, dtype=torch.float64),
        "weight": torch.randn(width, taps, generator=g, dtype=torch.float64),
        "activation": activation,
    }
    if bias:
        inputs["bias"] = torch.randn(width, generator=g, dtype=torch.float64)
    if initial_state:
        inputs["initial_state"] = torch.randn(2, width, taps - 1, generator=g, dtype=torch.float64)
    return inputs


def on_device(inputs, dtype=torch.float32):
    return {name: value.to(DEVICE, dtype) if torch.is_tensor(value) else value for name, value in inputs.items()}


def channel_last(x):
    return x.contiguous()


def channel_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_memory(view, op):
    """The operator applied to the view of x that `view` makes."""
    return lambda x, **rest: op(view(x), **rest)


@pytest.mark.parametrize(
    ("length", "taps", "dtype"),
    [
        (2, 3, torch.bfloat16),
        (65, 2, torch.float32),
        (65, 4, torch.bfloat16),
        *(slow(length, 2, torch.float32) for length in (1, 2, 63, 64, 500)),
        *(slow(length, 3, torch.bfloat16) for length in (1, 63, 64, 65, 500)),
        *(slow(length, 4, torch.bfloat16) for length in (1, 2, 63, 64, 500)),
    ],
)
@pytest.mark.parametrize("memory", [channel_last, channel_first])
def test_the_kernel_equals_the_loop(length, taps, dtype, memory):
    # with two channels, the sum that is the gradient of the bias can nearly cancel
    op, inputs = in_memory(memory, in_small_tiles), make_inputs(length, taps, width=3)
    assert_matches_reference(op, causal_conv1d_reference, inputs, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("memory", [channel_last, channel_first])
def test_result_and_gradient_have_the_memory_order_of_the_input(memory):
    inputs = on_device(make_inputs(40, initial_state=False))
    x = memory(inputs.pop("x")).requires_grad_()
    y = in_small_tiles(x, **inputs, return_final_state=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.stride() == x.stride() == dx.stride()


@pytest.mark.parametrize("length", [1, 2, slow(63), 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", ["small", "as configured"])
def test_a_result_with_time_contiguous_equals_the_loop(length, dtype, tiles):
    op = partial(in_small_tiles if tiles == "small" else TRITON, time_last=True)
    assert_matches_reference(op, causal_conv1d_reference, make_inputs(length, width=7), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("memory", [channel_last, channel_first])
def test_a_result_with_time_contiguous_has_the_same_bits_and_takes_such_a_gradient(memory):
    inputs = on_device(make_inputs(40, initial_state=False))
    x = memory(inputs.pop("x")).requires_grad_()
    dy = channel_first(torch.randn(2, 40, 6, device=DEVICE))
    found = in_small_tiles(x, **inputs, return_final_state=False, time_last=True)
    expected = in_small_tiles(x, **inputs, return_final_state=False)
    assert found.stride(1) == 1
    assert torch.equal(found, expected)
    (dx,), (wanted,) = torch.autograd.grad(found, x, dy), torch.autograd.grad(expected, x, memory(dy))
    assert dx.stride() == x.stride()
    assert torch.equal(dx, wanted)


def test_parameters_keep_their_own_dtype():
    inputs = make_inputs(40, initial_state=False)
    keep = ("weight", "bias")
    for op in (TORCH, in_small_tiles):
        assert_matches_reference(op, causal_conv1d_reference, inputs, dtype=torch.bfloat16, keep=keep, device=DEVICE)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_without_bias_and_state_equals_torch_conv1d(activation):
    inputs = make_inputs(30, 4, bias=False, initial_state=False, activation=activation)
    assert_matches_reference(TORCH, causal_conv1d_reference, inputs)
    x = F.pad(inputs["x"].transpose(1, 2), (3, 0))
    expected = F.conv1d(x, inputs["weight"].unsqueeze(1), groups=6).transpose(1, 2)
    expected = F.silu(expected) if activation else expected
    torch.testing.assert_close(causal_conv1d(**inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "taps"), [*(("torch", taps) for taps in (2, 3, 4)), ("triton", 4), slow("triton", 2), slow("triton", 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_whole(backend, dtype, taps):
    inputs = on_device(make_inputs(12, taps), dtype)
    exact, final = causal_conv1d_reference(**on_device(inputs, torch.float64))
    # a state kept in place, in memory of its own order
    state = inputs["initial_state"].transpose(1, 2).contiguous().transpose(1, 2)
    for t in range(12):
        y = causal_conv1d_step(
            inputs["x"][:, t], inputs["weight"], inputs["bias"], state, activation="silu", backend=backend
        )
        assert_close(y, exact[:, t], dtype, plain=exact[:, t].to(dtype), what=f"step {t}")
    assert torch.equal(state, final.to(dtype))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_wide_state_is_not_rounded(backend):
    inputs = on_device(make_inputs(2), torch.bfloat16)
    state = torch.randn(2, 6, 3, device=DEVICE)
    after = torch.cat([state[..., 1:], inputs["x"][:, 0, :, None].float()], dim=-1)
    exact = causal_conv1d_step(
        inputs["x"][:, 0].double(), inputs["weight"].double(), None, state.double(), activation="silu"
    )
    y = causal_conv1d_step(inputs["x"][:, 0], inputs["weight"], None, state, activation="silu", backend=backend)
    assert_close(y, exact, torch.bfloat16, plain=exact.to(torch.bfloat16))
    assert torch.equal(state, after)


INDICES = torch.tensor([[0] * 3 + [1] + [2] * 9 + [5] * 7, [4] * 20])


@pytest.mark.parametrize("taps", [2, 4])
def test_packed_sequences_equal_the_reference(taps):
    inputs = make_inputs(20, taps, initial_state=False)

    def reference(**given):
        return causal_conv1d_reference(**given, seq_idx=INDICES)[0]

    assert_matches_reference(partial(causal_conv1d, seq_idx=INDICES), reference, inputs)


def test_a_packed_sequence_is_convolved_as_it_would_be_alone():
    inputs = make_inputs(20, initial_state=False)
    x = inputs.pop("x")[:1]
    y = causal_conv1d(x, **inputs, seq_idx=INDICES[:1])
    alone = [causal_conv1d(part, **inputs) for part in x.split([3, 1, 9, 7], 1)]
    torch.testing.assert_close(y, torch.cat(alone, 1))


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_state_may_be_longer_than_the_filter(length, backend):
    inputs = make_inputs(length)
    inputs["initial_state"] = torch.randn(2, 6, 7, dtype=torch.float64)
    op = partial(causal_conv1d, return_final_state=True, backend=backend)
    assert_matches_reference(op, causal_conv1d_reference, inputs, device=DEVICE)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_updates_by_several_steps_equal_the_whole(size, steps):
    inputs = make_inputs(12)
    state = inputs.pop("initial_state")
    state = torch.cat([torch.ones(2, 6, size - 3, dtype=state.dtype), state], -1)
    x, bias = inputs.pop("x"), inputs.pop("bias")
    whole, final = causal_conv1d_reference(x, bias=bias, **inputs, initial_state=state)
    parts = []
    for t in range(0, 12, steps):
        part = x[:, t] if steps == 1 else x[:, t : t + steps]
        y = causal_conv1d_step(part, bias=bias, **inputs, state=state)
        parts.append(y.unsqueeze(1) if steps == 1 else y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_heads_of_length_one_of_a_batch_without_rows(backend):
    x, weight = torch.zeros(0, 5, 8, device=DEVICE), torch.ones(8, 3, device=DEVICE, requires_grad=True)
    q, v, state = causal_conv1d_heads(x, weight, [(2, 2), (1, 4)], num_unit=1, return_final_state=True, backend=backend)
    assert [tuple(y.shape) for y in (q, v, state)] == [(0, 5, 2, 2), (0, 5, 1, 4), (0, 8, 2)]
    (q.sum() + v.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
