"""The lookup of embeddings and its gradient against the lookup row by row."""

import pytest
import torch

from kernels.embedding import embedding
from kernels.embedding.reference import embedding_reference
from suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens_of(kind: str, rows: int, classes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(classes, (rows,), generator=generator)
    if kind == "one":
        return torch.full((rows,), 3)
    if kind == "filler":
        # the runs of the filler cross several chunks, other runs none
        return drawn.where(torch.rand(rows, generator=generator) < 0.3, 1)
    return drawn


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("kind", "rows", "classes"),
    [("any", 200, 5), ("any", 70, 40000), ("one", 129, 4), ("one", 2200, 4), ("filler", 300, 20), ("any", 1, 9)],
)
def test_lookup_and_gradient_equal_those_row_by_row(backend, kind, rows, classes):
    tokens = tokens_of(kind, rows, classes)
    weight = torch.randn(classes, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def op(weight):
        return embedding(tokens.to(DEVICE), weight, backend=backend)

    assert_matches_reference(op, lambda weight: embedding_reference(tokens, weight), {"weight": weight}, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int64])
def test_tokens_of_any_shape_and_integer_type(dtype):
    tokens = torch.randint(7, (3, 50), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    weight = torch.randn(7, 4, device=DEVICE, requires_grad=True)
    y = embedding(tokens, weight, backend="triton")
    assert y.shape == (3, 50, 4)
    y.sum().backward()
    counts = torch.bincount(tokens.flatten().long(), minlength=7)
    torch.testing.assert_close(weight.grad, counts[:, None].expand(-1, 4).float())
