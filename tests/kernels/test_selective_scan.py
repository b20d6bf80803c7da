"""Claims about the selective scan; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from subquad.kernels.selective_scan import selective_scan
from subquad.kernels.selective_scan.chunked import Schedule, selective_scan_chunked
from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.kernels.saved import kept_for_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 2, 63, 64, 65, 500)
WIDE = ("A", "D", "dt_bias", "initial_state")
TRITON = partial(selective_scan, return_final_state=True, backend="triton")


def slow(*values):
    """Parameters that are left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def make_inputs(batch, length, width, state, *, complex_=False, constant=False, extras=True, initial_state=True):
    g = torch.Generator().manual_seed(length + 7 * state)
    real, kind = torch.float64, torch.complex128 if complex_ else torch.float64

    def randn(*shape, dtype=real):
        return torch.randn(*shape, generator=g, dtype=dtype)

    A = -0.1 - torch.rand(width, state, generator=g, dtype=real)
    maps = (width, state) if constant else (batch, length, state)
    inputs = {
        "x": randn(batch, length, width),
        "dt": randn(batch, length, width),
        "A": torch.complex(A, randn(width, state)) if complex_ else A,
        "B": randn(*maps, dtype=kind),
        "C": randn(*maps, dtype=kind) / state**0.5,
        "dt_softplus": True,
    }
    if extras:
        inputs |= {"D": randn(width), "z": randn(batch, length, width) + 1, "dt_bias": randn(width) - 1}
    if initial_state:
        inputs["initial_state"] = randn(batch, width, state, dtype=kind)
    return inputs


def on_device(inputs, dtype=torch.float32):
    """Tensors on the device, in dtype or the complex type beside it; those of WIDE in float32 at least."""

    def move(name, value):
        if not torch.is_tensor(value):
            return value
        real = torch.promote_types(dtype, torch.float32) if name in WIDE else dtype
        return value.to(DEVICE, torch.promote_types(real, torch.complex32) if value.is_complex() else real)

    return {name: move(name, value) for name, value in inputs.items()}


TINY = {"chunk": 8, "steps": 4}
"""Two groups of four steps in a chunk, because the interpreter's time grows with the steps of a group."""


def short_chunks(*, chunk=16, whole=False, **changes):
    """The kernel with chunks of a few groups of steps, over segments of one chunk or over the whole sequence.

    changes: new values for the fields of every tile.
    """
    impl = pytest.importorskip("subquad.kernels.selective_scan.triton")
    tiles = {name: tile for name, tile in vars(impl.TUNING).items() if isinstance(tile, impl.Tile)}
    tiles["forward_narrow"] = replace(tiles["forward_narrow"], steps=16)
    tuning = replace(
        impl.TUNING,
        **{name: replace(tile, **changes) for name, tile in tiles.items()},
        chunk=chunk,
        enough_warps=0 if whole else 1000,
        busy_warps=1000,
        min_segment=1,
        uncut=1,
    )
    return partial(impl.selective_scan_triton, return_final_state=True, tuning=tuning)


def kernel_matches(inputs, dtype=torch.float32, op=TRITON, keep=WIDE):
    assert_matches_reference(op, selective_scan_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


SCHEDULES = {
    "host": Schedule(segment_elements=0, min_segment=23, blocks=False),
    "device": Schedule(segment_elements=1 << 12, min_segment=16, blocks=True),
}


@pytest.fixture(params=list(SCHEDULES))
def scan(request):
    """The scan in plain PyTorch by the host's schedule in short segments, and by the accelerator's.

    The latter cuts time into several segments of several blocks.
    """
    return partial(selective_scan_chunked, schedule=SCHEDULES[request.param])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_and_blocks_equal_the_recurrence(length, dtype, scan):
    inputs = make_inputs(2, length, 6, 5)
    assert_matches_reference(scan, selective_scan_reference, inputs, dtype=dtype, keep=WIDE)


@pytest.mark.parametrize("length", [1, 65, 200])
@pytest.mark.parametrize(("complex_", "constant"), [(True, False), (True, True), (False, True)])
def test_complex_and_constant_maps_equal_the_recurrence(length, complex_, constant, scan):
    inputs = make_inputs(2, length, 6, 5, complex_=complex_, constant=constant, extras=False)
    assert_matches_reference(scan, selective_scan_reference, inputs)


def test_forgetting_everything_at_once_neither_overflows_nor_loses_the_present(scan):
    inputs = make_inputs(1, 80, 4, 3, extras=False)
    inputs = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()} | {"dt_softplus": False}
    inputs["dt"] = torch.full_like(inputs["x"], 1e4).requires_grad_()
    y, _ = scan(**inputs)
    expected = inputs["dt"] * inputs["x"] * (inputs["B"] * inputs["C"]).sum(-1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-2)
    y.sum().backward()
    assert torch.isfinite(inputs["dt"].grad).all()


