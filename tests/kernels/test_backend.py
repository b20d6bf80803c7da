"""Which backend an operator takes, and the record of it."""

import threading

import pytest
import torch

from kernels import OPERATORS
from kernels.attention import attention
from kernels.backend import record, record_operators, triton_missing, use_triton
from kernels.cauchy import cauchy
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.delta_rule import delta_rule, delta_rule_step
from kernels.delta_rule.generalised import generalised_delta_rule
from kernels.embedding import embedding
from kernels.fft_conv import fft_conv
from kernels.float32_matmul import float32_matmul
from kernels.forget_gate import forget_gate
from kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_step
from kernels.h3_inner import h3_inner_step
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.lti_ssm import ContinuousSystem, DiagonalSystem, lti_ssm, lti_ssm_step
from kernels.mamba_inner import mamba_inner_step
from kernels.norm import norm
from kernels.rotary import rotary
from kernels.rotated_keys import rotated_keys
from kernels.rwkv6_inputs import rwkv6_inputs
from kernels.rwkv7_inputs import rwkv7_inputs
from kernels.selective_scan import selective_scan, selective_scan_step
from kernels.skinny_linear import skinny_linear
from kernels.slstm import slstm, slstm_step
from kernels.ssm_kernel import ssm_kernel
from kernels.swiglu import swiglu
from kernels.token_shift import token_shift
from kernels.versions import VERSIONS
from kernels.wkv import wkv, wkv_step


def ones(*shape):
    return torch.ones(shape)


STATE = -ones(2, 3), None, ones(2, 3), ones(2)
PARAMETERS = DiagonalSystem(ones(2), ones(2, 3), ones(2, 3), None, ones(2, 3, 2), ones(2))
CALLS = {
    "attention": [lambda: attention(*[ones(1, 3, 1, 2)] * 3)],
    "cauchy": [lambda: cauchy(*[ones(2, 3).to(torch.complex64)] * 2, ones(2), ones(4).to(torch.complex64))],
    "causal_conv1d": [
        lambda: causal_conv1d(ones(1, 3, 2), ones(2, 2)),
        lambda: causal_conv1d_step(ones(1, 2), ones(2, 2), None, ones(1, 2, 1)),
        lambda: causal_conv1d_step(ones(1, 2).requires_grad_(), ones(2, 2), None, ones(1, 2, 1)),
    ],
    "delta_rule": [
        lambda: delta_rule(*[ones(1, 3, 1, 2)] * 3, ones(1, 3, 1)),
        lambda: delta_rule_step(*[ones(1, 1, 2)] * 3, ones(1, 1), None, ones(1, 1, 2, 2)),
    ],
    "embedding": [lambda: embedding(torch.arange(3), ones(4, 2))],
    "fft_conv": [lambda: fft_conv(ones(1, 3, 2), ones(2, 3))],
    "float32_matmul": [lambda: float32_matmul(ones(2, 3), ones(3, 4))],
    "forget_gate": [lambda: forget_gate(ones(2, 3))],
    "gated_linear_attention": [
        lambda: gated_linear_attention(*[ones(1, 3, 1, 2)] * 3),
        lambda: gated_linear_attention_step(*[ones(1, 1, 2)] * 3, None, ones(1, 1, 2, 2)),
    ],
    "gated_slot_attention": [
        lambda: gated_slot_attention(*[ones(1, 3, 1, 2)] * 4),
        lambda: gated_slot_attention_step(*[ones(1, 1, 2)] * 4, None, (ones(1, 1, 2, 2), ones(1, 1, 2, 2))),
    ],
    "generalised_delta_rule": [lambda: generalised_delta_rule(*[ones(1, 3, 1, 2)] * 5, -ones(1, 3, 1, 2))],
    "h3_inner": [
        lambda: h3_inner_step(
            *[ones(1, 2)] * 3,
            ones(1, 2, 1),
            ones(1, 2, 3).to(torch.complex64),
            taps=ones(2, 2),
            shift_skip=ones(2),
            system=PARAMETERS,
        ),
    ],
    "linear_cross_entropy": [
        lambda: linear_cross_entropy(ones(3, 2), ones(4, 2), torch.zeros(3, dtype=torch.long)),
    ],
    "lti_ssm": [
        lambda: lti_ssm(ones(1, 3, 2), *STATE, conj_pairs=False),
        lambda: lti_ssm_step(ones(1, 2), ContinuousSystem(*STATE), ones(1, 2, 3), conj_pairs=False),
        lambda: lti_ssm_step(ones(1, 2), PARAMETERS, ones(1, 2, 3).to(torch.complex64)),
    ],
    "mamba_inner": [
        lambda: mamba_inner_step(
            ones(1, 2),
            None,
            ones(1, 2, 1),
            ones(1, 2, 3),
            conv_weight=ones(2, 2),
            conv_bias=ones(2),
            x_proj=ones(7, 2),
            dt_proj=ones(2, 1),
            dt_bias=ones(2),
            log_A=ones(2, 3),
            D=ones(2),
        ),
    ],
    "norm": [lambda: norm(ones(2, 3), ones(3))],
    "rotary": [lambda: rotary(ones(1, 2, 1, 4), ones(1, 2, 1, 4), ones(3, 2), ones(3, 2), torch.arange(2))],
    "rotated_keys": [
        lambda: rotated_keys(*[ones(1, 3, 4)] * 2, *[ones(2, 4)] * 2, ones(1, 3, 2, 1), *[ones(1, 3, 2)] * 3),
    ],
    "rwkv6_inputs": [lambda: rwkv6_inputs(*[ones(1, 3, 4)] * 4, *[ones(4)] * 2, head_dim=2)],
    "rwkv7_inputs": [lambda: rwkv7_inputs(*[ones(1, 3, 4)] * 5, *[ones(4)] * 5, head_dim=2)],
    "selective_scan": [
        lambda: selective_scan(ones(1, 3, 2), ones(1, 3, 2), -ones(2, 4), ones(1, 3, 4), ones(1, 3, 4)),
        lambda: selective_scan_step(ones(1, 2), ones(1, 2), -ones(2, 4), ones(1, 4), ones(1, 4), ones(1, 2, 4)),
    ],
    "skinny_linear": [lambda: skinny_linear(ones(1, 2), ones(3, 2))],
    "slstm": [
        lambda: slstm(ones(1, 3, 4, 1, 2), ones(4, 1, 2, 2)),
        lambda: slstm_step(ones(1, 4, 1, 2), ones(4, 1, 2, 2), None, ones(1, 4, 1, 2)),
    ],
    "ssm_kernel": [lambda: ssm_kernel(*STATE, 3, conj_pairs=False)],
    "swiglu": [lambda: swiglu(ones(2, 4))],
    "token_shift": [lambda: token_shift(ones(1, 3, 2), ones(2, 2))],
    "wkv": [
        lambda: wkv(ones(1, 3, 2), ones(1, 3, 2), -ones(2), ones(2)),
        lambda: wkv_step(ones(1, 2), ones(1, 2), -ones(2), ones(2), ones(1, 3, 2)),
    ],
}
IN_TORCH = {"version": 1, "backend": "torch"}


