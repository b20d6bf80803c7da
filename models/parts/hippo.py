"""HiPPO matrices, and their form as a diagonal matrix less one of low rank.

    x' = A x + B u,   A = V (Lambda - P P^*) V^*,   B = V B~,   V unitary

Source: HiPPO (Gu et al. 2020) and S4 (Gu et al. 2022, section 3.1 and appendix C) for LegS and LegT; How to Train Your
HiPPO (Gu et al. 2023) for FouT. Scales of time and signs are those of the authors' code (state-spaces/s4 at
070384aac428583d0b817c0e5393078bfef982f0, models/s4/s4.py, `transition` and `rank_correction`).

Departure from that code: eigenvectors have no natural phase, and there it is that of the eigenvalue routine, with the
imaginary part of B~ clipped to [-2, 2]. Here the phases are those that make B~ real and positive, on every machine.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Measure = Literal["legs", "legt", "fout"]
RANKS: dict[Measure, int] = {"legs": 1, "legt": 2, "fout": 1}
"""Rank of what makes each matrix normal."""


def transition(measure: Measure, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A [N, N] and B [N] of a measure, in float64. N is even.

    legs: the whole past, scaled:        A_nk = -sqrt(2n+1) sqrt(2k+1) below the diagonal and -(n+1) on it
    legt: a window, Legendre:            A_nk = -sqrt(2n+1) sqrt(2k+1) / 2, times (-1)^(n-k) above the diagonal
    fout: a window, Fourier:             A = pi S - B B^T with S skew and frequencies 0, 1, 2, ... in pairs
    """
    n = np.arange(size)
    root = np.sqrt(2.0 * n + 1)
    below = n[:, None] > n
    if measure == "legs":
        return -np.where(below, np.outer(root, root), np.diag(n + 1.0)), root
    if measure == "legt":
        signs = np.where(n[:, None] >= n, 1.0, (-1.0) ** (n[:, None] - n))
        return -np.outer(root, root) * signs / 2, root / 2
    B = np.where(n % 2 == 0, np.sqrt(2.0), 0.0)
    B[0] = 1.0
    # a pair of coordinates (2 j, 2 j + 1) is shared by no frequency but j
    frequencies = np.where(n[1:] % 2 == 1, n[1:] // 2, 0)
    skew = np.pi * (np.diag(frequencies, -1) - np.diag(frequencies, 1))
    return skew - np.outer(B, B), B


def low_rank(measure: Measure, size: int) -> np.ndarray:
    """P [rank, N] such that A + P^T P is a multiple of the identity and a skew matrix."""
    n = np.arange(size)
    if measure == "legs":
        return np.sqrt(n + 0.5)[None]
    if measure == "fout":
        return transition(measure, size)[1][None]
    root = np.sqrt(n + 0.5)
    return np.stack([np.where(n % 2 == 1, root, 0.0), np.where(n % 2 == 0, root, 0.0)])


def diagonal_less_low_rank(measure: Measure, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lambda [N/2], P [rank, N/2], B~ [N/2] and V [N, N/2], complex128, one of each conjugate pair.

    A = 2 Re(V diag(Lambda) V^*) - p^T p with p = 2 Re(P V^T), and B = 2 Re(V B~).
    """
    A, B = transition(measure, size)
    P = low_rank(measure, size)
    normal = A + P.T @ P
    real = np.mean(np.diag(normal))
    imaginary, V = np.linalg.eigh(-1j * (normal - normal.T) / 2)
    # ascending, so that the second half is one of each conjugate pair
    imaginary, V = imaginary[size // 2 :], V[:, size // 2 :]
    if imaginary[0] < 1e-6:
        # the pair of frequency zero of fout lies in the first two coordinates
        imaginary[0] = 0.0
        V[:, 0] = 0.0
        V[:2, 0] = np.array([1.0, -1j]) / np.sqrt(2)
    phase = V.conj().T @ B
    V = V * (phase / np.abs(phase))
    parts = real + 1j * imaginary, P @ V.conj(), V.conj().T @ B, V
    Lambda, P_tilde, B_tilde, vectors = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    return Lambda, P_tilde, B_tilde, vectors
