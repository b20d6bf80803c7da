"""A model trains all of its parameters and nothing else."""

import pytest
import torch

from subquad.suite.contracts import ParamGroup
from subquad.suite.runs import RunEnded
from subquad.suite.training import trainer
from tests.suite.toy import ToyModel, make_run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda parameters: parameters[:-2], r"leaves out head.weight, head.bias, which would stay as at the start"),
        (lambda parameters: [*parameters, torch.ones(3, requires_grad=True)], r"has 1 tensors that are no trainable"),
    ],
)
def test_groups_that_have_not_exactly_the_parameters_are_refused_before_the_first_step(monkeypatch, changed, words):
    monkeypatch.setattr(
        ToyModel, "param_groups", lambda self, no_decay=(): [ParamGroup("all", changed(list(self.parameters())))]
    )
    one = trainer.Trainer(make_run(), CPU)
    with pytest.raises(RunEnded, match=words):
        one()
    assert one.step == 0
