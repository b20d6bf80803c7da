"""Float32 products on a GPU at sizes of real use: as exact as cuBLAS, and taken where they should be."""

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.float32_matmul import float32_matmul
from subquad.kernels.float32_matmul.parts import parts_matmul, split
from subquad.models.parts.linear import Linear
from subquad.suite.laws.accuracy import assert_close
from subquad.suite.training.numerics import numerics

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def operands(rows, columns, depth, layout):
    g = torch.Generator("cuda").manual_seed(rows + depth)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda")

    a = randn(depth, rows).t() if layout == "weight" else randn(rows, depth)
    b = randn(columns, depth).t() if layout == "map" else randn(depth, columns)
    return a, b * depth**-0.5


@pytest.mark.parametrize("layout", ["map", "input", "weight"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(65536, 384, 128), (4096, 8192, 64), (8192, 128, 8192), (384, 128, 65536), (1001, 333, 777)],
)
def test_products_err_at_most_twice_as_much_as_torch(rows, columns, depth, layout):
    a, b = operands(rows, columns, depth, layout)
    found = float32_matmul(a, b, backend="triton")
    assert_close(found, a.double() @ b.double(), torch.float32, plain=a @ b)
    assert torch.equal(found, float32_matmul(a, b, backend="triton"))


@pytest.mark.parametrize("layout", ["map", "input", "weight"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(65536, 384, 128), (4096, 8192, 64), (8192, 128, 8192), (384, 128, 65536), (1001, 333, 777)],
)
def test_products_of_parts_err_at_most_twice_as_much_as_torch(rows, columns, depth, layout):
    a, b = operands(rows, columns, depth, layout)

    def parts(x):
        return split(x) if x.stride(1) == 1 else split(x.t()).t()

    found = parts_matmul(parts(a), parts(b))
    assert_close(found, a.double() @ b.double(), torch.float32, plain=a @ b)
    assert torch.equal(found, parts_matmul(parts(a), parts(b)))


def test_a_large_linear_map_takes_parts_and_a_narrow_one_does_not():
    for columns, is_taken in ((384, True), (128, False)):
        x = torch.randn(128, 512, 128, device="cuda", requires_grad=True)
        layer = Linear(128, columns).cuda()
        y = layer(x)
        assert y.grad_fn.name().startswith("PartsMap" if is_taken else "LinearMap")
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
        wide = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
        exact = torch.nn.functional.linear(*wide)
        plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert_close(y, exact, torch.float32, plain=plain)
        expected = torch.autograd.grad(exact, wide, dy.double())
        reference = torch.autograd.grad(plain, (x, layer.weight, layer.bias), dy)
        for gradient, wanted, other in zip(found, expected, reference, strict=True):
            assert_close(gradient, wanted, torch.float32, plain=other)


def test_large_and_small_numbers_keep_their_digits():
    a, b = operands(256, 256, 512, "map")
    # every row and column has a scale of its own, so each element is compared with its own size
    a = a * torch.logspace(-15, 15, 256, device="cuda")[:, None]
    b = b * torch.logspace(12, -12, 256, device="cuda")
    size = a.double().abs() @ b.double().abs()
    exact = a.double() @ b.double()
    errors = [((c.double() - exact) / size).abs() for c in (float32_matmul(a, b, backend="triton"), a @ b)]
    assert errors[0].max() <= 2 * errors[1].max() + 1e-7


def test_infinities_and_nan_stay():
    a, b = operands(128, 64, 96, "map")
    a[3, 5], a[7, 11] = torch.inf, torch.nan
    found, expected = float32_matmul(a, b, backend="triton"), a @ b
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    a, b = torch.randn(2**18 + 1, 16, device="cuda"), torch.randn(16, 2**13, device="cuda")
    last = float32_matmul(a, b, backend="triton")[-1]
    torch.testing.assert_close(last.double(), a[-1].double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_the_automatic_choice_follows_size_and_precision():
    a, b = operands(4096, 512, 512, "map")
    for precision, rows, backend in (("fp32", 4096, "triton"), ("fp32", 8, "torch"), ("tf32", 4096, "torch")):
        with numerics(precision), record_operators() as used:
            float32_matmul(a[:rows], b)
        assert used["float32_matmul"]["backend"] == backend
