"""Claims about the inputs of RWKV-6's linear attention; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.rwkv6_inputs import rwkv6_inputs, rwkv6_position
from subquad.suite.laws.accuracy import FLOOR, assert_close
from tests.kernels.gated import on_device
from tests.kernels.rwkv_inputs import (
    BACKENDS,
    gradients_of,
)

POSITIONS = ("r", "k", "v", "w")
KEEP = ("w_0", "bonus")


def make_inputs(batch: int, length: int, heads: int, key: int) -> dict:
    """Decays that forget at once and those that hardly forget, and own of order one."""
    g = torch.Generator().manual_seed(key)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    width = heads * key
    inputs = {name: normal(batch, length, width) for name in POSITIONS}
    return inputs | {"w_0": normal(width) - 1, "bonus": normal(width) / key**0.5, "head_dim": key}


gradients = partial(gradients_of, rwkv6_inputs)


def test_sums_over_long_runs_of_one_sign_are_exact():
    # sums over runs of positions are many times larger than the sum over all, which must not be rounded at their size
    inputs = on_device(make_inputs(4, 1024, 1, 64))
    exact = gradients(on_device(inputs, torch.float64), "torch")[len(POSITIONS) :]
    for name, a, e in zip(KEEP, gradients(inputs, "triton")[len(POSITIONS) :], exact, strict=True):
        assert_close(a, e, torch.float32, what=f"gradient of {name}", floor=FLOOR[torch.float32] / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_attention_of_these_inputs_is_the_recurrence(backend):
    inputs = on_device(make_inputs(2, 9, 2, 8))
    q, k, v, log_decay, own = (x.double() for x in rwkv6_inputs(**inputs, backend=backend))
    o, final = gated_linear_attention(q, k, v, log_decay, scale=1.0, return_final_state=True, backend="torch")
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    r, key, value, bonus = (exact[name].unflatten(-1, (2, 8)) for name in ("r", "k", "v", "bonus"))
    at = rwkv6_position(**exact)
    state = torch.zeros_like(final)
    for t in range(9):
        write = key[:, t].unsqueeze(-1) * value[:, t].unsqueeze(-2)
        wanted = (r[:, t].unsqueeze(-2) @ (state + bonus.unsqueeze(-1) * write)).squeeze(-2)
        before = o[:, t - 1] if t else torch.zeros_like(wanted)
        torch.testing.assert_close(before + own[:, t], wanted, rtol=1e-5, atol=1e-5)
        state = at.log_decay[:, t].exp().unsqueeze(-1) * state + write
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, at.own, rtol=1e-5, atol=1e-5)


def test_a_position_is_what_the_sequence_has_there():
    inputs = on_device(make_inputs(2, 5, 2, 8))
    whole = rwkv6_inputs(**inputs, backend="torch")
    at = rwkv6_position(**(inputs | {name: inputs[name][:, 3] for name in POSITIONS}))
    assert torch.equal(at.log_decay, whole.log_decay[:, 3])
    assert torch.equal(at.own, whole.own[:, 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_are_those_of_the_arguments_with_decays_in_float32(backend):
    inputs = on_device(make_inputs(1, 2, 1, 4), torch.bfloat16)
    found = rwkv6_inputs(**inputs, backend=backend)
    assert {x.dtype for x in (found.q, found.k, found.v)} == {torch.bfloat16}
    assert found.log_decay.dtype == found.own.dtype == torch.float32
    assert {x.shape for x in found} == {(1, 2, 1, 4)}
    for gradient, x in zip(gradients(inputs, backend), inputs.values(), strict=False):
        assert gradient.dtype == x.dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_are_not_copied(backend):
    inputs = on_device(make_inputs(1, 2, 1, 4))
    inputs["r"].requires_grad_()
    found = rwkv6_inputs(**inputs, backend=backend)
    assert found.k.data_ptr() == inputs["k"].data_ptr()
    assert found.v.data_ptr() == inputs["v"].data_ptr()


def test_extreme_decays_stay_finite():
    inputs = on_device(make_inputs(1, 4, 1, 8))
    inputs["w"][0] = torch.tensor([[-80.0], [-30.0], [30.0], [80.0]])
    plain, ours = (rwkv6_inputs(**inputs, backend=backend) for backend in BACKENDS)
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    for x, y in zip(gradients(inputs, "triton"), gradients(inputs, "torch"), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
