"""MesaNet: its equations, and what the steps of conjugate gradients leave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.operations import count_operations
from subquad.models import MODELS, mesanet
from subquad.models.parts.conjugate_gradients import solve
from subquad.suite.contracts import TaskSpec

SPEC = TaskSpec("tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)


def mixer_of(**options):
    torch.manual_seed(0)
    config = MODELS.load("mesanet")(num_layers=1, d_model=12, num_heads=3, init_std=0.5, **options)
    (mixer,) = config.build(SPEC).double().mixers
    for parameter in (mixer.gates.bias, mixer.ridge, mixer.norm.weight):
        torch.nn.init.normal_(parameter)
    return mixer


def written_out(mixer, x):
    """The equations of the source for x [T, D], its systems solved by elimination."""
    heads, size = mixer.num_heads, mixer.key_dim
    qk, v = (x @ mixer.proj.weight.T).split(mixer.split, dim=-1)
    taps = mixer.conv_weight.shape[1]
    padded = F.pad(qk, (0, 0, taps - 1, 0))
    qk = F.silu(sum(padded[i : i + len(x)] * mixer.conv_weight[:, i] for i in range(taps)))
    q, k = qk.unflatten(-1, (2, heads, size)).unbind(1)
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    v = v.unflatten(-1, (heads, -1))
    beta, decay = torch.sigmoid(x @ mixer.gates.weight.T + mixer.gates.bias).chunk(2, dim=-1)
    ridge = 0.25 + F.softplus(mixer.ridge)
    y = torch.zeros_like(v)
    for h in range(heads):
        gram, read = torch.zeros(size, size).double(), torch.zeros(size, v.shape[-1]).double()
        for t in range(len(x)):
            gram = decay[t, h] * gram + beta[t, h] * torch.outer(k[t, h], k[t, h])
            read = decay[t, h] * read + beta[t, h] * torch.outer(k[t, h], v[t, h])
            o = torch.linalg.solve(gram + torch.diag(ridge[h]), q[t, h]) @ read
            y[t, h] = o / (o.square().mean() + mixer.norm.eps).sqrt() * mixer.norm.weight
    return y.flatten(1) @ mixer.out.weight.T


@pytest.mark.parametrize("options", [{}, {"expand_k": 2.0, "d_conv": 3}], ids=str)
@torch.no_grad()
def test_the_mixer_is_the_least_squares_of_its_paper(options):
    mixer = mixer_of(**options)
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], written_out(mixer, x[0]), rtol=1e-9, atol=1e-9)


def test_a_layer_starts_as_the_released_one_and_has_its_parameters():
    (mixer,) = MODELS.load("mesanet")(num_layers=1, d_model=1024, num_heads=8).build(SPEC).mixers
    torch.testing.assert_close(mixer._ridge(), torch.ones(8, 128))
    assert mixer.gates.bias.count_nonzero() == 0
    # q, k, v and the output; two gates a head; two convolutions of four taps; l; the norm of a head
    count = 4 * 1024**2 + 2 * 8 * 1025 + 2 * 1024 * 4 + 1024 + 128
    assert sum(parameter.numel() for parameter in mixer.parameters()) == count


def test_thirty_steps_solve_systems_of_128_keys_that_hardly_decay():
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(2048, 128), dim=-1)
    matrix, b = keys.T @ keys + torch.diag(0.25 + torch.rand(128)), F.normalize(torch.randn(5, 128), dim=-1)
    found = solve(lambda p, a: p @ a, b, matrix, num_steps=30)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, b.T).T, rtol=0, atol=1e-5)


def test_what_is_solved_exactly_stays_and_a_query_of_zeros_reads_nothing():
    """The steps after the last one would divide zero by zero."""
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    matrix = torch.diag(torch.tensor([2.0, 4.0])).requires_grad_()
    found = solve(lambda p, a: p @ a, b, matrix, num_steps=30)
    torch.testing.assert_close(found.detach(), torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    found.sum().backward()
    torch.testing.assert_close(b.grad, torch.tensor([[0.5, 0.25], [0.5, 0.25]]))
    torch.testing.assert_close(matrix.grad, -torch.tensor([[0.25, 0.125], [0.25, 0.125]]))


@torch.no_grad()
def test_under_bfloat16_a_solution_is_not_rounded_before_it_reads(monkeypatch):
    """Nor does a step of decoding round its query before that."""
    mixer, x = mixer_of().float(), torch.randn(2, 9, 12).bfloat16()
    seen = []

    def attention(q, *others, **options):
        seen.append(q)
        return gated_linear_attention(q, *others, **options)

    def solved(product, b, *operands, **options):
        seen.append(b)
        return solve(product, b, *operands, **options)

    monkeypatch.setattr(mesanet, "gated_linear_attention", attention)
    with torch.autocast("cpu", torch.bfloat16):
        mixer(x)
        monkeypatch.setattr(mesanet, "solve", solved)
        mixer.step(x[:, 0], mixer.init_state(2, 1))
    # the solution of the sequence, which reads last, and the query of the step
    for y in seen[-2:]:
        assert not torch.equal(y, y.bfloat16().to(y.dtype))


def operations(call, *, gradient):
    """Operations of gated linear attention in call(x) and, with a gradient, in its backward pass."""
    with FakeTensorMode(), count_operations() as count, torch.set_grad_enabled(gradient):
        y = call(torch.empty(2, 40, 12, requires_grad=gradient))
        if gradient:
            y.sum().backward()
    return count.by_operator["gated_linear_attention"]


def test_every_step_of_a_solution_counts_and_is_not_differentiated():
    def mixer(x):
        return MODELS.load("mesanet")(num_layers=1, d_model=12, num_heads=3).build(SPEC).mixers[0](x)

    def once(x):
        q = x.unflatten(-1, (3, 4))
        return gated_linear_attention(q, q, q, x[..., :3])

    forward, both = (operations(once, gradient=gradient) for gradient in (False, True))
    assert operations(mixer, gradient=False) == 31 * forward
    # the products of the systems once more with a gradient, and that of the output
    assert operations(mixer, gradient=True) == 60 * forward + 2 * both
