"""A transposed copy has the same values and gradients."""

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.transpose import channels_last, time_last

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 200, 70), (3, 64, 129), (1, 1, 4), (2, 7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transposed_copies_are_equal_and_lie_as_asked(shape, dtype):
    wide = torch.randn(*shape[:2], 3 * shape[2], device=DEVICE).to(dtype)
    x = wide[..., : shape[2]]
    transposed = time_last(x)
    assert torch.equal(transposed, x)
    assert transposed.stride(1) == 1 or shape[1] == 1
    back = channels_last(transposed)
    assert torch.equal(back, x)
    assert back.stride(2) == 1 or shape[2] == 1
    assert time_last(transposed) is transposed
    assert channels_last(x) is x


def test_gradients_pass_a_transpose():
    x = torch.randn(2, 5, 3, device=DEVICE, requires_grad=True)
    weight = torch.randn(2, 5, 3, device=DEVICE)
    for transpose in (time_last, lambda x: channels_last(time_last(x))):
        (gradient,) = torch.autograd.grad((transpose(x) * weight).sum(), x)
        assert torch.equal(gradient, weight)
