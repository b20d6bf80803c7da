"""Claims about the Triton kernels of the selective scan with complex states, in Triton's interpreter without a GPU."""

from functools import partial

import pytest
import torch

from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.kernels.test_selective_scan import DEVICE, WIDE, make_inputs, on_device, slow

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
impl = pytest.importorskip("subquad.kernels.selective_scan.triton.complex")
sin_cos = pytest.importorskip("subquad.kernels.selective_scan.triton.complex.arithmetic").sin_cos
SEGMENTS = {"lanes": 4, "steps": 2, "part": 1, "busy_warps": 1000, "min_segment": 1}


def scan(**changes):
    tuning = impl.Tuning(**{"lanes": 4, "steps": 4, "part": 2, "busy_warps": 0, **changes})
    return partial(impl.selective_scan_complex, return_final_state=True, tuning=tuning)


def matches(inputs, dtype=torch.float32, **changes):
    assert_matches_reference(scan(**changes), selective_scan_reference, inputs, dtype=dtype, keep=WIDE, device=DEVICE)


@pytest.mark.parametrize(
    ("state", "dtype"), [(5, torch.bfloat16), slow(1, torch.float32), slow(5, torch.float32), slow(16, torch.bfloat16)]
)
def test_the_kernel_equals_the_recurrence(state, dtype):
    matches(make_inputs(1, 5, 3, state, complex_=True), dtype)


@pytest.mark.parametrize(("length", "constant"), [(5, ()), slow(7, ("B", "C")), slow(1, ()), slow(65, ())])
def test_segments_of_time_equal_the_recurrence(length, constant):
    fixed = make_inputs(1, length, 2, 5, complex_=True, constant=True)
    matches(make_inputs(1, length, 2, 5, complex_=True) | {name: fixed[name] for name in constant}, **SEGMENTS)


@pytest.mark.parametrize("constant", [("C",), slow(("B",)), slow(("B", "C"))])
def test_the_kernel_takes_maps_that_do_not_depend_on_time(constant):
    fixed = make_inputs(1, 5, 2, 3, complex_=True, constant=True)
    matches(make_inputs(1, 5, 2, 3, complex_=True) | {name: fixed[name] for name in constant})


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["D", "z", "dt_bias", "initial_state"])
def test_every_option_of_the_kernel_may_be_left_out(missing):
    inputs = make_inputs(1, 6, 2, 3, complex_=True)
    matches({name: value for name, value in inputs.items() if name != missing})


@pytest.mark.slow
def test_real_maps_beside_complex_eigenvalues_have_real_gradients():
    inputs = make_inputs(1, 6, 2, 3, complex_=True)
    matches(inputs | {name: inputs[name].real.contiguous() for name in ("B", "C")})


def test_forgetting_everything_at_once_neither_overflows_nor_loses_the_present():
    inputs = on_device(make_inputs(1, 6, 2, 4, complex_=True, extras=False)) | {"dt_softplus": False}
    inputs["dt"] = torch.full_like(inputs["x"], 1e30).requires_grad_()
    inputs["x"] = inputs["x"] * 1e-30
    y, _ = scan()(**inputs)
    expected = (inputs["x"] * inputs["dt"]) * (inputs["B"] * inputs["C"]).sum(-1, keepdim=True).real
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert torch.isfinite(inputs["dt"].grad).all()


@triton.jit
def _sin_cos_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b_sin, b_cos = sin_cos(tl.load(x + o))
    tl.store(y + o, b_sin)
    tl.store(y + SIZE + o, b_cos)


def test_sine_and_cosine_are_exact_to_a_rounding_up_to_ten_thousand():
    x = torch.cat([torch.linspace(-7, 7, 1024), torch.linspace(-1e4, 1e4, 1024)]).to(DEVICE)
    y = torch.empty(2, 2048, device=DEVICE)
    _sin_cos_kernel[(1,)](x, y, 2048)
    exact = torch.stack([x.double().sin(), x.double().cos()])
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1.5e-7)
