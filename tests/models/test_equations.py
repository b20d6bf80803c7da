"""The equations and listings of the papers, written down as they stand there, equal our operators in fp64."""

import torch

from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.gated_slot_attention import gated_slot_attention
from subquad.kernels.ssm_kernel import ssm_kernel

T, K, V, M, CHUNK = 24, 5, 3, 4, 8


def gsa_inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(T, width, generator=generator, dtype=torch.float64)

    return draw(K), draw(K), draw(V), torch.sigmoid(draw(M))


def one_head(x: torch.Tensor) -> torch.Tensor:
    """[T, D] as [B, T, H, D] with one row and one head."""
    return x[None, :, None]


def ours(q, k, v, alpha):
    return gated_slot_attention(*map(one_head, (q, k, v, 1 - alpha, alpha.log())), scale=1.0, backend="torch")[0, :, 0]


def test_gated_slot_attention_is_equation_6():
    q, k, v, alpha = gsa_inputs()
    keys, values = q.new_zeros(M, K), q.new_zeros(M, V)
    outputs = []
    for t in range(T):
        keys = alpha[t].diag() @ keys + torch.outer(1 - alpha[t], k[t])
        values = alpha[t].diag() @ values + torch.outer(1 - alpha[t], v[t])
        outputs.append(values.T @ torch.softmax(keys @ q[t], dim=0))
    torch.testing.assert_close(ours(q, k, v, alpha), torch.stack(outputs), rtol=1e-12, atol=1e-12)


def test_equation_6_is_the_two_passes_of_gated_linear_attention_of_equation_7():
    q, k, v, alpha = gsa_inputs()
    log_alpha = one_head(alpha.log())
    first = gated_linear_attention(
        *map(one_head, (q, k, 1 - alpha)), log_decay=log_alpha, decay_on="value", scale=1.0, backend="torch"
    )
    second = gated_linear_attention(
        torch.softmax(first, dim=-1), *map(one_head, (1 - alpha, v)), log_decay=log_alpha, scale=1.0, backend="torch"
    )
    torch.testing.assert_close(ours(q, k, v, alpha), second[0, :, 0], rtol=1e-12, atol=1e-12)


def test_listing_1_in_chunks_equals_the_recurrence():
    # Listing 1 without its second chunking, which only avoids overflow; g is the running sum of log alpha in a chunk
    q, k, v, alpha = gsa_inputs()
    inputs = (x.view(T // CHUNK, CHUNK, -1) for x in (q, k, v, 1 - alpha, alpha.log()))
    key_state, value_state = q.new_zeros(K, M), q.new_zeros(M, V)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.float64).tril()
    outputs = []
    for q_c, k_c, v_c, s_c, log_alpha in zip(*inputs, strict=True):
        g = log_alpha.cumsum(0)
        rest = (g[-1] - g).exp()
        inside = torch.einsum("ij,jm,jm->im", (q_c @ k_c.T) * past, s_c, (-g).exp())
        slots = torch.softmax((q_c @ key_state + inside) * g.exp(), dim=-1)
        key_state = key_state * g[-1].exp() + k_c.T @ (s_c * rest)
        weights = ((slots * g.exp()) @ (s_c * (-g).exp()).T) * past
        outputs.append((slots * g.exp()) @ value_state + weights @ v_c)
        value_state = g[-1].exp()[:, None] * value_state + (s_c * rest).T @ v_c
    torch.testing.assert_close(ours(q, k, v, alpha), torch.cat(outputs), rtol=1e-10, atol=1e-10)


def state_space(states: int = 4):
    """A state space with a full, diagonalisable A, the eigenvalues of A, and B and C in its eigenbasis."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(states, states, generator=generator, dtype=torch.complex128) - 2 * torch.eye(states)
    B, C = torch.randn(2, states, generator=generator, dtype=torch.complex128)
    eigenvalues, vectors = torch.linalg.eig(A)
    return A, B, C, eigenvalues, torch.linalg.solve(vectors, B), C @ vectors


def test_proposition_1_of_dss_gives_every_state_space_a_diagonal_one():
    dt, length = 0.1, 16
    A, B, C, eigenvalues, b, c = state_space()
    # equation 4: the kernel of (A, B, C) by powers of the discrete A
    discrete = torch.linalg.matrix_exp(A * dt)
    held = torch.linalg.solve(A, discrete - torch.eye(len(A), dtype=A.dtype)) @ B
    kernel = torch.stack([C @ torch.linalg.matrix_power(discrete, k) @ held for k in range(length)])
    P = eigenvalues[:, None] * dt * torch.arange(length)
    # (a), where w~ is the product of B and C in the eigenbasis
    exponential = ((c * b / eigenvalues) * (torch.exp(eigenvalues * dt) - 1)) @ torch.exp(P)
    torch.testing.assert_close(exponential, kernel, rtol=1e-10, atol=1e-10)
    # (b), where w takes up the sum of each row: w = w~ (e^(L lambda dt) - 1)
    softmax = (c * b * (torch.exp(length * eigenvalues * dt) - 1) / eigenvalues) @ (P.exp() / P.exp().sum(1, True))
    torch.testing.assert_close(softmax, kernel, rtol=1e-10, atol=1e-10)


def test_algorithm_1_of_dss_is_the_kernel_of_dss_softmax():
    generator = torch.Generator().manual_seed(2)
    states, channels, length = 4, 3, 16
    eigenvalues = torch.complex(
        torch.randn(states, generator=generator, dtype=torch.float64),
        torch.randn(states, generator=generator, dtype=torch.float64),
    )
    w = torch.randn(channels, states, generator=generator, dtype=torch.complex128)
    dt = torch.rand(channels, generator=generator, dtype=torch.float64)
    P = (dt[:, None] * eigenvalues)[..., None] * torch.arange(length)
    S = P.exp() / P.exp().sum(-1, keepdim=True)
    K_bar = ((w / eigenvalues)[..., None] * S).sum(1).real
    found = ssm_kernel(
        eigenvalues.expand(channels, states), None, w, dt, length, conj_pairs=False, discretization="dss-softmax"
    )
    # softmax with epsilon 1e-7 in place of the exact one (appendix A.2)
    torch.testing.assert_close(found, K_bar, rtol=1e-5, atol=1e-5)