def test_backward_keeps_far_less_than_the_states_of_all_times():
    batch, length, width, state = 4, 512, 64, 16
    x, dt = torch.randn(2, batch, length, width, requires_grad=True).unbind(0)
    B, C = torch.randn(2, batch, length, state).unbind(0)
    A = -torch.rand(width, state).requires_grad_()
    with kept_for_backward() as kept:
        selective_scan(x, dt, A, B, C, dt_softplus=True)
    assert 0 < sum(kept.values()) < batch * length * width * state / 2


@pytest.mark.parametrize(
    ("length", "changes"), [(9, TINY), slow(1, {}), slow(2, {}), slow(16, {}), slow(17, {}), slow(35, {})]
)
def test_the_kernel_equals_the_recurrence(length, changes):
    kernel_matches(make_inputs(1, length, 3, 5), op=short_chunks(**changes))


@pytest.mark.parametrize(
    ("dtype", "length", "changes"),
    [
        (torch.bfloat16, 9, {**TINY, "channels": 2}),
        (torch.float16, 9, TINY),
        slow(torch.bfloat16, 1, {}),
        slow(torch.bfloat16, 18, {}),
        slow(torch.float16, 18, {}),
    ],
)
def test_the_kernel_equals_the_recurrence_in_half_precision(dtype, length, changes):
    kernel_matches(make_inputs(1, length, 3, 4), dtype, op=short_chunks(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "length", "width"), [(1, 35, 1), (2, 17, 9)])
def test_one_segment_equals_the_recurrence(batch, length, width):
    kernel_matches(make_inputs(batch, length, width, 4), op=short_chunks(whole=True))


@pytest.mark.parametrize(
    ("state", "states"),
    [slow(1, 4), (16, 2), slow(16, 4), slow(16, 16), slow(24, 8), slow(24, 16), slow(64, 4), slow(64, 16)],
)
def test_a_channel_may_be_spread_over_several_lanes(state, states):
    kernel_matches(make_inputs(1, 9, 2, state), op=short_chunks(states=states))


