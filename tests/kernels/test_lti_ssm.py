"""Claims about the time-invariant state space model; the accuracy rule is that of `suite.accuracy`."""

from __future__ import annotations

import functools
import sys
import weakref
from functools import partial

import pytest
import torch

import kernels.lti_ssm as package
import kernels.lti_ssm.chunked as chunked
from kernels.lti_ssm import lti_ssm, lti_ssm_step
from kernels.lti_ssm.reference import lti_ssm_reference
from kernels.ssm_kernel import DISCRETIZATIONS, ssm_kernel
from suite.accuracy import assert_close, assert_matches_reference
from tests.kernels.test_ssm_kernel import make_parameters

LENGTHS = (1, 2, 63, 64, 65, 500)
PARAMETERS = ("A", "B", "C", "dt", "D", "initial_state")
BATCH, WIDTH, STATE = 2, 3, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = partial(lti_ssm, return_final_state=True, backend="triton")


def make_inputs(
    length,
    *,
    discretization,
    complex_=True,
    gates=True,
    bidirectional=False,
    initial_state=True,
    width=WIDTH,
    state=STATE,
):
    g = torch.Generator().manual_seed(length)

    def randn(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=g, dtype=dtype)

    inputs = make_parameters(width, state, discretization=discretization, complex_=complex_)
    inputs |= {"u": randn(BATCH, length, width), "D": randn(width)}
    inputs |= {"discretization": discretization, "conj_pairs": complex_}
    # filters of order one sum over up to 1 / dt steps
    inputs["C"] = inputs["C"] / 4
    if gates:
        inputs |= {"gate_in": randn(BATCH, length, width), "gate_out": randn(BATCH, length, width)}
    if bidirectional:
        inputs |= {"bidirectional": True, "C": torch.stack([inputs["C"], inputs["C"].flip(0)])}
    elif initial_state:
        inputs["initial_state"] = randn(BATCH, width, state, dtype=inputs["A"].dtype)
    if discretization == "dss-softmax" and not bidirectional:
        inputs |= {"length": length + 6, "position": 4}
    return inputs


@pytest.fixture(params=["toeplitz", "fft"])
def route(request, monkeypatch):
    """Both ways of convolving, whatever T."""
    monkeypatch.setattr(chunked, "TOEPLITZ_MAX_LENGTH", 10**6 if request.param == "toeplitz" else 0)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_convolution_equals_the_recurrence(discretization, length, route):
    inputs = make_inputs(length, discretization=discretization)
    assert_matches_reference(partial(lti_ssm, return_final_state=True), lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_inputs_lose_no_more_than_the_recurrence(discretization, length):
    inputs = make_inputs(length, discretization=discretization)
    op = partial(lti_ssm, return_final_state=True)
    assert_matches_reference(op, lti_ssm_reference, inputs, dtype=torch.bfloat16, keep=PARAMETERS)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [1, 65])
def test_real_systems_equal_the_recurrence(discretization, length, route):
    inputs = make_inputs(length, discretization=discretization, complex_=False)
    assert_matches_reference(partial(lti_ssm, return_final_state=True), lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [2, 65])
def test_two_sided_convolution_equals_two_recurrences(discretization, length, route):
    inputs = make_inputs(length, discretization=discretization, bidirectional=True)
    assert_matches_reference(lti_ssm, lti_ssm_reference, inputs)


