"""Tests that a run refuses a plugin's network that reads the future."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from subquad.suite.contracts import TaskSpec
from subquad.suite.model import Model
from subquad.suite.runs import RunEnded
from subquad.suite.training.causality import require_causal

TOKENS = TaskSpec(input="tokens", num_classes=8, readout="token", max_length=12, vocab_size=8)
LABELS = TaskSpec(input="tokens", num_classes=8, readout="sequence", max_length=12, vocab_size=8)
SIGNAL = TaskSpec(input="signal", num_classes=8, readout="token", max_length=12, channels=8)


class Means(Model):
    """Means of the inputs, with a share of those behind each position."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead, self.dropout, self.calls = ahead, nn.Dropout(0.5), 0

    def forward(self, inputs, positions=None):
        if self.ahead is None:
            raise RuntimeError("no rows of this length")
        x = inputs if inputs.is_floating_point() else nn.functional.one_hot(inputs.long(), 8).float()
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
        if self.ahead == "counts":
            self.calls += 1
            return past * self.calls
        return self.dropout(past + self.ahead * (x.mean(1, keepdim=True) + torch.rand(1)))


@pytest.mark.parametrize(
    ("ahead", "spec", "plugins", "options", "refused"),
    [
        (0.1, TOKENS, {"model": "mine"}, {}, True),
        (0.1, SIGNAL, {"model": "mine"}, {}, True),
        (0.1, TOKENS, {"model": "mine"}, {"bidirectional": True}, False),
        (0.1, TOKENS, {"task": "mine"}, {}, False),
        (0.1, LABELS, {"model": "mine"}, {}, False),
        # rounding errors of a transform, here as large as those of TF32, are no leak
        (1e-3, TOKENS, {"model": "mine"}, {}, False),
        (None, TOKENS, {"model": "mine"}, {}, False),
        # a fault of another kind, which `check model` names
        ("counts", TOKENS, {"model": "mine"}, {}, False),
    ],
    ids=["tokens", "signal", "meant", "of the suite", "one label", "rounding", "raises", "counts calls"],
)
def test_a_network_of_a_plugin_that_reads_labels_ahead_is_refused(ahead, spec, plugins, options, refused):
    run = SimpleNamespace(
        model=SimpleNamespace(**options),
        model_name="means",
        task=SimpleNamespace(spec=spec),
        task_name="toy",
        plugins=plugins,
    )
    model = Means(ahead)
    with pytest.raises(RunEnded, match=r"means reads the future: .* by .*e-0") if refused else nullcontext():
        require_causal(run, model, torch.device("cpu"))
    assert model.dropout.training
