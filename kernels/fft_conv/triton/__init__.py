"""The long convolution in Triton. See the README for derivations and cost.

plan.py             which algorithm, which tiles: `Tuning`, `ToeplitzPlan`, `SpectraPlan`
gates.py            inputs as the kernels read them: gate times x, with wide loads, or as halves
epilogue.py         from a sum over taps to outputs: skip, output gate, further outputs
products.py         up to 1023 taps, and float32: y and dx from products with Toeplitz matrices, without a transform
spectra.py          more taps: y and dx from short transforms, which are products with small matrices
outer_stage.py      most taps: transforms of whole sequences through memory, to rows and back
inner_stage.py      the rows: convolution and gradients of each by itself
half_size.py        float32 beyond products: cuFFT's transforms, and all passes around them
at_positions.py     float32 at few positions: sums over the inputs before each of them
tables.py           the matrices of these transforms
taps_gradient.py    the gradient of the taps from spectra of x and dy
chunks_gradient.py  the gradient of the taps from products of chunks of x and dy
autograd.py         the operator, forward and backward

Layout: time contiguous; y and the gradients are as well. Inputs in another layout are transposed
(`kernels.transpose.time_last`). float32: sums, gates, the skip. Deterministic: no atomics. Limits: `has_kernels` in
`plan.py`; longer filters take the transforms of `half_size.py` in float32.
"""

from subquad.kernels.fft_conv.triton.autograd import fft_conv_triton

__all__ = ["fft_conv_triton"]
