"""Statements of the papers about attention and linear attention."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subquad.models import MODELS
from subquad.models.abc_attention import ABCConfig, _running_total
from subquad.models.attention import Attention, AttentionConfig
from subquad.models.gated_attention import GatedAttentionConfig
from subquad.models.gla import GLAConfig
from subquad.models.gsa import FUNCTIONS, GSAConfig
from subquad.models.hgrn2 import HGRN2Config, LowerBounds
from subquad.models.linear_attention import LinearAttentionConfig
from subquad.models.parts.positions import Rotary
from subquad.models.retnet import RetNetConfig
from subquad.models.transformer import TransformerPPConfig
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws import models as laws
from subquad.suite.laws.accuracy import assert_close
from subquad.suite.training.numerics import default_dtype

SPEC = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=64, vocab_size=16)
PAPER_WIDTH = 2048
CONFIGS = [
    GLAConfig(),
    HGRN2Config(),
    RetNetConfig(),
    GLAConfig(expand_k=1.0, from_attention=True),
    RetNetConfig(expand_v=1, from_attention=True),
    LinearAttentionConfig(),
    GSAConfig(num_slots=8),
    GSAConfig(num_slots=8, gate="constant"),
    GSAConfig(num_slots=8, gate="retnet"),
    GSAConfig(num_slots=8, readout="relu2"),
    ABCConfig(num_slots=8),
]


def mixer_of(config, spec: TaskSpec = SPEC):
    with torch.device("meta"):
        return config.mixers(spec)[-1]


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("config", "per_channel"),
    [
        (GSAConfig(d_model=PAPER_WIDTH), 128),
        (HGRN2Config(d_model=PAPER_WIDTH, num_heads=16), 128),
        (GLAConfig(d_model=PAPER_WIDTH), 256),
        (RetNetConfig(d_model=PAPER_WIDTH, num_heads=8), 512),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else None,
)
def test_state_sizes_are_those_of_the_gsa_paper(config, per_channel):
    """GSA paper, Table 1 and appendix C.1: the state of a layer, as a multiple of the width."""
    assert mixer_of(config).state_size(4096) == per_channel * PAPER_WIDTH


def test_gsa_costs_an_eighth_of_a_square_more_than_attention():
    """GSA paper, footnote 5: 4.125 d^2 at d = 2048, H = 4, M = 64 (and the weight of the norm)."""
    assert num_parameters(mixer_of(GSAConfig(d_model=PAPER_WIDTH))) == 4.125 * PAPER_WIDTH**2 + PAPER_WIDTH
    attention = AttentionConfig(d_model=PAPER_WIDTH, num_heads=16, bias=False)
    assert num_parameters(mixer_of(attention)) == 4 * PAPER_WIDTH**2


def test_gla_and_hgrn2_have_four_squares_of_parameters():
    """GSA paper, appendix C.1. Beyond 4 d^2 there are GLA's low-rank decay, and the weights of norms."""
    gla = mixer_of(GLAConfig(d_model=PAPER_WIDTH))
    low_rank = 16 * PAPER_WIDTH + 16 * PAPER_WIDTH // 2 + PAPER_WIDTH // 2
    assert num_parameters(gla) == 4 * PAPER_WIDTH**2 + low_rank + PAPER_WIDTH // 4
    hgrn2 = mixer_of(HGRN2Config(d_model=PAPER_WIDTH, num_heads=16, lower_bound=False))
    assert num_parameters(hgrn2) == 4 * PAPER_WIDTH**2 + PAPER_WIDTH


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(
    "config", [AttentionConfig, TransformerPPConfig, LinearAttentionConfig, RetNetConfig, GLAConfig, HGRN2Config]
)
def test_small_widths_build_with_any_number_of_heads(config, heads):
    logits = config(d_model=32, num_heads=heads).build(SPEC)(torch.randint(16, (2, 9)))
    assert logits.shape == (2, 9, 16)


