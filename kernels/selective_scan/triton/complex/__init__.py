"""The selective scan with complex states in Triton.

Kept for the complex rows of Mamba's figures 7 and 10, because plain PyTorch takes a multiple of the time and keeps all
states of a block in memory; a state space model with complex A is also what people bring to the operator first.

    h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n];   y_t = (Re sum_n C_t[n] h_t[n] + skip x_t) silu(z_t)

for each channel, of which there are D; letters are those of `kernels.selective_scan.triton`, whose kernels take real
states only. A complex state costs a sine, a cosine and four multiply-adds where a real one costs a single multiply-add,
so that the exchange between threads matters less here, and the kernels are plain Triton without inline PTX.

A program owns BLOCK_D channels of one batch row. LANES neighbouring threads own a channel, with NT states each: state
n = i LANES + q is number i of lane q. Real and imaginary parts are separate tensors [BLOCK_D, LANES], so `h` is a tuple
of 2 NT tensors, first all real parts. A group of STEPS steps is loaded before it is computed. Where few channels leave
the chip empty, time is cut into segments that run side by side, as in `kernels.selective_scan.triton.segments`.

float32: states, decays, step sizes and sums. Sine and cosine are polynomials with an error of a rounding for
|dt Im A| < 10^4; beyond, they are bounded but not accurate. Results are deterministic. Limits: N <= 64.

Cost: forward keeps the state before every group, 8 N / STEPS bytes for each element of x; backward computes decays and
states of a group again.
"""

from __future__ import annotations

from subquad.kernels.selective_scan.triton.complex.autograd import selective_scan_complex
from subquad.kernels.selective_scan.triton.complex.plan import TUNING, Tuning

__all__ = ["TUNING", "Tuning", "selective_scan_complex"]
