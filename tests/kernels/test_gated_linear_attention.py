"""Gated linear attention against its recurrence."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.delta_rule import delta_rule
from subquad.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
)
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference, relative_error
from tests.kernels.gated import (
    DEVICE,
    calls_of_all_kinds,
    in_chunks,
    kept_plans_give_the_same,
    make_planner,
    on_device,
    on_kernels,
    packed_sequences_are_separate_ones,
    quick,
    results,
    scaled,
    small_tiles,
    without_states,
)
from tests.kernels.saved import kept_for_backward

B, H, K, V = 2, 3, 8, 12
DECAYS = ["none", "head", "head-time", "key", "value", "shared", "shared-head-time"]
"""Kinds of decay; of those that begin with "shared", several heads share queries and keys."""


run_triton = on_kernels("gated_linear_attention")


def make_inputs(
    length: int,
    decay: str,
    *,
    state: bool = True,
    strength: float = 0.3,
    seed: int = 0,
    B: int = B,
    H: int = H,
    K: int = K,
    V: int = V,
) -> dict:
    """Unit queries, keys and values; log-decays exponentially distributed around `strength`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared, of_head = decay.startswith("shared"), {"head": (H,), "head-time": (B, length, H)}
    # two groups of heads, or one of an odd number of heads
    groups = 1 if shared and H % 2 else 2 if shared else H
    shape = of_head.get(decay.removeprefix("shared-"))
    if decay in ("key", "value"):
        shape = (B, length, H, K if decay == "key" else V)
    log_decay = None
    if shape is not None:
        log_decay = strength * torch.rand(*shape, generator=generator, dtype=torch.float64).log()
    return {
        "q": normal(B, length, groups, K),
        "k": normal(B, length, groups, K),
        "v": normal(B, length, H, V),
        "log_decay": log_decay,
        "decay_on": "value" if decay == "value" else "key",
        "initial_state": normal(B, H, K, V) if state else None,
        "return_final_state": True,
    }


KEEP = ("log_decay", "initial_state")


@pytest.mark.parametrize("decay", quick(["head-time", "key", "value"], "key"))
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


def small_inputs(length: int, decay: str, *, K: int = 16, V: int = 16, **options) -> dict:
    """Inputs with a single sequence, which are quick in Triton's interpreter."""
    return make_inputs(length, decay, B=1, K=K, V=V, **options)


def equals_the_loop(inputs, dtype=torch.float32, keep=KEEP, **tuning):
    op = partial(run_triton, make_planner(**tuning))
    assert_matches_reference(op, gated_linear_attention_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("length", "key_dim", "value_dim"),
    [
        pytest.param(1, 16, 32, marks=pytest.mark.slow),
        (33, 32, 16),
        pytest.param(150, 16, 16, marks=pytest.mark.slow),
    ],
)
@in_chunks
def test_the_kernels_equal_the_loop(length, key_dim, value_dim, dtype, decay, chunk):
    # a single step has one gradient for each head, so more heads are needed to sample the rounding errors
    options = {"H": 16} if length == 1 else {}
    inputs = small_inputs(
        length if chunk == 64 else scaled(length + 64, chunk), decay, K=key_dim, V=value_dim, **options
    )
    equals_the_loop(inputs, dtype, chunk=chunk)


@in_chunks
@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_the_kernels_in_blocks_that_do_not_divide_the_sizes_equal_the_loop(decay, dtype, chunk):
    """In half precision the sizes are filled up to multiples of 16."""
    equals_the_loop(small_inputs(scaled(70, chunk), decay, K=20, V=36), dtype, chunk=chunk, **small_tiles())


@pytest.mark.parametrize(("size", "more"), [(5, 0), (16, 0), (17, 15), (65, 15), (153, 7)])
def test_rows_of_half_precision_are_filled_up_to_where_they_can_be_read_at_once(size, more):
    padding = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.autograd").padding
    assert padding(torch.zeros(1, size)) == 0
    assert padding(torch.zeros(1, size, dtype=torch.bfloat16)) == more


