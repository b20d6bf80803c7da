"""Version of every operator, part of the identity of a result.

A version is raised when the results of any of the operator's backends change by more than rounding. Operators may run
on kernels of another one (gated slot attention on those of gated linear attention): then both are raised.
"""

VERSIONS = {
    "attention": 1,
    "cauchy": 1,
    "causal_conv1d": 1,
    "delta_rule": 1,
    "embedding": 1,
    "fft_conv": 1,
    "fft_conv_at": 1,
    "float32_matmul": 1,
    "forget_gate": 1,
    "gated_linear_attention": 1,
    "gated_slot_attention": 1,
    "generalised_delta_rule": 1,
    "h3_inner": 1,
    "linear_cross_entropy": 1,
    "lti_ssm": 1,
    "mamba_inner": 1,
    "norm": 1,
    "rotary": 1,
    "rotated_keys": 4,
    "rwkv6_inputs": 1,
    "rwkv7_inputs": 3,
    "selective_scan": 1,
    "skinny_linear": 1,
    "slstm": 1,
    "squared_relu": 1,
    "ssd": 1,
    "ssd_steps": 1,
    "ssm_kernel": 1,
    "swiglu": 1,
    "token_shift": 1,
    "wkv": 1,
}
