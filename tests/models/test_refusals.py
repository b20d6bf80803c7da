"""Options that cannot work are refused before a network is built: one table, to which a new refusal is a line."""

from dataclasses import replace

import pytest

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec

TOKENS = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)
SIGNAL = TaskSpec(input="signal", num_classes=4, readout="sequence", max_length=20, channels=1)
LONG = replace(TOKENS, max_length=2**20)

PARTS = [
    ("give both or neither", {"attention_layers": [1]}),
    ("give both or neither", {"attention_heads": 2}),
    ("must lie in 0 to 1", {"attention_layers": [4], "attention_heads": 2}),
    ("attention_heads=3 does not divide d_model", {"attention_layers": [1], "attention_heads": 3}),
]
"""Attention in some layers of a state space model."""

REFUSED = {
    "attention": [
        ("'xpos' overflows beyond 65536", {"position": "xpos"}, LONG),
        ("masked_heads=5 must be at most num_heads=4", {"num_heads": 4, "masked_heads": 5}),
        ("window and masked_heads both", {"num_heads": 4, "masked_heads": 2, "window": 5}),
        ("set attention_dropout to 0", {"recompute": "layer", "attention_dropout": 0.1}),
    ],
    "comba": [
        ("could pass -1, where the state grows", {"d_model": 32, "num_heads": 2, "negative_eigenvalues": True}),
    ],
    "delta-product": [("drop one of them", {"d_model": 24, "without": ("decay",), "ssm_lr": 1e-3})],
    "dss-softmax": [
        ("at least 2 lags", {"kernel_length": 1}),
        ("reads the past only", {"kernel_length": 9, "bidirectional": True}),
    ],
    "mesanet": [("needs d_conv in 2..4", {"d_conv": 5})],
    "gsa": [
        ("choose one of none, learned, sinusoidal", {"position": "rope"}),
        ("num_layers\n.*greater than or equal to 1", {"num_layers": 0}),
        ("resid_dropout\n.*less than 1", {"resid_dropout": 1.0}),
        ("num_heads=5 does not divide d_model=64", {"num_heads": 5}),
        ("damping\n.*greater than 0", {"damping": 0.0}),
        *((f"short_conv must be 0 or 2 to 4, got {taps}", {"short_conv": taps}) for taps in (-1, 1, 5)),
        ("set resid_dropout to 0", {"recompute": "layer", "resid_dropout": 0.1}),
        ("would count every batch twice", {"recompute": "layer", "norm": "batch"}),
        ("vocab_size >= 1", {}, replace(TOKENS, vocab_size=0)),
        ("channels >= 1", {}, replace(SIGNAL, channels=0)),
    ],
    "gss": [("dt_min <= dt_max", {"dt_min": 0.2}), *PARTS],
    "h3": [
        ("head_dim=3 does not divide d_model=16", {"d_model": 16, "head_dim": 3}),
        ("defined for head_dim=1", {"head_dim": 2, "inner": "s6"}),
        ("short_filter must be 0 or 2 to 4", {"short_filter": 5}),
        ("set shift_taps=0", {"short_filter": 3, "shift_taps": 4}),
        *PARTS,
    ],
    "hybrid": [
        ("at least one name", {"layers": []}),
        ("attention", {"layers": ["gsa", "atention"]}),
        ("a hybrid cannot be a layer of a hybrid", {"layers": ["hybrid"]}),
        ("rwkv does not have one mixer a layer and cannot be in a hybrid", {"layers": ["attention", "rwkv"]}),
        ("sashimi does not have one mixer a layer", {"layers": ["sashimi"], "num_layers": 1}),
        ("got options of gla; layers has gsa", {"layers": ["gsa"], "options": {"gla": {}}}),
        ("gsa has no option heads here; .*num_heads", {"layers": ["gsa"], "options": {"gsa": {"heads": 4}}}),
        ("gsa has no option d_model here", {"layers": ["gsa"], "options": {"gsa": {"d_model": 4}}}),
        ("h3 has no option ssm_lr here", {"layers": ["h3"], "options": {"h3": {"ssm_lr": 0.1}}}),
        ("belongs to the network", {"layers": ["attention"], "options": {"attention": {"position": "learned"}}}),
        ("num_heads=3 does not divide d_model", {"layers": ["gsa"], "options": {"gsa": {"num_heads": 3}}}),
        (
            "the models are at {'gsa': 1} now, got {'gsa': 0}; train again",
            {"layers": ["gsa"], "versions": {"gsa": 0}},
        ),
    ],
    "hyena": [
        ("emb_dim must be odd", {"emb_dim": 4}),
        ("order must be at least 2", {"order": 1}),
        (
            "proj_groups=5 does not divide short_channels=48; choose proj_groups from 1, 2",
            {"d_model": 16, "proj_groups": 5},
        ),
    ],
    "linear-attention": [("can be negative", {"feature_map": "identity"})],
    "mamba": [
        (r"d_conv in 2\.\.4", {"d_conv": 5}),
        ("options of inner='s6'", {"inner": "s4d", "fixed": ["dt"]}),
        ("options of inner='s6'", {"inner": "hyena", "negative_eigenvalues": True}),
        ("needs real eigenvalues; set A_init to half", {"A_init": "complex", "negative_eigenvalues": True}),
        ("name it once", {"fixed": ["B", "B"]}),
        ("even number >= 2", {"A_init": "complex", "d_state": 3}),
    ],
    "mamba3": [("mamba3: half of d_state", {"d_state": 3})],
    "pythia": [
        ("rotary_fraction=0.25 of .* 4 channels are 1", {"d_model": 16, "num_heads": 4, "rotary_fraction": 0.25}),
        ("position='xpos' is not available", {"position": "xpos"}),
        ("leave out channel_mixer", {"channel_mixer": "swiglu"}),
        ("window and masked_heads", {"window": 4}),
        ("window and masked_heads", {"num_heads": 2, "masked_heads": 1}),
    ],
    "rwkv6": [
        ("rwkv6.*head_dim=5", {"head_dim": 5}),
        ("mlp_ratio=0.01 of d_model=16 is an inner width of 0", {"mlp_ratio": 0.01, "d_model": 16}),
    ],
    "rwkv7": [("rwkv7.*head_dim=5", {"head_dim": 5})],
    "s4": [("d_state must be", {"d_state": size}, SIGNAL) for size in (7, 2)],
    "s4d": [
        ("even number >= 2", {"d_state": 7}),
        ("defined for complex states", {"init": "real", "unit_response": True}),
    ],
    "sashimi": [
        ("cannot be a block", {"outer": "hybrid"}),
        ("s5", {"center": "s5"}),
        ("rwkv has layers of its own kind and cannot be a block", {"outer": "rwkv"}),
        ("pythia has layers of its own kind", {"center": "pythia"}),
        ("got options of mamba; the blocks are s4", {"options": {"mamba": {}}}),
        ("s4 has no option d_model here", {"options": {"s4": {"d_model": 3}}}),
        ("belong to the blocks", {"channel_mixer": "mlp"}),
        ("belong to the blocks", {"base_conv_layers": [0]}),
        ("pooling factors of at least 2", {"pool": []}),
        ("pooling factors of at least 2", {"pool": [4, 1]}),
        ("even number", {"options": {"s4": {"d_state": 7}}}),
        ("train again", {"versions": {"s4": 0}}),
    ],
}


@pytest.mark.parametrize(
    ("name", "words", "options", "spec"),
    [(name, *(row if len(row) > 2 else (*row, TOKENS))) for name, rows in REFUSED.items() for row in rows],
)
def test_what_cannot_work_is_refused(name, words, options, spec):
    with pytest.raises(ValueError, match=words):
        MODELS.load(name)(**options).check(spec)