@pytest.mark.slow
@pytest.mark.parametrize(("states", "channels"), [(4, 2), (16, 2), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thread_may_own_several_channels(states, channels, dtype):
    kernel_matches(make_inputs(1, 18, 21, 16), dtype, op=short_chunks(states=states, channels=channels))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["D", "z", "dt_bias", "initial_state"])
def test_every_option_of_the_kernel_may_be_left_out(missing):
    inputs = make_inputs(1, 18, 2, 4)
    kernel_matches({name: value for name, value in inputs.items() if name != missing}, op=short_chunks())


@pytest.mark.parametrize(
    ("constant", "length", "changes"),
    [(("B", "C"), 9, TINY), slow(("B",), 18, {}), slow(("C",), 18, {}), slow(("B", "C"), 18, {})],
)
def test_the_kernel_takes_maps_that_do_not_depend_on_time(constant, length, changes):
    fixed = make_inputs(1, length, 2, 4, constant=True)
    inputs = make_inputs(1, length, 2, 4) | {name: fixed[name] for name in constant}
    kernel_matches(inputs, op=short_chunks(**changes))


def test_parameters_may_have_the_dtype_of_the_input():
    kernel_matches(make_inputs(1, 12, 3, 4), torch.bfloat16, keep=())


@pytest.mark.slow
def test_the_kernel_neither_overflows_nor_loses_the_present_when_it_forgets_everything_at_once():
    scan = short_chunks()
    inputs = on_device(make_inputs(1, 18, 2, 4, extras=False)) | {"dt_softplus": False}
    inputs["dt"] = torch.full_like(inputs["x"], 1e4).requires_grad_()
    y, _ = scan(**inputs)
    expected = inputs["dt"] * inputs["x"] * (inputs["B"] * inputs["C"]).sum(-1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-2)
    y.sum().backward()
    assert torch.isfinite(inputs["dt"].grad).all()


@pytest.mark.slow
def test_the_kernel_keeps_far_less_than_the_states_of_all_times():
    scan = short_chunks()
    inputs = on_device(make_inputs(1, 48, 4, 8))
    given = {value.data_ptr() for value in inputs.values() if torch.is_tensor(value)}
    inputs["x"].requires_grad_()
    with kept_for_backward() as kept:
        scan(**inputs)
    # the states before every chunk and nothing else
    assert [numel for pointer, numel in kept.items() if pointer not in given] == [48 // 16 * 4 * 8]


def test_a_pass_over_segments_takes_seven_launches_and_few_operations():
    """Every launch and every operation of PyTorch takes the host microseconds, more than a short sequence computes."""
    pytest.importorskip("triton")
    from torch.profiler import profile

    from subquad.kernels.selective_scan.triton import TUNING, selective_scan_triton
    from subquad.kernels.selective_scan.triton.backward import scan_backward
    from subquad.kernels.selective_scan.triton.forward import scan_forward
    from tests.kernels.launches import on_a_gpu

    inputs = on_device(make_inputs(1, 256, 64, 16, initial_state=False), torch.bfloat16)
    leaves = {n: v.requires_grad_() if torch.is_tensor(v) else v for n, v in inputs.items()}
    tensors = [v for v in leaves.values() if torch.is_tensor(v)]
    cotangent = torch.ones_like(inputs["x"])
    tuning = replace(TUNING, uncut=0, enough_warps=10**6, busy_warps=10**6)
    with on_a_gpu(scan_forward, scan_backward) as started:
        for _ in range(4):
            started.clear()
            with profile() as profiled:
                y = selective_scan_triton(**leaves, tuning=tuning)
                torch.autograd.grad(y, tensors, cotangent)
            assert len(started) == 7
    names = [event.name for event in profiled.events()]
    # memory is filled with NaN under test
    operations = [name for name in names if name.startswith("aten::") and name != "aten::fill_"]
    # y, the states before chunks and eight gradients, and for each pass one memory for all that is temporary
    assert len(operations) <= 12, operations


@pytest.mark.parametrize(("shared", "negative"), [("", False), ("", True), ("B", False), ("C", False)])
def test_groups_of_channels_have_maps_of_their_own(shared, negative):
    inputs = make_inputs(2, 9, 6, 4) | {"negative_eigenvalues": negative}
    maps = {name: torch.randn(2, 9, 3, 4, dtype=torch.float64) for name in "BC" if name != shared}

    def one_channel(**given):
        """Every channel with the map of its group."""
        calls = []
        for d in range(6):
            mine = {n: m[..., d : d + 1] if n in ("x", "dt", "z") else m for n, m in given.items()}
            mine |= {n: given[n][d : d + 1] for n in ("A", "D", "dt_bias")}
            mine |= {n: given[n][:, :, d // 2] for n in maps}
            mine["initial_state"] = given["initial_state"][:, d : d + 1]
            calls.append(selective_scan_reference(**mine))
        return torch.cat([y for y, _ in calls], 2), torch.cat([state for _, state in calls], 1)

    assert_matches_reference(partial(selective_scan, return_final_state=True), one_channel, inputs | maps, keep=WIDE)


NEGATIVE = {"negative_eigenvalues": True}


@pytest.mark.parametrize(("length", "constant"), [(1, False), (65, False), (200, True)])
def test_negative_eigenvalues_equal_the_recurrence(length, constant, scan):
    inputs = make_inputs(2, length, 6, 5, constant=constant)
    assert_matches_reference(scan, selective_scan_reference, inputs | NEGATIVE, keep=WIDE)


@pytest.mark.parametrize(
    ("dtype", "length", "changes"),
    [
        (torch.float32, 9, TINY),
        (torch.bfloat16, 9, {**TINY, "channels": 2}),
        slow(torch.float32, 35, {}),
        slow(torch.bfloat16, 35, {}),
        slow(torch.float16, 18, {"whole": True}),
    ],
)
def test_the_kernel_with_negative_eigenvalues_equals_the_recurrence(dtype, length, changes):
    kernel_matches(make_inputs(2, length, 3, 4) | NEGATIVE, dtype, op=short_chunks(**changes))


@pytest.mark.slow
def test_the_kernel_takes_maps_without_time_beside_negative_eigenvalues():
    kernel_matches(make_inputs(1, 18, 2, 4, constant=True) | NEGATIVE, op=short_chunks())


@pytest.mark.parametrize("op", ["torch", "triton"])
def test_a_step_that_forgets_everything_reflects_the_state_where_eigenvalues_are_negative(op):
    inputs = make_inputs(1, 7, 3, 4, extras=False) | {"dt_softplus": False}
    inputs |= {"x": torch.zeros(1, 7, 3, dtype=torch.float64), "dt": torch.full((1, 7, 3), 1e4, dtype=torch.float64)}
    inputs = on_device(inputs)
    scan = short_chunks(**TINY) if op == "triton" else partial(selective_scan, return_final_state=True)
    _, state = scan(**inputs, **NEGATIVE)
    assert torch.equal(state, -inputs["initial_state"])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_size_without_softplus_has_its_bias(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs(1, 9, 3, 2)
    inputs |= {"dt": inputs["dt"].abs(), "dt_bias": inputs["dt_bias"].abs(), "dt_softplus": False}
    kernel_matches(inputs, op=partial(selective_scan, return_final_state=True, backend=backend))
