"""WKV on a GPU, at sizes of real use."""

from functools import partial

import pytest
import torch

from kernels.wkv import wkv, wkv_step
from suite.laws.accuracy import assert_close
from tests.gpu.test_selective_scan import results, wide
from tests.kernels.test_wkv import KEEP, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TORCH = partial(wkv, return_final_state=True, backend="torch")
TRITON = partial(wkv, return_final_state=True, backend="triton")


ROUNDED = 2e-6
"""Floor for the gradient of the decay, because forward keeps the denominator as a logarithm in float32 (README)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "length", "width"), [(4, 1000, 768), (1, 9001, 77), (2, 64, 33), (8, 500, 1)])
def test_the_kernel_equals_plain_pytorch_in_double_precision(batch, length, width, dtype):
    inputs = {
        name: x.to("cuda", torch.float32 if name in KEEP else dtype)
        for name, x in make_inputs(batch, length, width).items()
    }
    exact, plain, actual = results(TORCH, wide(inputs)), results(TORCH, inputs), results(TRITON, inputs)
    for name, e in exact.items():
        kept = torch.float32 if name in ("final state", *KEEP) else dtype
        floor = ROUNDED if name == "log_decay" else None
        assert_close(actual[name], e, kept, plain=plain[name], what=name, floor=floor)


def test_two_runs_are_bitwise_equal():
    inputs = {name: x.to("cuda", torch.float32).requires_grad_() for name, x in make_inputs(1, 9000, 256).items()}
    runs = []
    for _ in range(2):
        y, state = TRITON(**inputs)
        runs.append([y, state, *torch.autograd.grad(y.square().sum() + state.sum(), list(inputs.values()))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_steps_equal_the_whole():
    inputs = make_inputs(16, 20, 300)
    exact, final = TORCH(**inputs)
    inputs = {name: x.to("cuda", torch.float32) for name, x in inputs.items()}
    state, k, v = inputs.pop("initial_state"), inputs.pop("k"), inputs.pop("v")
    for t in range(20):
        y = wkv_step(k[:, t], v[:, t], **inputs, state=state, backend="triton")
        assert_close(y.cpu(), exact[:, t], torch.float32, plain=exact[:, t].float(), what=f"step {t}")
    assert_close(state.cpu(), final, torch.float32, plain=final.float())
