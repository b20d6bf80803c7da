"""Equation 6 of the paper of gated slot attention, written down as it stands there, equals our operator in fp64."""

import torch

from subquad.kernels.gated_slot_attention import gated_slot_attention

T, K, V, M = 24, 5, 3, 4


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
