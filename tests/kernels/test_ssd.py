"""Claims about state space duality that its laws do not judge: tiles, slices of groups, and states computed again."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.gated_linear_attention.triton.plan import Planner, Tile, Tuning
from subquad.kernels.launch import CompileOptions
from subquad.kernels.layout import parts_of_one
from subquad.kernels.ssd import ssd, ssd_steps, triton
from subquad.kernels.ssd.reference import ssd_reference
from subquad.kernels.ssd.workloads import KEEP, make_inputs
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"B": 1, "T": 70, "H": 4, "G": 1, "K": 32, "V": 32, "rule": "trapezoid", "state": "given"}


def inputs(**changes):
    return make_inputs({**SHAPE, **changes}, torch.float64, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", ["euler", "trapezoid"])
@pytest.mark.parametrize("slices", [1, 4])
def test_heads_of_a_group_and_blocks_of_values_add_up(slices, rule, monkeypatch):
    """Keys and values take two tiles each, and the heads of the group one program or four."""
    tile = Tile(16, 16, CompileOptions(2, 1))
    options = dict.fromkeys(("groups", "group_values"), tile)
    tuning = Tuning(chunk=32, min_width=16, read=dict.fromkeys(range(3), tile), enough_programs=6 * slices, **options)
    monkeypatch.setattr(triton, "PLANNER", Planner(tuning, tuning))
    op = partial(ssd, backend="triton")
    assert_matches_reference(op, ssd_reference, inputs(rule=rule), keep=(*KEEP, "initial_state"), device=DEVICE)


@pytest.mark.parametrize("groups", [1, 4])
def test_states_that_are_computed_again_are_the_same(groups):
    results = []
    for recompute in (False, True):
        leaves = {
            name: x.to(DEVICE, torch.float32).requires_grad_() if torch.is_tensor(x) else x
            for name, x in inputs(G=groups).items()
        }
        outputs = ssd(**leaves, recompute=recompute, backend="triton")
        wanted = [x for x in leaves.values() if torch.is_tensor(x)]
        results.append([*outputs, *torch.autograd.grad([y.square().sum() for y in outputs], wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_parts_of_one_tensor_are_parts_of_one(groups):
    """The convolution of Mamba-2 gives values, keys and queries as such parts; separate tensors give the same."""
    given = {
        name: x.to(DEVICE, torch.float32) for name, x in inputs(G=groups, rule="euler").items() if torch.is_tensor(x)
    }
    names, results = ("v", "k", "q"), []
    whole = torch.cat([given[name].flatten(-2) for name in names], -1)
    parts = whole.split([given[name].flatten(-2).shape[-1] for name in names], -1)
    in_one = {name: part.unflatten(-1, (-1, 32)) for name, part in zip(names, parts, strict=True)}
    for tensors in (given, given | in_one):
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        y = ssd(**leaves, backend="triton")
        results.append(torch.autograd.grad(y.square().sum(), [leaves[name] for name in names]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert parts_of_one([x.flatten(-2) for x in results[0]]) is None
    joined = parts_of_one([x.flatten(-2) for x in results[1]])
    assert joined is not None
    assert torch.equal(joined, torch.cat([x.flatten(-2) for x in results[0]], -1))


def test_autocast_does_not_round_what_is_read_of_the_initial_state():
    """A product of matrices would be rounded, in plain PyTorch at the first position alone."""
    tensors = {name: x.float() if torch.is_tensor(x) else x for name, x in inputs().items()}
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = ssd(**tensors, backend="torch")
    assert (y - ssd(**tensors, backend="torch")[0]).abs().max() < 1e-5


def test_a_recorded_final_state_may_be_changed_in_place():
    """So may that of gated linear attention; torch refuses the change for a view of an argument."""
    tensors = {name: x.to(DEVICE, torch.float32) if torch.is_tensor(x) else x for name, x in inputs().items()}
    tensors["v"].requires_grad_()
    _, state = ssd(**tensors, backend="triton")
    (expected,) = torch.autograd.grad(state.square().sum(), tensors["v"], retain_graph=True)
    (found,) = torch.autograd.grad(state.mul_(2).square().sum() / 4, tensors["v"])
    torch.testing.assert_close(found, expected)


def test_a_rate_that_is_nan_is_not_taken_for_the_least():
    x, rate, share = (torch.zeros(1, 3, 2, device=DEVICE) for _ in range(3))
    rate[0, 1, 1] = torch.nan
    for backend in ("torch", "triton"):
        _, log_decay, *_ = ssd_steps(x, torch.zeros(2, device=DEVICE), rate, share, least=0.1, backend=backend)
        assert log_decay.isnan().nonzero().tolist() == [[0, 1, 1]]
