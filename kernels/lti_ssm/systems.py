"""The two forms in which a step takes a diagonal state space model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.positions import bounded_exp


class ContinuousSystem(NamedTuple):
    """The tensors that `lti_ssm` takes, for systems of every kind."""

    A: Tensor
    """[D, N] or [N]."""
    B: Tensor | None
    """[D, N]; None: ones."""
    C: Tensor
    """[D, N]."""
    dt: Tensor
    """[D], positive."""
    D: Tensor | None = None
    """The skip [D]; None: zero."""


class DiagonalSystem(NamedTuple):
    """The trained parameters of a system with N complex states, A = -exp(log_A_real) + i A_imag and dt = exp(log_dt).

    A kernel reads them as they are, so that no other kernel has to compute A and dt at every step.
    """

    log_dt: Tensor
    """[D]."""
    log_A_real: Tensor
    """[D, N], or [1, N] where all channels share their eigenvalues."""
    A_imag: Tensor
    """The imaginary parts of A, in the shape of log_A_real."""
    B: Tensor | None
    """[D, N, 2], real and imaginary parts; None: one."""
    C: Tensor
    """[D, N, 2]."""
    skip: Tensor
    """D [D]."""

    def continuous(self, dtype: torch.dtype, dt_scale: float) -> ContinuousSystem:
        """The same system with A and dt computed in a real dtype and dt multiplied by dt_scale."""
        A = torch.complex(-bounded_exp(self.log_A_real.to(dtype)), self.A_imag.to(dtype))
        B = None if self.B is None else torch.view_as_complex(self.B.to(dtype))
        C = torch.view_as_complex(self.C.to(dtype))
        return ContinuousSystem(A, B, C, bounded_exp(self.log_dt.to(dtype)) * dt_scale, self.skip)

    def check(self, op: str, width: int, num_states: int) -> None:
        """Raises ValueError where a parameter has not the shape that a state [B, width, num_states] asks for."""
        rows = 1 if self.log_A_real.ndim and len(self.log_A_real) == 1 else width
        wanted: dict[str, tuple[Tensor | None, Allowed]] = {
            "log_dt": (self.log_dt, (width,)),
            "log_A_real": (self.log_A_real, (rows, num_states)),
            "A_imag": (self.A_imag, (rows, num_states)),
            "B": (self.B, (width, num_states, 2)),
            "C": (self.C, (width, num_states, 2)),
            "skip": (self.skip, (width,)),
        }
        check_shapes(op, wanted, to_go_with="the state")
