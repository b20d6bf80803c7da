"""State space models: options, initial values and sizes. The laws of all models are in tests/laws."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.lti_ssm import lti_ssm, lti_ssm_step
from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.models import MODELS, dss, s4d
from subquad.models.backbone import Backbone
from subquad.models.h3 import Contraction, Outer
from subquad.models.parts.linear import ResidualLinear
from subquad.models.s4d import S4DConfig, initial_frequencies, skew_hippo_frequencies
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.models import unroll

LENGTH = 40


def tokens(length: int = LENGTH, vocab_size: int = 16) -> TaskSpec:
    return TaskSpec(input="tokens", num_classes=vocab_size, readout="token", max_length=length, vocab_size=vocab_size)


def build(name: str, spec: TaskSpec | None = None, *, dtype: torch.dtype = torch.float64, **options) -> Backbone:
    config = MODELS.load(name)(**{"num_layers": 2, "d_model": 16, "init_std": 0.2, **options})
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return config.build(spec or tokens()).eval()
    finally:
        torch.set_default_dtype(default)


def make_inputs(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(16, (2, length), generator=torch.Generator().manual_seed(1))


def num_parameters(model: Backbone) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("s4d", {"d_state": 8}),
        ("s4d", {"tie_A": True, "discretization": "bilinear", "d_state": 6}),
        ("dss-exp", {"d_state": 5}),
        ("dss-exp-no-scale", {"d_state": 4}),
        ("gss", {"reduction": 2, "d_state": 4}),
        ("h3", {"short_filter": 3, "train_B": True, "d_state": 8}),
        ("mamba", {"inner": "s4d"}),
    ],
)
@torch.no_grad()
def test_steps_of_the_kernel_equal_forward(name, options, monkeypatch):
    pytest.importorskip("triton")
    kernel = partial(lti_ssm_step, backend="triton")
    for module in (s4d, dss):
        monkeypatch.setattr(module, "lti_ssm_step", kernel)
    model, inputs = build(name, dtype=torch.float32, **options), make_inputs()[:, :6]
    for module in model.modules():
        if hasattr(module, "step_scale"):
            module.step_scale = 0.5
    parallel = model(inputs)
    with record_operators() as used:
        steps, _ = unroll(model, inputs)
    assert used["lti_ssm"]["backend"] == "triton"
    torch.testing.assert_close(steps, parallel, rtol=1e-4, atol=1e-5 * parallel.abs().max().item())


@pytest.mark.parametrize("name", ["s4d", "dss-softmax", "dss-exp", "dss-exp-no-scale", "h3"])
def test_a_two_sided_model_reads_the_future_and_has_no_step(name):
    model, inputs = build(name, bidirectional=True, num_layers=1), make_inputs()
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    assert (model(inputs) - model(changed))[:, 30].abs().max() > 1e-9
    model(inputs).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="reads the future and has no step"):
        model.step(inputs[:, 0], model.init_state(2))


def test_a_bidirectional_h3_is_two_copies_in_opposite_directions():
    mixer = build("h3", bidirectional=True, num_layers=1).mixers[0]
    x = torch.randn(2, 9, mixer.past.qkv.weight.shape[1], dtype=torch.float64)
    expected = mixer(x)
    torch.testing.assert_close(mixer.past(x) + mixer.future(x.flip(1)).flip(1), expected)
    mixer.past, mixer.future = mixer.future, mixer.past
    torch.testing.assert_close(mixer(x.flip(1)).flip(1), expected)
    assert set(mixer.ssm_parameters()) == {
        f"{copy}.{key}" for copy in ("past", "future") for key in mixer.past.ssm_parameters()
    }


@pytest.mark.parametrize("name", ["s4d", "dss-exp", "dss-softmax"])
def test_under_autocast_operators_see_bfloat16_as_a_linear_map_would(name):
    """Norms and the residual stream are float32, for which the kernels of half precision would not run."""
    config = MODELS.load(name)(d_model=8, num_layers=2, norm="layer", prenorm=False)
    seen = []

    def record(u, *system, **options):
        seen.append((u.dtype, *(x.dtype for x in system if x is not None)))
        return lti_ssm(u, *system, **options)

    model = config.build(TaskSpec("tokens", num_classes=4, readout="token", max_length=8, vocab_size=16))
    for mixer in model.mixers:
        mixer.ssm.operator = record
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(16, (2, 8)))
    assert seen == [(torch.bfloat16, torch.complex64, torch.complex64, torch.float32)] * 2


def test_skew_hippo_starts_at_the_eigenvalues_of_its_matrix():
    size = 16
    root = torch.sqrt(2 * torch.arange(size, dtype=torch.float64) + 1)
    matrix = torch.outer(root, root) / 2
    matrix = torch.triu(matrix, 1) - torch.tril(matrix, -1) - torch.eye(size, dtype=torch.float64) / 2
    eigenvalues = torch.linalg.eigvals(matrix)
    torch.testing.assert_close(eigenvalues.real, torch.full((size,), -0.5, dtype=torch.float64))
    positive = eigenvalues.imag[eigenvalues.imag > 0].sort().values
    torch.testing.assert_close(skew_hippo_frequencies(size), positive)
    assert torch.equal(initial_frequencies("legs", 8), skew_hippo_frequencies(16))


def test_s4d_starts_as_in_its_table():
    torch.testing.assert_close(initial_frequencies("lin", 3), math.pi * torch.arange(3, dtype=torch.float64))
    # N/pi (N/(2n+1) - 1) with N = 4
    expected = torch.tensor([4 / math.pi * 3, 4 / math.pi / 3], dtype=torch.float64)
    torch.testing.assert_close(initial_frequencies("inv", 2), expected)


@torch.no_grad()
def test_s4d_with_unit_response_answers_a_constant_with_unit_variance():
    config = S4DConfig(num_layers=1, d_model=512, d_state=64, init="inv", tie_A=True, unit_response=True)
    torch.manual_seed(0)
    ssm = config.mixer(0, tokens()).ssm.double()
    assert ssm.log_A_real.shape == (1, 32)
    A, _, C, _ = ssm._system()
    # the steady state of h' = A h + 1 is -1 / A
    response = 2 * (C / -A).sum(-1).real
    assert response.var().item() == pytest.approx(1, rel=0.2)


def test_h3_starts_its_shift_filter_as_a_convolution_over_the_window():
    taps = build("h3", d_model=64).mixers[0].shift.C
    assert 0.99 / 8 < taps.abs().max() <= 1 / 8


def test_dss_variants_start_with_real_part_minus_one_half_and_the_shared_frequencies():
    for name in ("dss-softmax", "dss-exp", "dss-exp-no-scale"):
        ssm = build(name).mixers[0].ssm
        eigenvalues = ssm._system()[0]
        torch.testing.assert_close(eigenvalues.real, torch.full_like(eigenvalues.real, -0.5))
        torch.testing.assert_close(eigenvalues.imag, skew_hippo_frequencies(128))
        # 2N + D + 2DN real parameters (DSS, section 3.2)
        assert sum(p.numel() for p in ssm.ssm_parameters().values()) == 2 * 64 + 16 + 2 * 16 * 64


@pytest.mark.parametrize("sides", [(), (2,)], ids=["one side", "two sides"])
def test_the_derivative_of_two_step_sizes_is_that_of_their_system(sides):
    torch.manual_seed(0)
    parts = torch.randn(3), torch.randn(3), torch.rand(4, 1) + 0.5
    inputs = [x.double().requires_grad_() for x in parts]
    W = torch.randn(*sides, 4, 3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *system: dss.Stretched.apply(*system)[::2], (*inputs, W))


@pytest.mark.parametrize("name", ["dss-softmax", "dss-exp", "dss-exp-no-scale"])
@torch.no_grad()
def test_two_step_sizes_scale_the_real_and_the_imaginary_part_as_in_the_released_code(name):
    one = build(name, d_state=6).mixers[0].ssm
    ssm = build(name, d_state=6, separate_dt=True).mixers[0].ssm
    assert ssm.log_dt.shape == (16, 2)
    ssm.load_state_dict({**one.state_dict(), "log_dt": one.log_dt.unsqueeze(-1).expand(-1, 2)})
    torch.testing.assert_close(ssm.kernel(LENGTH), one.kernel(LENGTH))
    # a decay over steps of e^-200 is none
    for real, imaginary in ((0, 0.7), (-200, 0)):
        ssm.log_dt += torch.tensor([real, imaginary])
        Lambda = torch.complex(ssm.Lambda_re if name == "dss-softmax" else -ssm.Lambda_re.exp(), ssm.Lambda_im)
        dt = ssm.log_dt.exp()
        z = torch.complex(Lambda.real * dt[:, :1], Lambda.imag * dt[:, 1:])
        gain = {
            "dss-softmax": (z.exp() - 1) / (((LENGTH * z).exp() - 1) * Lambda),
            "dss-exp": (z.exp() - 1) / Lambda,
            "dss-exp-no-scale": torch.ones_like(z),
        }[name]
        powers = torch.exp(z.unsqueeze(-1) * torch.arange(LENGTH))
        expected = torch.einsum("hn,hnl->hl", torch.view_as_complex(ssm.W) * gain, powers).real
        # the guard of dss-softmax's reciprocal, 1e-7, is left out above
        torch.testing.assert_close(ssm.kernel(LENGTH), expected, rtol=0, atol=1e-5)
    # e^-120 is no float32, and the ratio of the two is one
    ssm.float().log_dt.fill_(-120)
    assert ssm.kernel(LENGTH).isfinite().all()
    assert "separate_dt" not in MODELS.load(name)().model_dump(mode="json")


@torch.no_grad()
def test_a_truncated_dss_is_that_of_a_shorter_sequence_and_forgets():
    """DSS table 3: the filter has 8 lags, as if sequences were no longer than that, and is zero behind them."""
    truncated, short = build("dss-softmax", kernel_length=8), build("dss-softmax", tokens(8))
    truncated.load_state_dict(
        {k.replace("ssm.", "ssm.ssm.", 1): v for k, v in short.state_dict().items()}, strict=False
    )
    ssm, whole = truncated.mixers[0].ssm, short.mixers[0].ssm
    torch.testing.assert_close(ssm.taps(), whole.kernel(8))
    x = torch.randn(1, LENGTH, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(ssm(x)[:, :8], whole(x[:, :8]))
    changed = x.clone()
    changed[:, 10] += 1
    difference = (ssm(changed) - ssm(x)).abs().amax((0, 2))
    assert difference[10:18].min() > 1e-6
    assert difference[18:].max() < 1e-12
    # the random start of the same table
    random = build("dss-softmax", random_start=True, d_state=256).mixers[0].ssm
    for part in (random.Lambda_re, random.Lambda_im):
        assert part.mean().abs() < 0.2
        assert part.std().item() == pytest.approx(1, rel=0.15)


def test_dss_softmax_refuses_more_steps_than_it_is_normalized_over():
    with pytest.raises(ValueError, match="normalized over length=40, got 41 steps"):
        build("dss-softmax")(make_inputs(41))


def test_hyena_refuses_more_steps_than_its_filters_cover():
    with pytest.raises(ValueError, match="cover max_length=40, got a sequence of 41"):
        build("hyena")(make_inputs(41))


@pytest.mark.parametrize(("inner_factor", "proj_groups"), [(4, 4), (1, 2), (3, None), (None, None)])
@torch.no_grad()
def test_hyena_with_wide_streams_and_a_tied_input_map_is_the_layer_of_mad(inner_factor, proj_groups):
    """y = W_out (x0 * (h conv (x1 * v) + D x1 * v)), where x0, x1, v are thirds of the short convolution of G copies
    of W_in x (athms/mad-lab, mad/model/layers/hyena.py at 944daee12ca370df53b39d6ea7cb568d549d949f)."""
    mixer = build("hyena", num_layers=1, inner_factor=inner_factor, proj_groups=proj_groups).mixers[0]
    inner, groups = 16 * (inner_factor or 1), proj_groups or 1
    generator = torch.Generator().manual_seed(3)
    for bias in (mixer.in_proj.bias, mixer.out.bias):
        bias.normal_(generator=generator)
    assert mixer.in_proj.weight.shape == (3 * inner // groups, 16)
    assert mixer.out.weight.shape == (16, inner)
    x = torch.randn(2, LENGTH, 16, generator=generator, dtype=torch.float64)
    copies = torch.cat([x @ mixer.in_proj.weight.T + mixer.in_proj.bias] * groups, dim=-1)
    padded = torch.cat([torch.zeros(2, 2, 3 * inner, dtype=torch.float64), copies], dim=1)
    short = mixer.short_bias + sum(padded[:, w : w + LENGTH] * mixer.short_weight[:, w] for w in range(3))
    *gates, v = short.split(inner, dim=-1)
    v = v * gates[1]
    (conv,) = mixer.convs
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    taps = conv.kernel(LENGTH)[:, lag.clamp(min=0)] * (lag >= 0)
    y = gates[0] * (torch.einsum("dts,bsd->btd", taps, v) + conv.D * v)
    wanted = y @ mixer.out.weight.T + mixer.out.bias
    torch.testing.assert_close(mixer(x), wanted, rtol=1e-10, atol=1e-10 * wanted.abs().max().item())


def test_hyena_without_the_options_of_mad_is_identified_as_before():
    config, added = MODELS.load("hyena"), {"inner_factor", "proj_groups"}
    assert not added & set(config().model_dump(mode="json"))
    assert added <= set(config(inner_factor=4, proj_groups=4).model_dump(mode="json"))


def test_mamba_starts_as_its_authors_code():
    mixer = build("mamba", d_model=64).mixers[0]
    s6 = mixer.inner
    assert s6.dt_rank == 4
    dt = torch.nn.functional.softplus(s6.dt_bias)
    assert 1e-3 * 0.999 <= dt.min() < dt.max() <= 1e-1 * 1.001
    torch.testing.assert_close(s6.log_A.exp(), torch.arange(1, 17, dtype=torch.float64).expand(128, 16))
    # the initialisation of torch is uniform up to 1 / sqrt(fan in); the output is scaled down with the depth
    assert 0.9 * 64**-0.5 < mixer.in_proj.weight.abs().max() <= 64**-0.5
    assert 0.9 * 128**-0.5 < mixer.out.weight.abs().max() * 2**0.5 <= 128**-0.5 * (1 + 1e-9)


@torch.no_grad()
def test_mamba_starts_as_the_network_does_where_it_is_asked_to():
    mixer = build("mamba", d_model=64, network_init=True, init_std=0.03, init_residual="plain").mixers[0]
    s6 = mixer.inner
    # softplus(0) = log 2
    torch.testing.assert_close(s6.dt_bias, torch.zeros_like(s6.dt_bias))
    for linear in (mixer.in_proj, mixer.out, s6.x_proj, s6.dt_proj):
        assert linear.weight.std().item() == pytest.approx(0.03, rel=0.1)
        # a normal distribution has no bound, unlike the start of torch
        assert linear.weight.abs().max() > 2.5 * 0.03
    torch.testing.assert_close(s6.log_A.exp(), torch.arange(1, 17, dtype=torch.float64).expand(128, 16))


@torch.no_grad()
def test_mamba_with_negative_eigenvalues_multiplies_the_state_by_twice_the_exponential_minus_one():
    s6 = build("mamba", negative_eigenvalues=True, d_state=4).mixers[0].inner
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    raw, A, B, C = s6._select(x)
    dt, h = torch.nn.functional.softplus(raw + s6.dt_bias), torch.zeros(2, 32, 4, dtype=torch.float64)
    y = s6(x)
    for t in range(9):
        size = dt[:, t, :, None]
        h = (2 * torch.exp(size * A) - 1) * h + size * x[:, t, :, None] * B[:, t, None]
        torch.testing.assert_close(y[:, t], (h @ C[:, t, :, None]).squeeze(-1) + s6.D * x[:, t])


@torch.no_grad()
def test_mamba_starts_as_in_its_ablations():
    n = torch.arange(4, dtype=torch.float64)
    for name, wanted in (("half", torch.full((4,), -0.5, dtype=torch.float64)), (None, -(n + 1))):
        s6 = build("mamba", A_init=name, d_state=4).mixers[0].inner
        torch.testing.assert_close(s6._select(torch.zeros(1, 32, dtype=torch.float64))[1], wanted.expand(32, 4))
    s6 = build("mamba", A_init="complex", d_state=8, fixed=["B"]).mixers[0].inner
    _, A, B, _ = s6._select(torch.zeros(1, 32, dtype=torch.float64))
    torch.testing.assert_close(A, torch.complex(torch.full_like(n, -0.5), n).expand(32, 4))
    torch.testing.assert_close(B, torch.ones_like(B))
    s6 = build("mamba", A_init="random", d_state=64).mixers[0].inner
    assert s6.log_A.mean().abs() < 0.1
    assert s6.log_A.std().item() == pytest.approx(1, rel=0.1)


@torch.no_grad()
def test_an_s6_of_conjugate_pairs_is_the_scan_over_both_of_each_pair():
    s6 = build("mamba", A_init="complex", d_state=6).mixers[0].inner
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    dt, A, B, C = s6._select(x)
    both = [torch.cat([m, m.conj()], dim=-1) for m in (A, B, C / 2)]
    wanted, _ = selective_scan_reference(x, dt, *both, D=s6.D, dt_bias=s6.dt_bias, dt_softplus=True)
    torch.testing.assert_close(s6(x), wanted, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_selective_model_of_constant_maps_is_time_invariant():
    """With nothing selective, S6 is a convolution: a later impulse has the same response."""
    s6 = build("mamba", fixed=["dt", "B", "C"], d_state=4).mixers[0].inner
    x = torch.zeros(1, LENGTH, 32, dtype=torch.float64)
    x[:, 0] = 1.0
    torch.testing.assert_close(s6(x)[:, : LENGTH - 7], s6(x.roll(7, dims=1))[:, 7:])
    assert (s6(3 * x) - 3 * s6(x)).abs().max() < 1e-12


@torch.no_grad()
def test_s4d_real_is_the_sum_of_its_exponentials():
    ssm = build("s4d", init="real", d_state=5).mixers[0].ssm
    torch.testing.assert_close(ssm.log_A_real.exp(), torch.arange(1, 6, dtype=torch.float64).expand(16, 5))
    A, dt = -ssm.log_A_real.exp(), ssm.log_dt.exp()[:, None]
    powers = torch.exp(torch.einsum("dn,l->dnl", A * dt, torch.arange(9, dtype=torch.float64)))
    wanted = torch.einsum("dn,dnl->dl", ssm.C * torch.expm1(A * dt) / A, powers)
    torch.testing.assert_close(ssm.kernel(9), wanted)


def test_h3_with_short_filters_and_hyena_differ_in_the_long_filter_only():
    """Mamba's H3+ is its Hyena+ with S4D as the long convolution."""
    h3, hyena = build("h3", short_filter=3), build("hyena")
    of_filter = {id(p) for mixer in hyena.mixers for p in mixer.convs[0].filter.parameters()}
    of_ssm = {id(p) for mixer in h3.mixers for name, p in mixer.inner.named_parameters() if name != "D"}
    rest = [
        sorted(tuple(p.shape) for p in model.parameters() if id(p) not in skipped)
        for model, skipped in ((h3, of_ssm), (hyena, of_filter))
    ]
    assert rest[0] == rest[1]


