"""Whole models of other libraries have our sizes, and where weights have a common layout they compute our loss."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from subquad.models import MODELS, checkpoints
from subquad.models.peers import FLA, MAMBA_SSM, TRANSFORMERS, build_peer
from subquad.suite.bench.models import PARAMETERS
from subquad.suite.contracts import TaskSpec
from subquad.suite.training.readout import mean_loss

SPEC = TaskSpec("tokens", num_classes=320, readout="token", max_length=64, vocab_size=320)
OPTIONS = {
    "gla": {"num_heads": 4},
    "gsa": {"num_heads": 4, "num_slots": 16},
    "retnet": {"num_heads": 4},
    "hgrn2": {"num_heads": 4},
    "deltanet": {"num_heads": 4},
    "gated-deltanet": {"num_heads": 4, "expand_k": 0.5},
    "kda": {"num_heads": 4},
    "rwkv7": {"head_dim": 64},
    "transformer++": {"num_heads": 4},
    "mamba": {},
    "mamba2": {},
    "mamba3": {"channel_mixer": "none"},
    "attention": {"num_heads": 4, "position": "learned"},
    "pythia": {"num_heads": 4},
}
LIBRARIES = {"fla": FLA, "mamba_ssm": MAMBA_SSM, "transformers": TRANSFORMERS}
NAMES = {type(MODELS.load(name)(**options)).__name__: name for name, options in OPTIONS.items()}
PAIRS = [(library, NAMES[kind]) for library, kinds in LIBRARIES.items() for kind in kinds]


def config_of(name):
    return MODELS.load(name)(d_model=256, num_layers=2, tie_embeddings=False, **OPTIONS[name])


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def peer_of(library, name):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; it is a peer of `speed`")
    try:
        return build_peer(library, config_of(name), SPEC)
    except ImportError as error:
        pytest.skip(f"{library} cannot be imported: {error}")


@pytest.mark.parametrize(("library", "name"), PAIRS)
def test_a_peer_has_our_number_of_parameters(library, name):
    with torch.device("meta"):
        theirs, ours = count(peer_of(library, name)), count(config_of(name).build(SPEC))
    assert abs(theirs / ours - 1) <= PARAMETERS


@pytest.mark.parametrize("name", ["mamba", "mamba2", "attention"])
def test_a_peer_with_our_weights_has_our_loss(name):
    peer, ours = peer_of("transformers", name), config_of(name).build(SPEC)
    layout = next(layout for key, layout in checkpoints.LAYOUTS.items() if layout.model == name and key != name)
    lost = peer.network.load_state_dict(checkpoints.unload(ours, layout), strict=False)
    assert not [key for key in (*lost.missing_keys, *lost.unexpected_keys) if not key.endswith(checkpoints.BUFFERS)]
    inputs, targets = torch.randint(320, (2, 2, 40), generator=torch.Generator().manual_seed(1))
    expected = mean_loss(ours.eval(), inputs, targets)
    torch.testing.assert_close(mean_loss(peer.eval(), inputs, targets), expected, rtol=1e-4, atol=1e-4)


def test_a_library_without_such_a_model_says_so():
    with pytest.raises(LookupError, match="mamba_ssm has no language model of this kind"):
        config_of("gla").build_peer("mamba_ssm", SPEC)
    signal = TaskSpec("signal", num_classes=2, readout="token", max_length=8, channels=1)
    with pytest.raises(LookupError, match="fla has no language model of this kind"):
        config_of("gla").build_peer("fla", signal)
