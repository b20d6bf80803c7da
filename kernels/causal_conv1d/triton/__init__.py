"""The short causal convolution in Triton. See the README for derivations and cost.

plan.py      tiles and layouts: `Tuning`
steps.py     groups of steps: how they are loaded and stored, and the arithmetic of both directions
forward.py   y and the final state
backward.py  all gradients, and the sums over programs
step.py      one step of decoding
autograd.py  the operators
heads.py     the convolution whose channels are heads of several results

Layout: x [B, T, D] is channel-last (D contiguous) or channel-first (T contiguous); dx has the layout of x, and y too,
unless it is wanted with time contiguous. Then threads exchange results in shared memory, and no copy is needed. A
tile is [BLOCK_D, GROUPS] groups of STEPS consecutive steps, and a thread holds all steps of its groups, so no element
of x moves between threads. Channel-last, step k of all groups is one load, 8 or 16 bytes of channels a thread;
channel-first, a group is one load of 16 bytes and is taken apart in registers. The W - 1 steps beside a group are
loaded once more, mostly from the first cache.

float32: products, sums, activation, partial sums of dweight and dbias. Deterministic: partial sums, no atomics. Limits:
W - 1 <= STEPS. Loads have that width where strides and sizes are multiples of 16, else they are one element wide.
Bytes: 2 elements for each of B T D forward, 3 backward. FLOPs for each: 2 W forward, 6 W backward, and one exponential.
"""

from subquad.kernels.causal_conv1d.triton.autograd import causal_conv1d_step_triton, causal_conv1d_triton
from subquad.kernels.causal_conv1d.triton.heads import causal_conv1d_heads_triton

__all__ = ["causal_conv1d_heads_triton", "causal_conv1d_step_triton", "causal_conv1d_triton"]
