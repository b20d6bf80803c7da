"""Recomputed activations have the same values, and are not kept meanwhile."""

from __future__ import annotations

import weakref
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from subquad.kernels.rotated_keys import rotated_keys
from subquad.kernels.ssd import ssd
from subquad.models import MODELS, deltanet, mamba, mamba3, rwkv7
from subquad.models.mamba import S6, MambaConfig
from subquad.models.parts.recompute import Recomputing, at_once, spares
from subquad.suite.contracts import TaskSpec

TOKENS = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)


def test_a_result_is_made_twice_and_not_kept():
    calls = []
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)

    def make():
        calls.append(torch.is_grad_enabled())
        return x.sin()

    with Recomputing() as keep:
        y = keep(make)
        alive = weakref.ref(y)
        # two operations keep y, one of them as a view
        z = (y.view(5, 1, 3) @ weight).sum() + (y * y).sum()
        del y
    assert alive() is None
    gradients = torch.autograd.grad(z, [x, weight])
    assert calls == [True, False]
    y = x.sin()
    expected = torch.autograd.grad((y @ weight).sum() + (y * y).sum(), [x, weight])
    torch.testing.assert_close(gradients, expected)


def test_results_that_are_made_together_are_made_again_once():
    calls = []
    x = torch.randn(5, 3, requires_grad=True)

    def make():
        calls.append(torch.is_grad_enabled())
        return x.sin(), x.cos()

    with Recomputing() as keep:
        first, second = keep(make)
        alive = [weakref.ref(first), weakref.ref(second)]
        z = (first * first + second * first).sum()
        del first, second
    assert [y() for y in alive] == [None, None]
    (gradient,) = torch.autograd.grad(z, x)
    assert calls == [True, False]
    torch.testing.assert_close(gradient, (2 * x).sin() + (2 * x).cos())


def test_a_second_backward_pass_makes_it_again():
    x, made = torch.randn(4, requires_grad=True), []

    def make():
        made.append(x.exp())
        return made[-1]

    with Recomputing() as keep:
        y = keep(make).square().sum()
    first, second = torch.autograd.grad(y, x, retain_graph=True)[0], torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)
    assert len(made) == 3


def test_a_selective_state_space_model_has_the_same_bits():
    torch.manual_seed(0)
    layer = S6(8, 4, 2, dt_min=1e-3, dt_max=1e-1)
    u, z = torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    results = []
    for recomputing in (False, True):
        x = u.clone().requires_grad_()
        if recomputing:
            with Recomputing() as keep:
                y = layer(keep(lambda x=x: x * 2), z, keep)
        else:
            y = layer(x * 2, z, at_once)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("fixed", [(), ("dt",)])
def test_mamba_keeps_neither_the_convolved_input_nor_the_step_sizes(monkeypatch, fixed):
    alive = []

    def scan(x, dt, *_, **options):
        # keeps both for its gradient, as the kernels do
        alive.extend([weakref.ref(x), weakref.ref(dt)])
        return x * dt * options["z"]

    monkeypatch.setattr(mamba, "spares", lambda *_: True)
    monkeypatch.setattr(mamba, "selective_scan", scan)
    layer = MambaConfig(d_model=16, num_layers=1, fixed=fixed).mixer(0, TOKENS)
    y = layer(torch.randn(2, 40, 16))
    assert [x() for x in alive] == [None, None]
    y.sum().backward()


def test_a_part_of_a_result_is_not_kept_either():
    x = torch.randn(4, 6, requires_grad=True)
    with Recomputing() as keep:
        y = keep(lambda: x.sin())
        alive = weakref.ref(y)
        left, right = y.split((2, 4), dim=1)
        z = (left * left).sum() + (right[:, ::2] * right[:, 1::2]).sum()
        del y, left, right
    assert alive() is None
    (found,) = torch.autograd.grad(z, x)
    y = x.sin()
    assert torch.equal(found, torch.autograd.grad((y[:, :2] ** 2).sum() + (y[:, 2::2] * y[:, 3::2]).sum(), x)[0])


def test_what_is_made_of_a_kept_result_does_not_keep_it():
    x, calls = torch.randn(4, 6, requires_grad=True), []

    def cheap():
        calls.append("cheap")
        return x.sin()

    with Recomputing() as keep:
        y = keep(cheap)
        z = keep(lambda y: y * y, y)
        alive = weakref.ref(y), weakref.ref(z)
        loss = (z * z).sum()
        del y, z
    assert [one() for one in alive] == [None, None]
    (found,) = torch.autograd.grad(loss, x)
    # once forward and once for both operations that read it
    assert calls == ["cheap"] * 2
    torch.testing.assert_close(found, 4 * x.sin() ** 3 * x.cos())


def test_a_result_that_is_read_as_another_dtype_has_the_right_gradient():
    x = torch.randn(4, 6, requires_grad=True)
    with Recomputing() as keep:
        pairs = torch.view_as_complex(keep(lambda: x.sin()).view(4, 3, 2))
        z = (pairs * pairs.conj()).real.sum()
        del pairs
    assert torch.allclose(torch.autograd.grad(z, x)[0], (2 * x).sin())