def test_mamba_has_the_papers_parameters_with_128_embedding_rows():
    assert num_parameters(build("mamba", tokens(vocab_size=16), d_model=64)) == 66_496
    assert num_parameters(build("mamba", tokens(vocab_size=128), d_model=64)) == 73_664


def test_training_b_of_h3_starts_from_the_same_function():
    fixed, trained = build("h3"), build("h3", train_B=True)
    missing = trained.load_state_dict(fixed.state_dict(), strict=False).missing_keys
    assert {name.rsplit(".", 1)[1] for name in missing} == {"B"}
    tokens = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(trained(tokens), fixed(tokens))
    groups = {group.name: group for group in trained.param_groups()}
    assert all(any(layer.mixer.shift.B is p for p in groups["ssm"].parameters) for layer in trained.layers)
    assert all(any(layer.mixer.inner.B is p for p in groups["ssm"].parameters) for layer in trained.layers)


@pytest.mark.parametrize("size", [8, 20], ids=["products", "transform"])
def test_the_taps_of_a_shift_model_with_b_are_the_response_of_its_register(size, monkeypatch):
    """With their first and second derivatives."""
    monkeypatch.setattr("subquad.models.h3.MOST_PRODUCTS", 16)
    shift = build("h3", train_B=True, d_state=size).mixers[0].shift.double()
    torch.nn.init.normal_(shift.B)
    parameters = B, C = shift.B, shift.C
    # h_t = shift(h_{t-1}) + B x_t, y_t = C h_t, fed an impulse
    h, response = B, []
    for _ in range(size):
        response.append((h * C).sum(-1))
        h = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
    found = []
    for taps in (shift.taps(), torch.stack(response, dim=1)):
        first = torch.autograd.grad(taps.square().sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), parameters)
        found.append((taps, *first, *second))
    torch.testing.assert_close(*found)


