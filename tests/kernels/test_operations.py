"""The operations of operators are counted by the cost that their workloads state for the shape of a call."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from subquad.kernels import OPERATORS
from subquad.kernels.backend import record_operators
from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.operations import count_operations
from subquad.run_suite import WORKLOADS

COUNTED = [name for name in OPERATORS if WORKLOADS.load(name).shape_of is not None]
ELEMENTWISE = {
    "embedding",
    "forget_gate",
    "norm",
    "rotary",
    "rotated_keys",
    "rwkv6_inputs",
    "rwkv7_inputs",
    "squared_relu",
    "ssd_steps",
    "swiglu",
}
ELEMENTWISE |= {"token_shift"}
AS_PRODUCTS = {"float32_matmul", "skinny_linear", "generalised_delta_rule"}
"""Without tensors of a GPU they are torch's products or another operator, which are counted as such."""


def without_values(mode, x, gradient):
    if not isinstance(x, torch.Tensor):
        return x
    return mode.from_tensor(x).requires_grad_(gradient and (x.is_floating_point() or x.is_complex()))


def test_every_operator_is_counted_or_works_on_single_elements():
    assert set(OPERATORS) - set(COUNTED) == ELEMENTWISE | AS_PRODUCTS


@pytest.mark.parametrize("name", COUNTED)
def test_a_call_counts_the_cost_of_its_shape_and_gives_results_of_its_shapes(name):
    workload = WORKLOADS.load(name)
    plain = next(one for one in workload.implementations if one.kind == "ours" and one.name == "torch").load()
    for shape in workload.small or [workload.short(shape) for shape in workload.shapes["quick"]]:
        inputs = workload.make_inputs(shape, torch.float32, torch.Generator().manual_seed(0))
        expected = plain(**{key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()})
        for backward in {False, workload.backward}:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            given = {key: without_values(mode, x, backward) for key, x in inputs.items()}
            with mode, count_operations() as count:
                results = plain(**given)
            assert count.total == workload.cost(shape, torch.float32, backward).num_flops, shape
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results, expected)), strict=True)
            assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs), shape


def test_gradients_have_the_shapes_of_inputs_and_nothing_is_recorded():
    mode = FakeTensorMode()
    with mode, count_operations(), record_operators() as used:
        q, k, v = (torch.empty(2, 70, 2, 8, requires_grad=True) for _ in "qkv")
        gated_linear_attention(q, k, v).sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))
    assert not used


def test_outside_of_a_count_an_operator_computes():
    x = torch.ones(1, 3, 1, 2)
    with count_operations():
        pass
    assert gated_linear_attention(x, x, x, scale=1.0)[0, :, 0, 0].tolist() == [2.0, 4.0, 6.0]
