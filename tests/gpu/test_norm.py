"""The norm on a GPU: the laws of `tests/kernels/test_norm.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.norm import norm
from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_inputs(rows, width, dtype, *, kind="rms", residual=True, gate=False, activation=None):
    g = torch.Generator("cuda").manual_seed(width)

    def randn(*size, dtype=torch.float32):
        return torch.randn(*size, generator=g, device="cuda", dtype=dtype)

    inputs = {"x": randn(rows, width, dtype=dtype), "weight": randn(width)}
    if kind == "layer":
        inputs["bias"] = randn(width)
    if residual:
        inputs["residual"] = randn(rows, width)
    if gate:
        inputs["gate"] = randn(rows, 2 * width, dtype=dtype)[:, width:]
    options = {"kind": kind, "activation": activation}
    if kind == "l2":
        del inputs["weight"]
        options["weight"] = None
    return inputs, options


def assert_right(inputs, options):
    ops = (partial(norm, **options, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width"), [(16384, 768), (4096, 2048), (65536, 64), (3001, 128), (7, 1), (100, 77), (33, 8192), (1, 5000)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "layer"},
        {"residual": False, "gate": True},
        {"kind": "layer", "residual": False},
        {"residual": False, "activation": "silu"},
        {"residual": False, "kind": "l2"},
    ],
    ids=["rms", "layer", "gated", "alone", "silu", "length one"],
)
def test_large_inputs_equal_plain_pytorch_in_double_precision(options, rows, width, dtype):
    if width == 1 and options:
        pytest.skip("the gradient of a norm of one element is zero, or rounding alone")
    inputs, rest = make_inputs(rows, width, dtype, **options)
    assert_right(inputs, rest)


def with_heads(tokens, heads, width, dtype, *, bias=True, residual=False):
    """Inputs of a layer norm with weights of heads and a gate that is a part of a projection."""
    inputs, options = make_inputs(tokens * heads, width, dtype, kind="layer", residual=residual)
    g = torch.Generator("cuda").manual_seed(heads)
    for name in ("x", "residual"):
        if name in inputs:
            inputs[name] = inputs[name].view(tokens, heads, width)
    for name in ("weight", "bias"):
        inputs[name] = torch.randn(heads, width, generator=g, device="cuda")
    if not bias:
        del inputs["bias"]
    projection = torch.randn(tokens, 3 * heads * width, generator=g, device="cuda").to(dtype)
    inputs["gate"] = projection[:, -heads * width :].unflatten(-1, (heads, width))
    return inputs, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [(512 * 39, 4, 32), (16384, 12, 64), (1001, 3, 8), (1, 4, 32), (77, 1, 20), (300, 40, 64), (50, 6, 2048)],
)
@pytest.mark.parametrize(
    ("options", "gate_activation"),
    [({"bias": False}, "sigmoid"), ({"residual": True}, "silu")],
    ids=["sigmoid", "silu, with bias and residual"],
)
def test_weights_of_heads_equal_plain_pytorch_in_double_precision(
    options, gate_activation, tokens, heads, width, dtype
):
    inputs, rest = with_heads(tokens, heads, width, dtype, **options)
    assert_right(inputs, {**rest, "gate_activation": gate_activation})


@pytest.mark.parametrize("name", ["mlstm", "rwkv6", "rwkv7", "lightning"])
def test_networks_with_norms_of_heads_and_gates_run_on_the_kernels(name):
    torch.manual_seed(0)
    spec = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)
    network = MODELS.load(name)(num_layers=2, d_model=128).build(spec).cuda()
    with record_operators() as used, torch.autocast("cuda", dtype=torch.bfloat16):
        network(torch.randint(16, (4, 40), device="cuda")).float().square().mean().backward()
    assert used["norm"]["backend"] == "triton"
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    inputs, options = make_inputs(2**21 + 3, 1024, torch.bfloat16, residual=False)
    y = norm(**inputs, **options)
    last = {**inputs, "x": inputs["x"][-5:]}
    assert torch.equal(y[-5:], norm(**last, **options))
