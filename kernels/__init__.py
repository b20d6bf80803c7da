"""Table of contents: every operator and the workload that describes it to the benchmark."""

OPERATORS = {
    "attention": ("subquad.kernels.attention.workloads:WORKLOAD", "causal softmax attention, the quadratic yardstick"),
    "attention_step": ("subquad.kernels.attention.workloads:STEP", "one step of it against a cache of keys and values"),
    "cauchy": (
        "subquad.kernels.cauchy.workloads:WORKLOAD",
        "sums of fractions over conjugate poles, which make S4's filter",
    ),
    "causal_conv1d": (
        "subquad.kernels.causal_conv1d.workloads:WORKLOAD",
        "short causal depthwise convolution, W 2 to 4",
    ),
    "delta_rule": (
        "subquad.kernels.delta_rule.workloads:WORKLOAD",
        "delta rule with decays: DeltaNet, Gated DeltaNet, KDA",
    ),
    "delta_rule_step": ("subquad.kernels.delta_rule.workloads:STEP", "one step of it"),
    "embedding": ("subquad.kernels.embedding.workloads:WORKLOAD", "lookup of embeddings with a gradient of its own"),
    "fft_conv": (
        "subquad.kernels.fft_conv.workloads:WORKLOAD",
        "long causal convolution with a filter as long as the input",
    ),
    "fft_conv_at": (
        "subquad.kernels.fft_conv.workloads:AT",
        "the same convolution at few positions, without a transform",
    ),
    "float32_matmul": (
        "subquad.kernels.float32_matmul.workloads:WORKLOAD",
        "product of float32 matrices on matrix units",
    ),
    "forget_gate": ("subquad.kernels.forget_gate.workloads:WORKLOAD", "forget gate in log space with its complement"),
    "gated_linear_attention": (
        "subquad.kernels.gated_linear_attention.workloads:WORKLOAD",
        "linear attention with decays: RetNet, GLA, HGRN2",
    ),
    "gated_linear_attention_step": ("subquad.kernels.gated_linear_attention.workloads:STEP", "one step of it"),
    "gated_slot_attention": (
        "subquad.kernels.gated_slot_attention.workloads:WORKLOAD",
        "M gated slots, read by a softmax",
    ),
    "generalised_delta_rule": (
        "subquad.kernels.delta_rule.workloads:GENERALISED",
        "delta rule that removes and adds in two directions: RWKV-7",
    ),
    "h3_inner_step": ("subquad.kernels.h3_inner.workloads:STEP", "one step between the linear maps of an H3 layer"),
    "linear_cross_entropy": (
        "subquad.kernels.linear_cross_entropy.workloads:WORKLOAD",
        "readout and cross entropy, without the logits of all tokens",
    ),
    "lti_ssm": (
        "subquad.kernels.lti_ssm.workloads:WORKLOAD",
        "diagonal time-invariant state space model: S4D, DSS, H3",
    ),
    "lti_ssm_step": ("subquad.kernels.lti_ssm.workloads:STEP", "one step of it, state in place"),
    "mamba_inner_step": (
        "subquad.kernels.mamba_inner.workloads:STEP",
        "one step between the wide maps of a Mamba block",
    ),
    "norm": (
        "subquad.kernels.norm.workloads:WORKLOAD",
        "layer and RMS norm with the residual add before and a gate behind",
    ),
    "rotary": ("subquad.kernels.rotary.workloads:WORKLOAD", "rotary positions of queries and keys"),
    "rotated_keys": ("subquad.kernels.rotated_keys.workloads:WORKLOAD", "rotated keys and queries of Mamba-3"),
    "rwkv6_inputs": (
        "subquad.kernels.rwkv6_inputs.workloads:WORKLOAD",
        "RWKV-6 between its linear maps and its recurrence",
    ),
    "rwkv7_inputs": (
        "subquad.kernels.rwkv7_inputs.workloads:WORKLOAD",
        "RWKV-7 between its linear maps and the delta rule",
    ),
    "selective_scan": ("subquad.kernels.selective_scan.workloads:WORKLOAD", "Mamba's input-dependent recurrence"),
    "selective_scan_step": ("subquad.kernels.selective_scan.workloads:STEP", "one step of it, state in place"),
    "skinny_linear": (
        "subquad.kernels.skinny_linear.workloads:WORKLOAD",
        "linear map of few rows with its norm and residual",
    ),
    "slstm": ("subquad.kernels.slstm.workloads:WORKLOAD", "scalar memory of xLSTM, gates that read the last output"),
    "slstm_step": ("subquad.kernels.slstm.workloads:STEP", "one step of it, state in place"),
    "squared_relu": ("subquad.kernels.squared_relu.workloads:WORKLOAD", "squared ReLU of RWKV's channel mixing"),
    "ssd": ("subquad.kernels.ssd.workloads:WORKLOAD", "state space duality with weights: Mamba-2, Mamba-3"),
    "ssd_steps": ("subquad.kernels.ssd.workloads:STEPS", "step sizes, decays and weights of Mamba-2 and Mamba-3"),
    "ssm_kernel": (
        "subquad.kernels.ssm_kernel.workloads:WORKLOAD",
        "convolution filter of a diagonal state space model",
    ),
    "swiglu": ("subquad.kernels.swiglu.workloads:WORKLOAD", "gated linear unit of a channel mixer"),
    "token_shift": ("subquad.kernels.token_shift.workloads:WORKLOAD", "inputs of RWKV mixed with the ones before them"),
    "wkv": ("subquad.kernels.wkv.workloads:WORKLOAD", "weighted mean of values of RWKV-4"),
    "wkv_step": ("subquad.kernels.wkv.workloads:STEP", "one step of it, state in place"),
}
