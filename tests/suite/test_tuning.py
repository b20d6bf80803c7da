"""Autotuned kernels of other projects: all forms are compiled before the first is timed."""

import pytest
import torch

from subquad.suite.bench import tuning
from subquad.suite.bench.tuning import forms_compiled_together

pytest.importorskip("triton", minversion="3.6")

import triton.language as tl
from triton import CompilationError, Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from subquad.suite.bench.compile import AbsentGPU


def _kernel(x, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 8)
    o = tl.arange(0, BLOCK)
    tl.store(x + o, 2 * tl.load(x + o, mask=o < N), mask=o < N)


def test_forms_are_compiled_before_one_is_timed(monkeypatch):
    """One of three forms cannot be compiled, which its own timing says and nothing before."""
    gpu = AbsentGPU("sm_90")
    if reason := gpu.reason():
        pytest.skip(reason)
    kernel = JITFunction(_kernel)
    monkeypatch.setattr(driver, "_active", gpu)
    # in one of many runs of all tests a form failed in one of two threads, for a reason that was not found; such a form
    # is compiled where it is timed, as without threads
    monkeypatch.setattr(tuning, "cores", lambda: 1)
    forms = [Config({"BLOCK": 8}), Config({"BLOCK": 16}), Config({"BLOCK": 16}, num_warps=1)]
    tuner = Autotuner(kernel, kernel.arg_names, forms, ["N"], None, None)
    tuner.nargs = {"x": torch.empty(64, device="meta"), "N": 64}
    prune = Autotuner.prune_configs
    with forms_compiled_together():
        assert tuner.prune_configs({"grid": (1,), "warmup": False}) == forms

    with pytest.raises(CompilationError, match="BLOCK > 8"):
        # Triton 3.6 returns what it has not compiled, and raises at the launch
        kernel.run(**tuner.nargs, grid=(1,), warmup=True, **forms[0].all_kwargs()).result()

    def compile_again(*args, **kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel, "_do_compile", compile_again)
    for form in forms[1:]:
        assert kernel.run(**tuner.nargs, grid=(1,), warmup=True, **form.all_kwargs()) is not None
    assert Autotuner.prune_configs is prune
