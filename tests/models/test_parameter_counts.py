"""Parameter counts and state sizes are those that the papers print."""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec

GPT2, NEOX, BASES = 50257, 50280, 8
"""Vocabularies: of GPT-2, of GPT-NeoX padded to a multiple of 8 as in Mamba's released models, and of DNA."""
MEDIUM = {"num_layers": 48, "d_model": 1024}

# (source, model, options, vocabulary, printed number of parameters in millions)
PRINTED = [
    ("Mamba table 9, static", "mamba", {**MEDIUM, "fixed": ["dt"]}, GPT2, "358.9"),
    *(
        (f"Mamba table 9, rank {rank}", "mamba", {**MEDIUM, "dt_rank": rank}, GPT2, printed)
        for rank, printed in (
            # the others lie on the line through these
            (1, "359.1"), (8, "360.5"), (64, "371.5")
        )
    ),
    *(
        (f"Mamba table 10, N {states}, fixed {fixed}", "mamba", {**MEDIUM, "d_state": states, "fixed": fixed}, GPT2, m)
        for states, m in ((1, "367.1"), (4, "368.0"), (16, "371.5"))
        for fixed in ([], ["B", "C"])
    ),
    *(
        (f"Mamba E.3.2, {printed}M", "mamba", {"num_layers": 2 * blocks, "d_model": width}, BASES, printed)
        for blocks, width, printed in (
            (5, 96, "0.7"), (6, 128, "1.4"), (7, 192, "3.5"), (8, 256, "7.0"), (10, 384, "19.3"), (12, 512, "40.7")
        )
    ),
    *(
        (f"state-spaces/mamba-{name}", "mamba", {"num_layers": layers, "d_model": width}, NEOX, exact)
        for name, layers, width, exact in (
            ("130m", 24, 768, "129.135360"), ("370m", 48, 1024, "371.516416"), ("790m", 48, 1536, "793.204224"),
            ("1.4b", 48, 2048, "1372.178432"), ("2.8b", 64, 2560, "2768.345600"),
        )
    ),
    *(
        (f"RWKV table 2, {name}", "rwkv", {"num_layers": layers, "d_model": width}, 50277, printed)
        for name, layers, width, printed in (
            ("169M", 12, 768, "169.3"), ("430M", 24, 1024, "430.4"), ("1.5B", 24, 2048, "1515"),
            ("3B", 32, 2560, "2985"), ("7B", 32, 4096, "7393"),
        )
    ),
    *(
        (f"Pythia table 1, {name}", "pythia", {"num_layers": n, "d_model": width, "num_heads": heads}, 50304, exact)
        for name, n, width, heads, exact in (
            ("70M", 6, 512, 8, "70.426624"), ("160M", 12, 768, 12, "162.322944"), ("410M", 24, 1024, 16, "405.334016"),
            ("1.4B", 24, 2048, 16, "1414.647808"), ("2.8B", 32, 2560, 32, "2775.208960"),
        )
    ),
    ("openai/gpt2", "attention", {"num_layers": 12, "d_model": 768, "num_heads": 12}, GPT2, "124.439808"),
]  # fmt: skip
"""The 0.25M of Mamba's E.3.2 are 0.26M here: its sizes are said to be approximate."""


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    """On the device `meta` there are no values, and yet to draw them takes longer than all else."""
    for name in ("kaiming_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


def build(name: str, vocab_size: int, **options):
    spec = TaskSpec("tokens", num_classes=vocab_size, readout="token", max_length=1024, vocab_size=vocab_size)
    with torch.device("meta"):
        return MODELS.load(name)(**options).build(spec)


def num_parameters(name: str, vocab_size: int, *, num_layers: int, **options) -> int:
    """Counts the parameters; those of a layer of a deep network are what a third layer adds, which is built sooner."""
    shallow, deeper = (num_layers, num_layers) if num_layers <= 4 else (2, 3)
    counts = [
        sum(parameter.numel() for parameter in build(name, vocab_size, num_layers=layers, **options).parameters())
        for layers in dict.fromkeys((shallow, deeper))
    ]
    return counts[0] + (num_layers - shallow) * (counts[-1] - counts[0])


@pytest.mark.parametrize(
    ("name", "options", "vocab_size", "printed"), [row[1:] for row in PRINTED], ids=[row[0] for row in PRINTED]
)
def test_a_model_has_the_printed_number_of_parameters(name, options, vocab_size, printed):
    count = num_parameters(name, vocab_size, **options)
    decimals = len(printed.partition(".")[2])
    assert f"{count / 1e6:.{decimals}f}" == printed


UNET = {"outer": "mamba", "center": "mamba", "down_blocks": True}


@pytest.mark.parametrize(
    ("options", "millions", "printed"),
    [
        ({}, "4.75", ""),
        ({"options": {"s4": {"output": "linear"}}}, "4.06", ""),
        ({**UNET, "num_layers": 3, "pool": [16, 16]}, "3.54", ""),
        (UNET, "6.24", "6.1"),
        ({**UNET, "num_layers": 15, "d_model": 96}, "24.84", "24.3"),
    ],
    ids=["SaShiMi", "4.1M of its code", "3.5M of Mamba E.4.1", "6.1M of Mamba table 4", "24.3M of Mamba table 4"],
)
def test_u_nets_have_the_sizes_that_the_model_says(options, millions, printed):
    """That of Mamba's table 4 is the printed one without its state space parameters."""
    model = build("sashimi", 256, **options)
    count = sum(p.numel() for p in model.parameters())
    assert f"{count / 1e6:.2f}" == millions
    if printed:
        without = count - sum(p.numel() for p in model.mixers[0].ssm_parameters().values())
        assert f"{without / 1e6:.1f}" == printed


@pytest.mark.parametrize("kind", ["half", "random", "complex"])
def test_another_start_of_a_does_not_change_the_size_of_mamba(kind):
    """Mamba's table 8 compares models of one size."""
    models = [build("mamba", GPT2, A_init=init, num_layers=2, d_model=64) for init in (None, kind)]
    sizes = [(sum(p.numel() for p in model.parameters()), model.state_size(100)) for model in models]
    assert sizes[0] == sizes[1]


def test_the_state_of_mamba_is_64_times_layers_and_width():
    """GSA (Zhang et al. 2024), appendix C.1, for two layers of Mamba in place of one of another model."""
    size = build("mamba", 16, num_layers=8, d_model=512).state_size(2048)
    # the paper does not count the last inputs of the convolution: three in each of two channels for one of width
    assert size == (64 + 2 * 2 * 3) * 4 * 512
