"""Gated linear attention against its recurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from suite.accuracy import assert_close, assert_matches_reference, relative_error

B, H, K, V = 2, 3, 8, 12
DECAYS = ["none", "head", "head-time", "key", "value"]


def make_inputs(length: int, decay: str, *, state: bool = True, strength: float = 0.3, seed: int = 0) -> dict:
    """Unit queries, keys and values; log-decays exponentially distributed around `strength`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = {"none": None, "head": (H,), "head-time": (B, length, H), "key": (B, length, H, K), "value": None}[decay]
    if decay == "value":
        shape = (B, length, H, V)
    log_decay = None
    if shape is not None:
        log_decay = strength * torch.rand(*shape, generator=generator, dtype=torch.float64).log()
    return {
        "q": normal(B, length, H, K),
        "k": normal(B, length, H, K),
        "v": normal(B, length, H, V),
        "log_decay": log_decay,
        "decay_on": "value" if decay == "value" else "key",
        "initial_state": normal(B, H, K, V) if state else None,
        "return_final_state": True,
    }


KEEP = ("log_decay", "initial_state")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("state", [False, True], ids=["empty", "state"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunked_equals_recurrent(length, decay, state, dtype):
    inputs = make_inputs(length, decay, state=state)
    if decay == "none":
        inputs["scale"] = 0.1
    assert_matches_reference(gated_linear_attention, gated_linear_attention_reference, inputs, dtype=dtype, keep=KEEP)


@pytest.mark.parametrize("decay", DECAYS)
def test_step_by_step_equals_parallel(decay):
    inputs = make_inputs(70, decay)
    o, final = gated_linear_attention(**inputs)
    state, log_decay = inputs["initial_state"], inputs["log_decay"]
    for t in range(70):
        decay_t = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, t]
        o_t, state = gated_linear_attention_step(
            inputs["q"][:, t], inputs["k"][:, t], inputs["v"][:, t], decay_t, state, decay_on=inputs["decay_on"]
        )
        assert_close(o_t, o[:, t], torch.float64, what=f"step {t}")
    assert_close(state, final, torch.float64, what="state")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_splitting_time_and_passing_the_state_equals_the_whole(decay, cut):
    inputs = make_inputs(200, decay)
    whole, final = gated_linear_attention(**inputs)
    along_time = ("q", "k", "v") if decay in ("none", "head") else ("q", "k", "v", "log_decay")
    first = gated_linear_attention(**{n: x[:, :cut] if n in along_time else x for n, x in inputs.items()})
    rest = {n: x[:, cut:] if n in along_time else x for n, x in inputs.items()} | {"initial_state": first[1]}
    second = gated_linear_attention(**rest)
    assert_close(torch.cat([first[0], second[0]], dim=1), whole, torch.float64, what="output")
    assert_close(second[1], final, torch.float64, what="final state")


@pytest.mark.parametrize("decay", DECAYS)
def test_the_future_cannot_change_the_past(decay):
    inputs = make_inputs(130, decay)
    changed = {n: x.clone() if isinstance(x, Tensor) and x.shape[1:2] == (130,) else x for n, x in inputs.items()}
    for name in ("q", "k", "v") if decay in ("none", "head") else ("q", "k", "v", "log_decay"):
        changed[name][:, 77:] *= 0.5
    before, after = gated_linear_attention(**inputs)[0], gated_linear_attention(**changed)[0]
    assert torch.equal(before[:, :77], after[:, :77])
    assert (before[:, 77:] - after[:, 77:]).abs().amax((0, 2, 3)).min() > 0


@pytest.mark.parametrize("decay", ["head-time", "key", "value"])
def test_extreme_decays_neither_overflow_nor_lose_the_near_terms(decay):
    """Steps that keep exp(-50) stand next to steps that keep all but 1e-4, over 2000 steps, in float32."""
    inputs = make_inputs(2000, decay)
    generator = torch.Generator().manual_seed(3)
    hard = torch.rand(inputs["log_decay"].shape, generator=generator) < 0.2
    inputs["log_decay"] = torch.where(hard, -50.0, -1e-4).double()
    assert_matches_reference(
        gated_linear_attention, gated_linear_attention_reference, inputs, dtype=torch.float32, keep=KEEP
    )


@pytest.mark.parametrize("decay", ["head", "head-time", "key", "value"])
def test_decays_of_exp_minus_50_everywhere_leave_the_diagonal(decay):
    inputs = make_inputs(300, decay, state=False)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -50.0)
    inputs = {n: x.float() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    o, _ = gated_linear_attention(**inputs)
    diagonal = K**-0.5 * (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * inputs["v"]
    assert max(relative_error(o, diagonal)) < 1e-5


def test_gradients_of_the_reference_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 1, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 3, 1, 2, generator=generator, dtype=torch.float64)
    log_decay = -torch.rand(1, 3, 1, 2, generator=generator, dtype=torch.float64)
    state = torch.randn(1, 1, 2, 2, generator=generator, dtype=torch.float64)
    arguments = [x.requires_grad_() for x in (q, k, v, log_decay, state)]
    for decay_on in ("key", "value"):

        def op(q, k, v, log_decay, state, decay_on=decay_on):
            return gated_linear_attention_reference(
                q, k, v, log_decay, decay_on=decay_on, initial_state=state, return_final_state=True
            )

        assert torch.autograd.gradcheck(op, arguments)


def test_non_contiguous_inputs_are_read_as_they_are():
    inputs = make_inputs(70, "key")
    strided = {
        n: x.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(x, Tensor) else x for n, x in inputs.items()
    }
    assert_close(gated_linear_attention(**strided)[0], gated_linear_attention(**inputs)[0], torch.float64)


def test_autocast_does_not_round_the_inside():
    inputs = {n: x.float() if isinstance(x, Tensor) else x for n, x in make_inputs(70, "key").items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gated_linear_attention(**inputs)
    for a, b in zip(inside, gated_linear_attention(**inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay_on": "keys"}, "decay_on='keys'"),
        ({"backend": "triton"}, "no Triton path yet"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"k": torch.zeros(B, 4, H, K + 1)}, "k must have the shape of q"),
        ({"v": torch.zeros(B, 5, H, V)}, "v must share"),
        ({"q": torch.zeros(B, 4, H)}, "must be"),
        ({"log_decay": torch.zeros(B, 4, H, V)}, "log_decay"),
        ({"initial_state": torch.zeros(B, H, V, K)}, "initial_state"),
    ],
)
def test_a_misfit_is_an_error_that_says_what_fits(change, message):
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**(make_inputs(4, "key") | change))
