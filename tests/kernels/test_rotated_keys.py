"""Claims about rotated keys; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

from subquad.kernels.rotated_keys import rotate_pairs, rotated_keys, turns
from subquad.kernels.rotated_keys.reference import rotated_keys_reference
from subquad.kernels.rotated_keys.workloads import KEEP
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = partial(rotated_keys, backend="torch")
TRITON = partial(rotated_keys, backend="triton")


def make_inputs(batch, length, heads, states, pairs, *, dtype=torch.float64):
    g = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "B": randn(batch, length, states),
        "C": randn(batch, length, states),
        "B_weight": randn(states),
        "C_weight": randn(states),
        "B_bias": randn(heads, states),
        "C_bias": randn(heads, states),
        "dt": randn(batch, length, heads),
        "w": randn(batch, length, pairs),
    }


def test_a_pair_turns_as_a_complex_number():
    inputs = make_inputs(2, 4, 3, 7, 2)
    keys, queries = rotated_keys_reference(**inputs)
    turn = torch.exp(1j * (inputs["dt"].unsqueeze(-1) * turns(inputs["w"]).unsqueeze(-2)).cumsum(1))
    k, q = (
        torch.nn.functional.rms_norm(inputs[x], (7,), inputs[f"{x}_weight"], 1e-5).unsqueeze(2) + inputs[f"{x}_bias"]
        for x in "BC"
    )
    for x, y in ((k, keys), (q, queries)):
        turned = torch.complex(x[..., :2], x[..., 2:4]) * turn
        torch.testing.assert_close(torch.complex(y[..., :2], y[..., 2:4]), turned)
        torch.testing.assert_close(y[..., 4:], x[..., 4:])


@pytest.mark.parametrize("programs", [1, 4, 100])
def test_heads_may_be_split_into_groups(programs, monkeypatch):
    """A sequence has five tiles, of which two at a time are added up along time."""
    triton = pytest.importorskip("subquad.kernels.rotated_keys.triton", reason="needs triton")
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(triton, name, getattr(triton, name)._replace(programs=programs))
    monkeypatch.setattr(triton, "BLOCK_T", 4)
    monkeypatch.setattr(triton, "TILES", 2)
    inputs = make_inputs(2, 18, 5, 6, 2)
    assert_matches_reference(TRITON, rotated_keys_reference, inputs, keep=KEEP, device=DEVICE)


def test_large_steps_and_gradients_at_one_end_take_no_digits_from_the_other(monkeypatch):
    """Position 5 is within a tile: a sum up to it or from it on is no whole one from which a part is subtracted."""
    triton = pytest.importorskip("subquad.kernels.rotated_keys.triton", reason="needs triton")
    monkeypatch.setattr(triton, "BLOCK_T", 4)
    monkeypatch.setattr(triton, "TILES", 2)

    def results(late=1.0, early=1.0):
        given = {name: x.to(DEVICE) for name, x in make_inputs(1, 18, 2, 6, 2, dtype=torch.float32).items()}
        given["dt"][:, 5:] *= late
        given["dt"].requires_grad_()
        outputs = TRITON(**given)
        cotangents = [x.detach().clone() for x in outputs]
        for x in cotangents:
            x[:, :5] *= early
        return [*outputs, *torch.autograd.grad(outputs, given["dt"], cotangents)]

    plain, *_ = results()
    keys, *_ = results(late=1e6)
    assert torch.equal(keys[:, :5], plain[:, :5])
    *_, expected = results()
    *_, found = results(early=1e6)
    assert torch.equal(found[:, 5:], expected[:, 5:])


def test_results_may_be_narrower_than_the_inputs():
    """B and C are float32 in a network of bfloat16, and keys and queries are not."""
    pytest.importorskip("triton")

    def narrow(op):
        return lambda **inputs: op(**inputs, dtype=torch.bfloat16)

    inputs = {name: x.to(DEVICE) for name, x in make_inputs(2, 9, 3, 8, 2, dtype=torch.float32).items()}
    found, plain = narrow(TRITON)(**inputs), narrow(TORCH)(**inputs)
    assert [x.dtype for x in found] == [x.dtype for x in plain] == [torch.bfloat16, torch.bfloat16]
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)


def test_a_rotation_keeps_products():
    g = torch.Generator().manual_seed(0)
    theta, k, q = (torch.randn(3, size, generator=g, dtype=torch.float64) for size in (2, 7, 7))
    turned_k, turned_q = rotate_pairs(theta, k, q)
    torch.testing.assert_close((turned_k * turned_q).sum(-1), (k * q).sum(-1))


def test_a_call_that_is_made_again_prepares_nothing_and_one_of_other_tensors_does(monkeypatch):
    """A layer that recomputes makes its keys twice of the same tensors, and the graph keeps what was prepared."""
    triton = pytest.importorskip("subquad.kernels.rotated_keys.triton", reason="needs triton")
    inputs = {name: x.to(DEVICE) for name, x in make_inputs(2, 20, 3, 8, 2, dtype=torch.float32).items()}
    inputs["B"].requires_grad_()
    other = {**inputs, "w": inputs["w"] + 1}
    wanted, kept = TRITON(**other), []
    TRITON(**inputs, kept=kept)
    assert torch.equal(TRITON(**other, kept=kept)[0], wanted[0])
    monkeypatch.setattr(triton, "_prepare", None)
    found = TRITON(**other, kept=kept)
    assert torch.equal(found[0], wanted[0])
    gradients = (torch.autograd.grad(k, inputs["B"], wanted[1]) for k in (found[0], wanted[0]))
    assert torch.equal(next(gradients)[0], next(gradients)[0])