def test_without_options_equals_the_recurrence(route):
    inputs = make_inputs(40, discretization="zoh", gates=False, initial_state=False)
    del inputs["D"]
    inputs["B"] = None
    assert_matches_reference(partial(lti_ssm, return_final_state=True), lti_ssm_reference, inputs)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_gradients_agree_with_finite_differences(discretization):
    inputs = make_inputs(5, discretization=discretization)
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    options = {name: value for name, value in inputs.items() if name not in names}
    leaves = [inputs[name].requires_grad_() for name in names]
    for function in (partial(lti_ssm, return_final_state=True), lti_ssm_reference):
        assert torch.autograd.gradcheck(
            lambda *tensors, f=function: f(**dict(zip(names, tensors, strict=True)), **options), leaves
        )


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("complex_", [True, False])
@pytest.mark.parametrize("split", [1, 20, 64])
def test_passing_the_state_equals_the_whole(discretization, complex_, split):
    inputs = make_inputs(65, discretization=discretization, complex_=complex_)
    whole, final = lti_ssm(**inputs, return_final_state=True)
    in_time = ("u", "gate_in", "gate_out")
    first = {name: value[:, :split] if name in in_time else value for name, value in inputs.items()}
    second = {name: value[:, split:] if name in in_time else value for name, value in inputs.items()}
    y_first, state = lti_ssm(**first, return_final_state=True)
    assert state.dtype == final.dtype == inputs["initial_state"].dtype
    if discretization == "dss-softmax":
        second["position"] += split
    y_second, state = lti_ssm(**(second | {"initial_state": state}), return_final_state=True)
    torch.testing.assert_close(torch.cat([y_first, y_second], 1), whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("complex_", [True, False])
def test_steps_equal_the_whole(discretization, complex_):
    inputs = make_inputs(20, discretization=discretization, complex_=complex_)
    whole, final = lti_ssm(**inputs, return_final_state=True)
    state = inputs["initial_state"].clone()
    rest = {name: inputs[name] for name in ("A", "B", "C", "dt", "D", "discretization", "conj_pairs")}
    for t in range(20):
        in_time = {name: inputs[name][:, t] for name in ("u", "gate_in", "gate_out")}
        if discretization == "dss-softmax":
            rest |= {"length": inputs["length"], "position": torch.tensor(inputs["position"] + t)}
        y = lti_ssm_step(**in_time, **rest, state=state)
        torch.testing.assert_close(y, whole[:, t], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_response_to_an_impulse_is_the_kernel(discretization, route):
    inputs = make_parameters(WIDTH, STATE, discretization=discretization)
    u = torch.zeros(1, 50, WIDTH, dtype=torch.float64)
    u[:, 0] = 1
    kernel = ssm_kernel(**inputs, length=50, discretization=discretization)
    torch.testing.assert_close(lti_ssm(u, **inputs, discretization=discretization)[0].T, kernel)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_future_inputs_change_the_past_by_rounding_only(discretization, route):
    inputs = make_inputs(60, discretization=discretization)
    whole = lti_ssm(**inputs)
    for name in ("u", "gate_in", "gate_out"):
        changed = inputs[name].clone()
        changed[:, 40:] += 1
        y = lti_ssm(**(inputs | {name: changed}))
        torch.testing.assert_close(y[:, :40], whole[:, :40], rtol=0, atol=1e-12)
        assert (y[:, 40:] - whole[:, 40:]).abs().max() > 0.1


def test_wrong_arguments_are_named():
    inputs = make_inputs(8, discretization="dss-softmax")
    with pytest.raises(ValueError, match="normalized over length=8, got 8 steps from position 4; raise length to 12"):
        lti_ssm(**(inputs | {"length": 8}))
    inputs = make_inputs(8, discretization="zoh")
    with pytest.raises(ValueError, match="belong to dss-softmax, not to zoh"):
        lti_ssm(**inputs, length=8)
    with pytest.raises(ValueError, match=r"needs C as \[2, D, N\]"):
        lti_ssm(**inputs, bidirectional=True)


# the kernels: every sequence of a channel is a program, so few channels in the interpreter
NUM_CHANNELS = 2


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """What kinds of calls have in common is kept on a GPU, and tests change what it comes from."""

    def forget():
        if (impl := sys.modules.get("kernels.lti_ssm.triton")) is not None:
            impl._kept_kind.cache_clear()

    forget()
    yield
    forget()


def make_kernel_inputs(length, discretization="zoh", **options):
    return make_inputs(length, **({"discretization": discretization, "width": NUM_CHANNELS} | options))


def configure(monkeypatch, **changes):
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    for key, config in impl.CONFIGS.items():
        monkeypatch.setitem(impl.CONFIGS, key, config._replace(**changes))
    return impl


@pytest.fixture
def small_tiles(monkeypatch):
    """16 rows of chunks of 16 steps."""
    configure(monkeypatch, chunk=16, rows=16)


@pytest.fixture
def pieces(monkeypatch, small_tiles):
    """Sequences cut into two pieces."""
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    monkeypatch.setattr(impl, "num_processors", lambda device: 2 * BATCH * NUM_CHANNELS)
    monkeypatch.setattr(impl, "BUSY_PROGRAMS", 1)


def on_device(inputs, dtype=torch.float32):
    def moved(x):
        return x.to(DEVICE, torch.complex64 if x.is_complex() else dtype)

    return {name: moved(value) if torch.is_tensor(value) else value for name, value in inputs.items()}


def assert_kernel_matches(inputs, dtype=torch.float32, op=TRITON):
    keep = () if dtype == torch.float32 else PARAMETERS
    assert_matches_reference(op, lti_ssm_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_equals_the_recurrence(length, dtype):
    assert_kernel_matches(make_kernel_inputs(length), dtype)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 1), (torch.bfloat16, 3)]
)
def test_the_kernel_as_configured_equals_the_recurrence(dtype, width):
    assert_kernel_matches(make_kernel_inputs(150, width=width), dtype)


