"""Table of contents: every operator and the workload that describes it to the benchmark."""

OPERATORS = {
    "causal_conv1d": ("kernels.causal_conv1d.workloads:WORKLOAD", "short causal depthwise convolution, W 2 to 4"),
}
