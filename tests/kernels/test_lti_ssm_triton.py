"""Claims about the state space model in Triton; without a GPU the kernels run in Triton's interpreter.

Every sequence of a channel is a program, so the interpreter is given few channels.
"""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from subquad.kernels.layout import spec
from subquad.kernels.lti_ssm import lti_ssm
from subquad.kernels.lti_ssm.reference import lti_ssm_reference
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference
from tests.kernels.test_lti_ssm import BATCH, PARAMETERS, STATE, make_inputs

pytest.importorskip("triton")

from subquad.kernels.lti_ssm.triton import (
    TUNING,
    Plan,
    Planner,
    backward_division,
    calls,
    cheapest_division,
    lti_ssm_triton,
    lti_ssm_triton_bidirectional,
)

NUM_CHANNELS = 2
SLOW = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = partial(lti_ssm, return_final_state=True, backend="triton")


def tiles(**changes):
    """The tuning of the kernels with other tiles."""
    return TUNING._replace(narrow=TUNING.narrow._replace(**changes), wide=TUNING.wide._replace(**changes))


SMALL_TILES = tiles(chunk=16, rows=16)
PIECES = SMALL_TILES._replace(programs=2 * BATCH * NUM_CHANNELS)
"""Sequences are cut into two pieces."""


def kernel_with(tuning, make_planner=Planner):
    """The operator in Triton with another tuning."""
    return partial(lti_ssm_triton, return_final_state=True, planner=make_planner(tuning))


SMALL = kernel_with(SMALL_TILES)


def make_kernel_inputs(length, discretization="zoh", **options):
    return make_inputs(length, **({"discretization": discretization, "width": NUM_CHANNELS} | options))


