"""Gated linear attention on a GPU: the laws of `tests/kernels/test_gated_linear_attention.py` at sizes of real use."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_reference
from suite.accuracy import assert_close, assert_matches_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TRITON = partial(gated_linear_attention, backend="triton")
TORCH = partial(gated_linear_attention, backend="torch")
DECAYS = ["none", "head", "head-step", "key", "value"]
KEEP = ("log_decay", "initial_state")
SIZES = {
    "none": (2, 128, 128),
    "head": (8, 128, 256),
    "head-step": (4, 128, 64),
    "key": (2, 256, 512),
    "value": (2, 512, 64),
}


def make_inputs(batch, length, heads, key_dim, value_dim, decay, dtype=torch.bfloat16, damping=4.0):
    g = torch.Generator("cuda").manual_seed(length)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda", dtype=torch.float64)

    channels = {"head": None, "head-step": (), "key": (key_dim,), "value": (value_dim,)}
    log_decay = None
    if decay != "none":
        size = (heads,) if decay == "head" else (batch, length, heads, *channels[decay])
        log_decay = F.logsigmoid(randn(*size)).div(damping).float()
    # what is never forgotten must be small for sums to stay of order one
    k = randn(batch, length, heads, key_dim) * (length**-0.5 if decay == "none" else 1.0)
    return {
        "q": randn(batch, length, heads, key_dim).to(dtype),
        "k": k.to(dtype),
        "v": randn(batch, length, heads, value_dim).to(dtype),
        "log_decay": log_decay,
        "decay_on": "value" if decay == "value" else "key",
        "initial_state": randn(batch, heads, key_dim, value_dim).float(),
        "return_final_state": True,
    }


def results(op, inputs):
    """o, the final state, and the gradients of every tensor among the inputs."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items() if torch.is_tensor(t)}
    outputs = op(**{**inputs, **leaves})
    g = torch.Generator("cuda").manual_seed(7)
    cotangents = [torch.randn(o.shape, generator=g, device="cuda").to(inputs["q"].dtype).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), cotangents)]


def wide(inputs):
    return {name: t.double() if torch.is_tensor(t) else t for name, t in inputs.items()}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("damping", [16.0, 1.0, 0.02], ids=["mild", "medium", "strong"])
def test_real_sizes_equal_plain_pytorch_in_double_precision(decay, dtype, damping):
    if decay == "head" and damping < 1:
        pytest.skip("one number a head, of which one or two matter, is no sample of rounding errors")
    inputs = make_inputs(1, 700, *SIZES[decay], decay, dtype, damping)
    exact = results(TORCH, wide(inputs))
    plain = results(gated_linear_attention_reference, inputs)
    names = ["o", "final state", *(f"gradient of {name}" for name, t in inputs.items() if torch.is_tensor(t))]
    for name, a, e, p in zip(names, results(TRITON, inputs), exact, plain, strict=True):
        assert_close(a, e, dtype, plain=p, what=name)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_equal_the_loop(decay, length, dtype):
    inputs = make_inputs(2, length, 40, 20, 36, decay, torch.float64)
    inputs = {name: t.cpu().double() if torch.is_tensor(t) else t for name, t in inputs.items()}
    assert_matches_reference(TRITON, gated_linear_attention_reference, inputs, dtype=dtype, keep=KEEP, device="cuda")


@pytest.mark.parametrize("decay", DECAYS)
def test_two_runs_are_bitwise_equal(decay):
    inputs = make_inputs(4, 2000, *SIZES[decay], decay)
    for first, second in zip(results(TRITON, inputs), results(TRITON, inputs), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("decay", ["none", "head-step", "key", "value"])
def test_a_hundred_thousand_steps(decay):
    inputs = make_inputs(1, 100_001, 1, 64, 64, decay)
    exact = results(TORCH, wide(inputs))
    for index, (a, e) in enumerate(zip(results(TRITON, inputs), exact, strict=True)):
        assert_close(a, e, torch.bfloat16, plain=e.to(torch.bfloat16), what=f"result {index}")


def test_offsets_beyond_two_to_the_31():
    """A view whose last step is more than 2^31 numbers behind its first."""
    inputs = make_inputs(1, 9, 1, 64, 64, "key")
    exact = results(TORCH, wide(inputs))
    storage = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    inputs["v"] = storage.as_strided((1, 9, 1, 64), (0, 2**28, 64, 1)).copy_(inputs["v"])
    for index, (a, e) in enumerate(zip(results(TRITON, inputs), exact, strict=True)):
        assert_close(a, e, torch.bfloat16, plain=e.to(torch.bfloat16), what=f"result {index}")


@pytest.mark.parametrize("decay", ["head", "key", "value"])
def test_a_recorded_training_step_gives_the_same_gradients(decay):
    inputs = make_inputs(2, 300, 2, 64, 64, decay)
    expected = results(TRITON, inputs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    generator = torch.Generator("cuda").manual_seed(7)
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items() if torch.is_tensor(t)}
    cotangents = [
        torch.randn(o.shape, generator=generator, device="cuda").to(torch.bfloat16).to(o) for o in expected[:2]
    ]
    with torch.cuda.graph(graph, stream=stream):
        outputs = TRITON(**{**inputs, **leaves})
        recorded = [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), cotangents)]
    for tensor in recorded:
        tensor.detach().zero_()
    graph.replay()
    for e, r in zip(expected, recorded, strict=True):
        assert torch.equal(e, r)
