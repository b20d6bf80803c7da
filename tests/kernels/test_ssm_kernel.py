"""Claims about the filters of diagonal state spaces, DSS proposition 1 among them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from subquad.kernels.ssm_kernel import DISCRETIZATIONS, ssm_kernel
from subquad.kernels.ssm_kernel.discretize import expm1
from subquad.kernels.ssm_kernel.reference import ssm_kernel_reference
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference
from tests.kernels.saved import kept_for_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = partial(ssm_kernel, backend="triton")
QUICK_TRITON_CASES = {
    (65, True, "zoh"),
    (65, False, "bilinear"),
    (65, True, "dss-softmax"),
    (65, False, "dss-exp-no-scale"),
}


def make_parameters(width, state, *, discretization, complex_=True, seed=0):
    """Parameters whose filter is of order one; for dss-softmax half of the modes grow, away from its singularities."""
    g = torch.Generator().manual_seed(seed)
    real = torch.float64
    A = -0.2 - torch.rand(width, state, generator=g, dtype=real)
    if discretization == "dss-softmax":
        A = (A - 0.5) * torch.tensor([1, -1]).repeat(state)[:state]
    if complex_:
        A = torch.complex(A, 4 * torch.randn(width, state, generator=g, dtype=real))
    kind = A.dtype
    dt = 0.02 + 0.1 * torch.rand(width, generator=g, dtype=real)
    # a filter of dt B C spread over 1 / dt steps
    scale = 1.0 if discretization in ("dss-exp-no-scale", "dss-softmax") else 10.0
    B, C = (torch.randn(width, state, generator=g, dtype=kind) * scale**0.5 for _ in range(2))
    return {"A": A, "B": B, "C": C * (10 if discretization == "dss-softmax" else 1), "dt": dt}


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("complex_", [True, False])
def test_kernel_is_the_unrolled_recurrence(discretization, length, complex_):
    inputs = make_parameters(3, 4, discretization=discretization, complex_=complex_)
    inputs |= {"length": length, "discretization": discretization, "conj_pairs": complex_}
    # a softmax over one entry is constant: its gradient in dt is rounding alone
    grad = length > 1 or discretization != "dss-softmax"
    assert_matches_reference(ssm_kernel, ssm_kernel_reference, inputs, grad=grad)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_shared_eigenvalues_and_unit_input_map_broadcast(discretization):
    inputs = make_parameters(3, 4, discretization=discretization)
    one = {"A": inputs["A"][0].clone(), "B": None}
    all_ = {"A": inputs["A"][:1].expand(3, -1), "B": torch.ones_like(inputs["B"])}
    options = {"discretization": discretization, "conj_pairs": False}
    torch.testing.assert_close(
        ssm_kernel(**(inputs | one), length=30, **options), ssm_kernel(**(inputs | all_), length=30, **options)
    )


def dense_kernel(A, B, C, dt, length):
    """K_k = C exp(A dt)^k (exp(A dt) - I) A^{-1} B for a full matrix A, DSS equations 2 and 4."""
    step = torch.matrix_exp(A * dt)
    term = (step - torch.eye(len(A), dtype=A.dtype)) @ torch.linalg.solve(A, B)
    values = []
    for _ in range(length):
        values.append(C @ term)
        term = step @ term
    return torch.stack(values)


def random_system():
    g = torch.Generator().manual_seed(3)
    A = torch.randn(6, 6, generator=g, dtype=torch.float64) - 0.7 * torch.eye(6, dtype=torch.float64)
    return A, *torch.randn(2, 6, generator=g, dtype=torch.float64), torch.tensor([0.05], dtype=torch.float64)


def test_proposition_1a_every_diagonalizable_system_is_a_dss_exp():
    A, B, C, dt = random_system()
    eigenvalues, V = torch.linalg.eig(A)
    weights = (C.to(V.dtype) @ V) * torch.linalg.solve(V, B.to(V.dtype))
    kernel = ssm_kernel(eigenvalues, None, weights[None], dt, 50, conj_pairs=False, discretization="dss-exp")
    torch.testing.assert_close(kernel[0], dense_kernel(A, B, C, dt, 50), rtol=1e-9, atol=1e-11)


def test_proposition_1b_and_a_dss_softmax_with_rescaled_weights():
    A, B, C, dt = random_system()
    length = 50
    eigenvalues, V = torch.linalg.eig(A)
    assert (eigenvalues.real > 0).any()
    assert (eigenvalues.real < 0).any()
    weights = (C.to(V.dtype) @ V) * torch.linalg.solve(V, B.to(V.dtype))
    weights = weights * (torch.exp(length * eigenvalues * dt) - 1)
    kernel = ssm_kernel(eigenvalues, None, weights[None], dt, length, conj_pairs=False, discretization="dss-softmax")
    # the guarded reciprocal costs eps / |x|^2
    torch.testing.assert_close(kernel[0], dense_kernel(A, B, C, dt, length), rtol=1e-5, atol=1e-5)


def test_proposition_1b_is_a_row_softmax():
    inputs = make_parameters(3, 4, discretization="dss-softmax")
    length = 40
    P = (inputs["dt"][:, None] * inputs["A"])[..., None] * torch.arange(length)
    row = torch.exp(P) / torch.exp(P).sum(-1, keepdim=True)
    expected = ((inputs["B"] * inputs["C"] / inputs["A"])[..., None] * row).sum(1).real
    kernel = ssm_kernel(**inputs, length=length, conj_pairs=False, discretization="dss-softmax")
    torch.testing.assert_close(kernel, expected, rtol=1e-5, atol=1e-5)


def test_softmax_of_strongly_growing_modes_stays_finite():
    A = torch.tensor([[40.0 + 3j, -40.0 + 3j]], dtype=torch.complex64, requires_grad=True)
    kernel = ssm_kernel(
        A, None, torch.ones_like(A), torch.ones(1), 4000, conj_pairs=False, discretization="dss-softmax"
    )
    kernel.sum().backward()
    assert torch.isfinite(kernel).all()
    assert torch.isfinite(torch.view_as_real(A.grad)).all()
    # the growing mode copies the oldest input, the falling one the newest: each 1 / A in size
    torch.testing.assert_close(kernel[0, -1], (1 / A[0, 0]).real.detach(), rtol=1e-4, atol=0)
    torch.testing.assert_close(kernel[0, 0], (1 / A[0, 1]).real.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_detached_maximum_changes_the_gradient_of_growing_modes_alone(backend):
    inputs = make_parameters(3, 4, discretization="dss-softmax")
    inputs |= {"length": 65, "discretization": "dss-softmax", "conj_pairs": True}
    op = partial(ssm_kernel, detach_maximum=True, backend=backend)
    reference = partial(ssm_kernel_reference, detach_maximum=True)
    assert_matches_reference(op, reference, inputs, device=DEVICE if backend == "triton" else "cpu")
    if backend == "torch":
        gradients = []
        for detach in (False, True):
            A = inputs["A"].clone().requires_grad_()
            taps = ssm_kernel(**(inputs | {"A": A}), detach_maximum=detach)
            gradients.append(torch.autograd.grad((taps * torch.linspace(-1, 1, 65)).sum(), A)[0])
        differs = (gradients[0] - gradients[1]).abs() > 1e-3 * gradients[0].abs()
        assert torch.equal(differs, inputs["A"].real > 0)


def test_no_table_of_all_powers_is_kept():
    width, state, length = 8, 32, 4096
    A = torch.complex(-torch.rand(width, state), torch.randn(width, state)).requires_grad_()
    C = torch.randn(width, state, dtype=torch.complex64)
    with kept_for_backward() as kept:
        ssm_kernel(A, None, C, torch.full((width,), 0.01), length)
    assert 0 < sum(kept.values()) < width * state * length / 4


def test_a_vanishing_eigenvalue_integrates_its_input():
    dt = torch.tensor([0.1])
    A = torch.zeros(1, 1, dtype=torch.complex64)
    kernel = ssm_kernel(A, None, torch.ones_like(A), dt, 10, conj_pairs=False)
    torch.testing.assert_close(kernel, torch.full((1, 10), 0.1))


def test_small_steps_do_not_cancel():
    z = torch.complex(torch.tensor([-1e-6, -1e-3, -2.0]), torch.tensor([1e-6, 3.0, 1e-3]))
    exact = torch.exp(z.to(torch.complex128)) - 1
    torch.testing.assert_close(expm1(z).to(torch.complex128), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("length", "complex_", "discretization"),
    [
        pytest.param(*case, name, marks=() if (*case, name) in QUICK_TRITON_CASES else pytest.mark.slow)
        for case in ((1, True), (65, True), (65, False), (500, True))
        for name in DISCRETIZATIONS
    ],
)
def test_the_kernel_in_triton_is_the_unrolled_recurrence(discretization, length, complex_):
    inputs = make_parameters(3, 4, discretization=discretization, complex_=complex_)
    inputs |= {"length": length, "discretization": discretization, "conj_pairs": complex_}
    grad = length > 1 or discretization != "dss-softmax"
    assert_matches_reference(TRITON, ssm_kernel_reference, inputs, device=DEVICE, grad=grad)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_softmax_over_more_than_the_filter_begins_as_the_whole(backend):
    inputs = make_parameters(3, 4, discretization="dss-softmax")
    if backend == "triton":
        inputs = {n: x.to(torch.complex64 if x.is_complex() else torch.float32).to(DEVICE) for n, x in inputs.items()}
    op = partial(ssm_kernel, **inputs, discretization="dss-softmax", backend=backend)
    whole, part = op(length=100), op(length=40, normalize_over=100)
    assert whole[:, :40].abs().max() > 0.5
    assert_close(part, whole[:, :40], whole.dtype)


@pytest.mark.slow
def test_several_tiles_and_blocks_of_states_in_triton():
    """Tiles end at 4096 taps backward and 8192 forward, blocks at 32 states."""
    inputs = make_parameters(2, 33, discretization="zoh")
    inputs |= {"B": None, "C": 4 * inputs["C"], "length": 8300}
    assert_matches_reference(TRITON, ssm_kernel_reference, inputs, device=DEVICE)


def test_phases_in_triton_do_not_drift():
    """Undamped modes, whose phase is all that is left after 20000 steps."""
    A = 1j * torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.complex128)
    inputs = {"A": A, "B": None, "C": torch.ones_like(A), "dt": torch.tensor([0.7], dtype=torch.float64)}
    options = {"length": 20000, "discretization": "dss-exp-no-scale"}
    narrow = {
        name: x if x is None else x.to(torch.complex64 if x.is_complex() else torch.float32).to(DEVICE)
        for name, x in inputs.items()
    }
    exact = {
        name: x if x is None else x.to(torch.complex128 if x.is_complex() else torch.float64)
        for name, x in narrow.items()
    }
    assert_close(TRITON(**narrow, **options), ssm_kernel(**exact, **options, backend="torch"), torch.float32)


@pytest.mark.slow
def test_shared_eigenvalues_in_triton_broadcast():
    inputs = make_parameters(3, 4, discretization="zoh")
    inputs |= {"A": inputs["A"][0].clone(), "length": 30}
    assert_matches_reference(TRITON, ssm_kernel_reference, inputs, device=DEVICE)


def test_a_vanishing_eigenvalue_and_an_instant_one_in_triton():
    """A = 0, where Bbar is a limit, and for bilinear dt A = -2, where Abar is zero."""
    A = torch.tensor([[0.0, -2.0]], device=DEVICE)
    one = torch.ones(1, 2, device=DEVICE)
    dt = torch.ones(1, device=DEVICE)
    for rule, instant in (("zoh", (1 - math.exp(-2)) / 2), ("bilinear", 0.5)):
        kernel = TRITON(A, None, one, dt, 4, conj_pairs=False, discretization=rule)
        assert kernel[0, 0].item() == pytest.approx(1 + instant, rel=1e-6)
        rest = math.exp(-6) * instant if rule == "zoh" else 0.0
        assert kernel[0, 3].item() == pytest.approx(1 + rest, rel=1e-6)
