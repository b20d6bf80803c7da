"""The U-Net over time. The laws of all models are in tests/laws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.models.attention import Attention
from subquad.models.mamba import Mamba
from subquad.models.parts.time_axis import LeftPadding
from subquad.models.s4 import S4Kernel
from subquad.models.sashimi import SashimiConfig, UNet
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import unroll
from subquad.suite.state import tensors

TOKENS = TaskSpec("tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)
SMALL = {"num_layers": 1, "d_model": 8, "pool": (3, 2)}


def make(**options) -> UNet:
    torch.manual_seed(0)
    model = SashimiConfig(**{**SMALL, **options}).build(TOKENS).double().eval()
    assert isinstance(model.mixers[0], UNet)
    return model.mixers[0]


@torch.no_grad()
def test_the_stages_are_joined_as_in_the_released_code():
    net = make()
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    d_1 = net.down[0](x.reshape(2, 4, 24))
    d_2 = net.down[1](d_1.reshape(2, 2, 32))
    y = net.stages[2](d_2)
    for i, skip in ((1, d_1), (0, x)):
        sent = net.up[i](y)
        sent = F.pad(sent[:, :-1], (0, 0, 1, 0)).reshape(skip.shape)
        y = net.stages[i](sent + skip)
    torch.testing.assert_close(net(x), y)
    assert [stage.blocks[0].mixer.out.in_features for stage in net.stages] == [8, 16, 32]
    # the blocks of a stage have a skip around all of them
    stage = net.stages[2]
    residual, branch = stage.blocks[0](d_2, None)
    torch.testing.assert_close(stage(d_2), d_2 + residual + branch)


@torch.no_grad()
def test_blocks_on_the_way_down_are_added_behind_those_on_the_way_up():
    net = make(down_blocks=True, num_layers=2, pool=(3,))
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(block, x):
        residual, branch = block(x, None)
        return residual + branch

    first, second = net.before[0].blocks
    l_1 = run(first, x)
    l_2 = run(second, l_1)
    sent = net.up[0](net.stages[1](net.down[0](l_2.reshape(2, 4, 24))))
    u = F.pad(sent[:, :-1], (0, 0, 1, 0)).reshape(x.shape) + l_2
    first, second = net.stages[0].blocks
    y = run(second, run(first, u) + l_1) + x
    torch.testing.assert_close(net(x), y)


@pytest.mark.parametrize("outer", ["s4", "mamba", "attention"])
@pytest.mark.parametrize("center", ["s4", "mamba", "attention"])
@torch.no_grad()
def test_steps_of_any_blocks_equal_the_parallel_form(outer, center):
    """The nine pairs of which Mamba's table 5 has six."""
    net = make(outer=outer, center=center)
    kinds = {"s4": S4Kernel, "mamba": Mamba, "attention": Attention}
    for stage, name in zip(net.stages, (outer, outer, center), strict=True):
        mixer = stage.blocks[0].mixer
        assert isinstance(mixer.ssm if name == "s4" else mixer, kinds[name])
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = net(x)
    torch.testing.assert_close(unroll(net, x, net.init_state(2, 40))[0], wanted, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_growing_modes_of_dss_softmax_count_the_steps_of_their_own_stage():
    net = make(center="dss-softmax", options={"dss-softmax": {"random_start": True, "d_state": 6}})
    ssm = net.stages[2].blocks[0].mixer.ssm
    assert (ssm.eigenvalues().real > 0).any()
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = net(x)
    torch.testing.assert_close(unroll(net, x, net.init_state(2, 40))[0], wanted, rtol=1e-9, atol=1e-9)
    # behind padding, the rows of a batch come to the stages below at different steps
    padding = LeftPadding.of(torch.tensor([14, 10]), 14)
    late = torch.stack([x[0], x[1].roll(4, 0)])
    y, state = net.prefill(late[:, :14], net.init_state(2, 40), padding)
    torch.testing.assert_close(y[1, 4:], wanted[1, :10], rtol=1e-9, atol=1e-9)
    steps, _ = unroll(net, late[:, 14:], state)
    torch.testing.assert_close(steps[0], wanted[0, 14:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(steps[1], wanted[1, 10:16], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 6, 7, 12])
@torch.no_grad()
def test_a_prompt_of_any_length_ends_in_the_state_of_its_steps(cut):
    net = make(outer="mamba")
    x = torch.randn(2, cut, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, wanted = unroll(net, x, net.init_state(2, 20))
    y, state = net.prefill(x, net.init_state(2, 20))
    torch.testing.assert_close(y, net(x))
    for got, expected in zip(tensors(state), tensors(wanted), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_blocks_have_the_channel_mixers_of_the_paper():
    """Mamba, appendix E.4.2: every kind of block has about 6 D^2 parameters."""
    for name in ("s4", "attention", "mamba", "transformer++"):
        with torch.device("meta"):
            block = make(outer=name, center=name, d_model=256).stages[0].blocks[0]
        large = sum(p.numel() for p in block.parameters() if p.ndim == 2 and min(p.shape) >= 128)
        assert large == pytest.approx(6 * 256**2, rel=0.02)


def test_options_of_blocks_are_written_out():
    config = SashimiConfig(outer="mamba", options={"mamba": {"d_state": 4}, "s4": {"mlp_ratio": 1.0}})
    stored = config.model_dump(mode="json")
    assert stored["options"]["mamba"]["d_state"] == 4
    assert (stored["options"]["s4"]["channel_mixer"], stored["options"]["s4"]["mlp_ratio"]) == ("mlp", 1.0)
    assert stored["versions"] == {name: MODELS.load(name).version for name in ("mamba", "s4")}
    assert SashimiConfig(**stored) == config
