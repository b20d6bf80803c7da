"""The readout `last`: all positions are decoded from the hidden state of the last one."""

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import build, make_inputs

SPEC = TaskSpec(input="tokens", num_classes=16, readout="last", max_length=12, vocab_size=16)


@pytest.mark.parametrize("name", ["attention", "gla", "sashimi"])
def test_labels_are_read_out_of_the_last_state_alone(name):
    model = build(MODELS.load(name), SPEC)
    inputs = make_inputs(SPEC, length=12)
    whole = model(inputs)
    assert whole.shape == (3, 12, 16)
    positions = torch.tensor([[0, 5, 11]]).expand(3, 3)
    torch.testing.assert_close(model(inputs, positions), whole[:, [0, 5, 11]])
    # the same state gives other tokens at other positions, and every token of the row moves it
    assert not torch.allclose(whole[:, 0], whole[:, 1])
    changed = inputs.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 16
    assert not torch.allclose(model(changed)[:, 7], whole[:, 7])
    assert all(parameter.requires_grad for parameter in model.decoder.parameters())


def test_a_state_that_is_decoded_has_no_steps():
    with pytest.raises(ValueError, match="reads out the last state has no step; use forward"):
        build(MODELS.load("gla"), SPEC).init_state(2)


def test_the_decoder_has_the_weights_that_autocast_asks_for():
    model = build(MODELS.load("attention"), SPEC).float()
    seen = []
    for linear in model.decoder.linears:
        linear.register_forward_pre_hook(lambda module, args: seen.append((module.weight.dtype, args[0].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(make_inputs(SPEC, length=12))
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    assert hidden.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in model.decoder.parameters())
    hidden.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.decoder.parameters())
