"""The selective scan in Triton.

    h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n];   y_t = (sum_n C_t[n] h_t[n] + skip x_t) silu(z_t)

for each channel, of which there are D; the paper calls skip D. dt is the step size after bias and softplus.

LANES neighbouring threads own a channel, or CHANNELS of them, with NT = N / LANES states each, and go through time;
decays and states stay in their registers. What a channel needs once a step (loads, softplus, gate, store) is divided
among its lanes, each of which does it for one of LANES steps and hands the result to the others. A group of STEPS steps
is loaded while the group before it is computed. x, dt, z and y have contiguous channels, so a warp reads 32 / LANES
neighbouring channels of a step at once. B_t and C_t are the same for all channels: each lane of a warp loads one 32-bit
word of them, two bfloat16 or one float32, and the others fetch it from that lane (`rows.py`).

Where few channels leave the chip empty, time is cut into segments that run side by side (`segments.py`).

The kernels of `forward.py` and `backward.py` take all dtypes and sizes. Those of `forward_matrix.py` and
`backward_matrix.py` take bfloat16 with a gate, 8 < N <= 16 and D > 32 on NVIDIA GPUs: the matrix units make u_t B_t and
add over states and channels, which takes the place of most shuffles (`matrix.py`).

float32: states, decays, step sizes and sums. Decays of float32 inputs are precise exponentials; half-precision inputs
take the hardware's 2^x, with a relative error of 2^-22. Results are deterministic: every sum has a fixed order, and
every address has one writer. `matrix.py` says what the matrix units round. Limits: real A and N <= 64.

Cost, for each element of x: forward N exponentials and 3 N multiply-adds, over segments 2 N exponentials and 5 N
multiply-adds. Backward computes states twice and decays three times, over segments four times, and needs 4 N / chunk
bytes besides the inputs.

Letters: h state, g gradient of h, r gradient of h that goes back through the decay, u = dt x, v output before the gate;
T steps, D channels, N states, and E threads of a program. Indices in kernels: i_b batch row, i_d block of channels,
i_s segment, c channel of a thread, n state, q lane of a channel, t step, k group of LANES steps, j step of a group.
Names: p_ pointer, o_ offset, m_ mask, b_ value of every thread.
"""

from __future__ import annotations

from subquad.kernels.selective_scan.triton.autograd import selective_scan_triton
from subquad.kernels.selective_scan.triton.plan import TUNING, Tile, Tuning
from subquad.kernels.selective_scan.triton.step import selective_scan_step_triton

__all__ = ["TUNING", "Tile", "Tuning", "selective_scan_step_triton", "selective_scan_triton"]
