"""Products of float32 matrices: the kernel against the product as written, in every layout."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.float32_matmul import float32_matmul
from subquad.kernels.float32_matmul.reference import float32_matmul_reference
from subquad.kernels.float32_matmul.triton import TF32, Tuning, float32_matmul_triton
from subquad.kernels.launch import CompileOptions
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tuning(16, 16, 16, TF32, CompileOptions(num_warps=4), min_span=16)


def make_inputs(rows, columns, depth, *, a_columns=False, b_columns=False, bias=False):
    g = torch.Generator().manual_seed(rows + depth)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    a = normal(depth, rows).t() if a_columns else normal(rows, depth)
    b = normal(columns, depth).t() if b_columns else normal(depth, columns)
    made = {"a": a, "b": b * depth**-0.5}
    # multiplication by a number keeps the layout of a dense matrix
    return made | ({"bias": normal(columns)} if bias else {})


def keeping_layout(op, inputs):
    """op with copies of the inputs in the layout of the originals; the comparison makes dense ones."""
    strides = {name: x.stride() for name, x in inputs.items()}

    def run(**given):
        laid = {
            name: x.new_empty(0).set_(x.new_empty(x.numel()).untyped_storage(), 0, x.shape, strides[name])
            for name, x in given.items()
        }
        return op(**{name: laid[name].copy_(x) for name, x in given.items()})

    return run


@pytest.mark.parametrize("a_columns", [False, True])
@pytest.mark.parametrize("b_columns", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (33, 40, 70), (100, 17, 200)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_are_those_of_the_equation_in_every_layout(backend, rows, columns, depth, a_columns, b_columns):
    inputs = make_inputs(rows, columns, depth, a_columns=a_columns, b_columns=b_columns, bias=True)
    op = float32_matmul if backend == "torch" else partial(float32_matmul_triton, tile=SMALL)
    assert_matches_reference(keeping_layout(op, inputs), float32_matmul_reference, inputs, device=DEVICE, grad=False)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_may_be_split_and_written_into_a_given_tensor(splits, bias):
    inputs = make_inputs(20, 35, 130, bias=bias)

    def op(**given):
        out = torch.full((20, 35), torch.nan, device=DEVICE)
        found = float32_matmul_triton(**given, out=out, tile=SMALL, splits=splits)
        assert found.data_ptr() == out.data_ptr()
        return found

    assert_matches_reference(op, float32_matmul_reference, inputs, device=DEVICE, grad=False)