class NotingPlanner(Planner):
    """Notes the plans of all calls."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []

    def __call__(self, on_gpu, *key):
        self.calls.append(super().__call__(on_gpu, *key))
        return self.calls[-1]


class KeepingPlanner(Planner):
    """Keeps plans on every device, as the operator does on a GPU."""

    def __call__(self, on_gpu, *key):
        return super().__call__(True, *key)


def on_device(inputs, dtype=torch.float32):
    def moved(x):
        return x.to(DEVICE, torch.complex64 if x.is_complex() else dtype)

    return {name: moved(value) if torch.is_tensor(value) else value for name, value in inputs.items()}


def assert_kernel_matches(inputs, dtype=torch.float32, op=TRITON):
    keep = () if dtype == torch.float32 else PARAMETERS
    assert_matches_reference(op, lti_ssm_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=SLOW) for n in (1, 2, 15, 16, 300)), 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_recurrence(length, dtype):
    assert_kernel_matches(make_kernel_inputs(length), dtype, SMALL)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        pytest.param(torch.float32, 1, marks=SLOW),
        pytest.param(torch.bfloat16, 1, marks=SLOW),
        (torch.float16, 1),
        pytest.param(torch.bfloat16, 3, marks=SLOW),
    ],
)
def test_the_kernel_as_configured_equals_the_recurrence(dtype, width):
    assert_kernel_matches(make_kernel_inputs(150, width=width), dtype)


@pytest.mark.parametrize(
    ("length", "gates"), [(520, False), pytest.param(1100, True, marks=SLOW), pytest.param(1100, False, marks=SLOW)]
)
def test_the_kernel_in_bfloat16_equals_the_recurrence_over_several_chunks(length, gates):
    assert_kernel_matches(make_kernel_inputs(length, gates=gates, width=1), torch.bfloat16, kernel_with(tiles(rows=16)))


@pytest.mark.parametrize(("states", "state_terms"), [(32, 2), (33, 1)])
def test_gates_take_two_terms_of_maps_and_of_as_many_states_as_there_is_room_for(states, state_terms):
    tile = TUNING.tile(torch.bfloat16, 512, states, True, True)
    assert (tile.map_terms, tile.state_terms, tile.sum_terms) == (2, state_terms, 1)
    assert not TUNING.needs_two_passes(torch.empty(1, 512, 1, dtype=torch.bfloat16), states)


@pytest.mark.parametrize(
    "discretization", ["bilinear", *(pytest.param(name, marks=SLOW) for name in ("dss-exp", "dss-exp-no-scale"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_the_kernel_takes_other_discretizations(discretization, dtype):
    assert_kernel_matches(make_kernel_inputs(65, discretization), dtype, SMALL)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16])
def test_more_modes_than_a_backward_pass_has_room_for_are_summed_in_two_parts(dtype):
    op = kernel_with(SMALL_TILES._replace(max_pairs=STATE - 1), NotingPlanner)
    assert_kernel_matches(make_kernel_inputs(20, width=1), dtype, op)
    assert [call.num_states for call in op.keywords["planner"].calls[:2]] == [STATE - 1, 1]


def test_the_result_may_be_changed_in_place():
    inputs = on_device(make_kernel_inputs(20, initial_state=False, width=1))
    u = inputs.pop("u").requires_grad_()
    changed, kept = (torch.autograd.grad(op(SMALL(u, **inputs)[0]).sum(), u) for op in (torch.sin_, torch.sin))
    assert torch.equal(changed[0], kept[0])


@pytest.mark.parametrize("discretization", [pytest.param("zoh", marks=SLOW), "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_the_kernel_takes_real_systems(discretization, dtype):
    assert_kernel_matches(make_kernel_inputs(300, discretization, complex_=False), dtype, SMALL)


@pytest.mark.slow
def test_the_kernel_keeps_small_differences_of_long_real_systems():
    """The gradient of dt, where gated inputs as one term of bfloat16 lost more than the rule allows."""
    assert_kernel_matches(make_inputs(1000, discretization="zoh", complex_=False), torch.bfloat16)


@pytest.mark.slow
def test_the_kernel_takes_negative_decays():
    """bilinear with dt A < -2, whose Abar is negative and has no real logarithm."""
    inputs = make_kernel_inputs(65, "bilinear", complex_=False)
    inputs |= {"A": inputs["A"] * 80, "C": inputs["C"] * 10}
    assert (inputs["dt"][:, None] * inputs["A"] < -2).any()
    assert_kernel_matches(inputs, op=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("state", [20, 64])
def test_the_kernel_takes_as_many_states_as_fit(state):
    inputs = make_kernel_inputs(80, width=1, state=state)
    inputs["C"] = inputs["C"] * (STATE / state) ** 0.5
    assert_kernel_matches(inputs)


@pytest.mark.slow
def test_pieces_equal_the_recurrence():
    assert_kernel_matches(make_kernel_inputs(600), op=kernel_with(PIECES))


@pytest.mark.parametrize("tuning", [pytest.param(SMALL_TILES, marks=SLOW), PIECES], ids=["whole", "pieces"])
def test_the_rounding_of_decays_does_not_add_up(tuning):
    """A state that never fades, over 256 chunks, which are 16 or 32 segments in one or two pieces."""
    inputs = on_device(make_kernel_inputs(4096, gates=False, width=1))
    inputs |= {"A": 1j * inputs["A"].imag, "u": inputs["u"] / 100}
    exact = {
        n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in inputs.items() if torch.is_tensor(x)
    }
    exact_state = lti_ssm(**(inputs | exact), return_final_state=True)[1]
    one_rounding = torch.finfo(torch.float32).eps
    assert_close(kernel_with(tuning)(**inputs)[1], exact_state, torch.float32, what="final state", floor=one_rounding)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_any_share_of_a_tile_equals_the_recurrence(sequences):
    """Rows that are whole sequences or segments, of one or several chunks, and tiles that the batch does not fill."""
    inputs = make_kernel_inputs(300)
    for name in ("u", "gate_in", "gate_out", "initial_state"):
        # three sequences
        inputs[name] = torch.cat([inputs[name], inputs[name][:1].flip(-1)])
    assert_kernel_matches(inputs, op=kernel_with(SMALL_TILES._replace(sequences=sequences, pieces=1)))


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("length", [1000, 1300])
def test_segments_half_as_long_have_the_same_gradients(pieces, length):
    """Even and odd numbers of chunks in a segment, with the gradients of both states and of the decays."""
    op = kernel_with(SMALL_TILES._replace(tall_steps=2, sequences=2, pieces=pieces), NotingPlanner)
    assert_kernel_matches(make_kernel_inputs(length, gates=False), torch.bfloat16, op)
    call = op.keywords["planner"].calls[0]
    assert (call.division.pieces, call.division.segments, call.division.rows) == (pieces, 8, 16)
    assert call.backward_division.rows == 32


def test_only_long_plain_loops_are_halved():
    plan = cheapest_division(8, 8192, 1024, False, 3 * 132, TUNING.narrow, TUNING)
    half = backward_division(plan, True, TUNING)
    assert (half.rows, half.segments, half.steps) == (128, 16, 8)
    assert backward_division(plan, False, TUNING) == plan
    short = cheapest_division(8, 1024, 1024, False, 3 * 132, TUNING.narrow, TUNING)
    assert backward_division(short, True, TUNING) == short


def test_tiles_are_shared_so_that_programs_fill_the_chip():
    programs = 3 * 132
    for shape in (
        (8, 1024, 1024),
        (8, 8192, 1024),
        (8, 32768, 1024),
        (1, 131072, 1024),
        (16, 16384, 256),
        (1, 2**20, 4),
    ):
        batch, length, width = shape
        plan = cheapest_division(batch, length, width, False, programs, TUNING.narrow, TUNING)
        rows = plan.pieces * plan.segments * plan.steps * plan.chunk * plan.groups * (plan.rows // plan.segments)
        assert batch * length <= rows <= 1.1 * batch * length, plan
        assert plan.programs * width >= 0.8 * programs, plan


@pytest.mark.slow
def test_short_sequences_in_bfloat16_lose_next_to_nothing_in_the_state():
    inputs = on_device(make_kernel_inputs(300, gates=False, width=1))
    inputs["u"] = inputs["u"].bfloat16()
    exact = lti_ssm(**(inputs | {"u": inputs["u"].double()}), return_final_state=True)[1]
    assert_close(SMALL(**inputs)[1], exact, torch.float32, plain=lti_ssm(**inputs, return_final_state=True)[1])


@pytest.mark.parametrize(("length", "wide"), [(2**19, False), (2**20, True)])
def test_offsets_take_64_bits_where_32_are_too_few(length, wide):
    u = time_contiguous(torch.empty(2, length, 1024, dtype=torch.bfloat16, device="meta"))
    A = torch.empty(1024, 32, dtype=torch.complex64, device="meta")
    specs = tuple(spec(x) for x in (u, None, None, A, None, A))
    tuning = TUNING._replace(programs=3 * 132)
    assert Plan(2.0, "zoh", False, False, specs, tuning=tuning).forward.named["INT64"] == wide


@pytest.mark.slow
def test_64_bit_offsets_give_the_same():
    assert_kernel_matches(make_kernel_inputs(300), op=kernel_with(SMALL_TILES._replace(int64_elements=0)))


@pytest.mark.parametrize(
    "without", ["B", *(pytest.param(name, marks=SLOW) for name in ("gates", "D", "initial_state"))]
)
def test_every_option_of_the_kernel_may_be_left_out(without):
    options = {without: False} if without in ("gates", "initial_state") else {}
    inputs = make_kernel_inputs(40, **options)
    if not options:
        inputs[without] = None
    assert_kernel_matches(inputs, op=SMALL)


@pytest.mark.slow
def test_shared_real_eigenvalues_meet_complex_maps():
    inputs = make_kernel_inputs(40)
    inputs |= {"A": inputs["A"][0].real.contiguous(), "conj_pairs": False}
    assert_kernel_matches(inputs, op=SMALL)


@pytest.mark.slow
def test_strong_decay_and_none_at_all_stay_finite():
    inputs = make_kernel_inputs(300, gates=False)
    inputs["A"] = torch.complex(inputs["A"].real * torch.tensor([0.0, 1.0, 1e3, 1e6]), inputs["A"].imag)
    assert_kernel_matches(inputs, op=SMALL)


def channel_last(x):
    return x.contiguous()


def time_contiguous(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def half_of_a_projection(x):
    return time_contiguous(torch.cat([x + 1, x], dim=-1))[..., x.shape[-1] :]


@pytest.mark.parametrize("view", [channel_last, time_contiguous])
def test_time_is_contiguous_in_what_the_kernel_returns(view):
    inputs = on_device(make_kernel_inputs(40, initial_state=False))
    u = view(inputs.pop("u")).requires_grad_()
    y, _ = SMALL(u, **inputs)
    assert y.stride() == (40 * NUM_CHANNELS, 1, 40)


@pytest.mark.parametrize("length", [pytest.param(1, marks=SLOW), 2, pytest.param(300, marks=SLOW)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
@pytest.mark.parametrize("gates", [pytest.param(True, marks=SLOW), False])
def test_the_kernel_reads_both_sides(length, dtype, gates):
    inputs = make_kernel_inputs(length, bidirectional=True, gates=gates)

    def op(bidirectional, **rest):
        return lti_ssm_triton_bidirectional(**rest, planner=Planner(SMALL_TILES))

    assert_kernel_matches(inputs, dtype, op)


def make_narrow_inputs(length):
    inputs = on_device(make_kernel_inputs(length), torch.bfloat16)
    inputs |= {name: inputs[name].float() for name in ("dt", "D")}
    return inputs | {name: time_contiguous(inputs[name]) for name in ("u", "gate_in", "gate_out")}


@pytest.mark.parametrize("programs", [1, 1000], ids=["whole", "pieces"])
def test_inputs_of_another_kind_start_what_they_would_alone(programs, monkeypatch):
    """Inputs that differ from others in one property; instead of results, the launches are compared."""
    tuning = SMALL_TILES._replace(programs=programs)
    inputs = make_narrow_inputs(600)
    real = {name: inputs[name].real.contiguous() for name in ("A", "B", "C", "initial_state")}
    changes = [
        {},
        {"gate_in": None},
        {"gate_out": None},
        {"initial_state": None},
        {"D": None},
        {"B": None},
        {"A": inputs["A"][0]},
        {"C": real["C"]},
        real | {"conj_pairs": False},
        {"conj_pairs": False},
        {"discretization": "bilinear"},
        {"return_final_state": True},
        {"dt": inputs["dt"].bfloat16()},
        {"D": inputs["D"].bfloat16()},
        {name: inputs[name].float() for name in ("u", "gate_in", "gate_out")},
        {name: inputs[name][:, :599] for name in ("u", "gate_in", "gate_out")},
        {name: inputs[name][:1] for name in ("u", "gate_in", "gate_out", "initial_state")},
        {name: inputs[name][..., :1] for name in ("u", "gate_in", "gate_out")}
        | {name: inputs[name][:1] for name in ("A", "B", "C", "dt", "D")}
        | {"initial_state": inputs["initial_state"][:, :1]},
        {name: inputs[name][..., :1] for name in ("A", "B", "C", "initial_state")},
        {"u": half_of_a_projection(inputs["u"])},
        {"gate_in": half_of_a_projection(inputs["gate_in"])},
        {"gate_out": half_of_a_projection(inputs["gate_out"])},
    ]

    def note(kernel, plan, **tensors):
        kinds = [x is not None and (x.dtype, x.shape) for x in tensors.values()]
        started[-1].append((kernel, plan, list(tensors), kinds))

    monkeypatch.setattr(calls, "launch", note)

    def start_all(planner):
        op = partial(lti_ssm_triton, planner=planner)
        started.clear()
        for change in changes:
            given = inputs | change
            leaves = {name: x.detach().requires_grad_() for name, x in given.items() if torch.is_tensor(x)}
            started.append([])
            op(**given)
            started.append([])
            outputs = op(**{**given | leaves, "return_final_state": True})
            torch.autograd.grad(outputs, list(leaves.values()), outputs)
            started.append([])
            y = op(**{**given | leaves, "return_final_state": True})[0]
            torch.autograd.grad(y, list(leaves.values()), half_of_a_projection(y))
            started.append([])
            # nothing asks for the gradient of the initial state
            y, _ = op(**given | {"u": leaves["u"]})
            torch.autograd.grad(y, leaves["u"], y)
        return list(started)

    started = []
    expected = start_all(Planner(tuning))
    # forward, prepare, and backward, prepare; of pieces one more each
    assert max(map(len, expected)) == (4 if programs == 1 else 6)
    planner = KeepingPlanner(tuning)
    for _ in range(2):
        for index, (actual, e) in enumerate(zip(start_all(planner), expected, strict=True)):
            assert actual == e, list(changes[index // 4])
    assert planner.kept.cache_info().hits


@pytest.mark.slow
def test_what_is_kept_holds_no_tensors():
    op = kernel_with(SMALL_TILES, KeepingPlanner)
    inputs = on_device(make_kernel_inputs(40))
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if torch.is_tensor(x)}
    y, state = op(**inputs)
    torch.autograd.grad([y, state], list(leaves.values()), [y, state])
    known = [weakref.ref(x) for x in (y, state, *leaves.values())]
    del inputs, leaves, y, state
    assert [x() for x in known] == [None] * len(known)
