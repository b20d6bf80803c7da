"""Loss and logits of models with and without a readout of their own."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from subquad.models.linear_attention import LinearAttentionConfig
from subquad.suite.contracts import IGNORE, TaskSpec
from subquad.suite.model import Model
from subquad.suite.training.readout import logits_by_rows, mean_loss

TOKENS = TaskSpec("tokens", num_classes=11, readout="token", max_length=20, vocab_size=11)
PAIRS = TaskSpec("tokens", num_classes=2, readout="sequence", max_length=20, vocab_size=11, towers=2)


class Plain(Model):
    """A model that has nothing but a call."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, positions=None):
        return self.model(inputs, positions)


def example(spec):
    torch.manual_seed(0)
    model = LinearAttentionConfig(num_layers=1, d_model=8).build(spec)
    inputs = torch.randint(11, (6, 20 * spec.towers))
    targets = torch.randint(spec.num_classes, (6, 3) if spec.readout == "token" else (6,))
    targets.view(-1)[::4] = IGNORE
    positions = torch.tensor([[2, 9, 17]]).expand(6, 3) if spec.readout == "token" else None
    return model, inputs, targets, positions


@pytest.mark.parametrize("spec", [TOKENS, PAIRS])
def test_a_readout_changes_no_bit_of_the_loss_on_a_cpu(spec):
    model, inputs, targets, positions = example(spec)
    logits = model(inputs, positions)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)
    for network in (model, Plain(model)):
        loss = mean_loss(network, inputs, targets, positions)
        assert torch.equal(loss, expected)
        pairs = zip(
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True),
            torch.autograd.grad(expected, list(model.parameters()), retain_graph=True),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("spec", [TOKENS, PAIRS])
@pytest.mark.parametrize(("max_logits", "parts"), [(1, 6), (70, 3), (10**6, 1)])
def test_logits_come_by_rows_where_they_are_many(spec, max_logits, parts):
    model, *batch = example(spec)
    pieces = list(logits_by_rows(model, *batch, spec.num_classes, contextlib.nullcontext, max_logits=max_logits))
    assert len(pieces) == (parts if spec is TOKENS else 1)
    logits, targets = (torch.cat(part) for part in zip(*pieces, strict=True))
    assert torch.allclose(logits, model(batch[0], batch[2]), atol=1e-6)
    assert torch.equal(targets, batch[1])
    plain = logits_by_rows(Plain(model), *batch, spec.num_classes, contextlib.nullcontext, max_logits=max_logits)
    assert torch.equal(torch.cat([logits for logits, _ in plain]), model(batch[0], batch[2]))


def test_the_caller_of_logits_works_outside_of_autocast():
    model, *batch = example(TOKENS)
    for logits, _ in logits_by_rows(model, *batch, 11, lambda: torch.autocast("cpu", torch.bfloat16), max_logits=1):
        assert logits.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
