"""The lookup of embeddings; the laws of operators judge its gradient."""

import pytest
import torch

from subquad.kernels.embedding import embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int64])
def test_tokens_of_any_shape_and_integer_type(dtype):
    tokens = torch.randint(7, (3, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    weight = torch.randn(7, 4, device=DEVICE, requires_grad=True)
    y = embedding(tokens, weight, backend="triton")
    assert torch.equal(y, weight[tokens.long()])
    y.sum().backward()
    counts = torch.bincount(tokens.flatten().long(), minlength=7)
    torch.testing.assert_close(weight.grad, counts[:, None].expand(-1, 4).float())
