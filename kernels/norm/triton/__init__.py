"""The norm in Triton. See the README for derivations and cost.

plan.py      tiles: rows of a program, programs of the backward pass
forward.py   y, the sum x + residual, and the statistics of every row
backward.py  all gradients in one pass, and the sums over programs
autograd.py  the operator

Layout: rows [R, D] with D contiguous, where R counts all axes but the last. x, residual, sum, y and their gradients are
dense. Rows of the gate may lie anywhere: row r at (r // HEADS) stride_outer + (r % HEADS) stride_inner, as in a part of
a projection with heads. A tile is [ROWS, BLOCK_D] with BLOCK_D the power of two that holds D, so a row never leaves its
program.

float32: sums, statistics, products, partial sums of dweight and dbias. Deterministic: partial sums, no atomics. Limits:
D <= 8192. Bytes, with e_x, e_r, e_y those of an element of x, residual and y: e_x + 2 e_r + e_y forward, and backward
e_y + 3 e_r + e_x; without a residual e_x + e_y and e_y + 2 e_x. FLOPs: about 8 an element forward and 16 backward.
"""

from kernels.norm.triton.autograd import norm_triton

__all__ = ["norm_triton"]
