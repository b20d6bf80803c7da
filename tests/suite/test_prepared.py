"""A prepared run trains all parameters of its model and nothing else, and records its operators."""

import functools

import pytest
import torch

from subquad.kernels.backend import record, record_operators
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


def test_every_compiled_run_records_its_operators(monkeypatch):
    forward = ToyModel.forward

    def calls_an_operator(self, *inputs):
        if self.training:
            record("fft_conv", "torch")
        return forward(self, *inputs)

    monkeypatch.setattr(ToyModel, "forward", calls_an_operator)
    # the default backend starts a compiler of C++
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for seed in range(2):
        with record_operators() as used:
            trainer.Trainer(make_run(train={"compile": True}, seed=seed), torch.device("cpu"))()
        assert list(used) == ["fft_conv"], seed