@pytest.mark.parametrize("xpos", [False, True], ids=["rope", "xpos"])
def test_rotary_scores_depend_on_the_distance_only(xpos):
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        rotary = Rotary(8, 2000, xpos=xpos)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        rotated_q, _ = rotary(q, k, torch.tensor([i]))
        _, rotated_k = rotary(q, k, torch.tensor([j]))
        return (rotated_q * rotated_k).sum().item()

    assert score(700, 200) == pytest.approx(score(1900, 1400), rel=1e-9)
    assert score(700, 200) != pytest.approx(score(701, 200), rel=1e-3)


def test_xpos_weighs_the_channels_by_the_power_of_the_distance():
    """Sun et al. 2022: the i-th pair decays as zeta_i^(n / 512), zeta_i = (2i/d + 0.4) / 1.4."""
    rope, xpos = Rotary(8, 2048), Rotary(8, 2048, xpos=True)
    ones = torch.ones(1, 1, 1, 8)
    distance = 512
    for channel in range(4):
        pair = torch.zeros(8)
        pair[[channel, channel + 4]] = 1.0
        scores = []
        for rotary in (rope, xpos):
            q, _ = rotary(ones, ones, torch.tensor([1000 + distance]))
            _, k = rotary(ones, ones, torch.tensor([1000]))
            scores.append((q * k * pair).sum().item())
        assert scores[1] / scores[0] == pytest.approx((2 * channel / 8 + 0.4) / 1.4, rel=1e-4)


def test_attention_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = AttentionConfig(attention_dropout=0.5).build(SPEC)
    inputs = torch.randint(16, (2, 20))
    assert not torch.equal(model.train()(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), model(inputs))


@torch.no_grad()
def test_normalised_linear_attention_is_a_weighted_mean_of_the_values():
    """Katharopoulos et al. 2020, equation 8, with phi = elu + 1, computed as a quadratic form."""
    torch.manual_seed(0)
    model = LinearAttentionConfig(d_model=8, num_heads=1, init_std=0.3).build(SPEC).double()
    mixer = model.mixers[0]
    x = torch.randn(2, 30, 8, dtype=torch.float64)
    q, k, v = mixer.qkv(x).chunk(3, dim=-1)
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    expected = mixer.out(weights / weights.sum(-1, keepdim=True) @ v)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-5, atol=1e-6)


def test_hgrn2_lower_bounds_start_at_zero_and_grow_with_depth():
    torch.manual_seed(0)
    model = HGRN2Config(num_layers=4, d_model=16).build(SPEC)
    shared = [mixer.lower_bounds for mixer in model.mixers]
    assert shared[0] is None
    assert shared[1] is shared[2] is shared[3]
    bounds = LowerBounds(4, 16)
    nn.init.normal_(bounds.logits)
    # a gate whose logits are very negative forgets as much as its bound lets it
    closed = torch.full((16,), -1e4)
    rows = torch.stack([bounds(closed, layer)[0].exp() for layer in (1, 2, 3)])
    assert (rows[0] > 0).all()
    assert (rows.diff(dim=0) > 0).all()
    assert (rows < 1).all()


@torch.no_grad()
@pytest.mark.parametrize("forget", ["none", "running-mean"])
def test_abc_slots_are_cumulative_softmaxes(forget):
    """GSA paper, equations 3 and 4, computed directly; and the variant whose slots are weighted means of the past."""
    torch.manual_seed(0)
    model = ABCConfig(d_model=8, num_heads=1, num_slots=5, init_std=0.5, forget=forget).build(SPEC).double()
    mixer = model.mixers[0]
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    q, k, v = mixer.qkv(x)[0].chunk(3, dim=-1)
    strength = mixer.slots(x)[0].exp()
    rows = []
    for t in range(12):
        past = slice(t + 1)
        phi = strength[past] / (strength.cumsum(0)[past] if forget == "none" else strength[past].sum(0))
        keys, values = phi.T @ k[past], phi.T @ v[past]
        rows.append((keys @ q[t] / math.sqrt(8)).softmax(0) @ values)
    torch.testing.assert_close(mixer(x)[0], mixer.out(torch.stack(rows)))


