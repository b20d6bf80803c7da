"""The gradient of embeddings on a GPU at sizes of real use."""

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.embedding import embedding
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("filler", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "classes", "width"), [(65536, 8192, 128), (16384, 50277, 768), (5000, 17, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_sums_in_a_fixed_order(rows, classes, width, filler, dtype):
    tokens = torch.randint(classes, (rows,), device="cuda")
    tokens = tokens.where(torch.rand(rows, device="cuda") >= filler, 3)
    weight = torch.randn(classes, width, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(rows, width, device="cuda", dtype=dtype)
    with record_operators() as used:
        found, again = (torch.autograd.grad(embedding(tokens, weight), weight, dy)[0] for _ in range(2))
    assert used["embedding"]["backend"] == "triton"
    exact = torch.zeros(classes, width, device="cuda", dtype=torch.float64).index_add_(0, tokens, dy.double())
    plain = torch.autograd.grad(embedding(tokens, weight, backend="torch"), weight, dy)[0]
    assert_close(found, exact, dtype, plain=plain)
    assert torch.equal(found, again)
