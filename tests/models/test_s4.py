"""S4 against dense HiPPO matrices in float64. The laws of all models are in tests/laws."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from subquad.kernels.cauchy import cauchy
from subquad.models.parts.hippo import RANKS, diagonal_less_low_rank, low_rank, transition
from subquad.models.s4 import MIN_DECAY, S4Config, S4Kernel
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import unroll
from subquad.suite.training.numerics import default_dtype

MEASURES = list(RANKS)
every_measure = pytest.mark.parametrize("measure", MEASURES)


def make(measure="legs", width=3, d_state=8, **options) -> S4Kernel:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return S4Kernel(width, d_state, init=measure, **options)


def dense(ssm: S4Kernel, channel: int, C: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Abar, Bbar and C of a channel in the coordinates of the HiPPO matrix, straight from its definition."""
    size = 2 * ssm.A_imag.shape[1]
    A, B = transition(ssm.init, size)
    # a real part of Lambda that would be zero starts a little below
    shift = MIN_DECAY if ssm.init != "legs" else 0.0
    A = A - shift * np.eye(size)
    dt = ssm.log_dt.exp()[channel].item() * ssm.step_scale
    V = diagonal_less_low_rank(ssm.init, size)[3].numpy()
    c = torch.view_as_complex(C)[channel].detach().numpy()
    before = np.eye(size) - dt / 2 * A
    return (
        np.linalg.solve(before, np.eye(size) + dt / 2 * A),
        np.linalg.solve(before, dt * B),
        2 * (c @ V.conj().T).real,
    )


def recurrence(Abar, Bbar, C, length):
    h, taps = Bbar, []
    for _ in range(length):
        taps.append(C @ h)
        h = Abar @ h
    return torch.tensor(np.array(taps))


@every_measure
@pytest.mark.parametrize("size", [4, 8, 64])
def test_the_diagonal_form_is_the_hippo_matrix(measure, size):
    A, B = transition(measure, size)
    Lambda, P, B_tilde, V = (part.numpy() for part in diagonal_less_low_rank(measure, size))
    np.testing.assert_allclose(2 * (V.conj().T @ V)[0, 0].real, 2.0)
    p = low_rank(measure, size)
    assert p.shape == (RANKS[measure], size)
    np.testing.assert_allclose(2 * (P @ V.T).real, p, atol=1e-10 * size)
    np.testing.assert_allclose(2 * (V @ np.diag(Lambda) @ V.conj().T).real - p.T @ p, A, atol=1e-9 * size)
    np.testing.assert_allclose(2 * (V @ B_tilde).real, B, atol=1e-10 * size)
    assert (B_tilde.real > 0).all()
    assert np.abs(B_tilde.imag).max() < 1e-9
    assert (np.linalg.eigvals(A).real < 1e-9).all()


def test_hippo_legs_is_the_matrix_of_its_paper():
    A, B = transition("legs", 4)
    np.testing.assert_allclose(A[2], [-(5**0.5), -(15**0.5), -3, 0])
    np.testing.assert_allclose(B, np.sqrt([1, 3, 5, 7]))
    # Lambda is Skew-Hippo, from which S4D-LegS and DSS start
    from subquad.models.s4d import skew_hippo_frequencies

    Lambda = diagonal_less_low_rank("legs", 16)[0]
    torch.testing.assert_close(Lambda.imag, skew_hippo_frequencies(16))
    torch.testing.assert_close(Lambda.real, torch.full((8,), -0.5, dtype=torch.float64))


@every_measure
@pytest.mark.parametrize("length", [1, 2, 7, 64, 300])
@torch.no_grad()
def test_the_filter_is_that_of_the_dense_recurrence(measure, length):
    ssm = make(measure)
    got = ssm.kernel(length)
    wanted = torch.stack([recurrence(*dense(ssm, channel, ssm.C), length) for channel in range(3)])
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8 * wanted.abs().max().item())