ABLATIONS = [{"gate": "constant"}, {"gate": "retnet"}, *({"readout": f} for f in FUNCTIONS)]


@pytest.mark.parametrize("options", ABLATIONS, ids=[str(options) for options in ABLATIONS])
def test_an_ablation_of_gsa_is_its_recurrence(options):
    """GSA's table 2: the slots of every head are averages, read by the softmax or another function."""
    torch.manual_seed(0)
    config = GSAConfig(d_model=16, num_heads=2, num_slots=5, **options)
    gsa = config.mixer(0, SPEC).double()
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    q, k, v, slots, log_decay = gsa._project(x)
    keys, values, outputs = torch.zeros(2, 2, 8, 5).double(), torch.zeros(2, 2, 5, 8).double(), []
    for t in range(70):
        a, s = log_decay[:, t].exp(), slots[:, t]
        keys = keys * a.unsqueeze(2) + k[:, t].unsqueeze(-1) * s.unsqueeze(2)
        values = values * a.unsqueeze(-1) + s.unsqueeze(-1) * v[:, t].unsqueeze(2)
        read = torch.einsum("bhk,bhkm->bhm", q[:, t], keys)
        read = FUNCTIONS[config.readout](read) if config.readout else read.softmax(-1)
        outputs.append(torch.einsum("bhm,bhmv->bhv", read, values))
    wanted = gsa._output(torch.stack(outputs, 1))
    torch.testing.assert_close(gsa(x), wanted, rtol=1e-9, atol=1e-9)
    if config.gate == "constant":
        assert (log_decay == log_decay[:1, :1]).all()
        # no two slots of a head decay alike
        assert log_decay[0, 0].diff(dim=-1).min() > 0
    if config.gate == "retnet":
        torch.testing.assert_close(log_decay.exp()[0, 0, :, 0], torch.tensor([1 - 2.0**-5, 1 - 2.0**-6]).double())
    loss = gsa(x).square().sum()
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, list(gsa.parameters())))
    assert {"gate", "readout"} & set(GSAConfig().model_dump(mode="json")) == set()


@pytest.mark.parametrize("name", ["gla", "hgrn2", "retnet", "linear_attention", "gsa", "abc_attention"])
def test_under_autocast_operators_multiply_in_bfloat16_and_decay_in_float32(name):
    """One float32 operand would make the operator multiply in float32."""
    seen = []

    def record(operator, q, k, v, *rest, **options):
        seen.append([x.dtype for x in (q, k, v, *rest) if x is not None])
        return operator(q, k, v, *rest, **options)

    model = next(c for c in CONFIGS if type(c).__module__ == f"subquad.models.{name}").build(SPEC)
    for mixer in model.mixers:
        mixer.operator = partial(record, mixer.operator)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(16, (2, 8)))
    assert len(seen) == 2
    for dtypes in seen:
        assert dtypes[:3] == [torch.bfloat16] * 3
        assert set(dtypes[3:]) <= {torch.float32}


