"""The laws of operators on a GPU: on the shapes of the benchmark, cut short where the reference judges them."""

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.backend import record_operators
from subquad.run_suite import REPOSITORY
from subquad.suite.bench.cases import label
from subquad.suite.laws import operators as laws
from subquad.suite.laws.calls import Operator, is_float
from tests.kernels.test_refusals import CALLS
from tests.laws.test_operators import broken

every_operator = pytest.mark.parametrize("name", OPERATORS)


# the kernels of the delta rule alone take five minutes to compile where other tests compile beside them
@pytest.mark.timeout(900)
@every_operator
def test_an_operator_obeys_its_laws(name):
    workload = REPOSITORY.operators.load(name)
    short = {label(s): s for shapes in workload.shapes.values() for s in map(workload.short, shapes)}
    lines = broken(Operator(workload, device="cuda", shapes=(*workload.small, *short.values())), laws.LAWS)
    # the reference of wkv starts from a number that float16 does not have
    if name != "wkv":
        lines += broken(Operator(workload, (torch.float16,), "cuda"), laws.ACCURACY)
    assert not lines, "\n".join(lines)


@every_operator
def test_calls_of_real_size_repeat_and_may_be_recorded(name):
    workload = REPOSITORY.operators.load(name)
    operator = Operator(workload, device="cuda", shapes=tuple(workload.shapes["quick"]))
    tried = (laws.calls_repeat_and_leave_their_inputs_alone, laws.recorded_calls_give_the_same)
    lines = broken(operator, tried)
    assert not lines, "\n".join(lines)


TAKEN = ["causal_conv1d", "cauchy", "lti_ssm_step", "norm", "rotated_keys", "rwkv6_inputs", "rwkv7_inputs", "slstm"]
TAKEN += ["ssd", "ssd_steps", "swiglu", "token_shift"]
"""Operators whose kernels are faster than plain PyTorch at any size."""


@pytest.mark.parametrize("name", TAKEN)
def test_auto_takes_the_kernels(name):
    call, inputs = CALLS[name]()
    for trained in (False, True) if REPOSITORY.operators.load(name).backward else (False,):
        given = {n: x.detach().requires_grad_(trained) if is_float(x) else x for n, x in inputs.items()}
        with record_operators() as used:
            call(**given, backend="auto")
        # a step counts as its operator
        assert used[name.removesuffix("_step")]["backend"] == "triton"
