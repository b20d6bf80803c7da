"""The short causal convolution on a GPU: the laws of `tests/kernels/test_causal_conv1d.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_heads, causal_conv1d_step
from subquad.kernels.causal_conv1d.reference import causal_conv1d_reference
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALVES = (torch.bfloat16, torch.float16)


def make_inputs(batch, length, width, taps=4, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(length)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda", dtype=dtype)

    return {
        "x": randn(batch, length, width),
        "weight": randn(width, taps) / 2,
        "bias": randn(width),
        "activation": "silu",
        "initial_state": randn(batch, width, taps - 1),
    }


def channel_last(x):
    return x


def channel_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def half_of_a_projection(x):
    return torch.cat([x, x + 1], dim=-1).chunk(2, dim=-1)[0]


TORCH, TRITON = (partial(causal_conv1d, return_final_state=True, backend=backend) for backend in ("torch", "triton"))


@pytest.mark.parametrize("memory", [channel_last, channel_first, half_of_a_projection])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("taps", "shape"), [(4, (4, 2048, 768)), (3, (3, 1000, 200)), (2, (2, 4099, 77))])
def test_a_long_sequence_equals_plain_pytorch_in_double_precision(memory, dtype, taps, shape):
    inputs = make_inputs(*shape, taps, dtype)
    assert_equals_plain_pytorch(TRITON, TORCH, inputs | {"x": memory(inputs["x"])}, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "size"), [(2048, 128), (1000, 96), (37, 256), (70, 5)])
def test_heads_of_length_one_equal_plain_pytorch_in_double_precision(length, size, dtype):
    heads = (2, size), (4, size), (3, 2 * size)
    inputs = make_inputs(2, length, 12 * size, 4, dtype)
    given = {name: inputs[name] for name in ("x", "weight")} | {"heads": heads, "num_unit": 2, "activation": "silu"}
    ops = (partial(causal_conv1d_heads, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, given | {"x": half_of_a_projection(inputs["x"])}, dtype)


@pytest.mark.parametrize("memory", [channel_last, channel_first])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize(("taps", "dtype"), [(2, torch.float32), (3, torch.float16), (4, torch.bfloat16)])
@pytest.mark.parametrize("width", [1, 64, 70])
def test_the_kernel_equals_the_loop(memory, length, taps, dtype, width):
    inputs = {k: t.double().cpu() if torch.is_tensor(t) else t for k, t in make_inputs(2, length, width, taps).items()}

    def op(x, **rest):
        return causal_conv1d(memory(x), **rest, return_final_state=True, backend="triton")

    assert_matches_reference(op, causal_conv1d_reference, inputs, dtype=dtype, device="cuda")


@pytest.mark.large
@pytest.mark.parametrize("memory", [channel_last, channel_first])
def test_a_million_steps(memory):
    inputs = make_inputs(1, 2**20, 6)
    assert_equals_plain_pytorch(TRITON, None, inputs | {"x": memory(inputs["x"])}, exact=TORCH)


@pytest.mark.large
def test_offsets_beyond_two_to_the_31():
    """A view whose last step is more than 2^31 elements behind its first."""
    storage = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((1, 9, 64), (0, 2**28, 1)).copy_(torch.randn(1, 9, 64, device="cuda"))
    inputs = make_inputs(1, 9, 64) | {"x": x}
    assert_equals_plain_pytorch(TRITON, None, inputs, exact=TORCH)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_recorded_steps_equal_the_whole(dtype):
    inputs = make_inputs(16, 20, 300, dtype=dtype)
    whole, final = causal_conv1d(**inputs, return_final_state=True)
    x_t, state = inputs["x"][:, 0].clone(), inputs["initial_state"].clone()

    def step():
        return causal_conv1d_step(x_t, inputs["weight"], inputs["bias"], state, activation="silu", backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_t = step()
    state.copy_(inputs["initial_state"])
    for t in range(20):
        x_t.copy_(inputs["x"][:, t])
        graph.replay()
        # the same products and sums in another kernel
        assert_close(y_t, whole[:, t].double(), dtype, plain=whole[:, t])
    assert torch.equal(state, final)
