"""The inputs of RWKV-6's linear attention on a GPU: the laws of `tests/kernels/test_rwkv6_inputs.py` at real sizes."""

from functools import partial

import pytest
import torch

from subquad.kernels.rwkv6_inputs import rwkv6_inputs
from subquad.kernels.rwkv6_inputs.reference import rwkv6_inputs_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.gated import on_device
from tests.kernels.test_rwkv6_inputs import KEEP, POSITIONS, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def own_first(op):
    """The comparison looks at the size of the first result, and the queries of a single position are zeros."""
    return lambda **inputs: tuple(reversed(op(**inputs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(2, 300, 32, 64), (3, 77, 5, 37), (1, 1, 1, 64), (1, 129, 2, 256), (2, 70, 3, 8), (700, 1, 3, 64)]
)
def test_the_kernels_equal_the_equations_in_double_precision(sizes, dtype):
    op, exact = own_first(partial(rwkv6_inputs, backend="triton")), own_first(rwkv6_inputs_reference)
    assert_matches_reference(op, exact, make_inputs(*sizes), dtype=dtype, keep=KEEP, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_plain_pytorch_in_double_precision(dtype):
    inputs = on_device(make_inputs(8, 2048, 32, 64))
    inputs |= {name: inputs[name].to(dtype) for name in POSITIONS}
    ops = (partial(rwkv6_inputs, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, inputs, dtype)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 70e9:
        pytest.skip("needs 70 GB that no other process uses")
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters = [torch.ones(2**13, device="cuda") for _ in KEEP]
    q, k, v, log_decay, own = rwkv6_inputs(*[x] * 4, *parameters, head_dim=64, backend="triton")
    last = x[:, -4:].detach().requires_grad_()
    end = rwkv6_inputs(*[last] * 4, *parameters, head_dim=64, backend="triton")
    for a, b in zip((q, k, v, log_decay, own), end, strict=True):
        assert torch.equal(a[:, -4:], b)
    del q, k, v, log_decay, end
    (dx,) = torch.autograd.grad(own, x, torch.ones((), device="cuda").expand(own.shape))
    own = rwkv6_inputs(*[last] * 4, *parameters, head_dim=64, backend="triton").own
    assert torch.equal(dx[:, -4:], torch.autograd.grad(own, last, torch.ones_like(own))[0])
