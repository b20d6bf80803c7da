"""Claims about the inputs of RWKV-7's delta rule; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels.delta_rule import delta_rule
from subquad.kernels.rwkv7_inputs import rwkv7_inputs, rwkv7_position
from tests.kernels.gated import on_device
from tests.kernels.rwkv_inputs import (
    BACKENDS,
    gradients_of,
)

POSITIONS = ("r", "k", "w", "a")


def make_inputs(batch: int, length: int, heads: int, key: int) -> dict:
    """Decays and rates over their whole range, and factors of the size that trained networks have."""
    g = torch.Generator().manual_seed(key)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    width = heads * key
    inputs = {name: normal(batch, length, width) for name in POSITIONS}
    inputs |= {"w_0": normal(width), "a_0": normal(width), "xi": 1 + 0.3 * normal(width)}
    return inputs | {"alpha": 1 + 0.3 * normal(width), "rho": normal(width) / key**0.5, "head_dim": key}


gradients = partial(gradients_of, rwkv7_inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_delta_rule_of_these_inputs_is_the_recurrence(backend):
    inputs = on_device(make_inputs(2, 9, 2, 8))
    q, k, write, plain, log_decay, strength = (x.double() for x in rwkv7_inputs(**inputs, backend=backend))
    v = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1)).to(q.device)
    options = {"write": write, "plain": plain, "scale": 1.0, "return_final_state": True, "backend": "torch"}
    o, final = delta_rule(q, k, v, torch.ones_like(v[..., 0]), log_decay, **options)
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    at = rwkv7_position(**exact)
    r = exact["r"].unflatten(-1, (2, 8))
    state = torch.zeros_like(final)
    for t in range(9):
        held = at.remove[:, t].unsqueeze(-2) @ state
        state = at.log_decay[:, t].exp().unsqueeze(-1) * state + at.add[:, t].unsqueeze(-1) * held
        state = state + at.k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        torch.testing.assert_close(o[:, t], (r[:, t].unsqueeze(-2) @ state).squeeze(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(strength, at.strength, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_are_those_of_the_keys_with_decays_in_float32(backend):
    inputs = on_device(make_inputs(1, 2, 1, 4), torch.bfloat16)
    *products, log_decay, strength = found = rwkv7_inputs(**inputs, backend=backend)
    assert {x.dtype for x in products} == {torch.bfloat16}
    assert log_decay.dtype == strength.dtype == torch.float32
    assert {x.shape for x in found[:-1]} == {(1, 2, 1, 4)}
    assert strength.shape == (1, 2, 1)
    for gradient, x in zip(gradients(inputs, backend), inputs.values(), strict=False):
        assert gradient.dtype == x.dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_are_not_copied(backend):
    inputs = on_device(make_inputs(1, 2, 1, 4))
    inputs["k"].requires_grad_()
    assert rwkv7_inputs(**inputs, backend=backend).q.data_ptr() == inputs["r"].data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_of_zeros_removes_nothing(backend):
    inputs = on_device(make_inputs(1, 3, 2, 8))
    inputs["k"] = torch.zeros_like(inputs["k"])
    found = rwkv7_inputs(**inputs, backend=backend)
    assert not found.k.any()
    assert not found.write.any()
    assert all(x.isfinite().all() for x in gradients(inputs, backend))


def test_extreme_decays_and_rates_stay_finite():
    inputs = on_device(make_inputs(1, 4, 1, 8))
    inputs["w"][0] = torch.tensor([[-80.0], [-30.0], [30.0], [80.0]])
    inputs["a"][0] = torch.tensor([[80.0], [30.0], [-30.0], [-80.0]])
    plain, ours = (rwkv7_inputs(**inputs, backend=backend) for backend in BACKENDS)
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(gradients(inputs, "triton"), gradients(inputs, "torch"), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
