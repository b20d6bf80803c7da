"""Which backend an operator takes, and the record of it."""

import threading

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.backend import record, record_operators, triton_missing, use_triton
from subquad.kernels.causal_conv1d import causal_conv1d
from subquad.kernels.versions import VERSIONS
from tests.kernels.test_refusals import CALLS, DEVICE


def ones(*shape):
    return torch.ones(shape)


IN_TORCH = {"version": 1, "backend": "torch"}


def test_every_operator_has_a_version():
    assert set(VERSIONS) == {name.removesuffix("_step") for name in OPERATORS}
    assert all(isinstance(version, int) and version >= 1 for version in VERSIONS.values())


RECORDED = [name for name in CALLS if name.split()[0].removesuffix("_step") in VERSIONS and name != "token_shift_step"]
"""A step of the token shift is plain PyTorch without a choice."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the kernels")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in RECORDED),
        *(pytest.param(name, True, marks=[pytest.mark.slow] * (name != "swiglu")) for name in RECORDED),
    ],
)
def test_every_call_of_an_operator_is_recorded(name, compiled):
    """On the CPU, where `auto` is PyTorch; a step counts as its operator."""
    op, (call, inputs) = name.split()[0].removesuffix("_step"), CALLS[name]()
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="eager", dynamic=False)
    with record_operators() as used:
        call(**inputs, backend="auto")
    assert used[op] == {"version": VERSIONS[op], "backend": "torch"}


def test_every_operator_can_be_recorded():
    assert {name.split()[0].removesuffix("_step") for name in RECORDED} == set(VERSIONS)


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


def test_a_triton_that_is_too_old_counts_as_missing(monkeypatch):
    """With 3.4, kernels of scans, of decoding steps and of products in float32 do not compile."""
    triton = pytest.importorskip("triton")
    monkeypatch.delattr(triton, "constexpr_function")
    assert "3.5 or newer" in triton_missing.__wrapped__()


def _on_a_gpu():
    from types import SimpleNamespace

    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)


def test_the_kernels_need_a_gpu_outside_of_the_interpreter(monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("there is one")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call, inputs = CALLS["swiglu"]()
    with pytest.raises(ValueError, match=r"needs a CUDA device .*, got cpu; use backend='auto' or 'torch'"):
        call(**inputs, backend="triton")
