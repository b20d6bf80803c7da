"""The state space model on a GPU: the claims of `tests/kernels/test_lti_ssm_triton.py` at realistic sizes."""

from functools import partial

import pytest
import torch

from subquad.kernels.lti_ssm import DiagonalSystem, lti_ssm, lti_ssm_step
from subquad.kernels.lti_ssm import workloads as described
from subquad.kernels.lti_ssm.reference import lti_ssm_reference, lti_ssm_step_reference
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.test_lti_ssm import PARAMETERS
from tests.kernels.test_lti_ssm import make_inputs as make_small_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TORCH = partial(lti_ssm, return_final_state=True, backend="torch")
TRITON = partial(lti_ssm, return_final_state=True, backend="triton")


def make_inputs(batch, length, width, state=32, dtype=torch.bfloat16, gates="gated"):
    """S4D-Lin as the benchmark draws it, with an initial state; the system in float32."""
    g = torch.Generator("cuda").manual_seed(length)
    shape = {"B": batch, "T": length, "D": width, "N": state, "gates": gates}
    inputs = described.make_inputs(shape, dtype, g)
    inputs |= {name: inputs[name].float() for name in ("dt", "D")}
    h = torch.randn(batch, width, state, generator=g, device="cuda", dtype=torch.complex64)
    return described.time_contiguous(inputs) | {"initial_state": h}


def assert_results_close(inputs, dtype):
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, dtype)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "gates", "shape"),
    [
        (BF16, "plain", (8, 2048, 96)),
        (BF16, "gated", (3, 1000, 40)),
        (BF16, "plain", (1, 70000, 16)),
        (BF16, "plain", (50, 1024, 24)),
        (FP32, "gated", (3, 1000, 40)),
        (FP32, "plain", (1, 70000, 8)),
        (FP16, "plain", (2, 8192, 33)),
    ],
)
def test_a_long_sequence_equals_plain_pytorch_in_double_precision(dtype, gates, shape):
    assert_results_close(make_inputs(*shape, dtype=dtype, gates=gates), dtype)


@pytest.mark.parametrize("state", [1, 33, 64])
def test_any_number_of_states(state):
    assert_results_close(make_inputs(2, 1500, 24, state), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "discretization", "shape", "state"),
    [
        (BF16, "dss-softmax", (8, 2000, 40), 64),
        (BF16, "dss-softmax", (2, 300, 40), 16),
        (FP32, "dss-softmax", (3, 1000, 40), 64),
        (FP32, "zoh", (3, 1000, 40), 64),
        (BF16, "zoh", (8, 2000, 40), 80),
    ],
)
def test_where_the_kernel_does_not_go_the_filter_and_its_convolution_do(dtype, discretization, shape, state):
    inputs = make_inputs(*shape, state, dtype=dtype)
    del inputs["initial_state"]
    if discretization == "dss-softmax":
        # a softmax that is not narrow, with some growing modes
        inputs |= {"A": inputs["A"] * torch.where(torch.arange(state, device="cuda") % 3 == 0, -1.0, 1.0)}
    auto, plain = lti_ssm, partial(lti_ssm, backend="torch")
    assert_equals_plain_pytorch(auto, plain, inputs | {"discretization": discretization}, dtype)


def test_a_skip_in_half_precision_has_its_gradient():
    inputs = make_inputs(2, 1500, 24)
    skip = inputs.pop("D").bfloat16()
    assert_results_close(inputs | {"D": skip}, torch.bfloat16)


@pytest.mark.parametrize("length", [1, 65, 1000])
@pytest.mark.parametrize(("dtype", "complex_"), [(BF16, True), (FP16, True), (FP32, True), (BF16, False)])
def test_the_kernel_equals_the_loop(length, dtype, complex_):
    inputs = make_small_inputs(length, discretization="zoh", complex_=complex_)
    keep = () if dtype == torch.float32 else PARAMETERS
    assert_matches_reference(TRITON, lti_ssm_reference, inputs, dtype=dtype, keep=keep, device="cuda")


@pytest.mark.large
def test_a_million_steps():
    assert_results_close(make_inputs(1, 2**20, 16, gates="plain"), torch.bfloat16)


STEP = described.with_state(partial(lti_ssm_step, backend="triton"))


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_step_with_gates_a_trained_B_and_shared_eigenvalues_on_a_strided_state(rows, dtype):
    g = torch.Generator().manual_seed(rows)
    inputs = described.make_step_inputs({"B": rows, "D": 300, "N": 24}, torch.float64, g)
    inputs |= {name: inputs[name][:1] for name in ("log_A_real", "A_imag")}
    inputs |= {name: torch.randn(rows, 300, generator=g).double() for name in ("gate_in", "gate_out")}
    inputs |= {"B": torch.randn(300, 24, 2, generator=g).double(), "conj_pairs": False, "dt_scale": 0.5}

    def with_strides(state, **rest):
        return STEP(state=state.permute(2, 0, 1).contiguous().permute(1, 2, 0), **rest)

    keep = (*described.STEP.keep, "B")
    assert_matches_reference(
        with_strides, lti_ssm_step_reference, inputs, dtype=dtype, keep=keep, device="cuda", grad=False
    )


@pytest.mark.parametrize("rows", [1, 17])
def test_2000_steps_follow_the_recurrence(rows):
    g = torch.Generator("cuda").manual_seed(rows)
    inputs = described.make_step_inputs({"B": rows, "D": 200, "N": 32}, FP32, g)
    system = DiagonalSystem(**{name: inputs[name] for name in described.PARAMETERS})
    exact = DiagonalSystem(*(x if x is None else x.double() for x in system))
    state = inputs["state"].clone()
    plain, wide_state = state.clone(), state.to(torch.complex128)
    for _ in range(2000):
        u = torch.randn(rows, 200, generator=g, device="cuda")
        y = lti_ssm_step(u, system, state, backend="triton")
        y_plain = lti_ssm_step(u, system, plain, backend="torch")
        expected = lti_ssm_step(u.double(), exact, wide_state, backend="torch")
    assert_close(y, expected, FP32, plain=y_plain, what="y")
    assert_close(state, wide_state, FP32, plain=plain, what="state")


@pytest.mark.parametrize("rows", [1, 17])
def test_recorded_steps_give_the_same_bits(rows):
    """With one row a step starts while the one before it still runs; here that one gives its input and its state."""
    g = torch.Generator("cuda").manual_seed(rows)
    inputs = described.make_step_inputs({"B": rows, "D": 2048, "N": 32}, BF16, g)
    system = DiagonalSystem(**{name: inputs[name] for name in described.PARAMETERS})
    u, start = inputs["u"], inputs["state"]

    def steps(state):
        y = u
        for _ in range(8):
            y = lti_ssm_step(y, system, state, backend="triton")
        return y

    expected_state = start.clone()
    expected = steps(expected_state)
    state = start.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        recorded = steps(state)
    state.copy_(start)
    graph.replay()
    assert torch.equal(recorded, expected)
    assert torch.equal(state, expected_state)
