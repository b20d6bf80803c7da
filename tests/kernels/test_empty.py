"""Claims about inputs without an element: a batch of no sequences has an empty result, and no sequence has no steps."""

import pytest
import torch

from kernels.attention import attention, attention_step
from kernels.causal_conv1d import causal_conv1d
from kernels.delta_rule import delta_rule
from kernels.fft_conv import fft_conv
from kernels.gated_linear_attention import gated_linear_attention
from kernels.gated_slot_attention import gated_slot_attention
from kernels.lti_ssm import lti_ssm
from kernels.selective_scan import selective_scan
from kernels.slstm import slstm
from kernels.wkv import wkv

D, N, H, K = 6, 4, 2, 4


def ones(*shape):
    return torch.ones(shape, requires_grad=True)


def system():
    return -ones(D, N).detach().to(torch.complex64), None, ones(D, N).detach().to(torch.complex64), ones(D)


CALLS = {
    "attention": lambda b, t, **o: attention(*(ones(b, t, H, K) for _ in "qkv"), **o),
    "causal_conv1d": lambda b, t, **o: causal_conv1d(ones(b, t, D), ones(D, 4), **o),
    "delta_rule": lambda b, t, **o: delta_rule(*(ones(b, t, H, K) for _ in "qkv"), ones(b, t, H), **o),
    "fft_conv": lambda b, t, **o: fft_conv(ones(b, t, D), ones(D, 9), **o),
    "gated_linear_attention": lambda b, t, **o: gated_linear_attention(*(ones(b, t, H, K) for _ in "qkv"), **o),
    "gated_slot_attention": lambda b, t, **o: gated_slot_attention(
        *(ones(b, t, H, K) for _ in "qkv"), ones(b, t, H, N), -ones(b, t, H, N), **o
    ),
    "lti_ssm": lambda b, t, **o: lti_ssm(ones(b, t, D), *system(), **o),
    "selective_scan": lambda b, t, **o: selective_scan(
        ones(b, t, D), ones(b, t, D), -ones(D, N), ones(b, t, N), ones(b, t, N), **o
    ),
    "slstm": lambda b, t, **o: slstm(ones(b, t, 4, H, K), ones(4, H, K, K), **o),
    "wkv": lambda b, t, **o: wkv(ones(b, t, D), ones(b, t, D), -ones(D), ones(D), **o),
}
STATES = ("delta_rule", "gated_linear_attention", "gated_slot_attention", "lti_ssm", "selective_scan", "slstm", "wkv")


@pytest.mark.parametrize("op", CALLS)
def test_no_sequences_give_an_empty_result(op):
    y = CALLS[op](0, 70)
    assert y.shape[:2] == (0, 70)
    y.sum().backward()


@pytest.mark.parametrize("op", STATES)
def test_no_sequences_leave_no_states(op):
    y, states = CALLS[op](0, 70, return_final_state=True)
    assert y.shape[:2] == (0, 70)
    assert not sum(state.numel() for state in (states if isinstance(states, tuple) else (states,)))


@pytest.mark.parametrize("op", ["fft_conv", "lti_ssm", "selective_scan", "wkv"])
def test_kernels_that_cannot_take_them_are_refused_by_name(op):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=f"{op}: backend='triton' needs at least one element"):
        CALLS[op](0, 70, backend="triton")


def test_the_filter_of_no_sequences_has_a_gradient_of_zeros():
    taps, skip = ones(D, 9), ones(D)
    fft_conv(ones(0, 70, D), taps, D=skip).sum().backward()
    assert taps.grad is not None
    assert skip.grad is not None
    assert not taps.grad.any()
    assert not skip.grad.any()


@pytest.mark.parametrize("op", CALLS)
def test_sequences_without_steps_are_refused_by_name(op):
    with pytest.raises(ValueError, match=rf"^{op}: .*(T >= 1|length >= 1|at least one time step)"):
        CALLS[op](2, 0)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_step_of_no_rows(backend):
    pytest.importorskip("triton")
    q, cache = torch.ones(0, H, K), torch.ones(0, 5, H, K)
    args = q, q, q, cache, cache.clone(), torch.zeros(0, dtype=torch.long)
    if backend == "triton":
        with pytest.raises(ValueError, match="attention_step: backend='triton' needs at least one element"):
            attention_step(*args, backend=backend)
    else:
        assert attention_step(*args, backend=backend).shape == (0, H, K)


def test_a_cache_without_room_is_refused():
    q, cache = torch.ones(2, H, K), torch.ones(2, 0, H, K)
    with pytest.raises(ValueError, match="with a capacity of at least 1"):
        attention_step(q, q, q, cache, cache, torch.zeros(2, dtype=torch.long))
