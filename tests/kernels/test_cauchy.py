"""Claims about sums of fractions over conjugate poles; the accuracy rule is that of `suite.laws.accuracy`."""

import math
from functools import partial

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.cauchy import cauchy, elements_per_point
from subquad.kernels.cauchy.reference import cauchy_reference
from subquad.suite.laws.accuracy import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = partial(cauchy, backend="torch")
TRITON = partial(cauchy, backend="triton")


def make_inputs(leading, width, poles, length):
    """S4D-Lin on the circle of S4, with outputs of order one."""
    g = torch.Generator().manual_seed(length)
    parts = torch.randn(2, *leading, width, poles, generator=g, dtype=torch.float64)
    dt = 10.0 ** (-3 + 2 * torch.rand(width, generator=g, dtype=torch.float64))
    k = torch.arange(length // 2 + 1, dtype=torch.float64)
    Lambda = torch.complex(torch.full_like(parts[0, *[0] * len(leading)], -0.5), math.pi * torch.arange(poles).double())
    return {
        "residues": torch.complex(*parts) * dt[:, None] * 8,
        "Lambda": Lambda + torch.complex(0 * Lambda.real, torch.rand(width, poles, generator=g, dtype=torch.float64)),
        "dt": dt,
        "s": torch.complex(torch.ones_like(k), math.pi * k) / length,
    }


def single(inputs):
    """The inputs in single precision, but for the points."""
    kinds = {"residues": torch.complex64, "Lambda": torch.complex64, "dt": torch.float32, "s": torch.complex128}
    return {name: x.to(DEVICE, kinds[name]) for name, x in inputs.items()}


def double(inputs):
    return {name: x.cpu().to(torch.complex128 if x.is_complex() else torch.float64) for name, x in inputs.items()}


def values(op, inputs):
    """U and the gradients of a seeded sum of it, on the CPU."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("residues", "Lambda", "dt")}
    U = op(**(inputs | leaves))
    cotangent = torch.randn(U.shape, generator=torch.Generator().manual_seed(2), dtype=torch.complex128)
    gradients = torch.autograd.grad(U, list(leaves.values()), cotangent.to(U))
    return {name: x.detach().cpu() for name, x in zip(["U", *leaves], [U, *gradients], strict=True)}


def assert_right(inputs, op=TRITON):
    """U and gradients from single precision follow the rule, beside those of the reference in float64."""
    inputs = single(inputs)
    exact, plain = values(cauchy_reference, double(inputs)), values(cauchy_reference, inputs)
    for name, value in values(op, inputs).items():
        assert value.dtype == plain[name].dtype
        assert_close(value, exact[name], torch.float32, plain=plain[name], what=name)


def test_the_sums_are_the_transform_of_a_diagonal_model():
    """dt e^s U at z = exp(-2 s) is the sum over all taps of K_l z^l, with K of the bilinear rule."""
    inputs = make_inputs((), 2, 3, 20)
    s = inputs["s"] + 0.3
    dt, Lambda, v = inputs["dt"][:, None], inputs["Lambda"], inputs["residues"]
    Abar, Bbar = (1 + dt / 2 * Lambda) / (1 - dt / 2 * Lambda), dt / (1 - dt / 2 * Lambda)
    steps = torch.arange(200)
    taps = 2 * (v * Bbar * Abar ** steps[:, None, None]).real.sum(-1)
    wanted = torch.einsum("ld,lf->df", taps.to(s.dtype), torch.exp(-2 * s * steps[:, None]))
    torch.testing.assert_close(dt * s.exp() * cauchy(v, Lambda, inputs["dt"], s), wanted, rtol=1e-10, atol=1e-12)


def test_points_are_constants():
    inputs = make_inputs((2,), 2, 3, 7)
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.grad(TORCH(**inputs).abs().sum(), leaves, allow_unused=True)[-1] is None


@pytest.mark.parametrize(
    ("leading", "width", "poles", "length"),
    [
        ((2, 2), 3, 4, 20),
        ((), 1, 1, 1),
        ((7,), 2, 3, 9),
        # two groups of residues, two blocks of poles, several tiles and segments of points
        pytest.param((4, 3), 2, 33, 1100, marks=pytest.mark.slow),
        pytest.param((3, 3), 3, 20, 300, marks=pytest.mark.slow),
        pytest.param((6,), 1, 100, 64, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_equal_the_loop(leading, width, poles, length):
    pytest.importorskip("triton")
    assert_right(make_inputs(leading, width, poles, length))


def test_tiles_segments_and_groups_that_are_cut(monkeypatch):
    """51 points in tiles of 16 and segments of 32, 5 poles in blocks of 4, four residues in groups of two."""
    triton = pytest.importorskip("subquad.kernels.cauchy.triton", reason="needs triton")
    for name, value in {"POINTS": 16, "SEGMENT": 32, "MOST_POLES": 4, "TILE": 32, "MOST_RESIDUES": 3}.items():
        monkeypatch.setattr(triton, name, value)
    assert_right(make_inputs((2, 2), 3, 5, 100))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("decay", [1e-6, 1e-4])
def test_weakly_damped_poles_on_the_frequencies_are_exact(backend, decay):
    """At some points w - q Lambda is a thousand times smaller than w and than q Lambda."""
    pytest.importorskip("triton")
    inputs = make_inputs((4,), 2, 6, 64)
    w, c = 2 * inputs["s"].sinh(), inputs["s"].cosh()
    resonant = (w / c).imag[5:30:4] / inputs["dt"][:, None]
    inputs["Lambda"] = torch.complex(torch.full((2, 6), -decay, dtype=torch.float64), resonant[:, :6])
    assert_right(inputs, partial(cauchy, backend=backend))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
def test_poles_and_steps_of_any_size(scale):
    pytest.importorskip("triton")
    inputs = make_inputs((2,), 2, 4, 16)
    inputs["dt"], inputs["residues"] = inputs["dt"] * scale, inputs["residues"] * max(1.0, scale)
    # a pole at zero, a real one and one without damping
    inputs["Lambda"][:, :3] = torch.tensor([0.0, -1.0, 2j], dtype=torch.complex128)
    assert_right(inputs)


def test_the_point_at_minus_one_is_no_exception():
    """There q is almost zero and the paper's w / q almost infinite; only the first term of the sum is left."""
    pytest.importorskip("triton")
    inputs = single(make_inputs((2,), 2, 4, 16))
    s = torch.tensor([1e-12 + 0.5j * math.pi], dtype=torch.complex128, device=DEVICE)
    for backend in ("torch", "triton"):
        U = cauchy(**(inputs | {"s": s}), backend=backend)
        torch.testing.assert_close(U, (inputs["residues"].real.sum(-1, keepdim=True) / 1j).to(U.dtype))


def test_a_point_takes_memory_for_every_pole_in_pytorch_and_asking_records_no_operator():
    inputs = make_inputs((2, 2), 5, 6, 9)
    with record_operators() as used:
        assert elements_per_point(**inputs) == 5 * 6
    assert used == {}
