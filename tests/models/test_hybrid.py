"""Networks whose layers have different mixers. The laws of all models are in tests/laws."""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.models.attention import Attention
from subquad.models.gss import GSS, GSSConfig
from subquad.models.h3 import H3, H3Config
from subquad.models.hgrn2 import HGRN2
from subquad.models.hybrid import HybridConfig
from subquad.models.mamba import S6, Mamba, MambaConfig
from subquad.models.parts.short_conv import BaseConv
from subquad.suite.contracts import TaskSpec
from tests.suite.toy import TASKS

TOKENS = TaskSpec("tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)
FOUR = {
    "layers": ["mamba", "base-conv", "attention", "hgrn2"],
    "options": {"attention": {"position": "rope", "num_heads": 2}, "mamba": {"d_state": 4}},
}


def build(config, **options):
    torch.manual_seed(0)
    return config(**{"num_layers": 4, "d_model": 16, "init_std": 0.2, **options}).build(TOKENS).double().eval()


def test_layers_have_the_mixers_that_are_listed():
    model = build(HybridConfig, **FOUR)
    assert [type(mixer) for mixer in model.mixers] == [Mamba, BaseConv, Attention, HGRN2]


def test_a_list_of_layers_is_repeated():
    model = build(HybridConfig, layers=["gss", "attention", "gss"], num_layers=7)
    assert [type(mixer) for mixer in model.mixers] == [GSS, Attention, GSS, GSS, Attention, GSS, GSS]


def test_a_hybrid_of_one_kind_computes_what_the_model_itself_does():
    network = {"channel_mixer": "none", "norm": "rms", "d_model": 16}
    model = build(HybridConfig, layers=["mamba"], options={"mamba": {"d_state": 4}}, **network)
    alone = build(MambaConfig, d_state=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    inputs = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(inputs), alone(inputs))


def test_options_of_a_mixer_reach_it_and_defaults_are_written_out():
    config = HybridConfig(**FOUR, num_layers=4, d_model=16)
    mamba, _, attention, hgrn2 = config.mixers(TOKENS)
    assert isinstance(mamba.inner, S6)
    assert mamba.inner.d_state == 4
    assert attention.num_heads == 2
    assert attention.rotary is not None
    # layers are counted through the whole network, so this one reads the lower bound of the fourth layer
    assert (hgrn2.layer, hgrn2.lower_bounds.logits.shape) == (3, (4, 16))
    stored = config.model_dump(mode="json")
    assert stored["options"]["mamba"]["expand"] == 2
    assert stored["options"]["attention"] == {
        "position": "rope", "num_heads": 2, "attention_dropout": 0.0, "bias": True,
    }  # fmt: skip
    assert stored["versions"] == {name: MODELS.load(name).version for name in ("attention", "hgrn2", "mamba")}
    assert HybridConfig(**stored) == config


def test_models_say_whether_they_have_one_mixer_a_layer():
    several = {name for name in MODELS if len(MODELS.load(name)(num_layers=3, d_model=16).mixers(TOKENS)) != 3}
    assert several == {name for name in MODELS if not MODELS.load(name).one_mixer_a_layer}
    assert several == {"rwkv", "rwkv6", "rwkv7", "sashimi"}


@pytest.mark.parametrize(("config", "mixer"), [(H3Config, H3), (GSSConfig, GSS)])
def test_attention_takes_the_place_of_the_mixer_in_some_layers(config, mixer):
    model = build(config, attention_layers=[1, 3], attention_heads=4)
    assert [type(m) for m in model.mixers] == [mixer, Attention, mixer, Attention]
    assert "attention_layers" not in config().model_dump(mode="json")


def test_a_grid_may_sweep_over_lists_of_layers_and_options_of_their_mixers():
    from subquad.suite.settings.config import ExperimentConfig
    from subquad.suite.settings.grid import expand
    from subquad.suite.settings.resolver import Resolver

    baseline = {
        "task": {"name": next(iter(TASKS))},
        "model": {"name": "hybrid", "d_model": 16},
        "train": {"steps": 1},
    }
    rows = [
        {"model.layers": ["h3", "attention"], "model.options": {"attention": {"num_heads": 2}}},
        {"model.layers": ["h3", "attention"], "model.options": {"attention": {"num_heads": 4}}},
        {"model.layers": ["attention"]},
    ]
    config = ExperimentConfig(title="hybrids", baseline=baseline, sweep={"model": rows})
    runs = expand("demo/hybrid", config, Resolver(TASKS, MODELS))
    assert len({run.run_id for run in runs}) == 3
    assert [run.model.options["attention"]["num_heads"] for run in runs] == [2, 4, 1]
    rows.append({"model.layers": ["attention", "rwkv6"]})
    config = ExperimentConfig(title="hybrids", baseline=baseline, sweep={"model": rows})
    with pytest.raises(ValueError, match="rwkv6 does not have one mixer a layer"):
        expand("demo/hybrid", config, Resolver(TASKS, MODELS))
