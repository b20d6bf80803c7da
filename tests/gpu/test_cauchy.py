"""Sums of fractions over conjugate poles on a GPU: the claims of `tests/kernels/test_cauchy.py` at realistic sizes."""

import copy

import pytest
import torch

from subquad.models.s4 import S4Kernel
from subquad.suite.laws.accuracy import assert_close
from tests.gpu.real_sizes import memory_taken
from tests.kernels.test_cauchy import TORCH, TRITON, double, make_inputs, single, values

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("leading", "width", "poles", "length"),
    [((2, 2), 70, 32, 2048), ((3, 3), 20, 32, 4097), ((4, 3), 5, 100, 1000), ((7,), 300, 2, 1), ((2, 2), 3, 32, 2**17)],
)
def test_the_kernels_equal_plain_pytorch_in_double_precision(leading, width, poles, length):
    inputs = single(make_inputs(leading, width, poles, length))
    exact = values(TORCH, {name: x.to("cuda") for name, x in double(inputs).items()})
    plain = values(TORCH, inputs)
    for name, value in values(TRITON, inputs).items():
        assert_close(value, exact[name], torch.float32, plain=plain[name], what=name)


def test_memory_is_that_of_the_sums():
    inputs = single(make_inputs((2, 2), 256, 32, 4096))
    # the sums, and a fifth of their size for those of the segments; a tensor [D, N, F] is eight times as large as U
    assert memory_taken(TRITON, inputs) < 1.5 * 8 * (2 * 2 * 256 * 2049)


def in_single(op):
    """The op on inputs that are rounded to single precision, with results and gradients in double precision."""

    def rounded(residues, Lambda, dt, s):
        return op(residues.to(torch.complex64), Lambda.to(torch.complex64), dt.float(), s).to(torch.complex128)

    return rounded


def on_rounded_inputs(residues, Lambda, dt, s):
    residues, Lambda = (x.to(torch.complex64).to(torch.complex128) for x in (residues, Lambda))
    return TORCH(residues, Lambda, dt.float().double(), s)


def filters_and_gradients(ssm, weights):
    """S4's filters, and gradients of their sums weighted by each of the cotangents `weights` [8, D, L]."""
    leaves = [getattr(ssm, name) for name in ("log_dt", "log_A_real", "A_imag", "P", "B", "C")]
    filters = ssm.kernel(weights.shape[-1])
    gradients = [torch.autograd.grad((filters * w).sum(), leaves, retain_graph=True) for w in weights]
    return [filters.unsqueeze(0), *(torch.stack(x) for x in zip(*gradients, strict=True))]


def assert_as_exact(actual, exact, plain):
    """The rule for filters and gradients, where the error of an element is its root mean square over the cotangents.

    Gradients of eigenvalues near the imaginary axis lose so many digits that the largest single error changes by more
    than a factor of two where plain PyTorch only adds the poles in another order.
    """

    def root_mean_square(x):
        return x.square().mean(0).sqrt()

    for a, e, p in zip(actual, exact, plain, strict=True):
        size = root_mean_square(e)
        with_errors = [size + root_mean_square(x - e) for x in (a, p)]
        assert_close(with_errors[0], size, torch.float32, plain=with_errors[1])


@pytest.mark.parametrize("measure", ["legs", "legt", "fout"])
def test_filters_of_s4_are_as_exact_as_the_rule_asks(measure, monkeypatch):
    """The sums are computed in float32 and the rest of the filter in float64, so that all errors are those of the sums.

    In float32, the rest would have errors several times as large.
    """
    torch.manual_seed(0)
    ssm = S4Kernel(64, 64, init=measure).cuda().double()
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(8, 64, 2048, generator=generator, dtype=torch.float64, device="cuda")

    def results(op):
        monkeypatch.setattr("subquad.models.s4.cauchy", op)
        return filters_and_gradients(ssm, weights)

    exact, plain, actual = map(results, (on_rounded_inputs, in_single(TORCH), in_single(TRITON)))
    assert_as_exact(actual, exact, plain)


def test_filters_of_s4_in_pieces_are_as_exact_as_in_one_piece(monkeypatch):
    """Gradients are sums over the pieces, in another order than in one piece, so neither is the exact value."""
    torch.manual_seed(0)
    ssm = S4Kernel(64, 64).cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(8, 64, 2048, generator=generator, device="cuda")
    exact = filters_and_gradients(copy.deepcopy(ssm).double(), weights.double())
    whole = filters_and_gradients(ssm, weights)
    # four sums of 64 channels, 100 of the 1,025 frequencies at a time
    monkeypatch.setattr("subquad.models.s4.MOST_ELEMENTS", 4 * 64 * 100)
    assert_as_exact(filters_and_gradients(ssm, weights), exact, plain=whole)
