"""At half the sampling rate a time-invariant layer with twice its step size answers the same signal the same way."""

from __future__ import annotations

import math

import pytest
import torch

from subquad.models import MODELS
from subquad.models.dss import DSS
from subquad.models.s4d import DiagonalSSM
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import unroll

LENGTH = 2048
SIGNAL = TaskSpec(input="signal", num_classes=4, readout="sequence", max_length=LENGTH, channels=1)
BUILDERS = {
    "s4d": lambda: DiagonalSSM(8, 32),
    "s4d bilinear": lambda: DiagonalSSM(8, 32, init="inv", discretization="bilinear", dt_max=1e-2),
    "s4d two-sided": lambda: DiagonalSSM(8, 32, bidirectional=True),
    "dss-softmax": lambda: DSS(8, 16, "dss-softmax", length=LENGTH),
    "dss-exp": lambda: DSS(8, 16, "dss-exp", length=LENGTH),
}


def smooth(channels: int) -> torch.Tensor:
    """A signal [2, T, C] with periods above 256 samples and zero at both ends, so that half the rate loses nothing."""
    time = torch.arange(LENGTH, dtype=torch.float64) / LENGTH
    waves = torch.stack([torch.sin(2 * math.pi * (k * time + k / 7)) for k in range(1, 9)])
    mixture = torch.randn(2, channels, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.einsum("bck,kt->btc", mixture, waves) * torch.sin(math.pi * time)[:, None] ** 2


def layer(name: str) -> DiagonalSSM | DSS:
    torch.manual_seed(0)
    made = BUILDERS[name]().double()
    # the skip is removed, because it repeats the input at any rate and would hide a difference
    torch.nn.init.zeros_(made.D)
    return made


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", BUILDERS)
@torch.no_grad()
def test_twice_the_step_gives_the_same_output_sampled_at_half_the_rate(name):
    ssm, x = layer(name), smooth(8)
    wanted = ssm(x)[:, ::2]
    as_it_was = ssm(x[:, ::2])
    ssm.step_scale = 2.0
    assert distance(ssm(x[:, ::2]), wanted) < 0.02
    # without the doubled step size the output differs
    assert distance(as_it_was, wanted) > 0.1


@torch.no_grad()
def test_the_steps_of_a_layer_follow_the_rate_too():
    for name in ("s4d", "dss-softmax", "dss-exp"):
        ssm, x = layer(name), smooth(8)[:, :128:2]
        ssm.step_scale = 2.0
        steps, _ = unroll(ssm, x, ssm.init_state(2, x.shape[1]))
        torch.testing.assert_close(steps, ssm(x), rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_without_its_scale_the_output_of_dss_exp_grows_with_the_rate():
    torch.manual_seed(0)
    ssm, x = DSS(8, 16, "dss-exp-no-scale", length=LENGTH).double(), smooth(8)
    torch.nn.init.zeros_(ssm.D)
    wanted = ssm(x)[:, ::2]
    ssm.step_scale = 2.0
    assert distance(2 * ssm(x[:, ::2]), wanted) < 0.1


def build(name: str, **options) -> torch.nn.Module:
    config = MODELS.load(name)(**{"num_layers": 2, "d_model": 16, "norm": "layer", **options})
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return config.build(SIGNAL).eval()
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("name", ["s4d", "dss-softmax", "dss-exp"])
@torch.no_grad()
def test_a_network_classifies_the_half_rate_signal_as_the_whole_one(name):
    model, x = build(name), smooth(1)
    wanted, plain = model(x), model(x[:, ::2])
    with model.at_rate(0.5) as follows:
        assert follows
        resampled = model(x[:, ::2])
    assert distance(resampled, wanted) < 0.02
    assert distance(plain, wanted) > 2 * distance(resampled, wanted)
    # after the context everything is as before
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    ("name", "options", "follows"),
    [
        ("h3", {}, True),
        ("gss", {}, True),
        ("mamba", {"inner": "s4d"}, True),
        ("mamba", {}, False),
        ("attention", {}, False),
        ("hyena", {}, False),
    ],
)
@torch.no_grad()
def test_models_without_a_fixed_step_size_say_so_and_ignore_the_rate(name, options, follows):
    model, x = build(name, **options), smooth(1)[:, :64]
    before = model(x)
    with model.at_rate(0.5) as does:
        assert does == follows
        assert torch.equal(model(x), before) == (not follows)


def test_a_rate_that_is_not_positive_is_an_error():
    with pytest.raises(ValueError, match="above 0, got 0"), build("s4d").at_rate(0):
        pass


def test_the_old_step_sizes_come_back_after_an_error():
    model = build("s4d")

    def fails():
        with model.at_rate(0.25):
            assert {mixer.ssm.step_scale for mixer in model.mixers} == {4.0}
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        fails()
    assert {mixer.ssm.step_scale for mixer in model.mixers} == {1.0}
