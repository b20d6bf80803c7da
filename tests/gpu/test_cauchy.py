"""Sums of fractions over conjugate poles on a GPU: the claims of `tests/kernels/test_cauchy.py` at realistic sizes."""

import pytest
import torch

from models.s4 import S4Kernel
from suite.laws.accuracy import assert_close
from tests.kernels.test_cauchy import TORCH, TRITON, double, make_inputs, single, values

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("leading", "width", "poles", "length"),
    [((2, 2), 70, 32, 2048), ((3, 3), 20, 32, 4097), ((4, 3), 5, 100, 1000), ((7,), 300, 2, 1), ((2, 2), 3, 32, 2**17)],
)
def test_the_kernels_equal_plain_pytorch_in_double_precision(leading, width, poles, length):
    inputs = single(make_inputs(leading, width, poles, length))
    exact = values(TORCH, {name: x.to("cuda") for name, x in double(inputs).items()})
    plain = values(TORCH, inputs)
    for name, value in values(TRITON, inputs).items():
        assert_close(value, exact[name], torch.float32, plain=plain[name], what=name)


def test_two_runs_are_bitwise_equal():
    inputs = single(make_inputs((2, 2), 300, 32, 2048))
    for first, second in zip(values(TRITON, inputs).values(), values(TRITON, inputs).values(), strict=True):
        assert torch.equal(first, second)


def test_memory_is_that_of_the_sums():
    inputs = single(make_inputs((2, 2), 256, 32, 4096))
    leaves = [inputs[name].requires_grad_() for name in ("residues", "Lambda", "dt")]
    cotangent = torch.randn(2, 2, 256, 2049, dtype=torch.complex64, device="cuda")
    torch.autograd.grad(TRITON(**inputs), leaves, cotangent)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(TRITON(**inputs), leaves, cotangent)
    # the sums, and a fifth of their size for those of the segments; a tensor [D, N, F] is eight times as large as U
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 8 * cotangent.numel()


@pytest.mark.parametrize("measure", ["legs", "legt", "fout"])
def test_filters_of_s4_are_as_exact_as_the_rule_asks(measure, monkeypatch):
    torch.manual_seed(0)
    single_ssm = S4Kernel(64, 64, init=measure).cuda()
    exact_ssm = S4Kernel(64, 64, init=measure).cuda().double()
    exact_ssm.load_state_dict(single_ssm.state_dict())
    weights = torch.randn(
        64, 2048, generator=torch.Generator("cuda").manual_seed(1), dtype=torch.float64, device="cuda"
    )

    def results(ssm, op):
        monkeypatch.setattr("models.s4.cauchy", op)
        leaves = [getattr(ssm, name) for name in ("log_dt", "log_A_real", "A_imag", "P", "B", "C")]
        filters = ssm.kernel(2048)
        return [filters, *torch.autograd.grad((filters * weights).sum(), leaves)]

    exact, plain, actual = results(exact_ssm, TORCH), results(single_ssm, TORCH), results(single_ssm, TRITON)
    for e, p, a in zip(exact, plain, actual, strict=True):
        assert_close(a, e, torch.float32, plain=p)


def test_a_recorded_step_gives_the_same_gradients():
    inputs = single(make_inputs((2, 2), 64, 32, 512))
    expected = values(TRITON, inputs)
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("residues", "Lambda", "dt")}
    cotangent = torch.randn(2, 2, 64, 257, generator=torch.Generator().manual_seed(2), dtype=torch.complex128)
    cotangent = cotangent.to("cuda", torch.complex64)

    def step():
        U = TRITON(**(inputs | leaves))
        return [U, *torch.autograd.grad(U, list(leaves.values()), cotangent)]

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        recorded = step()
    for tensor in recorded:
        tensor.zero_()
    graph.replay()
    for e, r in zip(expected.values(), recorded, strict=True):
        assert torch.equal(e, r.cpu())