@in_chunks
@pytest.mark.parametrize("decay", quick(["head-time", "key", "value"], "key"))
def test_the_kernels_take_decays_in_half_precision(decay, chunk):
    equals_the_loop(small_inputs(scaled(40, chunk), decay), torch.bfloat16, keep=("initial_state",), chunk=chunk)


@in_chunks
@pytest.mark.parametrize("decay", quick(["head-time", "key", "value", "shared-head-time"], "key", "shared-head-time"))
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)
def test_the_kernels_neither_overflow_nor_lose_the_near_terms(decay, dtype, chunk):
    """Steps that keep exp(-50), nothing at all, everything, or all but 1e-4, side by side."""
    inputs = small_inputs(scaled(130, chunk) + 1, decay)
    drawn = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(3))
    steps = torch.tensor([-50.0, -torch.inf, 0.0, -1e-4], dtype=torch.float64)
    inputs["log_decay"] = steps[torch.bucketize(drawn, torch.tensor([0.1, 0.2, 0.5]))]
    equals_the_loop(inputs, dtype, chunk=chunk)


@in_chunks
@pytest.mark.slow
@pytest.mark.parametrize("decay", ["head", "head-time", "key", "value"])
@pytest.mark.parametrize("strength", [0.01, 1.0, 3.0])
def test_the_kernels_at_other_decays_equal_the_loop(decay, strength, chunk):
    equals_the_loop(small_inputs(scaled(70, chunk), decay, strength=strength), torch.bfloat16, chunk=chunk)


@in_chunks
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=["bf16", "fp16"]
)
def test_the_gradients_of_decays_of_many_heads_equal_the_loop(dtype, chunk):
    """Five chunks. A decay of a head has one number as its gradient, so few heads do not sample the rounding errors.

    With three heads of seed 1 the rule is broken in bfloat16 without a mistake in the kernels. Here it is broken where
    the kernels truncate operands and states to bfloat16 instead of rounding them.
    """
    equals_the_loop(small_inputs(scaled(290, chunk), "head", strength=0.02, H=32), dtype, chunk=chunk)


@in_chunks
@pytest.mark.parametrize("decay", quick(["key", "value"], "key"))
def test_factors_about_the_middle_of_a_chunk_and_the_tree_equal_the_loop(decay, chunk):
    inputs = small_inputs(scaled(70, chunk), decay, strength=0.1)
    for mild in (60.0, 0.0):
        equals_the_loop(inputs, torch.bfloat16, mild_half=mild, chunk=chunk)
    about_the_middle, by_the_tree = (
        results(on_device(inputs), partial(run_triton, make_planner(mild_float32=mild, chunk=chunk)))
        for mild in (60.0, 0.0)
    )
    assert not torch.equal(about_the_middle[0], by_the_tree[0])


