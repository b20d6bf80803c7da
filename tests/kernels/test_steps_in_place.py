"""Steps of linear attention leave the state as it is unless they are told that they may overwrite it."""

import pytest
import torch

pytest.importorskip("triton")
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.calls import Operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", ["gated_linear_attention_step", "delta_rule_step"])
def test_a_step_overwrites_its_state_where_it_may(name):
    found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
    for call in found.compiled_calls():
        inputs, step = found.rounded(call), found.function(call)
        before = inputs["state"].clone()
        o, state = step(**inputs)
        assert torch.equal(inputs["state"], before)
        again, overwritten = step(**inputs, in_place=True)
        assert torch.equal(again, o)
        assert torch.equal(overwritten, state)
        assert torch.equal(inputs["state"], state)
