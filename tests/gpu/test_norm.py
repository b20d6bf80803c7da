"""The norm on a GPU: the laws of `tests/kernels/test_norm.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from kernels.backend import record_operators
from kernels.norm import norm
from suite.laws.accuracy import assert_close

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


def results(op, inputs, options, dtype):
    """Outputs and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = op(**leaves, **options)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    g = torch.Generator("cuda").manual_seed(7)
    cotangents = [torch.randn(o.shape, generator=g, device="cuda").to(dtype).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), cotangents)]


def wide(inputs):
    return {name: x.double() for name, x in inputs.items()}


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
    if width == 1 and options.get("kind") == "layer":
        pytest.skip("a layer norm of one element has no gradient for x")
    inputs, rest = make_inputs(rows, width, dtype, **options)
    exact = results(partial(norm, backend="torch"), wide(inputs), rest, dtype)
    plain = results(partial(norm, backend="torch"), inputs, rest, dtype)
    actual = results(partial(norm, backend="triton"), inputs, rest, dtype)
    for index, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        assert a.dtype == p.dtype
        assert_close(a, e, a.dtype, plain=p, what=f"result {index}")


def test_two_runs_are_bitwise_equal():
    inputs, options = make_inputs(20000, 640, torch.bfloat16, kind="layer")
    runs = [results(partial(norm, backend="triton"), inputs, options, torch.bfloat16) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_more_than_two_to_the_31_elements():
    inputs, options = make_inputs(2**21 + 3, 1024, torch.bfloat16, residual=False)
    y = norm(**inputs, **options)
    last = {**inputs, "x": inputs["x"][-5:]}
    assert torch.equal(y[-5:], norm(**last, **options))


def test_automatic_choice_is_triton():
    inputs, options = make_inputs(8, 16, torch.float32)
    for given, backend in ((inputs, "triton"), (wide(inputs), "torch")):
        with record_operators() as used:
            norm(**given, **options)
        assert used["norm"]["backend"] == backend
