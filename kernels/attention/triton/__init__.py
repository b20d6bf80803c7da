"""The Triton kernels of attention: one step against a cache, and whole sequences in float32."""

from subquad.kernels.attention.triton.autograd import attention_triton
from subquad.kernels.attention.triton.step import attention_step_triton

__all__ = ["attention_step_triton", "attention_triton"]
