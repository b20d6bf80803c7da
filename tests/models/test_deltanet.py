"""The mixers with the delta rule equal the equations of their papers, written out here one position at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.models.comba import CombaMixer
from subquad.models.gated_deltanet2 import GatedDeltaNet2Mixer
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.accuracy import relative_error

SPEC = TaskSpec("tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)
NAMES = ["deltanet", "gated-deltanet", "kda", "gated-deltanet2", "delta-product"]


def written_out(mixer, x, *, beta_factor):
    """y [T, D] of one sequence x [T, D]: S [V, K] of every head is updated by matrices, as the papers print it."""
    length, heads, steps, key_dim, value_dim = len(x), mixer.num_heads, mixer.steps, mixer.key_dim, mixer.value_dim
    groups = mixer.num_key_heads
    convolved = x @ mixer.proj.weight.T
    if mixer.conv_weight is not None:
        taps = mixer.conv_weight.shape[1]
        padded = F.pad(convolved, (0, 0, taps - 1, 0))
        convolved = torch.stack([(padded[t : t + taps] * mixer.conv_weight.T).sum(0) for t in range(length)])
    convolved = convolved * torch.sigmoid(convolved)
    q, k, v = convolved.split((groups * key_dim, steps * groups * key_dim, steps * heads * value_dim), -1)
    q = q.view(length, groups, key_dim)
    k, v = k.view(length, steps, groups, key_dim), v.view(length, steps, heads, value_dim)
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    beta = beta_factor * torch.sigmoid(x @ mixer.beta.weight.T)
    if isinstance(mixer, GatedDeltaNet2Mixer):
        erase = beta.view(length, 1, groups, key_dim).repeat_interleave(heads // groups, 2)
        write = torch.sigmoid(x @ mixer.write.weight.T).view(length, 1, heads, value_dim)
    else:
        erase = write = beta = beta.view(length, steps, heads, 1)
    decay = torch.ones(length, heads, key_dim, dtype=x.dtype)
    if mixer.decay == "head":
        a = torch.log1p(torch.exp(x @ mixer.decay_up.weight.T + mixer.dt_bias))
        decay = torch.exp(-mixer.log_A.exp() * a).unsqueeze(-1).expand_as(decay)
    elif mixer.decay == "key":
        a = torch.log1p(torch.exp(x @ mixer.decay_down.weight.T @ mixer.decay_up.weight.T + mixer.dt_bias))
        decay = torch.exp(-mixer.log_A.exp()[:, None] * a.view(length, heads, key_dim))
    o = torch.empty(length, heads, value_dim, dtype=x.dtype)
    closed_loop = isinstance(mixer, CombaMixer)
    for h in range(heads):
        S = torch.zeros(value_dim, key_dim, dtype=x.dtype)
        group = h * groups // heads
        for t in range(length):
            if closed_loop:
                key, b = k[t, 0, group], beta[t, 0, h] * torch.sigmoid(mixer.feedback[group])
                scalar_plus_low_rank = torch.diag(decay[t, h]) - b * torch.outer(key, key)
                S = S @ scalar_plus_low_rank + beta[t, 0, h] * torch.outer(v[t, 0, h], key)
                o[t, h] = S @ (q[t, group] - mixer.correction[group] * key) / key_dim**0.5
                continue
            S = S @ torch.diag(decay[t, h])
            for j in range(steps):
                key = k[t, j, group]
                S = S @ (torch.eye(key_dim, dtype=x.dtype) - torch.outer(erase[t, j, h] * key, key))
                S = S + torch.outer(write[t, j, h] * v[t, j, h], key)
            o[t, h] = S @ q[t, group] / key_dim**0.5
    y = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + mixer.norm.eps) * mixer.norm.weight).flatten(1)
    if closed_loop:
        y = y * torch.sigmoid(x @ mixer.gate_up.weight.T)
    elif mixer.gate == "silu":
        gate = x @ mixer.gate_up.weight.T
        y = y * gate * torch.sigmoid(gate)
    elif mixer.gate == "sigmoid":
        y = y * torch.sigmoid(x @ mixer.gate_down.weight.T @ mixer.gate_up.weight.T + mixer.gate_up.bias)
    return y @ mixer.out.weight.T


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        *(("delta-product", {"without": parts}) for parts in [("gate",), ("decay",)]),
        *(
            (name, {"expand_v": 2.0, "num_value_heads": 6})
            for name in ("gated-deltanet", "kda", "gated-deltanet2", "delta-product")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(("negative", "taps"), [(False, 4), (True, 4), (True, None)], ids=str)
@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper(name, options, negative, taps):
    torch.manual_seed(0)
    config = MODELS.load(name)(
        num_layers=1,
        d_model=12,
        num_heads=3,
        expand_k=0.5,
        negative_eigenvalues=negative,
        d_conv=taps,
        init_std=0.5,
        **{"expand_v": 1.5, **options},
    )
    (mixer,) = config.build(SPEC).double().mixers
    # a norm and biases that differ from their start
    for parameter in mixer.parameters():
        if parameter.ndim == 1:
            parameter.normal_()
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    expected = written_out(mixer, x[0], beta_factor=2 if negative else 1)
    assert expected.std() > 0.1
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-10, atol=1e-10)


def comba(d_conv=4, **options):
    """A mixer of three heads in float64, whose parameters of single heads differ, and an input for it."""
    torch.manual_seed(0)
    config = MODELS.load("comba")(
        num_layers=1, d_model=12, num_heads=3, expand_k=0.5, init_std=0.5, d_conv=d_conv, **options
    )
    (mixer,) = config.build(SPEC).double().mixers
    for parameter in mixer.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_()
    return mixer, torch.randn(1, 40, 12, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"expand_v": 2.0, "num_value_heads": 6}, {"d_conv": None}], ids=str)
@torch.no_grad()
def test_comba_is_the_closed_loop_of_its_paper(options):
    mixer, x = comba(**options)
    # no decay is so strong that it is bounded
    mixer.log_A.sub_(2)
    expected = written_out(mixer, x[0], beta_factor=1)
    assert expected.std() > 0.1
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 0.02)], ids=str)
@torch.no_grad()
def test_comba_forgets_all_where_its_decays_underflow(dtype, limit):
    """The operator divides by decays, of which e^-300 is zero in float32."""
    mixer, x = comba()
    mixer.log_A.fill_(math.log(200))
    expected = written_out(mixer, x[0], beta_factor=1)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.float16):
        y = mixer.float()(x.float())[0]
    root_mean_square, _ = relative_error(y, expected)
    assert root_mean_square < limit


def test_comba_starts_as_its_released_layer_does():
    (mixer,) = MODELS.load("comba")(num_layers=1, d_model=32, num_heads=2, correction=0.02).build(SPEC).mixers
    assert mixer.feedback.tolist() == [1.0, 1.0]
    assert mixer.correction.tolist() == pytest.approx([0.02, 0.02])
    assert set(mixer.ssm_parameters()) == {"log_A", "dt_bias", "feedback", "correction"}


def test_one_householder_step_is_gated_deltanet():
    def logits(name, **options):
        torch.manual_seed(0)
        model = MODELS.load(name)(num_layers=2, d_model=32, negative_eigenvalues=True, **options).build(SPEC)
        return model(torch.arange(16)[None])

    assert torch.equal(logits("delta-product", num_householder=1), logits("gated-deltanet"))
    widths = {"num_heads": 4, "expand_k": 1.0, "expand_v": 1.0}
    assert torch.equal(
        logits("delta-product", num_householder=1, without=("decay", "gate"), **widths), logits("deltanet")
    )


def test_parts_that_are_left_out_have_one_order():
    (first, second) = (
        MODELS.load("delta-product")(without=parts) for parts in [("gate", "decay", "gate"), ("decay", "gate")]
    )
    assert first == second


def test_it_starts_as_the_released_layers_do():
    torch.manual_seed(0)
    for name, lowest in (("gated-deltanet", 0.0), ("kda", 1.0)):
        mixer = MODELS.load(name)(num_layers=1, d_model=512, num_heads=128, expand_k=0.5).build(SPEC).mixers[0]
        dt, rate = F.softplus(mixer.dt_bias), mixer.log_A.exp()
        assert 1e-3 <= dt.min() < 2e-3
        assert 5e-2 < dt.max() <= 0.1001
        assert lowest < rate.min() < lowest + 1
        assert 15.0 < rate.max() <= 16.0
        assert set(mixer.ssm_parameters()) == {"log_A", "dt_bias"}


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # q, k, v and the output; four taps; beta; the norm of a head of width 256
        ("deltanet", {}, 4 * 1024**2 + 4 * 3072 + 4 * 1024 + 256),
        # six squares, of which keys 3/4 and values 3/2; betas, decays, A and b of six heads; the norm of width 256
        ("gated-deltanet", {}, 6 * 1024**2 + 4 * 3 * 1024 + 2 * 6 * 1024 + 12 + 256),
        # two numbers more for each head
        ("comba", {}, 6 * 1024**2 + 4 * 3 * 1024 + 2 * 6 * 1024 + 12 + 256 + 12),
        # both low-rank maps have the width of a head
        ("kda", {"num_heads": 8}, 4 * 1024**2 + 4 * 3072 + 8 * 1024 + 4 * 1024 * 128 + 1024 + 8 + 1024 + 128),
        # a square each for the gates that erase and that write in place of the betas
        ("gated-deltanet2", {"num_heads": 8}, 6 * 1024**2 + 4 * 3072 + 4 * 1024 * 128 + 1024 + 8 + 1024 + 128),
        ("delta-product", {}, 8.25 * 1024**2 + 4 * (768 + 2 * 768 + 2 * 1536) + 3 * 6 * 1024 + 12 + 256),
    ],
)
def test_parameters_are_those_of_the_released_layers(name, options, count):
    with torch.device("meta"):
        model = MODELS.load(name)(num_layers=1, d_model=1024, **options).build(SPEC)
    assert sum(parameter.numel() for parameter in model.mixers[0].parameters()) == count


@pytest.mark.parametrize("name", NAMES)
def test_a_rounded_beta_reaches_its_limit(name):
    def betas(**options):
        torch.manual_seed(0)
        config = MODELS.load(name)(num_layers=1, d_model=24, num_heads=2, negative_eigenvalues=True, **options)
        (mixer,) = config.build(SPEC).mixers
        torch.nn.init.normal_(mixer.beta.weight, std=2.0)
        with torch.autocast("cpu", torch.bfloat16):
            convolved = torch.randn(64, mixer.conv_weight.shape[0])
            x = torch.randn(64, 24)
            logits = F.linear(x, mixer.beta.weight).float()
            return logits, mixer._heads(mixer._parts(convolved), mixer._read(x))[3].reshape(logits.shape)

    logits, exact = betas()
    _, rounded = betas(round_beta=True)
    large = logits >= 6.25
    assert 0.05 < large.float().mean() < 0.95
    assert (rounded[large] == 2).all()
    assert (rounded[logits <= 5.5] < 2).all()
    assert (exact[large & (logits < 12)] < 2).all()
    assert torch.equal(rounded, (2 * torch.sigmoid(logits.bfloat16())).float())
    torch.testing.assert_close(exact, 2 * torch.sigmoid(logits))


def test_convolutions_may_start_normally():
    def taps(**options):
        torch.manual_seed(0)
        return MODELS.load("deltanet")(num_layers=1, d_model=256, **options).build(SPEC).mixers[0].conv_weight.detach()

    assert taps().abs().max() <= 0.5
    assert taps().std() == pytest.approx(1 / 12**0.5, rel=0.05)
    normal = taps(conv_std=0.02)
    assert normal.std() == pytest.approx(0.02, rel=0.05)
    assert normal.abs().max() > 0.06


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="num_heads=5 does not divide key_width=32"):
        MODELS.load("kda")(d_model=32, num_heads=5).build(SPEC)
    with pytest.raises(ValueError, match="num_heads=4 does not divide num_value_heads=6"):
        MODELS.load("kda")(d_model=32, num_value_heads=6).build(SPEC)
    with pytest.raises(ValueError, match="num_value_heads=12 does not divide value_width=32"):
        MODELS.load("kda")(d_model=32, num_value_heads=12).build(SPEC)
    with pytest.raises(ValueError, match="needs d_conv in 2"):
        MODELS.load("deltanet")(d_model=32, d_conv=5).build(SPEC)
    with pytest.raises(ValueError, match="starts convolutions, and d_conv=null leaves them out"):
        MODELS.load("deltanet")(d_model=32, d_conv=None, conv_std=0.1).build(SPEC)
