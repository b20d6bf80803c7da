"""The norm in Triton. See the README for derivations and cost.

plan.py      tiles: rows of a program, programs of the backward pass
forward.py   y, the sum x + residual, and the statistics of every row
backward.py  all gradients in one pass, and the sums over programs
autograd.py  the operator

Layout: rows [R, D] with D contiguous, where R counts all axes but the last. x, residual, sum, y and their gradients are
dense. Rows of the gate may lie anywhere: row r at (r // GATE_HEADS) gate_outer + (r % GATE_HEADS) gate_inner, as in a
part of a projection with heads. A tile is [ROWS, BLOCK_D] with BLOCK_D the power of two that holds D, so a row never
leaves its program. With a weight [H, D], row r has that of head r % H. The rows of a forward tile are consecutive.
Those of a backward tile are BLOCK_H heads of ROWS / BLOCK_H tokens, so that each row of the sums belongs to one head;
BLOCK_H is a power of two that divides H, and where it is less than H, different programs have different heads.

float32: sums, statistics, products, partial sums of dweight and dbias. Deterministic: partial sums, no atomics. Limits:
D <= 8192. Bytes, with e_x, e_r, e_y those of an element of x, residual and y: e_x + 2 e_r + e_y forward, and backward
e_y + 3 e_r + e_x; without a residual e_x + e_y and e_y + 2 e_x. FLOPs: about 8 an element forward and 16 backward.
"""

from subquad.kernels.norm.triton.autograd import norm_triton
from subquad.kernels.norm.triton.plan import Factors, Options

__all__ = ["Factors", "Options", "norm_triton"]