def test_every_operator_has_a_version():
    assert set(VERSIONS) == {name.removesuffix("_step") for name in OPERATORS}
    assert all(isinstance(version, int) and version >= 1 for version in VERSIONS.values())


@pytest.mark.parametrize("op", VERSIONS)
def test_every_call_of_an_operator_is_recorded(op):
    """On the CPU, where `auto` is PyTorch; a step counts as its operator."""
    for call in CALLS[op]:
        with record_operators() as used:
            call()
        assert used[op] == {"version": VERSIONS[op], "backend": "torch"}


def test_an_operator_in_triton_is_recorded_as_such():
    pytest.importorskip("triton")
    with record_operators() as used:
        causal_conv1d(ones(1, 3, 2), ones(2, 2), backend="triton")
        assert used == {"causal_conv1d": {"version": 1, "backend": "triton"}}
        causal_conv1d(ones(1, 3, 2), ones(2, 2), backend="torch")
    assert used == {"causal_conv1d": {"version": 1, "backend": "triton+torch"}}


def test_outside_of_a_recorder_nothing_is_recorded():
    with record_operators() as used:
        pass
    record("fft_conv", "torch")
    assert used == {}


def test_recorders_may_be_nested_and_an_error_closes_the_inner_one():
    def fails():
        with record_operators() as inner:
            record("fft_conv", "torch")
            assert inner == {"fft_conv": IN_TORCH}
            raise ValueError("expected")

    with record_operators() as outer:
        record("attention", "torch")
        with pytest.raises(ValueError, match="expected"):
            fails()
        with record_operators() as other:
            pass
        record("ssm_kernel", "torch")
    assert outer == {"attention": IN_TORCH, "fft_conv": IN_TORCH, "ssm_kernel": IN_TORCH}
    assert other == {}


def test_threads_have_records_of_their_own():
    seen = {}

    def work(op):
        with record_operators() as used:
            both.wait()
            record(op, "torch")
            both.wait()
        seen[op] = used

    both = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(op,)) for op in ("fft_conv", "attention")]
    with record_operators() as used:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"fft_conv": {"fft_conv": IN_TORCH}, "attention": {"attention": IN_TORCH}}
    assert used == {}


def test_what_is_no_operator_is_not_recorded():
    with record_operators() as used:
        use_triton("transpose", "auto", ones(1))
    assert used == {}


def test_an_obstacle_of_the_operator_is_an_error_where_triton_is_asked_for():
    with pytest.raises(ValueError, match=r"^op: backend='triton' takes no ones; use backend='auto' or 'torch'.$"):
        use_triton("op", "triton", ones(1), obstacle="takes no ones")
    assert not use_triton("op", "auto", ones(1), obstacle="takes no ones")
    with pytest.raises(ValueError, match="backend='cuda' is not one of"):
        use_triton("op", "cuda", ones(1))


def test_auto_takes_triton_on_a_gpu_where_it_is_faster_and_nothing_is_in_its_way():
    if triton_missing():
        pytest.skip("needs triton")
    x = torch.empty(1, device="cuda") if torch.cuda.is_available() else _on_a_gpu()
    assert use_triton("op", "auto", x)
    assert not use_triton("op", "auto", x, is_faster=False)
    assert not use_triton("op", "auto", x, obstacle="takes no ones")
    assert use_triton("op", "triton", x, is_faster=False)
    assert not use_triton("op", "torch", x)
    assert not use_triton("op", "auto", torch.zeros(1))
    assert use_triton("op", "triton", torch.zeros(1, device="meta"))


def _on_a_gpu():
    from types import SimpleNamespace

    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
