"""Claims about the unfused scan, the baseline of Mamba's figure 8, by the rule of `suite.laws.accuracy`."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels.selective_scan.unfused import scan, selective_scan_unfused
from subquad.kernels.selective_scan.workloads import WORKLOAD, make_inputs
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(length, form="core"):
    shape = {"B": 2, "T": length, "D": 5, "N": 16, "form": form}
    given = make_inputs(shape, torch.float64, torch.Generator().manual_seed(length))
    # the core starts from small steps; a sequence of one of them would have almost no output
    return {**given, "dt": 10 * given["dt"]} if form == "core" else given


@pytest.mark.parametrize("form", ["core", "gated"])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_parallel_scan_equals_the_recurrence(form, length, dtype):
    assert_matches_reference(
        selective_scan_unfused,
        WORKLOAD.reference,
        inputs(length, form),
        dtype=dtype,
        keep=("A", "D", "dt_bias"),
        device=DEVICE,
    )


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 500])
def test_the_scan_of_ones_counts(length):
    ones = torch.ones(1, length, 1, 1, dtype=torch.float64)
    assert scan(ones, ones).flatten().tolist() == list(range(1, length + 1))


def test_it_passes_over_the_state_three_times_however_long_the_sequence():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        computed = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.addcmul.default):
                self.computed += result.numel()
            return result

    for length in (64, 512, 777):
        a = torch.ones(1, length, 2, 2)
        with Count() as count:
            scan(a, a)
        assert 2 < count.computed / a.numel() < 3
