"""Claims about rotary positions; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from kernels.rotary import rotary
from kernels.rotary.reference import rotary_reference
from suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(batch, length, heads, size, *, rows=False):
    g = torch.Generator().manual_seed(size)
    angle = torch.arange(length + 7)[:, None] * 100.0 ** -(torch.arange(size // 2) / size * 2)
    time = torch.randint(length + 7, (batch, length) if rows else (length,), generator=g)
    heads = {name: torch.randn(batch, length, heads, size, generator=g, dtype=torch.float64) for name in "qk"}
    return heads | {"cos": angle.cos().double(), "sin": angle.sin().double(), "time": time}


def of_heads(op, time):
    """op as a function of q, k and the tables, which have no gradient."""

    def run(q, k, cos, sin):
        return op(q, k, cos.detach(), sin.detach(), time.to(q.device))

    return run


@pytest.mark.parametrize("size", [(2, 5, 3, 2), (1, 70, 2, 48), (3, 1, 4, 16)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_and_gradients_are_those_of_the_equation(backend, dtype, rows, size):
    inputs = make_inputs(*size, rows=rows)
    time = inputs.pop("time")
    op, reference = (of_heads(f, time) for f in (partial(rotary, backend=backend), rotary_reference))

    def without_tables(op):
        tables = {name: inputs[name].float() for name in ("cos", "sin")}
        return lambda q, k: op(q, k, *(t.to(q.device) for t in tables.values()))

    heads = {name: inputs[name] for name in "qk"}
    assert_matches_reference(without_tables(op), without_tables(reference), heads, dtype=dtype, device=DEVICE)


def test_inputs_may_be_parts_of_one_projection():
    inputs = {name: x.to(DEVICE) for name, x in make_inputs(2, 6, 3, 8).items()}
    q, k = torch.cat([inputs.pop("q"), inputs.pop("k")], -1).float().split(8, -1)
    tables = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    for found, expected in zip(
        rotary(q, k, **tables, backend="triton"), rotary(q, k, **tables, backend="torch"), strict=True
    ):
        torch.testing.assert_close(found, expected)