def test_a_layer_that_is_computed_again_keeps_nothing_inside(monkeypatch):
    """A hook inside that of the layer would keep whatever it does not make again."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1))
    x = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert [spares(recompute, 1, x) for recompute in ("auto", "layer", "never")] == [True, False, False]


def test_results_side_by_side_in_one_memory_are_not_kept():
    x = torch.randn(4, 6, requires_grad=True)
    with Recomputing() as keep:
        first, second = keep(lambda: tuple(x.sin().view(2, 2, 6).unbind()))
        alive = weakref.ref(first._base)
        z = (first * second).sum()
        del first, second
    assert alive() is None
    (found,) = torch.autograd.grad(z, x)
    assert torch.equal(found, torch.autograd.grad((x.sin()[:2] * x.sin()[2:]).sum(), x)[0])


def test_memory_that_a_result_leaves_is_not_mistaken_for_it():
    """Other tensors of its size would be put into the same memory."""
    x = torch.randn(64, 64, requires_grad=True)
    with Recomputing() as keep:
        z = keep(lambda: x.sin()).sum()
        for _ in range(20):
            z = z + (x * 2).square().sum()
    (found,) = torch.autograd.grad(z, x)
    torch.testing.assert_close(found, x.cos() + 160 * x)


def test_a_result_inside_another_tensor_is_kept():
    """Its memory holds what the recipe does not give."""
    x = torch.randn(4, 6, requires_grad=True)
    with Recomputing() as keep:
        whole = x.sin()
        part = keep(lambda: whole[:2])
        z = (part * part).sum() + (whole[2:] * whole[2:]).sum()
    assert torch.equal(torch.autograd.grad(z, x)[0], torch.autograd.grad(x.sin().square().sum(), x)[0])


@pytest.mark.parametrize("name", ["mamba2", "mamba3"])
def test_a_mixer_on_ssd_gives_the_same_bits_where_it_computes_again(name, monkeypatch):
    """On the kernels, whose backward pass then makes states and scores anew."""
    pytest.importorskip("triton")
    monkeypatch.setattr(mamba3, "rotated_keys", partial(rotated_keys, backend="triton"))
    layer = MODELS.load(name)(d_model=16, num_layers=1, d_state=16, head_dim=16).mixer(0, TOKENS)
    layer.operator = partial(ssd, backend="triton")
    u = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for answer in (False, True):
        monkeypatch.setattr(import_module(f"subquad.models.{name}"), "spares", lambda *_, answer=answer: answer)
        y = layer(u)
        results.append([y, *torch.autograd.grad(y.square().sum(), [u, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["gated-deltanet", "kda"])
def test_the_delta_rule_gives_the_same_bits_with_and_without_what_its_last_map_reads(name, monkeypatch):
    torch.manual_seed(0)
    layer = MODELS.load(name)(d_model=16, num_layers=1, num_heads=2, expand_k=1.0).mixer(0, TOKENS)
    u = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for answer in (False, True):
        monkeypatch.setattr(deltanet, "spares", lambda *_, answer=answer: answer)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(u)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [u, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rwkv7_keeps_neither_mixed_inputs_nor_what_the_delta_rule_reads(monkeypatch):
    alive, results = [], []
    mix = rwkv7.ChannelMix7._mix

    def rule(q, k, v, beta, log_decay, *, write, plain, **_):
        # keeps all of them for their gradients, as the kernels do; plain PyTorch needs `plain` for that of the strength
        alive.extend(map(weakref.ref, (k, log_decay, write)))
        return q * k * v * log_decay * write * plain, None

    def mixed(*arguments):
        found = mix(*arguments)
        alive.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(rwkv7, "delta_rule", rule)
    for mixer in (rwkv7.TimeMix7, rwkv7.ChannelMix7):
        monkeypatch.setattr(mixer, "_mix", mixed)
    for answer in (False, True):
        monkeypatch.setattr(rwkv7, "spares", lambda *_, answer=answer: answer)
        torch.manual_seed(0)
        model = MODELS.load("rwkv7")(num_layers=1, d_model=16, head_dim=8).build(TOKENS)
        alive.clear()
        y = model(torch.arange(8).view(2, 4))
        if answer:
            assert [x() for x in alive] == [None] * (6 + 3 + 1)
        y.square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["mamba", "gsa", "h3", "transformer++"])
@pytest.mark.parametrize("at", [None, [3, 17]])
def test_a_network_that_recomputes_its_layers_has_the_same_bits(name, at):
    tokens = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = None if at is None else torch.tensor(at).expand(2, 2)
    results = []
    for recompute in ("never", "layer"):
        torch.manual_seed(0)
        model = MODELS.load(name)(num_layers=2, d_model=16, recompute=recompute).build(TOKENS)
        model(tokens, positions).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_it_is_not_part_of_the_identity_of_a_run():
    assert MambaConfig(recompute="layer").model_dump(mode="json") == MambaConfig().model_dump(mode="json")
