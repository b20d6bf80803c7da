"""Float32 attention on a GPU at sizes of real use: no less exact than torch's kernels, and taken where it should be."""

import pytest
import torch

from subquad.kernels.attention import attention
from subquad.kernels.backend import record_operators
from subquad.suite.laws.accuracy import assert_close
from subquad.suite.training.capture import record
from subquad.suite.training.numerics import numerics

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(batch, length, heads, size, queries=None):
    g = torch.Generator("cuda").manual_seed(length + size)

    def normal(steps):
        return torch.randn(batch, steps, heads, size, generator=g, device="cuda", requires_grad=True)

    q, k, v = normal(queries or length), normal(length), normal(length)
    positions = None
    if queries is not None:
        drawn = torch.rand(batch, length, generator=g, device="cuda").argsort(1)[:, :queries]
        positions = drawn.sort(1).values
    return (q, k, v), positions


def exact_attention(q, k, v, positions):
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1], device="cuda").expand(len(q), -1) if positions is None else positions
    future = torch.arange(k.shape[1], device="cuda") > at[:, None, :, None]
    return torch.einsum("bhij,bjhk->bihk", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def run(op, leaves, cotangent):
    o = op(*leaves)
    return [o, *torch.autograd.grad(o, leaves, cotangent.to(o.dtype))]


@pytest.mark.parametrize(
    ("batch", "length", "heads", "size", "queries"),
    [
        (4, 512, 1, 128, None),
        (2, 1000, 3, 64, None),
        (4, 512, 2, 128, 64),
        (2, 300, 1, 80, 299),
        (1, 4096, 2, 128, None),
    ],
)
def test_it_errs_at_most_twice_as_much_as_torch(batch, length, heads, size, queries):
    leaves, positions = inputs(batch, length, heads, size, queries)
    cotangent = torch.randn_like(leaves[0])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = run(lambda q, k, v: exact_attention(q, k, v, positions), wide, cotangent)
    plain = run(lambda *x: attention(*x, positions=positions, backend="torch"), leaves, cotangent)
    found = run(lambda *x: attention(*x, positions=positions, backend="triton"), leaves, cotangent)
    again = run(lambda *x: attention(*x, positions=positions, backend="triton"), leaves, cotangent)
    for name, f, e, p, a in zip(("o", "dq", "dk", "dv"), found, exact, plain, again, strict=True):
        assert_close(f, e, torch.float32, plain=p, what=name)
        assert torch.equal(f, a)


def test_a_replay_drops_other_weights():
    leaves, _ = inputs(2, 512, 1, 64)
    o = torch.empty_like(leaves[0])

    def step():
        with torch.no_grad():
            o.copy_(attention(*leaves, dropout=0.5, backend="triton"))

    replay = record(step, lambda: (), o.device, None)
    replay()
    first = o.clone()
    replay()
    assert not torch.equal(first, o)
    torch.manual_seed(5)
    replay()
    first.copy_(o)
    torch.manual_seed(5)
    replay()
    assert torch.equal(first, o)


def test_the_automatic_choice_follows_length_and_precision():
    for precision, length, backend in (("fp32", 512, "triton"), ("fp32", 64, "torch"), ("tf32", 512, "torch")):
        with numerics(precision), record_operators() as used:
            attention(*inputs(1, length, 1, 128)[0])
        assert used["attention"]["backend"] == backend
