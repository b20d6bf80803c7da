"""The selective scan on a GPU: the laws of `tests/kernels/test_selective_scan.py` at sizes of real use."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from subquad.kernels.selective_scan import selective_scan
from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch, memory_taken, results

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDE = ("A", "D", "dt_bias", "initial_state")


def make_inputs(batch, length, width, state=16, dtype=torch.bfloat16, *, dt_min=1e-3, dt_max=1e-1, constant=False):
    """Inputs whose biases give step sizes between dt_min and dt_max, as Mamba's initialization does."""
    g = torch.Generator("cuda").manual_seed(length)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda")

    step = torch.empty(width, device="cuda").uniform_(dt_min, dt_max, generator=g)
    maps = (width, state) if constant else (batch, length, state)
    inputs = {
        "x": randn(batch, length, width),
        "dt": randn(batch, length, width) / 2,
        "A": -torch.arange(1.0, state + 1, device="cuda").repeat(width, 1),
        "B": randn(*maps),
        "C": randn(*maps),
        "D": randn(width),
        "z": randn(batch, length, width) + 1,
        # the inverse of softplus
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "initial_state": randn(batch, width, state),
    }
    return {n: v.to(torch.float32 if n in WIDE else dtype) for n, v in inputs.items()} | {"dt_softplus": True}


APPROXIMATE = 2.0**-18
"""Allowed error of what stays in float32 (states, gradients of A and the like) where inputs are half-precision.

Decays are then the hardware's 2^x, with a relative error of 2^-22, which adds up over the steps that a state remembers:
sixteen times as much is the sum of 256 random errors.
"""
TORCH = partial(selective_scan, return_final_state=True, backend="torch")
TRITON = partial(selective_scan, return_final_state=True, backend="triton")


def assert_right(inputs, dtype, op=TRITON):
    floors = dict.fromkeys(("output 1", *WIDE), APPROXIMATE) if dtype != torch.float32 else {}
    assert_equals_plain_pytorch(op, TORCH, inputs, floors=floors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "state"), [(4, 2048, 768, 16), (3, 1000, 77, 16), (2, 515, 200, 5), (1, 700, 33, 64)]
)
def test_a_long_sequence_equals_plain_pytorch_in_double_precision(batch, length, width, state, dtype):
    assert_right(make_inputs(batch, length, width, state, dtype), dtype)


