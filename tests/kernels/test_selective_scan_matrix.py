"""The scan's kernels for bfloat16 on the matrix units, whose inline PTX `ptx.py` executes in Triton's interpreter."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.kernels import ptx
from tests.kernels.test_selective_scan import WIDE, make_inputs, short_chunks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these kernels itself (tests/gpu)")


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched, on a machine that takes its processor for an NVIDIA GPU."""
    pytest.importorskip("triton")
    from subquad.kernels.launch import Launcher
    from subquad.kernels.selective_scan.triton import inputs, plan

    names = set()

    start = Launcher.__call__

    def recording(self, kernel, grid, /, **named):
        names.add(kernel.fn.__name__)
        start(self, kernel, grid, **named)

    monkeypatch.setattr(Launcher, "__call__", recording)
    ptx.install(monkeypatch)
    for module in (inputs, plan):
        monkeypatch.setattr(module, "speaks_ptx", lambda: True)
    yield names, short_chunks(whole=True).keywords["tuning"]
    inputs.kept_plan.cache_clear()


@pytest.mark.parametrize(
    ("length", "state", "splits"),
    [(11, 16, 1), pytest.param(19, 9, 2, marks=pytest.mark.slow)],
)
def test_the_kernels_on_the_matrix_units_equal_the_recurrence(length, state, splits, launched):
    from subquad.kernels.selective_scan.triton import selective_scan_triton

    names, tuning = launched
    if splits > 1:
        tuning = replace(tuning, enough_warps=1000)
    assert_matches_reference(
        partial(selective_scan_triton, return_final_state=True, tuning=tuning),
        selective_scan_reference,
        make_inputs(1, length, 34, state),
        dtype=torch.bfloat16,
        keep=WIDE,
        device="cpu",
    )
    assert {"_scan_fwd_matrix_kernel", "_scan_bwd_matrix_kernel"} <= names


def test_negative_eigenvalues_are_kept_from_the_matrix_units_and_from_segments_of_time(launched):
    from subquad.kernels.selective_scan.triton.inputs import prepare_inputs

    tuning = replace(launched[1], enough_warps=1000)
    x, maps = torch.zeros(1, 256, 34, dtype=torch.bfloat16), torch.zeros(1, 256, 16, dtype=torch.bfloat16)
    A = -torch.ones(34, 16)
    calls = [
        prepare_inputs(x, x, A, maps, maps, None, x, None, True, negative, tuning).plan for negative in (False, True)
    ]
    assert [call.matrix for call in calls] == [True, False]
    for plans in zip(*[(call.forward_division, call.backward_division) for call in calls], strict=True):
        assert [plan.splits > 1 for plan in plans] == [True, False]
