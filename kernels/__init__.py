"""Table of contents: every operator and the workload that describes it to the benchmark."""

OPERATORS = {
    "attention": ("kernels.attention.workloads:WORKLOAD", "causal softmax attention, the quadratic yardstick"),
    "attention_step": ("kernels.attention.workloads:STEP", "one step of it against a cache of keys and values"),
    "causal_conv1d": ("kernels.causal_conv1d.workloads:WORKLOAD", "short causal depthwise convolution, W 2 to 4"),
    "delta_rule": ("kernels.delta_rule.workloads:WORKLOAD", "delta rule with decays: DeltaNet, Gated DeltaNet, KDA"),
    "delta_rule_step": ("kernels.delta_rule.workloads:STEP", "one step of it"),
    "embedding": ("kernels.embedding.workloads:WORKLOAD", "lookup of embeddings with a gradient of its own"),
    "fft_conv": ("kernels.fft_conv.workloads:WORKLOAD", "long causal convolution with a filter as long as the input"),
    "float32_matmul": ("kernels.float32_matmul.workloads:WORKLOAD", "product of float32 matrices on matrix units"),
    "forget_gate": ("kernels.forget_gate.workloads:WORKLOAD", "forget gate in log space with its complement"),
    "gated_linear_attention": (
        "kernels.gated_linear_attention.workloads:WORKLOAD",
        "linear attention with decays: RetNet, GLA, HGRN2",
    ),
    "gated_linear_attention_step": ("kernels.gated_linear_attention.workloads:STEP", "one step of it"),
    "gated_slot_attention": ("kernels.gated_slot_attention.workloads:WORKLOAD", "M gated slots, read by a softmax"),
    "generalised_delta_rule": (
        "kernels.delta_rule.workloads:GENERALISED",
        "delta rule that removes and adds in two directions: RWKV-7",
    ),
    "h3_inner_step": ("kernels.h3_inner.workloads:STEP", "one step between the linear maps of an H3 layer"),
    "linear_cross_entropy": (
        "kernels.linear_cross_entropy.workloads:WORKLOAD",
        "readout and cross entropy, without the logits of all tokens",
    ),
    "lti_ssm": ("kernels.lti_ssm.workloads:WORKLOAD", "diagonal time-invariant state space model: S4D, DSS, H3"),
    "mamba_inner_step": ("kernels.mamba_inner.workloads:STEP", "one step between the wide maps of a Mamba block"),
    "norm": ("kernels.norm.workloads:WORKLOAD", "layer and RMS norm with the residual add before and a gate behind"),
    "rotary": ("kernels.rotary.workloads:WORKLOAD", "rotary positions of queries and keys"),
    "selective_scan": ("kernels.selective_scan.workloads:WORKLOAD", "Mamba's input-dependent recurrence"),
    "selective_scan_step": ("kernels.selective_scan.workloads:STEP", "one step of it, state in place"),
    "skinny_linear": ("kernels.skinny_linear.workloads:WORKLOAD", "linear map of few rows with its norm and residual"),
    "ssm_kernel": ("kernels.ssm_kernel.workloads:WORKLOAD", "convolution filter of a diagonal state space model"),
    "swiglu": ("kernels.swiglu.workloads:WORKLOAD", "gated linear unit of a channel mixer"),
    "wkv": ("kernels.wkv.workloads:WORKLOAD", "weighted mean of values of RWKV-4"),
    "wkv_step": ("kernels.wkv.workloads:STEP", "one step of it, state in place"),
}
