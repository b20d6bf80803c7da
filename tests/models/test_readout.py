"""Readout of sequences that end early, and of pairs of sequences."""

from dataclasses import replace

import pytest
import torch

from subquad.models import MODELS
from subquad.models.parts.time_axis import take_positions
from subquad.suite.contracts import TaskSpec

SPEC = TaskSpec("tokens", num_classes=3, readout="sequence", max_length=12, vocab_size=20)
PAIR = replace(SPEC, towers=2)


def build(name="dss-exp", spec=SPEC, **options):
    torch.manual_seed(0)
    config = MODELS.load(name)(**{"d_model": 8, "norm": "layer", **options})
    return config.build(spec).double().eval()


def tokens(rows, length=12):
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["dss-exp", "mamba", "attention"])
def test_padding_behind_the_end_changes_nothing(name, pooling):
    model = build(name, pooling=pooling)
    inputs, ends = tokens(4), torch.tensor([[11], [6], [0], [3]])
    logits = model(inputs, ends)
    for row, end in enumerate(ends[:, 0].tolist()):
        other = inputs[row : row + 1].clone()
        other[:, end + 1 :] = 7
        assert torch.allclose(model(other, ends[row : row + 1])[0], logits[row])
        assert torch.allclose(model(inputs[row : row + 1, : end + 1])[0], logits[row])
    before = inputs.clone()
    before[1, 6] = (before[1, 6] + 1) % 20
    assert not torch.allclose(model(before, ends)[1], logits[1])


def test_a_full_row_needs_no_end():
    model = build()
    inputs = tokens(3)
    assert torch.allclose(model(inputs), model(inputs, torch.full((3, 1), 11)))


def test_integers_of_any_width_are_accepted():
    model = build()
    ends = torch.tensor([[3], [9]])
    expected = model(tokens(2), ends)
    assert torch.equal(model(tokens(2).to(torch.uint8), ends.to(torch.int16)), expected)


def test_two_towers_have_the_same_weights_and_meet_in_the_readout():
    model = build(spec=PAIR)
    first, second = tokens(4)[:2], tokens(4)[2:]
    ends = torch.tensor([[5, 11], [9, 2]])
    logits = model(torch.cat([first, second], dim=1), ends)
    assert logits.shape == (2, 3)
    # the summary of each tower, computed by a network for single sequences
    single = build()
    single.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head")}, strict=False)
    single.head = torch.nn.Identity()
    a, b = single(first, ends[:, :1]), single(second, ends[:, 1:])
    inner = torch.relu(model.head.inner(torch.cat([a, b, a * b, a - b], dim=1)))
    assert torch.allclose(model.head.outer(inner), logits)


def test_towers_do_not_see_each_other_but_both_count():
    model = build(spec=PAIR)
    pair = tokens(1, 24)
    logits = model(pair)
    for place in (3, 15):
        other = pair.clone()
        other[0, place] = (other[0, place] + 1) % 20
        assert not torch.allclose(model(other), logits)
    swapped = torch.cat([pair[:, 12:], pair[:, :12]], dim=1)
    assert not torch.allclose(model(swapped), logits), "a - b tells the two apart"


def test_every_parameter_of_a_pair_network_learns():
    model = build(spec=PAIR).train()
    torch.nn.functional.cross_entropy(model(tokens(6, 24)), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "norm" not in name
    )


def test_impossible_towers_are_refused():
    for spec in (replace(SPEC, towers=3), replace(PAIR, readout="token")):
        with pytest.raises(ValueError, match=f"towers={spec.towers} and readout="):
            build(spec=spec)
    with pytest.raises(ValueError, match="two sequences per row has no step"):
        build(spec=PAIR).init_state(1)


def test_time_steps_of_dss_may_have_a_rate_of_their_own():
    model = build(dt_lr=0.02)
    groups = {group.name: group for group in model.param_groups()}
    assert groups["dt"].lr == 0.02
    assert groups["ssm"].lr == 1e-3
    assert groups["dt"].weight_decay == groups["ssm"].weight_decay == 0
    assert len(groups["dt"].parameters) == 2
    assert "dt" not in {group.name for group in build().param_groups()}
    everything = [p for group in groups.values() for p in group.parameters]
    assert len({id(p) for p in everything}) == len(everything) == len(list(model.parameters()))


def test_positions_are_taken_with_the_gradient_of_an_index():
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 2, 6], [1, 3, 4]])
    y = take_positions(x, positions)
    assert torch.equal(y, x[torch.arange(2)[:, None], positions])
    assert torch.autograd.gradcheck(lambda x: take_positions(x, positions), x)
