"""The sums as a product of real matrices, in plain PyTorch.

Both fractions of a pair have the denominator r = (w - q Lambda)(w - q conj(Lambda)), and their sum is

    v / (w - q Lambda) + conj(v) / (w - q conj(Lambda)) = (w 2 Re(v) - q 2 Re(v conj(Lambda))) / r

so two sums of 1 / r with real weights give U. They are one product of matrices [2 M, N] and [N, 2 F] for each channel,
with M the number of residues of a pole. The tensors of size [D, N, F] are those on the way to 1 / r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.cauchy.reference import points


def _products_are_exact() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


# torch.compile cannot trace that question; it compiles again where the answer is another one
_products_are_exact._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cauchy_matrix(residues: Tensor, Lambda: Tensor, dt: Tensor, s: Tensor) -> Tensor:
    """U [.., D, F] of arguments as those of `cauchy`."""
    w, q = points(s, dt)
    pole, at = Lambda.unsqueeze(-1), q.unsqueeze(1)
    # the product form: multiplied out, w^2 - 2 w q Re(Lambda) + q^2 |Lambda|^2 would cancel near a pole
    shared = torch.view_as_real(1 / ((w - at * pole) * (w - at * pole.conj())))
    weights = torch.stack([2 * residues.real, 2 * (residues * Lambda.conj()).real])
    # the sums cancel too far for TF32
    exact = dt.dtype if _products_are_exact() else torch.float64
    sums = weights.to(exact).flatten(0, -3).transpose(0, 1) @ shared.to(exact).flatten(-2)
    sums = torch.view_as_complex(sums.to(dt.dtype).unflatten(-1, (-1, 2))).transpose(0, 1)
    sums = sums.unflatten(0, weights.shape[:-2])
    return w * sums[0] - q * sums[1]
