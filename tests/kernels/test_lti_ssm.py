"""Claims about the time-invariant state space model in PyTorch; `suite.laws.accuracy` has the accuracy rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from subquad.kernels.lti_ssm import _kernels_win, lti_ssm
from subquad.kernels.lti_ssm.chunked import lti_ssm_chunked
from subquad.kernels.lti_ssm.reference import lti_ssm_reference
from subquad.kernels.ssm_kernel import DISCRETIZATIONS, ssm_kernel
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.kernels.test_ssm_kernel import make_parameters

LENGTHS = (1, 2, 63, 64, 65, pytest.param(500, marks=pytest.mark.slow))
PARAMETERS = ("A", "B", "C", "dt", "D", "initial_state")
BATCH, WIDTH, STATE = 2, 3, 4


def make_inputs(
    length,
    *,
    discretization,
    complex_=True,
    gates=True,
    bidirectional=False,
    initial_state=True,
    width=WIDTH,
    state=STATE,
):
    g = torch.Generator().manual_seed(length)

    def randn(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=g, dtype=dtype)

    inputs = make_parameters(width, state, discretization=discretization, complex_=complex_)
    inputs |= {"u": randn(BATCH, length, width), "D": randn(width)}
    inputs |= {"discretization": discretization, "conj_pairs": complex_}
    # filters of order one sum over up to 1 / dt steps
    inputs["C"] = inputs["C"] / 4
    if gates:
        inputs |= {"gate_in": randn(BATCH, length, width), "gate_out": randn(BATCH, length, width)}
    if bidirectional:
        inputs |= {"bidirectional": True, "C": torch.stack([inputs["C"], inputs["C"].flip(0)])}
    elif initial_state:
        inputs["initial_state"] = randn(BATCH, width, state, dtype=inputs["A"].dtype)
    if discretization == "dss-softmax" and not bidirectional:
        inputs |= {"length": length + 6, "position": 4}
    return inputs


@pytest.fixture(params=["toeplitz", "fft"])
def convolution(request):
    """The operator in PyTorch by one of its two ways to convolve, whatever T is."""
    return partial(lti_ssm_chunked, toeplitz_max_length=10**6 if request.param == "toeplitz" else 0)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_convolution_equals_the_recurrence(discretization, length, convolution):
    inputs = make_inputs(length, discretization=discretization)
    assert_matches_reference(partial(convolution, return_final_state=True), lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_inputs_lose_no_more_than_the_recurrence(discretization, length):
    inputs = make_inputs(length, discretization=discretization)
    op = partial(lti_ssm, return_final_state=True)
    assert_matches_reference(op, lti_ssm_reference, inputs, dtype=torch.bfloat16, keep=PARAMETERS)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [1, 65])
def test_real_systems_equal_the_recurrence(discretization, length, convolution):
    inputs = make_inputs(length, discretization=discretization, complex_=False)
    assert_matches_reference(partial(convolution, return_final_state=True), lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [2, 65])
def test_two_sided_convolution_equals_two_recurrences(discretization, length, convolution):
    inputs = make_inputs(length, discretization=discretization, bidirectional=True)
    assert_matches_reference(convolution, lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_response_to_an_impulse_is_the_kernel(discretization, convolution):
    inputs = make_parameters(WIDTH, STATE, discretization=discretization)
    u = torch.zeros(1, 50, WIDTH, dtype=torch.float64)
    u[:, 0] = 1
    kernel = ssm_kernel(**inputs, length=50, discretization=discretization)
    y, _ = convolution(u, **inputs, discretization=discretization)
    torch.testing.assert_close(y[0].T, kernel)


@pytest.mark.parametrize(
    ("length", "state", "dtype", "trained", "expected"),
    [
        (8192, 64, torch.bfloat16, True, True),
        (256, 32, torch.float32, True, True),
        (512, 32, torch.float32, True, False),
        (8192, 32, torch.float32, False, True),
        (256, 64, torch.float32, False, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_measured_to_be_faster(length, state, dtype, trained, expected):
    u = torch.empty(8, length, 16, dtype=dtype, device="meta", requires_grad=trained)
    assert _kernels_win(u, torch.empty(16, state, device="meta")) is expected
