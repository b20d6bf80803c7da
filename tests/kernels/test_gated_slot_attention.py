"""Gated slot attention against its recurrence and against its definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.gated_slot_attention import (
    gated_slot_attention,
    gated_slot_attention_reference,
    gated_slot_attention_step,
)
from subquad.kernels.gated_slot_attention.workloads import flat
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference
from tests.kernels.gated import (
    DEVICE,
    in_chunks,
    kept_plans_give_the_same,
    make_planner,
    on_device,
    on_kernels,
    packed_sequences_are_separate_ones,
    scaled,
)

B, H, K, V, M = 2, 3, 8, 12, 5


def make_inputs(
    length: int,
    *,
    coupled: bool = True,
    seed: int = 0,
    B: int = B,
    H: int = H,
    K: int = K,
    V: int = V,
    M: int = M,
) -> dict:
    """GSA's inputs (slots = 1 - decay), or ABC's (slots of their own, no decay)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_decay = torch.nn.functional.logsigmoid(normal(B, length, H, M)) / 4
    slots = 1 - log_decay.exp()
    if not coupled:
        slots, log_decay = torch.rand(B, length, H, M, generator=generator, dtype=torch.float64) / length**0.5, None
    return {
        "q": normal(B, length, H, K),
        "k": normal(B, length, H, K),
        "v": 2 * normal(B, length, H, V),
        "slots": slots,
        "log_decay": log_decay,
        "return_final_state": True,
    }


def random_state(seed: int = 7, B: int = B, H: int = H, K: int = K, V: int = V, M: int = M) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "initial_keys": torch.randn(B, H, K, M, generator=generator, dtype=torch.float64),
        "initial_values": torch.randn(B, H, M, V, generator=generator, dtype=torch.float64),
    }


KEEP = ("slots", "log_decay", "initial_keys", "initial_values")
OP, REFERENCE = flat(gated_slot_attention), flat(gated_slot_attention_reference)


run_triton = flat(on_kernels("gated_slot_attention"))