@pytest.mark.parametrize("state", [13, 16])
def test_the_kernels_without_matrix_units_equal_plain_pytorch_in_double_precision(state):
    from subquad.kernels.selective_scan.triton import TUNING, selective_scan_triton

    op = partial(selective_scan_triton, return_final_state=True, tuning=replace(TUNING, matrix=False))
    assert_right(make_inputs(3, 515, 200, state), torch.bfloat16, op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length", "width", "state"), [(256, 39, 256, 16), (2, 515, 200, 5)])
def test_negative_eigenvalues_equal_plain_pytorch_in_double_precision(batch, length, width, state, dtype):
    inputs = make_inputs(batch, length, width, state, dtype) | {"negative_eigenvalues": True}
    assert_right(inputs, dtype)


@pytest.mark.parametrize("width", [16, 18, 32, 34, 64, 66])
def test_few_channels_in_bfloat16_equal_plain_pytorch_in_double_precision(width):
    # the number of warps of a program follows the width
    inputs = make_inputs(2, 130, width, 16, torch.bfloat16)
    assert_right(inputs, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
def test_the_kernel_equals_the_recurrence(length):
    inputs = {n: v.double().cpu() if torch.is_tensor(v) else v for n, v in make_inputs(2, length, 70, 24).items()}
    inputs["C"] /= 24**0.5
    assert_matches_reference(TRITON, selective_scan_reference, inputs, dtype=torch.bfloat16, keep=WIDE, device="cuda")


@pytest.mark.parametrize("length", [1, 65, 500])
def test_channels_one_by_one_equal_the_recurrence(length):
    """Width 1, in eight calls, because the error of a single element is a matter of luck."""

    def one_by_one(B, C, **rest):
        calls = []
        for d in range(8):
            mine = {n: v[..., d : d + 1] if n in ("x", "dt", "z") else v for n, v in rest.items()}
            mine |= {n: rest[n][d : d + 1] for n in ("A", "D", "dt_bias")}
            calls.append(TRITON(B=B, C=C, **(mine | {"initial_state": rest["initial_state"][:, d : d + 1]})))
        return torch.cat([y for y, _ in calls], 2), torch.cat([state for _, state in calls], 1)

    inputs = {n: v.double().cpu() if torch.is_tensor(v) else v for n, v in make_inputs(2, length, 8).items()}
    inputs["C"] /= 4
    assert_matches_reference(one_by_one, selective_scan_reference, inputs, keep=WIDE, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dt_min", "dt_max"), [(5.0, 50.0), (1e-6, 1e-5)], ids=["forgets at once", "forgets nothing"])
def test_extreme_step_sizes_equal_plain_pytorch_in_double_precision(dt_min, dt_max, dtype):
    inputs = make_inputs(2, 600, 64, dtype=dtype, dt_min=dt_min, dt_max=dt_max)
    assert_right(inputs, dtype)


def test_maps_that_do_not_depend_on_time_equal_plain_pytorch_in_double_precision():
    inputs = make_inputs(2, 600, 64, constant=True)
    inputs["B"], inputs["C"] = inputs["B"].float(), inputs["C"].float()
    floors = dict.fromkeys(("output 1", *WIDE, "B", "C"), APPROXIMATE)
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, floors=floors)


@pytest.mark.large
def test_a_million_steps():
    inputs = make_inputs(1, 2**20, 3, dtype=torch.float32)
    assert_right(inputs, torch.float32)


@pytest.mark.large
def test_offsets_beyond_two_to_the_31():
    """A view whose last step is more than 2^31 elements behind its first."""
    storage = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    inputs = make_inputs(1, 9, 64)
    inputs["x"] = storage.as_strided((1, 9, 64), (0, 2**28, 1)).copy_(inputs["x"])
    assert_equals_plain_pytorch(TRITON, None, inputs, exact=TORCH)


def test_training_takes_far_less_memory_than_the_states_of_all_times():
    inputs = make_inputs(1, 2**16, 256)
    states = 4 * inputs["x"].numel() * 16
    assert memory_taken(TRITON, inputs) < states / 4


def test_launches_that_are_made_again_read_the_inputs_of_their_call():
    """The first two calls of a form plan, allocate and launch; those after them start what the second one did."""
    inputs, others = make_inputs(1, 1000, 256), make_inputs(1, 1000, 256)
    others["x"] = others["x"].flip(0, 1)
    first, other = results(TRITON, inputs), results(TRITON, others)
    assert not torch.equal(first["output 0"], other["output 0"])
    for given, before in ((inputs, first), (others, other), (inputs, first)):
        assert all(torch.equal(before[name], x) for name, x in results(TRITON, given).items())
    graph, wanted = torch.cuda.CUDAGraph(), TRITON(**inputs)
    TRITON(**inputs)
    with torch.cuda.graph(graph):
        y, _ = TRITON(**inputs)
    graph.replay()
    assert torch.equal(y, wanted[0])


def test_a_gpu_takes_the_kernel_by_itself():
    inputs = make_inputs(1, 40, 16)
    taken, kernel = (results(partial(op, return_final_state=True), inputs) for op in (selective_scan, TRITON))
    assert all(torch.equal(taken[name], tensor) for name, tensor in kernel.items())
    exact = results(TORCH, inputs)
    assert any(not torch.equal(taken[name], tensor) for name, tensor in exact.items())


def test_a_gpu_takes_plain_pytorch_where_the_kernel_cannot_run():
    inputs = make_inputs(1, 20, 8, state=80)
    assert torch.equal(selective_scan(**inputs), selective_scan(**inputs, backend="torch"))
