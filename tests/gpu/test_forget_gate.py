"""Forget gates on a GPU: the laws of `tests/kernels/test_forget_gate.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.forget_gate import forget_gate
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"damping": 16.0}, {"damping": 1.0}, {"layer": 1}, {"layer": 23}], ids=str)
@pytest.mark.parametrize("size", [(4096, 2048), (1, 2048), (3, 77)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(size, options, dtype):
    g = torch.Generator("cuda").manual_seed(size[0])
    x = (4 * torch.randn(*size, generator=g, device="cuda")).to(dtype)
    logits = torch.randn(24, size[1], generator=g, device="cuda") if "layer" in options else None
    plain = forget_gate(x, logits, **options, backend="torch")
    exact = forget_gate(x.double(), None if logits is None else logits.double(), **options, backend="torch")
    found = partial(forget_gate, **options, backend="triton")(x, logits)
    for a, e, p in zip(found, exact, plain, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, e, torch.float32, plain=p)