@pytest.mark.parametrize("gates", [True, False])
def test_the_kernel_in_bfloat16_equals_the_recurrence_over_several_chunks(gates, monkeypatch):
    configure(monkeypatch, rows=16)
    assert_kernel_matches(make_kernel_inputs(1100, gates=gates, width=1), torch.bfloat16)


@pytest.mark.parametrize("discretization", ["bilinear", "dss-exp", "dss-exp-no-scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_takes_other_discretizations(discretization, dtype):
    assert_kernel_matches(make_kernel_inputs(65, discretization), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_more_modes_than_a_backward_pass_has_room_for_are_summed_in_two_parts(dtype, monkeypatch):
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    monkeypatch.setattr(impl, "MAX_PAIRS", STATE - 1)
    sizes, prepare = [], impl.prepare
    monkeypatch.setattr(impl, "prepare", lambda kind, *system: sizes.append(system[2].shape) or prepare(kind, *system))
    assert_kernel_matches(make_kernel_inputs(65), dtype)
    assert sizes[:2] == [(NUM_CHANNELS, STATE - 1), (NUM_CHANNELS, 1)]


@pytest.mark.usefixtures("small_tiles")
def test_the_result_may_be_changed_in_place():
    inputs = on_device(make_kernel_inputs(20, initial_state=False))
    u = inputs.pop("u").requires_grad_()
    changed, kept = (
        torch.autograd.grad(op(lti_ssm(u, **inputs, backend="triton")).sum(), u) for op in (torch.sin_, torch.sin)
    )
    assert torch.equal(changed[0], kept[0])


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_takes_real_systems(discretization, dtype):
    assert_kernel_matches(make_kernel_inputs(300, discretization, complex_=False), dtype)


def test_the_kernel_keeps_small_differences_of_long_real_systems():
    """The gradient of dt, where gated inputs as one term of bfloat16 lost more than the rule allows."""
    assert_kernel_matches(make_inputs(1000, discretization="zoh", complex_=False), torch.bfloat16)


@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_takes_negative_decays():
    """bilinear with dt A < -2, whose Abar is negative and has no real logarithm."""
    inputs = make_kernel_inputs(65, "bilinear", complex_=False)
    inputs |= {"A": inputs["A"] * 80, "C": inputs["C"] * 10}
    assert (inputs["dt"][:, None] * inputs["A"] < -2).any()
    assert_kernel_matches(inputs)


@pytest.mark.parametrize("state", [20, 64])
def test_the_kernel_takes_as_many_states_as_fit(state):
    inputs = make_kernel_inputs(80, width=1, state=state)
    inputs["C"] = inputs["C"] * (STATE / state) ** 0.5
    assert_kernel_matches(inputs)


@pytest.mark.usefixtures("pieces")
def test_pieces_equal_the_recurrence():
    assert_kernel_matches(make_kernel_inputs(600))


@pytest.mark.parametrize("cut", ["small_tiles", "pieces"])
def test_the_rounding_of_decays_does_not_add_up(cut, request):
    """A state that never fades, over 256 chunks, which are 16 or 32 segments in one or two pieces."""
    request.getfixturevalue(cut)
    inputs = on_device(make_kernel_inputs(4096, gates=False, width=1))
    inputs |= {"A": 1j * inputs["A"].imag, "u": inputs["u"] / 100}
    exact = {
        n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in inputs.items() if torch.is_tensor(x)
    }
    exact_state = lti_ssm(**(inputs | exact), return_final_state=True)[1]
    one_rounding = torch.finfo(torch.float32).eps
    assert_close(TRITON(**inputs)[1], exact_state, torch.float32, what="final state", floor=one_rounding)


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.usefixtures("small_tiles")
def test_any_share_of_a_tile_equals_the_recurrence(sequences, monkeypatch):
    """Rows that are whole sequences or segments, of one or several chunks, tiles that the batch does not fill."""
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    cheapest = impl._cheapest

    def share(batch, *rest):
        plan = cheapest(batch, *rest)
        segments, groups = plan.rows // sequences, -(-batch // sequences)
        steps = -(-plan.chunks // segments)
        return plan._replace(segments=segments, groups=groups, steps=steps, pieces=1)

    monkeypatch.setattr(impl, "_cheapest", share)
    inputs = make_kernel_inputs(300)
    for name in ("u", "gate_in", "gate_out", "initial_state"):
        # three sequences
        inputs[name] = torch.cat([inputs[name], inputs[name][:1].flip(-1)])
    assert_kernel_matches(inputs)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("length", [1000, 1300])
def test_segments_half_as_long_have_the_same_gradients(pieces, length, monkeypatch):
    """Even and odd numbers of chunks in a segment, with the gradients of both states and of the decays."""
    impl = configure(monkeypatch, chunk=16, rows=16)
    cheapest, halves, halved = impl._cheapest, impl._backward_plan, []
    monkeypatch.setattr(impl, "TALL_STEPS", 2)

    def cut(*args):
        plan = cheapest(*args)
        steps = -(-plan.chunks // (plan.segments * pieces))
        return plan._replace(steps=steps + steps % 2 if pieces > 1 else steps, pieces=pieces)

    def noted(plan, fits):
        half = halves(plan, fits)
        halved.append(half.rows == 2 * plan.rows)
        return half

    monkeypatch.setattr(impl, "_cheapest", cut)
    monkeypatch.setattr(impl, "_backward_plan", noted)
    assert_kernel_matches(make_kernel_inputs(length, gates=False), torch.bfloat16)
    assert halved == [True]


def test_only_long_plain_loops_are_halved():
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    plan = impl._cheapest(8, 8192, 1024, False, 3 * 132, impl.CONFIGS[2])
    half = impl._backward_plan(plan, True)
    assert (half.rows, half.segments, half.steps) == (128, 16, 8)
    assert impl._backward_plan(plan, False) == plan
    short = impl._cheapest(8, 1024, 1024, False, 3 * 132, impl.CONFIGS[2])
    assert impl._backward_plan(short, True) == short


def test_tiles_are_shared_so_that_programs_fill_the_chip():
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    config, slots = impl.CONFIGS[2], 3 * 132
    for shape in (
        (8, 1024, 1024),
        (8, 8192, 1024),
        (8, 32768, 1024),
        (1, 131072, 1024),
        (16, 16384, 256),
        (1, 2**20, 4),
    ):
        batch, length, width = shape
        plan = impl._cheapest(batch, length, width, False, slots, config)
        rows = plan.pieces * plan.segments * plan.steps * plan.chunk * plan.groups * (plan.rows // plan.segments)
        assert batch * length <= rows <= 1.1 * batch * length, plan
        assert plan.programs * width >= 0.8 * slots, plan


@pytest.mark.usefixtures("small_tiles")
def test_short_sequences_in_bfloat16_lose_next_to_nothing_in_the_state():
    inputs = on_device(make_kernel_inputs(300, gates=False, width=1))
    inputs["u"] = inputs["u"].bfloat16()
    exact = lti_ssm(**(inputs | {"u": inputs["u"].double()}), return_final_state=True)[1]
    assert_close(TRITON(**inputs)[1], exact, torch.float32, plain=lti_ssm(**inputs, return_final_state=True)[1])


@pytest.mark.parametrize(("length", "wide"), [(2**19, False), (2**20, True)])
def test_offsets_take_64_bits_where_32_are_too_few(length, wide, monkeypatch):
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    u = time_contiguous(torch.empty(2, length, 1024, dtype=torch.bfloat16, device="meta"))
    A = torch.empty(1024, 32, dtype=torch.complex64, device="meta")
    monkeypatch.setattr(impl, "num_processors", lambda device: 132)
    monkeypatch.setattr(impl, "speaks_ptx", lambda: True)
    forms = [impl.form(x) for x in (u, None, None, None, A, None, A, A[:, 0].real, None)]
    kind, launches = impl.Kind(2.0, "zoh", False, False, *forms), []
    monkeypatch.setattr(
        impl, "Launch", lambda *args, **constants: launches.append(constants) or (lambda *tensors: None)
    )
    kind.launch(None, u)
    assert [constants["WIDE"] for constants in launches] == [wide]


@pytest.mark.usefixtures("small_tiles")
def test_64_bit_offsets_give_the_same(monkeypatch):
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    constants = impl._constants

    def wide(*args):
        return constants(*args) | {"WIDE": True}

    monkeypatch.setattr(impl, "_constants", wide)
    assert_kernel_matches(make_kernel_inputs(300))


@pytest.mark.parametrize("without", ["gates", "D", "B", "initial_state"])
@pytest.mark.usefixtures("small_tiles")
def test_every_option_of_the_kernel_may_be_left_out(without):
    options = {without: False} if without in ("gates", "initial_state") else {}
    inputs = make_kernel_inputs(40, **options)
    if not options:
        inputs[without] = None
    assert_kernel_matches(inputs)


@pytest.mark.usefixtures("small_tiles")
def test_shared_real_eigenvalues_meet_complex_maps():
    inputs = make_kernel_inputs(40)
    inputs |= {"A": inputs["A"][0].real.contiguous(), "conj_pairs": False}
    assert_kernel_matches(inputs)


@pytest.mark.usefixtures("small_tiles")
def test_strong_decay_and_none_at_all_stay_finite():
    inputs = make_kernel_inputs(300, gates=False)
    inputs["A"] = torch.complex(inputs["A"].real * torch.tensor([0.0, 1.0, 1e3, 1e6]), inputs["A"].imag)
    assert_kernel_matches(inputs)


def channel_last(x):
    return x.contiguous()


def time_contiguous(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def half_of_a_projection(x):
    return time_contiguous(torch.cat([x + 1, x], dim=-1))[..., x.shape[-1] :]


def every_second_step(x):
    return time_contiguous(x.repeat_interleave(2, dim=1))[:, ::2]


@pytest.mark.parametrize("view", [channel_last, half_of_a_projection, every_second_step])
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_takes_any_view(view):
    def op(u, gate_in, gate_out, **rest):
        return TRITON(u=view(u), gate_in=channel_last(gate_in), gate_out=view(gate_out), **rest)

    assert_kernel_matches(make_kernel_inputs(40), torch.bfloat16, op)


@pytest.mark.parametrize("view", [channel_last, time_contiguous])
@pytest.mark.usefixtures("small_tiles")
def test_time_is_contiguous_in_what_the_kernel_returns(view):
    inputs = on_device(make_kernel_inputs(40, initial_state=False))
    u = view(inputs.pop("u")).requires_grad_()
    y = lti_ssm(u, **inputs, backend="triton")
    assert y.stride() == (40 * NUM_CHANNELS, 1, 40)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("output", [0, 1], ids=["y", "final state"])
@pytest.mark.usefixtures("small_tiles")
def test_either_output_alone_has_the_right_gradients(length, output):
    names = ("u", "gate_in", "A", "B", "dt", "initial_state")
    rounded = on_device(make_kernel_inputs(length))
    wide = {
        n: x.to(torch.promote_types(x.dtype, torch.float64)) if torch.is_tensor(x) else x for n, x in rounded.items()
    }

    def gradients(op, inputs):
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        result = op(**inputs | leaves)[output]
        return torch.autograd.grad(result.abs().square().sum(), list(leaves.values()))

    plain = partial(lti_ssm, return_final_state=True)
    found = zip(gradients(TRITON, rounded), gradients(plain, wide), gradients(plain, rounded), strict=True)
    for name, (actual, exact, torch_own) in zip(names, found, strict=True):
        assert_close(actual, exact, torch.float32, plain=torch_own, what=name)


@pytest.mark.parametrize("split", [1, 16, 39])
@pytest.mark.usefixtures("small_tiles")
def test_passing_the_state_of_the_kernel_equals_the_whole(split):
    inputs = on_device(make_kernel_inputs(40))
    whole, final = TRITON(**inputs)
    in_time = ("u", "gate_in", "gate_out")
    first, second = (
        {n: x[:, part] if n in in_time else x for n, x in inputs.items()} for part in (slice(split), slice(split, None))
    )
    y_first, state = TRITON(**first)
    y_second, state = TRITON(**(second | {"initial_state": state}))
    torch.testing.assert_close(torch.cat([y_first, y_second], 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_future_inputs_cannot_change_the_past_of_the_kernel():
    inputs = on_device(make_kernel_inputs(60, initial_state=False))
    whole = lti_ssm(**inputs, backend="triton")
    changed = inputs["u"].clone()
    changed[:, 40:] += 1
    y = lti_ssm(**(inputs | {"u": changed}), backend="triton")
    assert torch.equal(y[:, :40], whole[:, :40])
    assert (y[:, 40:] - whole[:, 40:]).abs().max() > 0.1


@pytest.mark.parametrize("length", [1, 2, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_reads_both_sides(length, dtype, gates):
    inputs = make_kernel_inputs(length, bidirectional=True, gates=gates)
    assert_kernel_matches(inputs, dtype, op=partial(lti_ssm, backend="triton"))


def test_what_the_kernel_cannot_do_is_named():
    inputs = on_device(make_kernel_inputs(8, initial_state=False))
    with pytest.raises(ValueError, match="takes no dss-softmax; use backend='auto'"):
        lti_ssm(**(inputs | {"discretization": "dss-softmax"}), backend="triton")
    with pytest.raises(ValueError, match="takes N <= 64, got N=65; use backend='auto'"):
        lti_ssm(**on_device(make_kernel_inputs(8, state=65)), backend="triton")
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 and float16, got torch\.float64"):
        lti_ssm(**(inputs | {"A": inputs["A"].to(torch.complex128)}), backend="triton")
    with pytest.raises(ValueError, match="not one of 'auto', 'torch', 'triton'"):
        lti_ssm(**inputs, backend="cuda")


def keep_launches(monkeypatch):
    """What calls have in common is kept as on a GPU, and a launch sees to it that its tensors are of the same kinds."""
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    launches = []

    class Watched(impl.Launch):
        def __init__(self, *args, **constants):
            super().__init__(*args, **constants)
            self.kinds, self.calls = None, 0
            launches.append(self)

        def __call__(self, *tensors):
            kinds = [None if x is None else x.dtype for x in tensors]
            assert self.kinds in (None, kinds)
            self.kinds, self.calls = kinds, self.calls + 1
            super().__call__(*tensors)

    monkeypatch.setattr(impl, "Launch", Watched)
    kept = functools.lru_cache(256)(impl.Kind)
    monkeypatch.setattr(impl, "Kind", kept)
    monkeypatch.setattr(impl, "_kept_kind", kept)
    return launches


def make_narrow_inputs(length):
    inputs = on_device(make_kernel_inputs(length), torch.bfloat16)
    inputs |= {name: inputs[name].float() for name in ("dt", "D")}
    return inputs | {name: time_contiguous(inputs[name]) for name in ("u", "gate_in", "gate_out")}


@pytest.mark.parametrize("processors", [1, 1000], ids=["whole", "pieces"])
@pytest.mark.usefixtures("small_tiles")
def test_inputs_of_another_kind_start_what_they_would_alone(processors, monkeypatch):
    """Inputs that differ from others in one thing; what would be started stands for results."""
    impl = pytest.importorskip("kernels.lti_ssm.triton")
    monkeypatch.setattr(impl, "num_processors", lambda device: processors)
    monkeypatch.setattr(impl, "BUSY_PROGRAMS", 1)
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

    class Started(impl.Launch):
        def __call__(self, *tensors):
            kinds = [x is not None and (x.dtype, x.shape) for x in tensors]
            assert kinds == self.__dict__.setdefault("kinds", kinds)
            started[-1].append((self.kernel, self.grid, self.numbers, self.constants, kinds))

    def start_all():
        started.clear()
        for change in changes:
            given = inputs | change
            leaves = {name: x.detach().requires_grad_() for name, x in given.items() if torch.is_tensor(x)}
            started.append([])
            lti_ssm(**given, backend="triton")
            started.append([])
            outputs = TRITON(**{**given | leaves, "return_final_state": True})
            torch.autograd.grad(outputs, list(leaves.values()), outputs)
            started.append([])
            y = lti_ssm(**{**given | leaves, "return_final_state": True}, backend="triton")[0]
            torch.autograd.grad(y, list(leaves.values()), half_of_a_projection(y))
            started.append([])
            # nothing asks for the gradient of the initial state
            y = lti_ssm(**given | {"u": leaves["u"]}, backend="triton")
            y = y[0] if isinstance(y, tuple) else y
            torch.autograd.grad(y, leaves["u"], y)
        return list(started)

    started = []
    monkeypatch.setattr(impl, "Launch", Started)
    expected = start_all()
    # forward, prepare, and backward, prepare; of pieces one more each
    assert max(map(len, expected)) == (4 if processors == 1 else 6)
    kept = functools.lru_cache(None)(impl.Kind)
    monkeypatch.setattr(impl, "Kind", kept)
    monkeypatch.setattr(impl, "_kept_kind", kept)
    for _ in range(2):
        for index, (actual, e) in enumerate(zip(start_all(), expected, strict=True)):
            assert actual == e, list(changes[index // 4])
    assert kept.cache_info().hits


@pytest.mark.usefixtures("small_tiles")
def test_launches_that_are_kept_give_the_same(monkeypatch):
    inputs = make_narrow_inputs(20)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if torch.is_tensor(x)}

    def results():
        outputs = TRITON(**inputs | leaves)
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), outputs)]

    expected = results()
    launches = keep_launches(monkeypatch)
    for _ in range(2):
        for index, (actual, e) in enumerate(zip(results(), expected, strict=True)):
            assert torch.equal(actual, e), index
    assert [launch.calls for launch in launches] == [2] * 4


@pytest.mark.usefixtures("small_tiles")
def test_what_is_kept_holds_no_tensors(monkeypatch):
    launches = keep_launches(monkeypatch)
    inputs = on_device(make_kernel_inputs(40))
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if torch.is_tensor(x)}
    y, state = TRITON(**inputs)
    torch.autograd.grad([y, state], list(leaves.values()), [y, state])
    known = [weakref.ref(x) for x in (y, state, *leaves.values())]
    del inputs, leaves, y, state
    assert len(launches) == 4
    assert [x() for x in known] == [None] * len(known)


@pytest.mark.parametrize(
    ("length", "state", "dtype", "trained", "expected"),
    [
        (8192, 64, torch.bfloat16, True, True),
        (256, 32, torch.float32, True, True),
        (512, 32, torch.float32, True, False),
        (8192, 32, torch.float32, False, True),
        (256, 64, torch.float32, False, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_measured_to_be_faster(length, state, dtype, trained, expected):
    u = torch.empty(8, length, 16, dtype=dtype, device="meta", requires_grad=trained)
    assert package._kernels_win(u, torch.empty(16, state, device="meta")) is expected