def test_only_the_maps_of_channel_mixers_start_smaller_where_a_grid_says_so():
    layer = build("h3", d_model=64, init_residual="scaled-mlp", init_std=0.02).layers[0]
    assert layer.mixer.out.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert [m.weight.std().item() for m in layer.channel.modules() if isinstance(m, ResidualLinear)] == pytest.approx(
        [0.01], rel=0.1
    )


def test_h3_has_the_authors_parameters_less_its_redundant_input_maps():
    # learned B of the shift model [64, 64] and of the 32 complex modes would add 8192 per layer: 142,464
    assert num_parameters(build("h3", d_model=64)) == 126_080


@pytest.mark.slow
def test_hyena_has_the_papers_69_million_parameters():
    spec = tokens(length=2**20)
    model = build("hyena", spec, dtype=torch.float32, d_model=64, emb_dim=33, learn_positions=True)
    assert num_parameters(model) == 69_338_112


def test_states_have_the_sizes_of_their_papers():
    assert build("mamba", d_model=64, num_layers=1).state_size(1000) == 128 * 16 + 128 * 3
    assert build("s4d", d_model=32, num_layers=1).state_size(1000) == 32 * 64
    assert build("h3", d_model=32, num_layers=1).state_size(1000) == 32 * 63 + 32 * 64
    assert build("h3", d_model=32, num_layers=1, shift_taps=22).state_size(1000) == 32 * 21 + 32 * 64
    assert build("h3", d_model=32, num_layers=1, head_dim=8).state_size(1000) == 32 * 63 + 32 * 8 * 64
    assert build("hyena", d_model=32, num_layers=1).state_size(1000) == 32 * 1000 + 3 * 32 * 2
    wide = build("hyena", d_model=32, num_layers=1, inner_factor=4, proj_groups=4)
    assert wide.state_size(1000) == 128 * 1000 + 3 * 128 * 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("s4", "log_dt log_A_real A_imag B P"),
        ("s4d", "log_dt log_A_real A_imag"),
        ("dss-softmax", "log_dt Lambda_re Lambda_im W"),
        ("mamba", "inner.log_A inner.D inner.dt_bias"),
        ("mamba2", "log_A D dt_bias"),
        ("mamba3", "D dt_bias"),
    ],
)
def test_the_parameters_of_a_state_space_are_those_of_its_dynamics(name, parameters):
    assert set(build(name).mixers[0].ssm_parameters()) == set(parameters.split())


@pytest.mark.parametrize("name", ["s4d", "dss-softmax", "gss", "h3"])
def test_ssm_parameters_have_their_own_rate_and_no_decay(name):
    (group,) = [group for group in build(name, ssm_lr=3e-4).param_groups() if group.name == "ssm"]
    assert group.lr == 3e-4
    assert group.weight_decay == 0.0


def test_products_of_wide_heads_are_those_of_einsum():
    """The products are those of H3 with head_dim above 1; gradients are compared, too."""
    k, q = (torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True) for _ in "kq")
    states = torch.randn(2, 3, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(Outer.apply(k, q), torch.einsum("biht,bjht->bijht", k, q))
    torch.testing.assert_close(Contraction.apply(states, q), torch.einsum("bijht,biht->bjht", states, q))
    assert torch.autograd.gradcheck(Outer.apply, (k, q))
    assert torch.autograd.gradcheck(Contraction.apply, (states, q))