@every_measure
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_filters_and_gradients_in_float32_are_near_those_of_float64(measure, precision):
    """At the roots of unity themselves, the gradients of LegT and FouT would be lost (see `models.s4`)."""
    single = S4Kernel(16, 64, init=measure)
    exact = make(measure, width=16, d_state=64)
    exact.load_state_dict(single.state_dict())
    weights = torch.randn(16, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.set_float32_matmul_precision(precision)
    try:
        results = []
        for ssm in (exact, single):
            leaves = [getattr(ssm, name) for name in ("log_dt", "log_A_real", "A_imag", "P", "B", "C")]
            filters = ssm.kernel(512)
            results.append([filters, *torch.autograd.grad((filters * weights).sum(), leaves)])
    finally:
        torch.set_float32_matmul_precision("highest")
    for wanted, got in zip(*results, strict=True):
        assert (got - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("measure", ["legs", "legt"])
def test_filters_and_gradients_from_the_triton_kernels_are_near_those_of_float64(measure, monkeypatch):
    """In one piece and, with a gradient through a checkpoint, in pieces of 30 frequencies."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = make(measure, width=3, d_state=16, bidirectional=True).to(device)
    single = S4Kernel(3, 16, init=measure, bidirectional=True).to(device)
    single.load_state_dict(exact.state_dict())
    exact.load_state_dict(single.state_dict())
    weights = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    results = []
    for ssm, backend, piece in ((exact, "torch", None), (single, "triton", None), (single, "triton", 30)):
        monkeypatch.setattr("subquad.models.s4.cauchy", partial(cauchy, backend=backend))
        leaves = [getattr(ssm, name) for name in ("log_dt", "log_A_real", "A_imag", "P", "B", "C")]
        filters = ssm._system().filters(ssm._maps(), 100, piece)
        results.append([filters, *torch.autograd.grad((filters * weights).sum(), leaves)])
    for wanted, *found in zip(*results, strict=True):
        for got in found:
            assert (got - wanted).norm() < 1e-4 * wanted.norm()


@torch.no_grad()
def test_a_filter_does_not_depend_on_the_length():
    ssm = make("legt", width=2)
    torch.testing.assert_close(ssm.kernel(100)[:, :30], ssm.kernel(30), rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_finite_differences_whole_or_in_pieces():
    """The measure is the one whose correction has two columns; the laws judge the default, whose has one."""
    ssm = make("legt", width=2, d_state=4)
    leaves = [getattr(ssm, name) for name in ("log_A_real", "A_imag", "P", "B", "C", "log_dt")]

    def filters(size, *_):
        system, C = ssm._system(), ssm._maps()
        return system.filters(C, 6, size)

    # gradcheck changes the parameters in place
    assert torch.autograd.gradcheck(lambda *p: filters(4, *p), leaves)
    assert torch.autograd.gradcheck(lambda *p: filters(2, *p), leaves)


@torch.no_grad()
def test_a_two_sided_model_reads_the_future_by_its_second_filter():
    ssm = make("legs", bidirectional=True)
    x = torch.zeros(1, 9, 3, dtype=torch.float64)
    x[:, 4] = 1.0
    y = ssm(x)[0]
    past, future = (torch.stack([recurrence(*dense(ssm, i, C), 9) for i in range(3)]) for C in ssm.C)
    torch.testing.assert_close(y[4:].T, past[:, :5] + torch.where(torch.arange(5) == 0, 1.0, 0.0) * ssm.D[:, None])
    torch.testing.assert_close(y[:4].T, future[:, :4].flip(1))
    with pytest.raises(ValueError, match="reads the future and has no step"):
        ssm.step(x[:, 0], ssm.init_state(1, 9))


@every_measure
@torch.no_grad()
def test_the_state_behind_a_long_prompt_is_that_of_its_steps(measure):
    ssm = make(measure)
    x = torch.randn(2, 150, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs, state = unroll(ssm, x, ssm.init_state(2, 150))
    y, (h,) = ssm.prefill(x, ssm.init_state(2, 150))
    torch.testing.assert_close(h, state[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(outputs, y, rtol=1e-9, atol=1e-9)


def test_channels_may_share_their_state_matrix():
    spec = TaskSpec("signal", num_classes=4, readout="sequence", max_length=20, channels=1)
    sizes = [
        sum(p.numel() for p in S4Config(d_model=8, d_state=16, num_layers=1, tie_A=tie).mixer(0, spec).parameters())
        for tie in (False, True)
    ]
    # Lambda, P and B of 8 complex numbers each, once instead of eight times
    assert sizes[0] - sizes[1] == 7 * 3 * 8 * 2
