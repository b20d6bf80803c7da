"""Laws of models with options other than their defaults, at the sizes of `suite.laws.models`."""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.laws import models as laws
from subquad.suite.laws.models import TOKENS, make_inputs, unroll
from tests.laws.networks import MODEL_OPTIONS

MORE = [
    ("s4d", {"init": "real", "d_state": 7}),
    ("dss-softmax", {"separate_dt": True, "d_state": 6}),
    ("h3", {"attention_layers": [1], "attention_heads": 2, "d_state": 8}),
    ("h3", {"init": "real", "d_state": 7}),
    ("hyena", {"inner_factor": 3, "proj_groups": 2, "order": 3}),
    ("mamba", {"gate": False, "inner": "s4d"}),
    ("mamba", {"fixed": ["B"], "d_state": 3}),
    ("mamba", {"fixed": ["C"], "d_state": 3}),
    ("mamba", {"A_init": "complex", "fixed": ["dt"], "gate": False, "d_state": 2}),
    ("sashimi", {"down_blocks": True, "outer": "mamba", "pool": [2, 2, 2], "d_model": 8}),
]
"""Options beside those of which `versions.json` records the results."""
RECORDED = [
    (name, network.options)
    for name, networks in MODEL_OPTIONS.items()
    for network in networks
    # a two-sided model reads the future and has no step
    if network.spec == "tokens" and network.rate == 1 and not network.options.get("bidirectional")
]
FEW = 20
"""Steps from the first on: more than the positions of any window, filter or group of these options."""


@torch.no_grad()
def few_steps_equal_parallel(config, **options):
    """Steps from the first on, and those behind a prompt of more than a chunk; the defaults are tried at all steps."""
    model, inputs = laws.build(config, **options), make_inputs(TOKENS)
    parallel = model(inputs)
    laws.assert_near(unroll(model, inputs[:, :FEW])[0], parallel[:, :FEW], f"{FEW} steps against the parallel form")
    laws.assert_steps_follow_a_prompt(model, inputs, parallel, 66)


TRIED = (few_steps_equal_parallel, laws.state_size_is_what_is_stored)
"""Those that are broken by a part of a layer which only some options have; steps that see no future equal no other."""
SLOWLY = (laws.padding_is_not_read, laws.gradients_reach_every_parameter)
"""Padding is a matter of the mixer rather than of its options, and the record has the gradients of most."""


@pytest.mark.parametrize("tried", [TRIED, pytest.param(SLOWLY, marks=pytest.mark.slow)], ids=["steps", "padding"])
@pytest.mark.parametrize(
    ("name", "options"), [*RECORDED, *MORE], ids=[f"{name}-{options}" for name, options in [*RECORDED, *MORE]]
)
def test_a_model_obeys_the_laws_with_other_options(name, options, tried):
    """With one layer where that has all kinds of parameters, since the defaults are tried with two."""
    config, fewer = MODELS.load(name), {"num_steps": 8} if name == "mesanet" else {}
    num_layers = laws.build_one_layer(config, **fewer, **options).config.num_layers
    for law in tried:
        law(config, **{**fewer, **options, "num_layers": num_layers})
