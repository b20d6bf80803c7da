"""The network around the mixers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subquad.models import MODELS
from subquad.models.attention import AttentionConfig
from subquad.models.backbone import BackboneConfig
from subquad.models.dss import DSSSoftmaxConfig
from subquad.models.gsa import GSAConfig
from subquad.models.h3 import H3Config
from subquad.models.hgrn2 import HGRN2Config
from subquad.models.mamba import MambaConfig
from subquad.models.parts.layer import joined
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.short_conv import BaseConv
from subquad.models.parts.time_axis import LeftPadding
from subquad.models.rwkv import FirstLayer
from subquad.models.s4d import S4DConfig, SSMLayer
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import build, unroll
from subquad.suite.state import tensors

TOKENS = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=32, vocab_size=16)
SIGNAL = TaskSpec(input="signal", num_classes=5, readout="sequence", max_length=32, channels=2)
SMALL = {"num_layers": 2, "d_model": 16}


class Narrow(Mixer):
    """A mixer whose result has a channel less, and which has no other method."""

    def forward(self, x):
        return x[..., 1:]


class NarrowConfig(BackboneConfig):
    def mixer(self, layer, spec):
        return Narrow()


class Short(Mixer):
    """A mixer whose result has a position less."""

    def forward(self, x):
        return x[:, :-1]


class ShortConfig(BackboneConfig):
    def mixer(self, layer, spec):
        return Short()


class Coarse(Mixer):
    """A mixer whose result has fewer digits than its input."""

    def forward(self, x):
        return x.bfloat16()


class CoarseConfig(BackboneConfig):
    def mixer(self, layer, spec):
        return Coarse()


class ModuleConfig(BackboneConfig):
    def mixer(self, layer, spec):
        return nn.Identity()


class EmptyConfig(BackboneConfig):
    pass


def test_a_mixer_that_does_not_keep_the_contract_is_named():
    with pytest.raises(ValueError, match=r"EmptyConfig: it defines no method mixer\(self, layer, spec\)"):
        EmptyConfig().check(TOKENS)
    with pytest.raises(ValueError, match=r"ModuleConfig.mixer must return a Mixer .* got Identity"):
        ModuleConfig().build(TOKENS)
    model = NarrowConfig().build(TOKENS)
    with pytest.raises(ValueError, match=r"Narrow.forward must return \[B, T, D\] = \[1, 3, 64\], got \[1, 3, 63\]"):
        model(torch.zeros(1, 3, dtype=torch.long))
    last = NarrowConfig(num_layers=1).build(TOKENS)
    with pytest.raises(ValueError, match=r"Narrow.forward must return \[B, T, D\] = \[1, 3, 64\], got \[1, 3, 63\]"):
        last(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1]]))
    # a sequence that lacks a position has the labelled ones all the same
    short = ShortConfig(num_layers=1).build(TOKENS)
    with pytest.raises(ValueError, match=r"Short.forward must return \[B, T, D\] = \[1, 3, 64\], got \[1, 2, 64\]"):
        short(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1]]))
    with pytest.raises(NotImplementedError, match=r"Narrow defines no method state_size\(self, length\)"):
        Narrow().state_size(3)


def test_embeddings_are_tied_exactly_where_the_vocabularies_are_the_same():
    tied, untied = AttentionConfig().build(TOKENS), AttentionConfig(tie_embeddings=False).build(TOKENS)
    assert tied.head.weight is tied.encoder.weight
    assert untied.head.weight is not untied.encoder.weight
    other = TaskSpec(input="tokens", num_classes=5, readout="sequence", max_length=32, vocab_size=16)
    assert AttentionConfig().build(other).head.weight.shape == (5, 64)


@pytest.mark.parametrize(("channel_mixer", "branches"), [("none", 4), ("mlp", 8), ("swiglu", 8)])
def test_projections_into_the_residual_stream_start_smaller_with_depth(channel_mixer, branches):
    config = AttentionConfig(num_layers=4, d_model=128, channel_mixer=channel_mixer)
    for scaled, expected in ((True, 0.02 / branches**0.5), (False, 0.02)):
        model = config.model_copy(update={"init_residual": "scaled" if scaled else "plain"}).build(TOKENS)
        weights = torch.cat([m.weight.flatten() for m in model.modules() if isinstance(m, ResidualLinear)])
        assert weights.std().item() == pytest.approx(expected, rel=0.02)
        linear = [m for m in model.layers.modules() if isinstance(m, nn.Linear)]
        others = [m for m in linear if not isinstance(m, ResidualLinear)]
        assert torch.cat([m.weight.flatten() for m in others]).std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
@pytest.mark.parametrize("prenorm", [True, False], ids=["prenorm", "postnorm"])
@torch.no_grad()
def test_steps_equal_forward_with_every_norm_and_order(norm, prenorm):
    torch.manual_seed(0)
    model = GSAConfig(norm=norm, prenorm=prenorm, num_slots=8, init_std=0.2).build(SIGNAL).double()
    inputs = torch.randn(4, 20, 2, dtype=torch.float64)
    model.train()(inputs)
    model.eval()
    torch.testing.assert_close(unroll(model, inputs)[0][:, -1], model(inputs))


def test_postnorm_ends_every_layer_normalised():
    torch.manual_seed(0)
    model = GSAConfig(norm="layer", prenorm=False, num_slots=8).build(SIGNAL)
    seen = []
    model.layers[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    model(torch.randn(2, 20, 2))
    torch.testing.assert_close(seen[0].std(-1, unbiased=False), torch.ones(2, 20), rtol=1e-3, atol=1e-3)
    assert isinstance(model.final_norm, nn.Identity)


@pytest.mark.parametrize("option", ["embed_dropout", "resid_dropout"])
def test_dropout_acts_in_training_only(option):
    torch.manual_seed(0)
    model = GSAConfig(**{option: 0.5, "num_slots": 8}).build(TOKENS)
    inputs = torch.randint(16, (2, 20))
    assert not torch.equal(model.train()(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), model(inputs))


def test_param_groups_keep_weight_decay_off_what_is_named():
    model = AttentionConfig().build(TOKENS)
    assert {group.name for group in model.param_groups()} == {"embedding", "norm", "weight", "bias"}
    assert all(group.weight_decay is None for group in model.param_groups())
    groups = {group.name: group for group in model.param_groups(no_decay=("bias", "embedding"))}
    assert groups["bias"].weight_decay == groups["embedding"].weight_decay == 0.0
    assert groups["norm"].weight_decay is groups["weight"].weight_decay is None
    # token and position embedding; the tied head is not listed again
    assert [tuple(p.shape) for p in groups["embedding"].parameters] == [(16, 64), (32, 64)]
    with pytest.raises(ValueError, match="got biases; allowed are bias, norm, embedding"):
        model.param_groups(no_decay=("biases",))


def test_frozen_parameters_are_in_no_group():
    model = AttentionConfig().build(TOKENS)
    model.encoder.weight.requires_grad_(False)
    listed = {id(p) for group in model.param_groups() for p in group.parameters}
    assert id(model.encoder.weight) not in listed


def test_a_sequence_longer_than_the_learned_positions_is_an_error():
    model = AttentionConfig().build(TOKENS)
    with pytest.raises(ValueError, match="covers 32 positions, got a sequence of 33"):
        model(torch.zeros(1, 33, dtype=torch.long))


class Twice:
    def forward(self, x):
        return 2 * super().forward(x)

    def step(self, x_t, state):
        y_t, state = super().step(x_t, state)
        return 2 * y_t, state


class Doubled(Twice, SSMLayer):
    """A layer with a `forward` and a `step` of its own, and the `forward_at` and `prefill` of its parent."""


class DoubledConfig(S4DConfig):
    def mixer(self, layer, spec):
        mixer = super().mixer(layer, spec)
        mixer.__class__ = Doubled
        return mixer


@pytest.mark.parametrize("count", [2, 6], ids=["few", "many"])
@pytest.mark.parametrize(
    "config",
    [
        *(AttentionConfig(num_heads=2, position=position, **SMALL) for position in ("none", "rope", "xpos")),
        S4DConfig(**SMALL),
        DoubledConfig(**SMALL),
        *(H3Config(inner=inner, **SMALL) for inner in ("ssm", "s6", "hyena")),
        H3Config(head_dim=4, **SMALL),
        *(MambaConfig(inner=inner, gate=gate, **SMALL) for inner in ("s6", "hyena") for gate in (False, True)),
    ],
    ids=lambda config: "-".join(
        map(str, (type(config).__name__, *config.model_dump(exclude=set(SMALL), exclude_unset=True).values()))
    ),
)
def test_a_mixer_at_some_positions_gives_what_it_gives_there(config, count):
    torch.manual_seed(0)
    mixer = config.mixer(0, TOKENS).double()
    x = torch.randn(3, 20, 16, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 5, 9, 12, 16, 19], [1, 2, 3, 4, 5, 6], [7, 8, 10, 11, 17, 18]])[:, :count]
    rows = torch.arange(3)[:, None]
    weight = torch.randn(3, count, 16, dtype=torch.float64)
    some, full = mixer.forward_at(x, positions), mixer(x)[rows, positions]
    torch.testing.assert_close(some, full, rtol=1e-12, atol=1e-12)
    trained = [x, *mixer.parameters()]
    expected = torch.autograd.grad((full * weight).sum(), trained)
    found = torch.autograd.grad((some * weight).sum(), trained)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_prompt_is_read_by_the_steps_of_a_derived_mixer():
    torch.manual_seed(0)
    mixer, x = DoubledConfig(**SMALL).mixer(0, TOKENS).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer.prefill(x, mixer.init_state(2, 9))[0], mixer(x))


def test_batch_norm_keeps_the_statistics_of_all_positions():
    config = AttentionConfig(num_layers=1, d_model=16, norm="batch", position="none")
    torch.manual_seed(0)
    model = config.build(TOKENS).train()
    inputs = torch.randint(0, TOKENS.vocab_size, (4, 12))
    positions = torch.tensor([[3, 7]] * 4)
    torch.testing.assert_close(model(inputs, positions), model(inputs)[:, [3, 7]])


@torch.no_grad()
def test_a_short_convolution_looks_back_as_far_as_its_taps_and_steps_as_in_parallel():
    torch.manual_seed(0)
    plain = GSAConfig(num_slots=8, init_std=0.2).build(TOKENS).double().eval()
    model = GSAConfig(num_slots=8, init_std=0.2, short_conv=3).build(TOKENS).double().eval()
    assert model.state_size(32) == plain.state_size(32) + 2 * 64 * 2
    inputs = torch.randint(16, (4, 20))
    logits = model(inputs)
    torch.testing.assert_close(unroll(model, inputs)[0], logits)
    positions = torch.tensor([[0, 7, 19]]).expand(4, 3)
    torch.testing.assert_close(model(inputs, positions), logits[:, [0, 7, 19]])
    x = torch.randn(1, 20, 64, dtype=torch.float64)
    changed = x.clone()
    changed[:, 10] += 1
    seen = []
    mixer = model.mixers[0]
    mixer.mixer.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    mixer(x), mixer(changed)
    assert (seen[0] != seen[1]).any(-1).nonzero()[:, 1].tolist() == [10, 11, 12]


def test_without_a_short_convolution_runs_keep_their_ids():
    assert "short_conv" not in GSAConfig().model_dump(mode="json")
    assert GSAConfig(short_conv=4).model_dump(mode="json")["short_conv"] == 4


@torch.no_grad()
def test_an_identity_channel_mixer_adds_the_normalised_input():
    torch.manual_seed(0)
    model = GSAConfig(norm="layer", channel_mixer="identity", num_slots=8, init_std=0.2).build(TOKENS).double().eval()
    layer, x = model.layers[0], torch.randn(2, 20, 64, dtype=torch.float64)
    assert layer.channel_norm is not layer.mixer_norm
    layer.channel_norm.weight.normal_()
    middle = x + layer.mixer(layer.mixer_norm(x))
    torch.testing.assert_close(joined(*layer(x)), middle + layer.channel_norm(middle))


@torch.no_grad()
def test_a_base_convolution_is_a_convolution_times_a_linear_map_plus_its_input():
    torch.manual_seed(0)
    mixer = BaseConv(6).double()
    conv = nn.Conv1d(6, 6, 3, padding=2, groups=6, dtype=torch.float64)
    conv.weight.copy_(mixer.conv_weight.unsqueeze(1))
    conv.bias.copy_(mixer.conv_bias)
    x = torch.randn(2, 20, 6, dtype=torch.float64)
    expected = conv(x.mT)[..., :20].mT * mixer.proj(x) + x
    torch.testing.assert_close(mixer(x), expected)
    state = mixer.init_state(2, 20)
    assert sum(part[0].numel() for part in state) == mixer.state_size(20) == 6 * 2
    torch.testing.assert_close(unroll(mixer, x, state)[0], expected)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_base_convolution_reads_a_prompt_at_once_and_as_its_steps_do(padded, monkeypatch):
    torch.manual_seed(0)
    mixer, x = BaseConv(6).double(), torch.randn(3, 9, 6, dtype=torch.float64)
    for steps in (1, 2, 9):
        lengths = torch.tensor([steps, 1, (steps + 1) // 2])
        padding = LeftPadding.of(lengths, steps) if padded else None
        real = torch.ones(3, steps, dtype=torch.bool) if padding is None else padding.time >= 0
        wanted, after = Mixer.prefill(mixer, x[:, :steps], mixer.init_state(3, 9), padding)
        with monkeypatch.context() as patch:
            patch.setattr(BaseConv, "step", None)
            y, state = mixer.prefill(x[:, :steps], mixer.init_state(3, 9), padding)
        torch.testing.assert_close(y[real], wanted[real])
        torch.testing.assert_close(state, after)


@torch.no_grad()
def test_named_layers_are_base_convolutions_and_steps_still_equal_forward():
    model = HGRN2Config(base_conv_layers=(0,), short_conv=2, init_std=0.2).build(TOKENS).double().eval()
    assert [type(mixer).__name__ for mixer in model.mixers] == ["BaseConv", "ShortConv"]
    inputs = torch.randint(16, (2, 20))
    torch.testing.assert_close(unroll(model, inputs)[0], model(inputs))
    assert "base_conv_layers" not in HGRN2Config().model_dump(mode="json")
    with pytest.raises(ValueError, match="there is no layer 2; num_layers=2 gives the layers 0 to 1"):
        HGRN2Config(base_conv_layers=(0, 2)).build(TOKENS)


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (128, 1), (256, 2)])
def test_an_expand_ratio_sets_the_head_size_of_hgrn2_up_to_the_width(width, heads):
    mixer = HGRN2Config(d_model=width, expand_ratio=128).build(TOKENS).mixers[1]
    assert (mixer.num_heads, mixer.key_dim) == (heads, min(width, 128))
    assert "expand_ratio" not in HGRN2Config().model_dump(mode="json")
    with pytest.raises(ValueError, match="expand_ratio=96 does not divide d_model=128"):
        HGRN2Config(d_model=128, expand_ratio=96).build(TOKENS)


def test_the_initialisation_of_torch_is_that_of_the_released_code_of_dss():
    spec = TaskSpec(input="tokens", num_classes=10, readout="sequence", max_length=32, vocab_size=500)
    torch.manual_seed(0)
    model = DSSSoftmaxConfig(d_model=128, torch_init=True).build(spec)
    maps = torch.stack([mixer.out.weight for mixer in model.mixers])
    assert maps.std().item() == pytest.approx(0.051, rel=0.02)
    assert maps.abs().max() <= 128**-0.5
    assert model.encoder.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert model.head.bias.abs().max() > 0
    assert "torch_init" not in DSSSoftmaxConfig().model_dump(mode="json")
    assert "detach_maximum" not in DSSSoftmaxConfig().model_dump(mode="json")


def test_the_weights_of_torch_start_as_in_the_released_code_of_mad():
    """Linear maps uniform within 1 / sqrt(inputs), their biases at zero, and embeddings at 0.02."""
    torch.manual_seed(0)
    model = AttentionConfig(d_model=128, torch_init="weights", tie_embeddings=False, readout_bias=True).build(TOKENS)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
            assert module.bias is None or not module.bias.any()
    assert model.head.bias is not None
    assert model.encoder.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_the_maps_of_mixers_start_by_xaviers_rule():
    """Uniform within gain sqrt(6 / (inputs + outputs)); the maps of channel mixers start as before."""
    torch.manual_seed(0)
    model = AttentionConfig(d_model=128, mixer_gain=2**-2.5).build(TOKENS)
    for mixer in model.mixers:
        for module in mixer.modules():
            if isinstance(module, nn.Linear):
                bound = 2**-2.5 * (6 / sum(module.weight.shape)) ** 0.5
                assert module.weight.abs().max() <= bound
                assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    others = [module.weight for module in model.layers.modules() if isinstance(module, nn.Linear)]
    assert max(weight.abs().max().item() for weight in others) > 0.05
    assert "mixer_gain" not in AttentionConfig().model_dump(mode="json")


def test_a_gain_that_the_start_of_a_mixer_would_undo_is_refused():
    for name in ("mamba", "mamba2", "mamba3"):
        with pytest.raises(ValueError, match=f"{name}: its linear maps start as in the authors' code, so mixer_gain=2"):
            MODELS.load(name)(mixer_gain=2.0).check(TOKENS)
    first, second = (build(MODELS.load("mamba"), network_init=True, mixer_gain=gain) for gain in (None, 2.0))
    assert not torch.equal(first.mixers[0].in_proj.weight, second.mixers[0].in_proj.weight)


@pytest.mark.parametrize("name", ["rwkv", "rwkv6", "rwkv7"])
def test_short_convolutions_keep_the_norm_behind_the_embedding_and_base_convolutions_are_refused(name):
    for short_conv in (0, 3):
        model = build(MODELS.load(name), short_conv=short_conv)
        assert [isinstance(layer, FirstLayer) for layer in model.layers] == [True, False, False, False]
    with pytest.raises(ValueError, match=r"which no BaseConv can replace, got base_conv_layers=\[1\]; leave it out"):
        MODELS.load(name)(base_conv_layers=[1]).check(TOKENS)


HALVED = (
    *("linear-attention", "based", "gla", "retnet", "abc", "mamba", "mamba2", "mlstm", "slstm", "dss-exp", "h3"),
    *("deltanet", "kda", "rwkv", "rwkv6", "rwkv7", "sashimi"),
)


# the readout of a sequence is that of all models
@pytest.mark.parametrize(
    ("name", "pooling"), [*((name, None) for name in HALVED), ("gla", "mean"), ("gla", "last"), ("sashimi", "mean")]
)
@torch.no_grad()
def test_a_network_in_half_precision_reads_sequences_steps_and_prompts(name, pooling):
    """Without autocast, with the norm that the model has by default."""
    spec = TOKENS if pooling is None else SIGNAL
    model = build(MODELS.load(name), spec, dtype=torch.float32, pooling=pooling or "mean")
    inputs = torch.randint(16, (2, 9)) if pooling is None else torch.randn(2, 9, 2).bfloat16()
    exact = model(inputs if pooling is None else inputs.float())
    model.bfloat16()
    logits, (prompt, after), state = model(inputs), model.prefill(inputs), model.init_state(2)
    dtypes = [part.dtype for part in tensors(state)]
    for t in range(9):
        last, state = model.step(inputs[:, t], state)
    if pooling is None:
        exact, logits = exact[:, -1], logits[:, -1]
    for found in (logits, prompt, last):
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact).norm() < 0.1 * exact.norm()
    # a recorded step needs the same dtypes every time
    assert dtypes == [part.dtype for part in tensors(state)] == [part.dtype for part in tensors(after)]
    assert torch.bfloat16 not in dtypes


def test_hyena_refuses_weights_in_half_precision():
    model = build(MODELS.load("hyena"), TOKENS, dtype=torch.float32).bfloat16()
    with pytest.raises(ValueError, match="its filters cannot be computed from weights in bfloat16"):
        model(torch.randint(16, (2, 9)))


def test_dss_softmax_hands_the_detached_maximum_to_its_operator():
    gradients = []
    for detach in (False, True):
        torch.manual_seed(0)
        model = DSSSoftmaxConfig(norm="layer", detach_maximum=detach).build(TOKENS).double()
        for mixer in model.mixers:
            mixer.ssm.Lambda_re.data.fill_(0.5)
        logits = model(torch.arange(16).view(1, 16))
        logits[..., 3].sum().backward()
        gradients.append(model.mixers[0].ssm.Lambda_re.grad)
    assert not torch.allclose(*gradients, rtol=0.1)


def test_a_mixer_that_loses_digits_is_refused_unless_the_run_has_no_more_of_them():
    model = CoarseConfig(d_model=16).build(TOKENS)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Coarse.forward returns torch.bfloat16 in a run of torch.float32; return"):
        model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)


def test_a_mixer_with_more_digits_than_the_next_layer_can_read_is_refused():
    class Fine(Coarse):
        def forward(self, x):
            return x.double()

    model = CoarseConfig(d_model=16).build(TOKENS)
    model.layers[0].mixer = Fine()
    with pytest.raises(ValueError, match=r"Fine.forward returns torch.float64 in a run of torch.float32; return"):
        model(torch.zeros(2, 8, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "options", "grows"),
    [
        ("attention", {}, True),
        ("attention", {"window": 4}, True),
        ("hyena", {}, True),
        ("hybrid", {"layers": ("s4d", "attention")}, True),
        ("gla", {"num_heads": 2}, False),
    ],
)
def test_a_step_beyond_the_capacity_is_refused_where_the_state_grows(name, options, grows):
    """A cache that is full would lose a position without a word, also one of a window that it is shorter than."""
    model, tokens = build(MODELS.load(name), TOKENS, **options), torch.randint(16, (2, 4))
    with torch.no_grad():
        state = model.init_state(2, 3)
        for t in range(3):
            _, state = model.step(tokens[:, t], state)
        _, behind = model.prefill(tokens[:, :3], capacity=3)
        for full in (state, behind):
            if grows:
                with pytest.raises(ValueError, match="the state has room for 3 positions and has read as many; give"):
                    model.step(tokens[:, 3], full)
            else:
                model.step(tokens[:, 3], full)
        model.restart(state)
        model.step(tokens[:, 3], state)
