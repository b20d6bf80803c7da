"""Halves of the gated linear unit that lie apart, as Mamba-3's z, a part of a projection, and what it gates."""

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("mapped", [False, True])
def test_halves_may_have_rows_at_different_distances(mapped):
    g = torch.Generator().manual_seed(0)
    projection, up, weight = (torch.randn(*size, generator=g).to(DEVICE) for size in ((2, 5, 48), (2, 5, 20), (6, 20)))
    gate = projection[..., 7:27]
    results = []
    for backend in ("torch", "triton"):
        leaves = [x.detach().requires_grad_() for x in (gate, up, weight)]
        y = swiglu(leaves[0], leaves[2] if mapped else None, up=leaves[1], backend=backend)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves if mapped else leaves[:2])])
    assert not leaves[0].is_contiguous()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
