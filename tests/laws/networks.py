"""Tiny networks of every model, for the record of what they compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subquad.suite.contracts import TaskSpec
from subquad.suite.training.numerics import default_dtype
from tests.laws.draw import LENGTH, Draw


@dataclass(frozen=True)
class Network:
    """A tiny network of a model: its options, and the properties of its task."""

    case: str
    options: dict[str, Any] = field(default_factory=dict)
    spec: str = "tokens"
    rate: float = 1.0
    """Sampling rate of the inputs over that trained at (`Backbone.at_rate`)."""


SPECS = {
    "tokens": TaskSpec("tokens", num_classes=16, readout="token", max_length=LENGTH, vocab_size=16),
    "signal": TaskSpec("signal", num_classes=5, readout="sequence", max_length=LENGTH, channels=2),
    "pair": TaskSpec("tokens", num_classes=2, readout="sequence", max_length=LENGTH // 2, vocab_size=16, towers=2),
}

BACKBONE = (
    Network("signal, last position", {"pooling": "last"}, "signal"),
    Network("two towers", {}, "pair"),
    Network("untied", {"tie_embeddings": False, "init_residual": "plain"}),
    Network("only channel mixers scaled", {"init_residual": "scaled-mlp"}),
    *(Network(f"norm={norm}", {"norm": norm}) for norm in ("layer", "rms", "batch")),
    *(Network(f"position={position}", {"position": position}) for position in ("none", "learned", "sinusoidal")),
    *(Network(f"channel_mixer={kind}", {"channel_mixer": kind}) for kind in ("none", "identity", "mlp", "swiglu")),
    Network("postnorm", {"prenorm": False}),
    Network("initialisation of torch", {"torch_init": True}, "signal"),
    Network("weights of torch, mixers by Xavier's rule", {"torch_init": "weights", "mixer_gain": 0.2}),
    Network("short convolution", {"short_conv": 3}),
    Network("BaseConv below", {"base_conv_layers": [0]}),
)
"""Options of the network around every mixer; they run with linear attention, the simplest mixer."""

MODEL_OPTIONS: dict[str, tuple[Network, ...]] = {
    "attention": (
        Network("rope", {"position": "rope"}),
        Network("xpos", {"position": "xpos", "num_heads": 2}),
        Network("window", {"position": "rope", "num_heads": 2, "window": 5}),
        Network("masked heads", {"position": "none", "num_heads": 4, "masked_heads": 3}),
    ),
    "gated-attention": (
        Network("one gate a head", {"gate": "head", "num_heads": 2}),
        Network("window", {"num_heads": 2, "window": 5}),
    ),
    "linear-attention": (
        Network("relu", {"feature_map": "relu"}),
        Network("identity", {"feature_map": "identity", "normalize": False}),
        Network("swish, rms", {"feature_map": "swish", "normalize": False, "output_norm": "rms"}),
    ),
    "pythia": (Network("half of a head rotates", {"num_heads": 2, "rotary_fraction": 0.5}),),
    "based": (Network("three heads", {"d_model": 12, "num_heads": 3, "feature_dim": 3}),),
    "gla": (Network("from attention", {"expand_k": 1.0, "from_attention": True}),),
    "retnet": (Network("from attention", {"expand_v": 1, "from_attention": True}),),
    "hgrn2": (Network("no lower bound", {"lower_bound": False}), Network("expand ratio", {"expand_ratio": 8})),
    "gsa": (
        Network("constant gate", {"gate": "constant", "num_slots": 8}),
        Network("decay of RetNet", {"gate": "retnet", "num_slots": 8}),
        *(Network(f"readout {f}", {"readout": f, "num_slots": 8}) for f in ("identity", "swish", "relu", "relu2")),
    ),
    "abc": (Network("running mean", {"num_slots": 4, "forget": "running-mean"}),),
    "s4": (
        Network("legt", {"init": "legt", "d_state": 8, "output": "linear"}),
        Network("fout", {"init": "fout", "d_state": 8, "tie_A": True}),
        Network("bidirectional", {"bidirectional": True, "d_state": 8}),
        Network("half the rate", {"d_state": 8}, "signal", 0.5),
    ),
    "s4d": (
        Network("inv", {"init": "inv", "discretization": "bilinear"}),
        Network("legs", {"init": "legs", "output": "linear", "d_state": 8}),
        Network("unit response", {"unit_response": True, "tie_A": True}),
        Network("bidirectional", {"bidirectional": True}),
        Network("half the rate", {}, "signal", 0.5),
        Network("real", {"init": "real", "d_state": 8}),
        Network("random", {"init": "random", "d_state": 8}),
    ),
    "dss-softmax": (
        Network("glu", {"output": "glu", "d_state": 6}),
        Network("bidirectional", {"bidirectional": True}),
        Network("random start", {"random_start": True, "d_state": 6}),
        Network("truncated", {"kernel_length": 9, "d_state": 6}),
    ),
    "dss-exp": (Network("half the rate", {}, "signal", 0.5), Network("two step sizes", {"separate_dt": True})),
    "gss": (
        Network("narrow", {"reduction": 8, "expand": 2.0, "d_state": 8}),
        Network("attention above", {"attention_layers": [1], "attention_heads": 2}),
    ),
    "mamba2": (Network("three heads", {"d_state": 6, "head_dim": 8, "expand": 3, "d_model": 8, "d_conv": 3}),),
    "mamba3": (Network("three heads", {"d_state": 9, "head_dim": 8, "expand": 3, "d_model": 8}),),
    "lightning": (Network("one layer", {"num_layers": 1, "num_heads": 2}),),
    "rwkv6": (Network("three heads", {"d_model": 12, "head_dim": 4, "mix_rank": 2, "decay_rank": 3}),),
    "rwkv7": (Network("three heads", {"d_model": 12, "head_dim": 4, "rank": 2}),),
    "slstm": (Network("no convolution", {"num_heads": 2, "d_conv": None}),),
    "mlstm": (Network("wide keys", {"num_heads": 2, "expand_k": 2.0}),),
    "deltanet": (
        Network("wide values", {"num_heads": 2, "expand_v": 2.0, "d_conv": 3, "negative_eigenvalues": True}),
        Network("normal convolutions", {"conv_std": 0.1, "round_beta": True}),
        Network("no convolutions", {"d_conv": None}),
    ),
    "comba": (Network("more heads of values", {"num_heads": 2, "num_value_heads": 4, "correction": 0.02}),),
    "mesanet": (Network("wide keys", {"num_heads": 2, "expand_k": 1.5, "d_conv": 3}),),
    "gated-deltanet2": (Network("more heads of values", {"num_heads": 2, "num_value_heads": 4}),),
    "delta-product": (
        Network("three steps", {"num_householder": 3, "num_heads": 2}),
        Network("without decays", {"without": ["decay", "gate"], "num_heads": 2, "d_conv": None}),
    ),
    "rwkv": (Network("narrow channel mixing", {"mlp_ratio": 1.5, "num_layers": 1}),),
    "sashimi": (
        Network("mamba outside", {"outer": "mamba", "center": "attention", "pool": [3, 2], "d_model": 8}),
        Network("blocks on the way down", {"down_blocks": True, "outer": "mamba", "pool": [3], "d_model": 8}),
        Network("hyena in the centre", {"outer": "mamba", "center": "hyena", "pool": [3], "d_model": 8}),
    ),
    "hybrid": (
        Network(
            "four kinds of layers",
            {
                "num_layers": 4,
                "layers": ["mamba", "base-conv", "attention", "hgrn2"],
                "options": {"attention": {"position": "rope", "num_heads": 2}, "mamba": {"d_state": 4}},
            },
        ),
    ),
    "h3": (
        Network("heads", {"head_dim": 2, "d_state": 8}),
        Network("trained B", {"train_B": True, "d_state": 8}),
        Network("hyena", {"inner": "hyena"}),
        Network("s6", {"inner": "s6", "d_state": 8}),
        Network("short filters", {"short_filter": 3, "head_dim": 8, "d_state": 8}),
        Network("real states", {"init": "real", "d_state": 8}),
        Network("bidirectional", {"bidirectional": True, "d_state": 8}),
    ),
    "hyena": (
        Network("order 3", {"order": 3, "short_filter": 4}),
        Network("learned positions", {"learn_positions": True, "emb_dim": 9}),
        Network("wide streams, tied input map", {"inner_factor": 4, "proj_groups": 4}),
    ),
    "mamba": (
        Network("no gate", {"gate": False}),
        Network("s4d", {"inner": "s4d"}),
        Network("hyena", {"inner": "hyena", "d_conv": 2, "expand": 1}),
        Network("small", {"dt_rank": 1, "d_state": 3}),
        Network("nothing selective", {"fixed": ["dt", "B", "C"], "A_init": "half", "d_state": 4}),
        Network("complex", {"A_init": "complex", "d_state": 8}),
        Network("groups", {"groups": 4, "d_state": 4}),
        Network("negative eigenvalues", {"negative_eigenvalues": True, "d_state": 4}),
        Network("complex, fixed maps", {"A_init": "complex", "fixed": ["B", "C"], "d_state": 8}),
        Network("random", {"A_init": "random", "fixed": ["dt"], "d_state": 3}),
        Network("s4d-real", {"inner": "s4d-real", "d_state": 8}),
        Network("start of the network", {"network_init": True, "d_state": 3}),
    ),
}
"""Options of the mixers beyond their defaults."""


def networks(model: str) -> tuple[Network, ...]:
    """The tiny networks of a registered model: its defaults on tokens and on a signal, then its options."""
    return Network("tokens"), Network("signal", {}, "signal"), *MODEL_OPTIONS.get(model, ())


def build(config: type, network: Network, **options: Any) -> Any:
    """The network in float64, with the weights of seed 0."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return config(**{"num_layers": 2, "d_model": 16, **network.options, **options}).build(SPECS[network.spec])


def logits_and_gradients(model: Any, network: Network) -> tuple[Tensor, list[Tensor]]:
    """Logits of a seeded batch of two rows, and the gradients of a seeded weighted sum of them."""
    draw = Draw(11)
    spec = SPECS[network.spec]
    tokens = spec.input == "tokens"
    inputs = draw.integers(spec.vocab_size, 2, LENGTH) if tokens else draw(2, LENGTH, spec.channels)
    with model.at_rate(network.rate):
        logits = model(inputs)
        (logits * draw(*logits.shape)).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]
