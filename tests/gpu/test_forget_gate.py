"""Forget gates on a GPU: the laws of `tests/kernels/test_forget_gate.py` at sizes of real use."""

import pytest
import torch

from subquad.kernels.forget_gate import forget_gate
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"damping": 16.0}, {"damping": 1.0}, {"layer": 1}, {"layer": 23}, {}], ids=str)
@pytest.mark.parametrize("size", [(4096, 2048), (1, 2048), (3, 77)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(size, options, dtype):
    """Outputs and gradients; without options the gate is a rated one."""
    g = torch.Generator("cuda").manual_seed(size[0])
    x = (4 * torch.randn(*size, generator=g, device="cuda")).to(dtype)
    weights = torch.randn(2, *size, generator=g, device="cuda")
    parameters = {}
    if "layer" in options:
        parameters["logits"] = torch.randn(24, size[1], generator=g, device="cuda")
    elif not options:
        parameters["bias"] = torch.randn(size[1], generator=g, device="cuda")
        parameters["log_rate"] = torch.rand(size[1] // 11 if size[1] % 11 == 0 else 8, generator=g, device="cuda") - 0.5

    def results(backend, cast):
        leaves = {name: cast(z).requires_grad_() for name, z in {"x": x, **parameters}.items()}
        found = forget_gate(**leaves, **options, backend=backend)
        return [*found, *torch.autograd.grad(found, list(leaves.values()), [cast(w) for w in weights])]

    plain, exact = results("torch", torch.clone), results("torch", torch.Tensor.double)
    for a, e, p in zip(results("triton", torch.clone), exact, plain, strict=True):
        assert a.dtype == p.dtype
        assert_close(a, e, p.dtype, plain=p)