@in_chunks
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)
@pytest.mark.parametrize("slices", [1, 2])
def test_gradients_of_the_heads_of_a_group_are_summed_within_and_between_slices(dtype, slices, chunk):
    """Two groups of four heads. Keys and values take two tiles."""
    tile = make_planner()(1.0, torch.zeros(1, dtype=dtype)).tuning.groups._replace(block_k=16, block_v=16)
    length = scaled(70, chunk)
    inputs = small_inputs(length, "shared-head-time", H=8, K=20, V=20)
    programs = 2 * -(-length // chunk) * 2
    planner = make_planner(chunk=chunk, groups=tile, enough_programs=programs * slices)
    groups = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.groups")
    assert groups.num_slices(planner(1.0, torch.zeros(1, dtype=dtype)), 4, programs) == slices
    assert_matches_reference(
        partial(run_triton, planner), gated_linear_attention_reference, inputs, dtype=dtype, keep=KEEP, device=DEVICE
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_of_the_size_of_repeated_keys_is_kept_for_backward(backend):
    """For a position and head, pairs of a chunk have 64 elements, states 8, and repeated keys would have 256."""
    inputs = on_device(make_inputs(64, "shared-head-time", B=1, H=3, K=256, V=2, state=False), torch.bfloat16)
    leaves = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    with kept_for_backward() as kept:
        gated_linear_attention(**leaves, backend=backend)
    assert max(kept.values()) == inputs["k"].numel()


ENDS = [0, 1, 70, 110]


@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
@pytest.mark.parametrize("backend", ["torch", "triton"])
@in_chunks
def test_packed_sequences_equal_separate_ones(backend, decay, chunk):
    op = gated_linear_attention if backend == "torch" else partial(run_triton, make_planner(chunk=chunk))
    ends = [scaled(end, chunk) if end > 1 else end for end in ENDS]
    packed_sequences_are_separate_ones(op, on_device(small_inputs(ends[-1], decay, H=2)), ends)


@pytest.mark.parametrize("state", [False, True], ids=["empty", "state"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_empty_packed_sequence_ends_with_its_initial_state(backend, state):
    """The other sequences, and all gradients, are those of a call without the empty ones."""
    ends, filled = torch.tensor([0, 0, 5, 5, 9, 9]), [1, 3]
    inputs = on_device(small_inputs(9, "key", H=1, state=False))
    del inputs["initial_state"]
    if state:
        inputs["initial_state"] = torch.linspace(-1, 1, 5 * 16 * 16, device=DEVICE).view(5, 1, 16, 16)
    op = partial(gated_linear_attention, backend=backend)

    def among_filled(initial_state=None, **inputs):
        before = torch.zeros(5, 1, 16, 16, device=DEVICE) if initial_state is None else initial_state
        some = None if initial_state is None else initial_state[filled]
        o, final = op(**inputs, initial_state=some, cu_seqlens=torch.tensor([0, 5, 9]))
        return o, torch.stack([final[filled.index(i)] if i in filled else before[i] for i in range(5)])

    actual, expected = results(inputs, partial(op, cu_seqlens=ends)), results(inputs, among_filled)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@in_chunks
@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_segments_walked_side_by_side_equal_the_loop(decay, chunks, chunk):
    """Five chunks in segments of one, or of three and two."""
    tuning = {"few_programs": 1000, "enough_programs": 1000, "min_segment": chunks, "chunk": chunk}
    equals_the_loop(small_inputs(scaled(290, chunk), decay, strength=0.02), **tuning)


def is_right_without_states(inputs, tuning=None, **options):
    """o and the final state in bfloat16, without gradients and without states that are written."""
    dtype, planner = torch.bfloat16, make_planner(**(tuning or {}))
    rounded = {n: x.to(torch.float32 if n in KEEP else dtype) for n, x in inputs.items() if isinstance(x, Tensor)}
    inputs = {n: rounded[n].to(DEVICE) if n in rounded else x for n, x in inputs.items()}
    exact = gated_linear_attention(**on_device(inputs, torch.float64), **options)
    plain = gated_linear_attention_reference(**inputs) if not options else [e.to(dtype) for e in exact]
    with without_states():
        results = run_triton(planner, **inputs, **options)
    for name, a, e, p in zip(("o", "final state"), results, exact, plain, strict=True):
        assert_close(a, e, dtype, plain=p, what=name)


KEPT_INSIDE = ["none", "head", "head-time", "key"]


@in_chunks
@pytest.mark.parametrize("decay", KEPT_INSIDE)
@pytest.mark.parametrize(
    ("length", "key_dim", "value_dim"),
    [
        pytest.param(1, 16, 32, marks=pytest.mark.slow),
        pytest.param(150, 100, 40, marks=pytest.mark.slow),
        (70, 16, 200),
    ],
)
def test_a_forward_that_keeps_its_states_inside_equals_the_loop(length, key_dim, value_dim, decay, chunk):
    is_right_without_states(small_inputs(scaled(length, chunk), decay, K=key_dim, V=value_dim), {"chunk": chunk})


@in_chunks
@pytest.mark.parametrize("decay", quick(KEPT_INSIDE, "key"))
def test_a_forward_without_states_in_segments_equals_the_loop(decay, chunk):
    """Five chunks in segments of three and two."""
    tuning = {"min_segment": 2, "walk_warps": 100, "chunk": chunk}
    is_right_without_states(small_inputs(scaled(290, chunk), decay, strength=0.02, H=1), tuning)


@in_chunks
@pytest.mark.parametrize("decay", quick(KEPT_INSIDE, "key"))
def test_a_forward_without_states_of_packed_sequences_is_that_of_separate_ones(decay, chunk):
    ends = [scaled(end, chunk) if end > 1 else end for end in ENDS]
    inputs = small_inputs(ends[-1], decay, H=2)
    inputs["initial_state"] = torch.stack([inputs["initial_state"][0] * (i + 1) for i in range(3)])
    is_right_without_states(inputs, {"chunk": chunk}, cu_seqlens=torch.tensor(ends, device=DEVICE))


@in_chunks
@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
def test_the_kernels_do_without_states_and_take_a_scale(decay, chunk):
    inputs = small_inputs(scaled(70, chunk), decay, state=False) | {"scale": 0.1, "return_final_state": False}
    equals_the_loop(inputs, chunk=chunk)


@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
def test_plans_that_are_kept_belong_to_calls_of_one_kind(decay):
    inputs = on_device(small_inputs(18, decay, H=3 if decay.startswith("shared") else 1), torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].float()

    kept_plans_give_the_same(lambda planner: calls_of_all_kinds(partial(run_triton, planner), inputs), chunk=16)


@pytest.mark.parametrize("decay", quick(DECAYS, "key", "shared-head-time"))
@pytest.mark.parametrize(("K", "V"), [pytest.param(4, 4, marks=pytest.mark.slow), (40, 24)])
def test_float32_operands_have_a_tuning_of_their_own(decay, K, V):
    """Heads narrower than a tile, and keys of one tile and a part of a second, over more than two chunks."""
    planner = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.plan").PLANNER
    inputs = small_inputs(70, decay, K=K, V=V)
    assert_matches_reference(
        partial(run_triton, planner), gated_linear_attention_reference, inputs, dtype=torch.float32, device=DEVICE
    )


def test_a_plan_takes_the_tuning_of_its_operands():
    plan = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.plan")
    q = torch.zeros(1, 1, 1, 1)
    chunks = {dtype: plan.PLANNER(1.0, *[q.to(dtype)] * 3).chunk for dtype in (torch.bfloat16, torch.float32)}
    assert chunks == {torch.bfloat16: plan.Tuning().chunk, torch.float32: plan.FLOAT32.chunk}


@pytest.mark.parametrize("decay_shape", [(1, 40, 2), (1, 40, 2, 16)], ids=["head", "key"])
@pytest.mark.parametrize("operator", [gated_linear_attention, delta_rule])
def test_a_decay_that_is_no_number_shows_in_all_later_outputs(operator, decay_shape):
    """A bound on decays would turn it into a number, and a network that has diverged would go on."""
    pytest.importorskip("triton")
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 2, 16, generator=g)
    log_decay = -0.1 * torch.rand(decay_shape, generator=g)
    log_decay[0, 20, 1] = float("nan")
    beta = {"beta": torch.ones(1, 40, 2) / 2} if operator is delta_rule else {}
    inputs = on_device({"q": q, "k": F.normalize(k, dim=-1), "v": v, "log_decay": log_decay, **beta})
    o = operator(**inputs, backend="triton")
    lost = torch.isnan(o).any(-1)[0]
    assert lost[20:, 1].all()
    assert not lost[:, 0].any()
