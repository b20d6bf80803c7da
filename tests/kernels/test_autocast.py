"""Under autocast, operators compute what they compute without it: states, decays and sums keep their precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels import OPERATORS
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.accuracy import outputs_of
from subquad.suite.laws.calls import Operator, is_float

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAST = {
    ("attention", "torch"), ("attention_step", "torch"), ("float32_matmul", "torch"), ("linear_cross_entropy", "torch"),
    ("linear_cross_entropy", "triton"), ("mamba_inner_step", "torch"),
}  # fmt: skip
"""Implementations that multiply matrices in the dtype of autocast, as their docstrings say or as PyTorch's own do."""


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_no_bit(name):
    """Gradients are taken outside of it, as PyTorch asks for."""
    found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
    for call in found.tiny() or found.once(1):
        if call.implementation.kind != "ours" or (name, call.implementation.name) in CAST:
            continue
        given, results = found.rounded(call), []
        for enabled in (False, True):
            leaves = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
            trained = [x.requires_grad_() for x in leaves.values() if is_float(x) and found.workload.backward]
            with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                outputs = outputs_of(found.function(call)(**leaves))
            made = [x for x in outputs if x.requires_grad]
            weights = [torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape).to(x) for x in made]
            gradients = torch.autograd.grad(made, trained, weights, allow_unused=True) if made else ()
            results.append([x for x in (*outputs, *gradients) if x is not None])
        for i, (plain, cast) in enumerate(zip(*results, strict=True)):
            assert plain.dtype == cast.dtype, f"{call}: result {i}"
            assert torch.equal(plain, cast), f"{call}: result {i}"
