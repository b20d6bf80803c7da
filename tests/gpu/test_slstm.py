"""sLSTM on a GPU, at sizes of real use."""

import pytest
import torch

from kernels.slstm import slstm_step
from suite.laws.accuracy import assert_close
from tests.gpu.test_selective_scan import results, wide
from tests.kernels.test_slstm import KEEP, TORCH, TRITON, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(100, 39, 4, 32), (3, 300, 2, 64), (17, 20, 3, 21), (1, 5, 1, 5)])
def test_the_kernel_equals_plain_pytorch_in_double_precision(sizes, dtype):
    inputs = {name: x.to("cuda", torch.float32 if name in KEEP else dtype) for name, x in make_inputs(*sizes).items()}
    exact, plain, actual = results(TORCH, wide(inputs)), results(TORCH, inputs), results(TRITON, inputs)
    for name, e in exact.items():
        kept = torch.float32 if name in ("final state", *KEEP) and dtype == torch.float32 else dtype
        assert_close(actual[name], e, kept, plain=plain[name], what=name)


def test_two_runs_are_bitwise_equal():
    inputs = {name: x.to("cuda", torch.float32).requires_grad_() for name, x in make_inputs(200, 39, 4, 32).items()}
    runs = []
    for _ in range(2):
        y, state = TRITON(**inputs)
        runs.append([y, state, *torch.autograd.grad(y.square().sum() + state.sum(), list(inputs.values()))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_steps_equal_the_whole():
    inputs = make_inputs(20, 12, 3, 40)
    exact, final = TORCH(**inputs)
    inputs = {name: x.to("cuda", torch.float32) for name, x in inputs.items()}
    state = inputs.pop("initial_state")
    for t in range(12):
        y = slstm_step(inputs["x"][:, t], inputs["recurrent"], inputs["bias"], state, backend="triton")
        assert_close(y.cpu(), exact[:, t], torch.float32, plain=exact[:, t].float(), what=f"step {t}")
    assert_close(state.cpu(), final, torch.float32, plain=final.float())