@pytest.mark.parametrize("options", [{}, {"gate": "head"}, {"gate": "head", "window": 5}], ids=str)
@torch.no_grad()
def test_gated_attention_gates_every_head_behind_the_softmax(options):
    """Qiu et al. 2025, section 2, one position and one head at a time; W_g has the rows of one head together."""
    model = laws.build(GatedAttentionConfig, num_layers=1, d_model=12, num_heads=3, init_std=0.5, **options)
    config, (mixer,) = model.config, model.mixers
    x = torch.randn(20, 12, dtype=torch.float64)
    # one gate for a head is the same gate for each of its channels
    W_g = mixer.gate.weight.repeat_interleave(1 if config.gate == "channel" else 4, dim=0)
    rates = 10000.0 ** -(torch.arange(2, dtype=torch.float64) / 2)

    def rotated(z, t):
        turned = torch.polar(torch.ones(2, dtype=torch.float64), t * rates) * torch.complex(z[:2], z[2:])
        return torch.cat([turned.real, turned.imag])

    rows = []
    for t in range(20):
        heads = []
        for h in range(3):
            W_q, W_k, W_v = (mixer.qkv.weight[12 * i + 4 * h : 12 * i + 4 * h + 4] for i in range(3))
            past = range(max(0, t + 1 - (config.window or 20)), t + 1)
            q = rotated(W_q @ x[t], t)
            weights = torch.stack([q @ rotated(W_k @ x[j], j) / math.sqrt(4) for j in past]).softmax(0)
            o = sum(weight * (W_v @ x[j]) for weight, j in zip(weights, past, strict=True))
            heads.append(o / (1 + torch.exp(-(W_g[4 * h : 4 * h + 4] @ x[t]))))
        rows.append(mixer.out.weight @ torch.cat(heads))
    expected = torch.stack(rows)
    assert expected.std() > 0.1
    torch.testing.assert_close(mixer(x[None])[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("gate", "rows"), [("channel", PAPER_WIDTH), ("head", 16)])
def test_gates_of_attention_cost_a_map_and_no_state(gate, rows):
    options = {"d_model": PAPER_WIDTH, "num_heads": 16}
    gated, plain = (
        mixer_of(config) for config in (GatedAttentionConfig(gate=gate, **options), TransformerPPConfig(**options))
    )
    assert num_parameters(gated) - num_parameters(plain) == rows * PAPER_WIDTH
    assert gated.state_size(100) == plain.state_size(100)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "position", ["rope", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xpos", "learned"))]
)
def test_attention_to_a_window_obeys_the_laws(law, position):
    law(MODELS.load("attention"), window=5, num_heads=2, position=position)


@torch.no_grad()
def test_a_window_is_what_a_query_sees():
    options = {"num_layers": 1, "position": "rope", "num_heads": 2}
    near = laws.build(MODELS.load("attention"), window=5, **options)
    inputs = laws.make_inputs(laws.TOKENS, 30, 2)
    logits = near(inputs)
    other = inputs.clone()
    other[:, 10] = (other[:, 10] + 1) % 16
    changed = (near(other) - logits).abs().amax((0, 2)) > 1e-12
    assert changed.nonzero().flatten().tolist() == [10, 11, 12, 13, 14]
    far, wide = (laws.build(MODELS.load("attention"), window=window, **options) for window in (None, 64))
    torch.testing.assert_close(wide(inputs), far(inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("position", ["none", pytest.param("rope", marks=pytest.mark.slow)])
def test_hard_alibi_obeys_the_laws(law, position):
    law(MODELS.load("attention"), masked_heads=3, num_heads=4, position=position)


ROTATED = {
    "rope": ("attention", {"position": "rope"}),
    "xpos": ("attention", {"position": "xpos"}),
    "window": ("attention", {"position": "rope", "window": 5}),
    "a part": ("pythia", {"num_heads": 2}),
    "retnet": ("retnet", {}),
}


@pytest.mark.parametrize(("name", "options"), ROTATED.values(), ids=ROTATED)
@torch.no_grad()
def test_sequences_that_are_longer_than_the_table_of_rotations_are_refused(name, options):
    model = laws.build(MODELS.load(name), num_layers=1, **options)
    inputs = laws.make_inputs(laws.TOKENS, laws.LENGTH + 1)
    refused = partial(pytest.raises, ValueError)
    message = "rotary positions cover max_length=70 positions, got 71; raise max_length"
    with refused(match=message):
        model(inputs)
    with refused(match=message):
        model(inputs, torch.tensor([[3]] * 3))
    with refused(match=message if name == "retnet" or "window" in options else "room for 70 positions, got 71"):
        model.prefill(inputs, capacity=laws.LENGTH)
    model.prefill(inputs[:, 1:], capacity=laws.LENGTH)


def test_a_prompt_for_which_a_cache_less_than_the_window_has_no_room_is_refused():
    model = laws.build(MODELS.load("attention"), num_layers=1, window=8)
    inputs = laws.make_inputs(laws.TOKENS, 10)
    with pytest.raises(ValueError, match="attention: its cache has room for 4 positions, got 10; raise capacity"):
        model.prefill(inputs, capacity=4)
    # a cache as long as the window has all that later positions see
    for steps, capacity in ((4, 4), (10, 8), (10, 10)):
        model.prefill(inputs[:, :steps], capacity=capacity)


@torch.no_grad()
@pytest.mark.parametrize("masked_heads", [None, 2])
@pytest.mark.parametrize("position", ["none", "rope", "xpos"])
def test_steps_beyond_a_full_cache_overwrite_its_last_position(position, masked_heads):
    options = {"num_layers": 1, "num_heads": 4, "masked_heads": masked_heads, "position": position}
    model = laws.build(MODELS.load("attention"), **options)
    mixer = next(module for module in model.modules() if isinstance(module, Attention))
    capacity = laws.TOKENS.max_length
    x = torch.randn(1, capacity + 1, mixer.out.in_features, dtype=torch.float64)
    y, _ = laws.unroll(mixer, x, mixer.init_state(1, capacity))
    kept = torch.cat([x[:, : capacity - 1], x[:, -1:]], dim=1)
    torch.testing.assert_close(y[:, -1], mixer(kept)[:, -1], rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_masked_heads_see_one_position_more_each():
    model = laws.build(MODELS.load("attention"), num_layers=1, num_heads=4, masked_heads=3, position="none")
    mixer = next(module for module in model.modules() if isinstance(module, Attention))
    x = torch.randn(1, 12, mixer.out.in_features, dtype=torch.float64)
    heads = []
    mixer.out.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].unflatten(-1, (4, -1))))
    mixer(x)
    x[:, 5] += 1
    mixer(x)
    changed = (heads[1] - heads[0]).abs().amax((0, 3)) > 1e-12
    seen = [changed[:, head].nonzero().flatten().tolist() for head in range(4)]
    assert seen == [[5], [5, 6], [5, 6, 7], list(range(5, 12))]


@torch.no_grad()
def test_layers_of_the_based_paper_are_a_hybrid():
    model = laws.build(
        MODELS.load("hybrid"),
        num_layers=3,
        layers=["base-conv", "based", "attention"],
        options={"based": {"num_heads": 2, "feature_dim": 4}, "attention": {"window": 5, "position": "rope"}},
    )
    inputs = laws.make_inputs(laws.TOKENS, 30, 2)
    torch.testing.assert_close(laws.unroll(model, inputs)[0], model(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 128, 300])
def test_the_running_total_of_abc_is_a_cumulative_log_sum_exp(steps):
    logits = torch.empty(2, steps, 3, 4, dtype=torch.float64).uniform_(-32, 32).requires_grad_()
    total, exact = _running_total(logits), logits.logcumsumexp(1)
    torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(exact)
    ours, theirs = (torch.autograd.grad(x, logits, weights)[0] for x in (total, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    # padding in front of a row adds nothing
    padded = torch.cat([torch.full((2, 5, 3, 4), -math.inf, dtype=torch.float64), logits.detach()], dim=1)
    torch.testing.assert_close(_running_total(padded)[:, 5:], total.detach(), rtol=1e-12, atol=1e-12)


def test_gradients_of_the_running_total_of_abc_are_exact_in_float32():
    logits = torch.empty(1, 2000, 2, 4).uniform_(-32, 32).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    weights = torch.randn_like(logits)
    (ours,) = torch.autograd.grad(_running_total(logits), logits, weights)
    (exact,) = torch.autograd.grad(wide.logcumsumexp(1), wide, weights.double())
    assert_close(ours, exact, torch.float32, what="gradient of the logits")
