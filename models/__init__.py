"""Table of contents: every registered model, the place of its configuration, and a description in one line.

The names are those of the papers' tables.
"""

from subquad.suite.registry import Entry, Registry

MODELS = Registry(
    "model",
    {
        "attention": Entry(
            "subquad.models.attention:AttentionConfig", "softmax attention, GPT-2 style (Vaswani et al. 2017)"
        ),
        "transformer++": Entry(
            "subquad.models.transformer:TransformerPPConfig", "attention with RoPE, SwiGLU and RMSNorm"
        ),
        "gated-attention": Entry(
            "subquad.models.gated_attention:GatedAttentionConfig", "transformer++, heads with gates (Qiu et al. 2025)"
        ),
        "pythia": Entry(
            "subquad.models.pythia:PythiaConfig", "GPT-NeoX, attention beside an MLP (Biderman et al. 2023)"
        ),
        "linear-attention": Entry(
            "subquad.models.linear_attention:LinearAttentionConfig",
            "attention without softmax (Katharopoulos et al. 2020)",
        ),
        "based": Entry(
            "subquad.models.based:BasedConfig", "linear attention, a Taylor series of exp (Arora et al. 2024)"
        ),
        "retnet": Entry(
            "subquad.models.retnet:RetNetConfig", "linear attention, one fixed decay per head (Sun et al. 2023)"
        ),
        "gla": Entry(
            "subquad.models.gla:GLAConfig", "gated linear attention, one decay per key channel (Yang et al. 2023)"
        ),
        "hgrn2": Entry("subquad.models.hgrn2:HGRN2Config", "gated linear RNN with state expansion (Qin et al. 2024)"),
        "lightning": Entry(
            "subquad.models.lightning:LightningConfig", "linear attention, decays by head and layer (Qin et al. 2024)"
        ),
        "abc": Entry(
            "subquad.models.abc_attention:ABCConfig", "attention with bounded memory control (Peng et al. 2022)"
        ),
        "gsa": Entry("subquad.models.gsa:GSAConfig", "gated slot attention (Zhang et al. 2024)"),
        "s4": Entry("subquad.models.s4:S4Config", "state space model, diagonal less low rank (Gu et al. 2022)"),
        "s4d": Entry("subquad.models.s4d:S4DConfig", "diagonal state space model (Gu et al. 2022)"),
        "dss-softmax": Entry(
            "subquad.models.dss:DSSSoftmaxConfig", "diagonal state spaces, row-softmax (Gupta et al. 2022)"
        ),
        "dss-exp": Entry("subquad.models.dss:DSSExpConfig", "diagonal state spaces, Re(A) = -exp (Gupta et al. 2022)"),
        "dss-exp-no-scale": Entry(
            "subquad.models.dss:DSSExpNoScaleConfig", "dss-exp without its scale factor, an ablation"
        ),
        "gss": Entry("subquad.models.gss:GSSConfig", "gated state spaces (Mehta et al. 2022)"),
        "h3": Entry("subquad.models.h3:H3Config", "shift and diagonal SSM with multiplicative gates (Fu et al. 2023)"),
        "hyena": Entry(
            "subquad.models.hyena:HyenaConfig", "gated long convolutions, implicit filters (Poli et al. 2023)"
        ),
        "mamba": Entry("subquad.models.mamba:MambaConfig", "selective state space model (Gu and Dao 2023)"),
        "mamba2": Entry(
            "subquad.models.mamba2:Mamba2Config", "state space duality, one decay per head (Dao and Gu 2024)"
        ),
        "mamba3": Entry(
            "subquad.models.mamba3:Mamba3Config", "Mamba-2 with rotations and a trapezoid (Lahoti et al. 2026)"
        ),
        "deltanet": Entry(
            "subquad.models.deltanet:DeltaNetConfig", "linear attention with the delta rule (Yang et al. 2024)"
        ),
        "gated-deltanet": Entry(
            "subquad.models.deltanet:GatedDeltaNetConfig", "delta rule, one decay per head (Yang et al. 2024)"
        ),
        "comba": Entry(
            "subquad.models.comba:CombaConfig", "delta rule with feedback and corrected output (Hu et al. 2025)"
        ),
        "kda": Entry("subquad.models.deltanet:KDAConfig", "delta rule, one decay per key channel (Kimi Team 2025)"),
        "gated-deltanet2": Entry(
            "subquad.models.gated_deltanet2:GatedDeltaNet2Config",
            "delta rule, gates that erase and that write (Hatamizadeh et al. 2026)",
        ),
        "delta-product": Entry(
            "subquad.models.deltanet:DeltaProductConfig", "several delta-rule steps per token (Siems et al. 2025)"
        ),
        "mesanet": Entry(
            "subquad.models.mesanet:MesaNetConfig",
            "least squares over the past at each position (von Oswald et al. 2025)",
        ),
        "rwkv": Entry("subquad.models.rwkv:RWKVConfig", "RWKV-4, a weighted mean over the past (Peng et al. 2023)"),
        "rwkv6": Entry(
            "subquad.models.rwkv6:RWKV6Config", "linear attention, one decay per key channel (Peng et al. 2024)"
        ),
        "rwkv7": Entry(
            "subquad.models.rwkv7:RWKV7Config", "decay by channel and a generalised delta rule (Peng et al. 2025)"
        ),
        "slstm": Entry(
            "subquad.models.slstm:SLSTMConfig", "xLSTM's scalar memory, gates read the output (Beck et al. 2024)"
        ),
        "mlstm": Entry(
            "subquad.models.mlstm:MLSTMConfig", "xLSTM's matrix memory, exponential gates (Beck et al. 2024)"
        ),
        "sashimi": Entry("subquad.models.sashimi:SashimiConfig", "U-Net over time of any blocks (Goel et al. 2022)"),
        "hybrid": Entry(
            "subquad.models.hybrid:HybridConfig", "layers with the mixers of different models, from any list"
        ),
    },
)
