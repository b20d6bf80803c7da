"""Table of contents: every registered model, the place of its configuration, and a description in one line.

The names are those of the papers' tables.
"""

from subquad.suite.registry import Registry, entries

_PLACES = {
    "attention": ("attention:AttentionConfig", "softmax attention, GPT-2 style (Vaswani et al. 2017)"),
    "transformer++": ("transformer:TransformerPPConfig", "attention with RoPE, SwiGLU and RMSNorm"),
    "gated-attention": ("gated_attention:GatedAttentionConfig", "transformer++, heads with gates (Qiu et al. 2025)"),
    "pythia": ("pythia:PythiaConfig", "GPT-NeoX, attention beside an MLP (Biderman et al. 2023)"),
    "linear-attention": (
        "linear_attention:LinearAttentionConfig",
        "attention without softmax (Katharopoulos et al. 2020)",
    ),
    "based": ("based:BasedConfig", "linear attention, a Taylor series of exp (Arora et al. 2024)"),
    "retnet": ("retnet:RetNetConfig", "linear attention, one fixed decay per head (Sun et al. 2023)"),
    "gla": ("gla:GLAConfig", "gated linear attention, one decay per key channel (Yang et al. 2023)"),
    "hgrn2": ("hgrn2:HGRN2Config", "gated linear RNN with state expansion (Qin et al. 2024)"),
    "lightning": ("lightning:LightningConfig", "linear attention, decays by head and layer (Qin et al. 2024)"),
    "abc": ("abc_attention:ABCConfig", "attention with bounded memory control (Peng et al. 2022)"),
    "gsa": ("gsa:GSAConfig", "gated slot attention (Zhang et al. 2024)"),
    "s4": ("s4:S4Config", "state space model, diagonal less low rank (Gu et al. 2022)"),
    "s4d": ("s4d:S4DConfig", "diagonal state space model (Gu et al. 2022)"),
    "dss-softmax": ("dss:DSSSoftmaxConfig", "diagonal state spaces, row-softmax (Gupta et al. 2022)"),
    "dss-exp": ("dss:DSSExpConfig", "diagonal state spaces, Re(A) = -exp (Gupta et al. 2022)"),
    "dss-exp-no-scale": ("dss:DSSExpNoScaleConfig", "dss-exp without its scale factor, an ablation"),
    "gss": ("gss:GSSConfig", "gated state spaces (Mehta et al. 2022)"),
    "h3": ("h3:H3Config", "shift and diagonal SSM with multiplicative gates (Fu et al. 2023)"),
    "hyena": ("hyena:HyenaConfig", "gated long convolutions, implicit filters (Poli et al. 2023)"),
    "mamba": ("mamba:MambaConfig", "selective state space model (Gu and Dao 2023)"),
    "mamba2": ("mamba2:Mamba2Config", "state space duality, one decay per head (Dao and Gu 2024)"),
    "mamba3": ("mamba3:Mamba3Config", "Mamba-2 with rotations and a trapezoid (Lahoti et al. 2026)"),
    "deltanet": ("deltanet:DeltaNetConfig", "linear attention with the delta rule (Yang et al. 2024)"),
    "gated-deltanet": ("deltanet:GatedDeltaNetConfig", "delta rule, one decay per head (Yang et al. 2024)"),
    "comba": ("comba:CombaConfig", "delta rule with feedback and corrected output (Hu et al. 2025)"),
    "kda": ("deltanet:KDAConfig", "delta rule, one decay per key channel (Kimi Team 2025)"),
    "gated-deltanet2": (
        "gated_deltanet2:GatedDeltaNet2Config",
        "delta rule, gates that erase and that write (Hatamizadeh et al. 2026)",
    ),
    "delta-product": ("deltanet:DeltaProductConfig", "several delta-rule steps per token (Siems et al. 2025)"),
    "mesanet": ("mesanet:MesaNetConfig", "least squares over the past at each position (von Oswald et al. 2025)"),
    "rwkv": ("rwkv:RWKVConfig", "RWKV-4, a weighted mean over the past (Peng et al. 2023)"),
    "rwkv6": ("rwkv6:RWKV6Config", "linear attention, one decay per key channel (Peng et al. 2024)"),
    "rwkv7": ("rwkv7:RWKV7Config", "decay by channel and a generalised delta rule (Peng et al. 2025)"),
    "slstm": ("slstm:SLSTMConfig", "xLSTM's scalar memory, gates read the output (Beck et al. 2024)"),
    "mlstm": ("mlstm:MLSTMConfig", "xLSTM's matrix memory, exponential gates (Beck et al. 2024)"),
    "sashimi": ("sashimi:SashimiConfig", "U-Net over time of any blocks (Goel et al. 2022)"),
    "hybrid": ("hybrid:HybridConfig", "layers with the mixers of different models, from any list"),
}

MODELS = Registry("model", entries("subquad.models", _PLACES))
