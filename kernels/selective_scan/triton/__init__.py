"""The selective scan in Triton: one pass over time, or two where there are too few channels to fill the chip.

    h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n];   y_t = (sum_n C_t[n] h_t[n] + D x_t) silu(z_t)

LANES neighbouring threads own one channel d, N / LANES states each, and go through time; decays and states never
leave their registers. What a step needs once for a channel (softplus, gate, loads, store) is done by one of the
threads, each for another of LANES steps, and handed round. x, dt, z, y are channel-last, so a warp reads 32 / LANES
neighbouring channels of a step, a group of steps ahead of their use. B and C are the same for all channels: a lane
holds one 32-bit word of a row [B_t, C_t], two states of bfloat16 or one of float32, and hands it to the others when its
step comes. They are read where they lie; what does not lie in such words is copied first (`_words_of`).

Long sequences on few channels are cut into segments. Their ends from a zero start come first (`y=None`), with the sum
of dt, from which follows the decay of a whole segment, exp(A sum dt); `_pass_kernel` turns the ends into starts; then
all segments run side by side. That computes every exponential twice.

Backward, with g_t the gradient of h_t and r_t that of h_{t-1} through the decay (README),

    g_t = C_t dp_t + r_{t+1};   r_t = exp(dt_t A) g_t;   dp_t = dy_t silu(z_t)

goes through time in reverse, segments as before. Forward keeps the state every CHUNK steps; a chunk is first swept for
the states before each of its groups of steps, kept in scratch memory, then a group at a time is computed again and
taken back. dB and dC are sums over channels: over a warp by a butterfly in which each lane ends with the sum of one
number of the row, over the warps of a program through shared memory, and over programs in `_add_parts_kernel`;
those of dA, dbias and dskip over programs in `_add_totals_kernel`.

float32: states, decays, step sizes, sums. Deterministic: every sum has a fixed order, and what is added to in memory
has one writer. Limits: real A, N <= 64.
Kept for backward besides the inputs: 4 N / CHUNK bytes for each x.
"""

from __future__ import annotations

from kernels.selective_scan.triton.autograd import selective_scan_triton
from kernels.selective_scan.triton.plan import TUNING, Tile, Tuning
from kernels.selective_scan.triton.step import selective_scan_step_triton

__all__ = ["TUNING", "Tile", "Tuning", "selective_scan_step_triton", "selective_scan_triton"]