@pytest.mark.parametrize("coupled", [True, False], ids=["gsa", "abc"])
@pytest.mark.parametrize("state", [pytest.param(False, marks=pytest.mark.slow), True], ids=["empty", "state"])
@pytest.mark.parametrize(
    "length", [129, *(pytest.param(length, marks=pytest.mark.slow) for length in (1, 2, 63, 64, 65, 500))]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_chunked_equals_recurrent(length, state, coupled, dtype):
    inputs = make_inputs(length, coupled=coupled) | (random_state() if state else {})
    assert_matches_reference(OP, REFERENCE, inputs, dtype=dtype, keep=KEEP)


def test_it_is_two_passes_of_gated_linear_attention_joined_by_a_softmax():
    """GSA paper, equation 7."""
    inputs = make_inputs(100)
    slots, log_decay = inputs["slots"], inputs["log_decay"]
    logits = gated_linear_attention(inputs["q"], inputs["k"], slots, log_decay, decay_on="value")
    o = gated_linear_attention(logits.softmax(-1), slots, inputs["v"], log_decay, scale=1.0)
    assert_close(gated_slot_attention(**inputs)[0], o, torch.float64)


def test_as_many_slots_as_positions_written_once_each_is_softmax_attention():
    """GSA paper, section 2.1: with m = t slots and one write a slot, the slots are the key-value cache."""
    length = 20
    inputs = make_inputs(length)
    slots = torch.eye(length, dtype=torch.float64)[None, :, None, :].expand(B, length, H, length)
    o = gated_slot_attention(inputs["q"], inputs["k"], inputs["v"], slots)
    assert isinstance(o, Tensor)
    last = torch.nn.functional.scaled_dot_product_attention(
        *(inputs[name].transpose(1, 2) for name in ("q", "k", "v")), is_causal=False
    )
    # only the last position sees every slot filled; before, the empty ones hold keys of zero
    assert_close(o[:, -1], last.transpose(1, 2)[:, -1], torch.float64)


@pytest.mark.parametrize("coupled", [True, False], ids=["gsa", "abc"])
def test_step_by_step_equals_parallel(coupled):
    inputs = make_inputs(70, coupled=coupled)
    states = random_state()
    state = (states["initial_keys"], states["initial_values"])
    o, final = gated_slot_attention(**inputs, initial_state=state)
    for t in range(70):
        log_decay = None if inputs["log_decay"] is None else inputs["log_decay"][:, t]
        now = [inputs[name][:, t] for name in ("q", "k", "v", "slots")]
        o_t, state = gated_slot_attention_step(*now, log_decay, state)
        assert_close(o_t, o[:, t], torch.float64, what=f"step {t}")
    assert_close(state[0], final[0], torch.float64, what="key memories")
    assert_close(state[1], final[1], torch.float64, what="value memories")


@pytest.mark.parametrize("coupled", [True, False], ids=["gsa", "abc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_of_the_kernel_equals_plain_pytorch(coupled, dtype):
    inputs, states = make_inputs(1, coupled=coupled), random_state()
    now = [inputs[name][:, 0].to(dtype) for name in ("q", "k", "v")]
    now += [inputs[name] if inputs[name] is None else inputs[name][:, 0].float() for name in ("slots", "log_decay")]
    state = states["initial_keys"].float(), states["initial_values"].float()
    wide = [x if x is None else x.double() for x in now]
    exact, after = gated_slot_attention_step(*wide, (state[0].double(), state[1].double()))
    now = [x if x is None else x.to(DEVICE) for x in now]
    o, new = gated_slot_attention_step(*now, (state[0].to(DEVICE), state[1].to(DEVICE)), backend="triton")
    assert o.dtype == dtype
    assert_close(o, exact, dtype)
    for actual, expected in zip(new, after, strict=True):
        assert_close(actual, expected, torch.float32)


@pytest.mark.slow
def test_extreme_decays_neither_overflow_nor_lose_the_near_terms():
    """Gates that erase a slot (exp(-50)) stand next to gates that keep all but 1e-4, over 2000 steps, in float32."""
    inputs = make_inputs(2000)
    hard = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(3)) < 0.2
    inputs["log_decay"] = torch.where(hard, -50.0, -1e-4).double()
    inputs["slots"] = -torch.expm1(inputs["log_decay"])
    assert_matches_reference(OP, REFERENCE, inputs, dtype=torch.float32, keep=KEEP)


SMALL = {"B": 1, "K": 16, "V": 24, "M": 10}


QUICK = [(150, "bf16", "gsa"), (150, "fp32", "abc")]
SLOW = [pytest.mark.slow]


def equals_the_loop(inputs, dtype=torch.float32, keep=KEEP, **tuning):
    op = partial(run_triton, planner=make_planner(**tuning))
    assert_matches_reference(op, REFERENCE, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize(
    ("length", "dtype", "coupled"),
    [
        pytest.param(
            length,
            dtype,
            coupled,
            id=f"{length}-{dtype_id}-{model}",
            marks=[] if (length, dtype_id, model) in QUICK else SLOW,
        )
        for length, dtype, dtype_id in (
            (1, torch.float32, "fp32"),
            (33, torch.float32, "fp32"),
            (150, torch.float32, "fp32"),
            (33, torch.bfloat16, "bf16"),
            (150, torch.bfloat16, "bf16"),
            (150, torch.float16, "fp16"),
        )
        for coupled, model in ((True, "gsa"), (False, "abc"))
    ],
)
@in_chunks
def test_the_kernels_equal_the_loop(length, dtype, coupled, chunk):
    sizes = SMALL | ({"H": 8} if length == 1 else {})
    state = random_state(**sizes) if length != 33 else {}
    equals_the_loop(make_inputs(scaled(length, chunk), coupled=coupled, **sizes) | state, dtype, chunk=chunk)


@in_chunks
@pytest.mark.parametrize(
    "coupled", [pytest.param(True, id="gsa"), pytest.param(False, id="abc", marks=pytest.mark.slow)]
)
def test_a_forward_without_gradients_takes_float32_slots_beside_bfloat16(coupled, chunk):
    inputs = make_inputs(scaled(70, chunk), coupled=coupled, **SMALL)
    rounded = {n: x.to(torch.float32 if n in KEEP else torch.bfloat16) for n, x in inputs.items() if torch.is_tensor(x)}
    inputs |= {n: x.to(DEVICE) for n, x in rounded.items()}
    exact = flat(gated_slot_attention_reference)(**inputs | {n: x.double() for n, x in rounded.items()})
    plain = flat(gated_slot_attention_reference)(**inputs | rounded)
    for name, a, e, p in zip(
        ("o", "keys", "values"), run_triton(planner=make_planner(chunk=chunk), **inputs), exact, plain, strict=True
    ):
        assert_close(a, e, torch.bfloat16, plain=p, what=name)


@in_chunks
def test_the_kernels_take_slots_and_decays_in_half_precision(chunk):
    equals_the_loop(make_inputs(scaled(40, chunk), **SMALL), torch.bfloat16, keep=(), chunk=chunk)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernels_neither_overflow_nor_lose_the_near_terms(dtype):
    """Gates that erase a slot (exp(-50), or all of it) stand next to gates that keep all but 1e-4."""
    inputs = make_inputs(130, **SMALL)
    drawn = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(3))
    steps = torch.tensor([-50.0, -torch.inf, -1e-4], dtype=torch.float64)
    inputs["log_decay"] = steps[torch.bucketize(drawn, torch.tensor([0.1, 0.2]))]
    # random slots, because slots of exactly one would have no rounding error in plain PyTorch
    inputs["slots"] = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    equals_the_loop(inputs, dtype, keep=[name for name in KEEP if name != "slots"])


@in_chunks
@pytest.mark.parametrize(
    ("backend", "coupled"),
    [
        pytest.param("torch", True, id="gsa-torch"),
        pytest.param("triton", True, id="gsa-triton", marks=pytest.mark.slow),
        pytest.param("torch", False, id="abc-torch"),
        pytest.param("triton", False, id="abc-triton", marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_equal_separate_ones(backend, coupled, chunk):
    ends, sizes = [0, 1, scaled(70, chunk), scaled(100, chunk)], SMALL | {"H": 2}
    inputs = on_device(make_inputs(ends[-1], coupled=coupled, **sizes))
    op = OP if backend == "torch" else partial(run_triton, planner=make_planner(chunk=chunk))
    states = on_device(random_state(**sizes))
    packed_sequences_are_separate_ones(op, inputs | states, ends, tuple(states))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_empty_packed_sequence_ends_with_its_initial_state(backend):
    ends, sizes = torch.tensor([0, 5, 5, 9]), SMALL | {"H": 1}
    inputs = on_device(make_inputs(9, **sizes))
    states = on_device(random_state(**sizes | {"B": 3}))
    op = flat(partial(gated_slot_attention, backend=backend))
    o, *final = op(**inputs, **states, cu_seqlens=ends)
    some = {n: x[[0, 2]] for n, x in states.items()}
    expected, *final_of_others = op(**inputs, **some, cu_seqlens=torch.tensor([0, 5, 9]))
    assert torch.equal(o, expected)
    for state, of_others, initial in zip(final, final_of_others, states.values(), strict=True):
        assert torch.equal(state[[0, 2]], of_others)
        assert torch.equal(state[1], initial[1])


@in_chunks
def test_gradients_that_are_not_asked_for_are_not_formed(chunk):
    inputs = on_device(make_inputs(scaled(40, chunk), **SMALL))
    inputs["q"].requires_grad_()
    run_triton(planner=make_planner(chunk=chunk), **inputs)[0].sum().backward()
    assert inputs["q"].grad is not None
    assert inputs["log_decay"].grad is None


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [True, False], ids=["gsa", "abc"])
def test_plans_that_are_kept_belong_to_calls_of_one_kind(coupled):
    """Both passes of one size and with the same scale."""
    sizes = {"B": 1, "K": 16, "V": 16, "M": 16}
    inputs = on_device(make_inputs(70, coupled=coupled, **sizes), torch.bfloat16)
    states = on_device(random_state(**sizes))

    def calls(planner):
        op = partial(run_triton, planner=planner)
        leaves = {n: x.detach().requires_grad_() for n, x in (inputs | states).items() if isinstance(x, Tensor)}
        outputs = op(**{**inputs, **leaves}, scale=1.0)
        yield from op(**inputs, scale=1.0)
        yield from op(**inputs, **states)
        yield from torch.autograd.grad(outputs, list(leaves.values()), outputs, retain_graph=True)
        yield from torch.autograd.grad(outputs[0].sum(), list(leaves.values()))
        yield from torch.autograd.grad(op(**{**inputs, "v": leaves["v"]})[0].sum(), [leaves["v"]])

    kept_plans_give_the_same(calls)
